"""Bounds of fp8 operands: an emulator of Hopper's dots and of P in e4m3; faults leave them."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fa_verify.arithmetic import Arithmetic
from fa_verify.bounds import bound_forward
from fa_verify.case import Case, Values
from fa_verify.errors import InvalidInputError
from fa_verify.inputs import materialise
from fa_verify.masks import Mask
from fa_verify.problem import Problem
from fa_verify.scales import SCALE_FAMILIES
from fa_verify.terms import Terms
from fa_verify.ttir.numbers import floats, tensor_core
from fa_verify.values import QK_FAMILIES, V_FAMILIES

E4M3 = torch.float8_e4m3fn
SMALLEST = (tensor_core.SMALLEST["f8E4M3FN"],) * 2
COARSER = dataclasses.replace(tensor_core.FP8, fraction=8, result=8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A forward pass with its rounding points: one head, whole float32 otherwise.

    `order` is of the products along head_dim; `chain` keeps the sums of P V in one accumulator.
    """

    block_n: int = 32
    p: str = "f8E4M3FN"
    p_scale: float = 1.0
    chain: bool = True
    l_rounded: bool = False
    reverse: bool = False
    order: int = 0
    unit: tensor_core.Unit = tensor_core.FP8
    dequantized: bool = False
    bug: str = ""

    def forward(self, problem, x):
        """O and lse, (heads, rows[, dim]), of batch 1."""
        parts = [self._head(problem, x, head) for head in range(problem.heads_q)]
        o, lse = (torch.from_numpy(np.stack(part)) for part in zip(*parts, strict=True))
        return o.to(getattr(torch, problem.dtype))[None], lse[None]

    def _dot(self, a, b, c):
        return tensor_core.fused_dot(a[None], b[None], c[None], self.unit, SMALLEST)[0]

    def _head(self, problem, x, head):
        kv = head // problem.group
        q, k, v = (x.q[0, head], x.k[0, kv], x.v[0, kv])
        q, k, v = (t.float().numpy() for t in (q, k, v))
        qs, ks, vs = (
            of_rows(problem, s, h, n)
            for s, h, n in ((x.q_scale, head, len(q)), (x.k_scale, kv, len(k)),
                            (x.v_scale, kv, len(v)))
        )  # fmt: skip
        if self.bug == "k's scale for v":
            vs = ks
        if self.bug == "no scale of k":
            ks = np.ones_like(ks)
        if self.dequantized:
            q, k, v = (
                floats.round_to(a * b[:, None], "bf16") for a, b in ((q, qs), (k, ks), (v, vs))
            )
            qs, ks, vs = (np.ones_like(b) for b in (qs, ks, vs))
        along = np.random.default_rng(self.order).permutation(q.shape[1])
        q, k = (q, k) if not self.order else (q[:, along], k[:, along])
        s = q @ k.T if self.dequantized else self._dot(q, k.T, np.zeros((len(q), len(k)), "f4"))
        s = s * (qs * np.float32(problem.scale))[:, None] * ks[None]
        if problem.softcap:
            cap = np.float32(problem.softcap)
            s = np.tanh(s / cap) * cap
        allowed = problem.mask.allowed(problem.seqlen_q, problem.seqlen_k)
        s = np.where(allowed, s, np.float32(-np.inf))
        m = np.full((len(q), 1), -np.inf, np.float32)
        l = np.zeros((len(q), 1), np.float32)  # noqa: E741
        acc = np.zeros((len(q), v.shape[1]), np.float32)
        starts = list(range(0, len(k), self.block_n))
        for start in reversed(starts) if self.reverse else starts:
            block = slice(start, start + self.block_n)
            new = np.maximum(m, s[:, block].max(1, keepdims=True))
            shift = np.where(np.isneginf(new), 0, new)
            p, rescale = np.exp(s[:, block] - shift), np.exp(m - shift)
            lifted = p * np.float32(self.p_scale)
            if self.p == "bf16":  # v's scale within P
                cast, of_v = floats.round_to(lifted * vs[None, block], "bf16"), None
            else:
                cast, of_v = floats.round_to(lifted, self.p), vs[block]
            counted = cast / np.float32(self.p_scale) if self.l_rounded else p
            l = l * rescale + counted.sum(1, keepdims=True, dtype=np.float32)  # noqa: E741
            acc *= rescale
            if of_v is None:
                acc += cast @ v[block]
            elif self.chain and (of_v == of_v[0]).all() and (vs == vs[0]).all():
                acc = self._dot(cast, v[block], acc)
            else:  # a sum of each part of the block that has a scale of its own
                for scale in np.unique(of_v):
                    mine = of_v == scale
                    none = np.zeros_like(acc)
                    acc += self._dot(cast[:, mine], v[block][mine], none) * scale
            m = new
        if self.p != "bf16" and self.chain and len(vs) and (vs == vs[0]).all():
            acc *= vs[0]
        empty = l == 0
        l = np.where(empty, 1, l) * np.float32(self.p_scale)  # noqa: E741
        lse = np.where(empty, -np.inf, np.where(empty, 0, m) + np.log(l / np.float32(self.p_scale)))
        return acc / l, lse[:, 0].astype(np.float32)


def of_rows(problem, scale, head, rows):
    """The scale of each row of a head, as one who wrote the format down again would have it."""
    scale = scale[0, min(head, scale.shape[1] - 1)].numpy()
    return np.array([scale[i // (problem.scaled_rows or rows)] for i in range(rows)], np.float32)


def judged(problem, arithmetic, kernel, values, seed):
    x = materialise(Case(problem=problem, values=values, seed=seed))
    terms = Terms(q_scale=x.q_scale, k_scale=x.k_scale, v_scale=x.v_scale)
    got = kernel.forward(problem, x)
    bounded = bound_forward(problem, arithmetic, x.q, x.k, x.v, terms=terms)
    return [ratio(g, b) for g, b in zip(got, bounded, strict=True)]


def ratio(got, bounded):
    """The largest error in units of det; elements of which nothing is said count as 0."""
    same = got.double() == bounded.reference
    error = torch.where(same, 0.0, (got.double() - bounded.reference).abs())
    over = torch.where(same | bounded.det.isinf(), 0.0, error / bounded.det)
    return float(over.max()) if over.numel() else 0.0


MASKS = (Mask(), Mask(causal=True), Mask(window_left=20, window_right=3))


@st.composite
def trials(draw):
    problem = Problem(
        heads_q=2, heads_kv=draw(st.sampled_from((1, 2))),
        seqlen_q=draw(st.sampled_from((1, 17, 40))), seqlen_k=draw(st.sampled_from((5, 33, 130))),
        head_dim=draw(st.sampled_from((8, 40, 64))), head_dim_v=draw(st.sampled_from((8, 24))),
        dtype=draw(st.sampled_from(("bfloat16", "float16"))),
        fp8=draw(st.sampled_from(("tensor", "head", "block16", "block32"))),
        mask=draw(st.sampled_from(MASKS)), softcap=draw(st.sampled_from((0.0, 0.0, 5.0))),
    )  # fmt: skip
    kernel = Kernel(
        block_n=draw(st.sampled_from((32, 64, 128))), p=draw(st.sampled_from(("f8E4M3FN", "bf16"))),
        p_scale=draw(st.sampled_from((1.0, 256.0, 448.0))), chain=draw(st.booleans()),
        l_rounded=draw(st.booleans()), reverse=draw(st.booleans()),
        order=draw(st.integers(0, 3)),
    )  # fmt: skip
    if kernel.p == "bf16":
        kernel = dataclasses.replace(
            kernel, p_scale=1.0, l_rounded=False, dequantized=draw(st.booleans())
        )
    values = Values(
        qk=draw(st.sampled_from(sorted(QK_FAMILIES))), v=draw(st.sampled_from(sorted(V_FAMILIES))),
        scales=draw(st.sampled_from(sorted(SCALE_FAMILIES))),
    )  # fmt: skip
    return problem, kernel, values


def declared(kernel):
    """What the kernel states of itself, at the least."""
    return Arithmetic(
        p_dtype="bfloat16" if kernel.p == "bf16" else "input",
        p_scale=kernel.p_scale,
        l_from_rounded_p=kernel.l_rounded,
        promoted=None if kernel.chain else kernel.block_n,
        dequantized="bfloat16" if kernel.dequantized else None,
    )


@settings(
    max_examples=150, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(trials(), st.integers(0, 1000))
def test_an_emulator_of_the_chip_stays_within_det(trial, seed):
    problem, kernel, values = trial
    o, lse = judged(problem, declared(kernel), kernel, values, seed)
    assert max(o, lse) <= 1, (kernel, values, problem)


PROBLEM = Problem(seqlen_q=40, seqlen_k=130, head_dim=64, head_dim_v=24, dtype="bfloat16",
                  heads_q=2, fp8="head")  # fmt: skip
ADVERSE = Values(qk="one-hot", v="offset", scales="coarse")


@pytest.mark.parametrize(
    ("kernel", "arithmetic", "values"),
    [
        (Kernel(bug="no scale of k"), Arithmetic(), Values(scales="coarse")),
        (Kernel(bug="k's scale for v"), Arithmetic(), Values()),
        # P beyond 448 saturates.
        (Kernel(p_scale=1024.0), Arithmetic(p_scale=256.0), ADVERSE),
        # What is not lifted loses small weights.
        (Kernel(), Arithmetic(p_scale=256.0), Values(qk="dominant-key", logits=0.38, v="ones")),
        (Kernel(), Arithmetic(p_dtype="bfloat16"), Values(v="offset", scales="coarse")),
        (Kernel(unit=COARSER), Arithmetic(), Values(qk="uniform-positive", v="indicator")),
        (Kernel(l_rounded=True), Arithmetic(), Values(qk="two-level", scales="coarse", v="ones")),
        (
            Kernel(p="bf16", dequantized=True),
            Arithmetic(p_dtype="bfloat16"),
            Values(qk="uniform-positive", scales="coarse", logits=30.0),
        ),
    ],
    ids=[
        *("no scale", "another's scale", "saturates", "not lifted", "P in e4m3", "8 bits", "l"),
        "rounded operands",
    ],
)
def test_a_fault_leaves_det(kernel, arithmetic, values):
    problem = PROBLEM if values.logits == 1 else PROBLEM.resized(8, 1500)
    found = [max(judged(problem, arithmetic, kernel, values, seed)) for seed in range(6)]
    assert max(found) > 1
    right = dataclasses.replace(
        kernel, bug="", p="bf16" if arithmetic.p_dtype == "bfloat16" else "f8E4M3FN",
        p_scale=arithmetic.p_scale, unit=tensor_core.FP8, l_rounded=False, dequantized=False,
    )  # fmt: skip
    assert max(max(judged(problem, arithmetic, right, values, seed)) for seed in range(6)) <= 1


def test_sums_that_fit_14_bits_are_exact_in_any_order():
    """And the bound of lse is then one of float32; with one more bit neither is so."""
    rng = np.random.default_rng(0)
    most = {3: True, 14: False}  # 128 * 3^2 < 2^14 <= 128 * 14^2
    for size, exact in most.items():
        q, k = (rng.integers(-size, size, (1, 16, 128), endpoint=True) for _ in "qk")
        q[:, 0], k[:, 0] = size, size
        q[..., 0] = size - 1
        problem = Problem(seqlen_q=16, seqlen_k=16, head_dim=128, head_dim_v=8, fp8="tensor")
        stored = [torch.from_numpy(x)[None].float().to(E4M3) for x in (q, k)]
        one = torch.full((1, 1, 1), 0.5)
        terms = Terms(q_scale=one, k_scale=one, v_scale=one)
        _, lse = bound_forward(problem, Arithmetic(), *stored, stored[1][..., :8], terms=terms)
        assert (float(lse.det.max()) < 2.0**-10) == exact
        if not exact:
            continue
        given_q, given_k = (x[0, 0].float().numpy() for x in stored)
        want = given_q.astype(np.float64) @ given_k.T.astype(np.float64)
        for seed in range(4):
            along = np.random.default_rng(seed).permutation(128)
            zero = np.zeros((1, 16, 16), np.float32)
            a, b = given_q[None][..., along], given_k.T[None][:, along]
            got = tensor_core.fused_dot(a, b, zero, tensor_core.FP8, SMALLEST)
            np.testing.assert_array_equal(got[0], want)


def test_the_bound_of_a_dot_is_that_of_an_adversary():
    """Terms of which each loses nearly a unit: 2^-13 of the largest, over and over."""
    worst = 0.0
    for depth, small in itertools.product((32, 64, 256), (1.0, 1.875, 0.9375)):
        a = np.full((1, 1, depth), small * 2.0**-7, np.float32)
        b = np.full((1, depth, 1), 1.875 * 2.0**-5, np.float32)
        a[..., 0] = b[:, 0] = 1.0
        a, b = (floats.round_to(x, "f8E4M3FN") for x in (a, b))
        got = float(tensor_core.fused_dot(a, b, np.zeros((1, 1, 1), np.float32), tensor_core.FP8,
                                          SMALLEST)[0, 0, 0])  # fmt: skip
        exact = float((a.astype(np.float64) @ b.astype(np.float64))[0, 0, 0])
        size = float((np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64))[0, 0, 0])
        limit = 34 * 2.0**-13 * -(-depth // 32) * size
        assert abs(got - exact) <= limit
        worst = max(worst, abs(got - exact) / limit)
    assert worst > 0.3  # the bound is no more than three times what such a chip may lose


def test_a_kernel_in_float32_is_right_too():
    """One that scales its operands in float32, and sums in ascending order."""
    worst = 0.0
    for seed in range(4):
        values = Values(qk="uniform-positive", scales="coarse")
        x = materialise(Case(problem=PROBLEM, values=values, seed=seed))
        terms = Terms(q_scale=x.q_scale, k_scale=x.k_scale, v_scale=x.v_scale)
        q, k, v = (t.float() for t in terms.operands(PROBLEM, x.q, x.k, x.v))
        s = torch.zeros(1, 2, 40, 130)
        for column in range(64):
            s += q[..., column, None] * k[..., column].unsqueeze(2)
        s *= torch.tensor(PROBLEM.scale, dtype=torch.float32)
        bounded = bound_forward(PROBLEM, Arithmetic(p_dtype="bfloat16"), x.q, x.k, x.v, terms=terms)
        o, lse = torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)
        worst = max(
            worst, *(ratio(g, b) for g, b in zip((o.bfloat16(), lse), bounded, strict=True))
        )
    assert 0 < worst <= 1


def test_scales_are_asked_for():
    problem = Problem(seqlen_q=2, seqlen_k=2, head_dim=8, head_dim_v=8, fp8="tensor")
    x = torch.zeros(1, 1, 2, 8).to(E4M3)
    with pytest.raises(InvalidInputError, match="fp8=tensor: terms must have q_scale"):
        bound_forward(problem, Arithmetic(), x, x, x)
