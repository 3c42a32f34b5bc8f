"""The float64 reference against 50-digit arithmetic, against autograd, and within its memory."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap

import mpmath
import pytest
import torch

from fa_verify import reference
from fa_verify.masks import Mask
from fa_verify.problem import Problem

MASKS = [
    Mask(),
    Mask(causal=True),
    Mask(causal=True, alignment="top-left"),
    Mask(window_left=1),
    Mask(window_right=0, alignment="top-left"),
    Mask(window_left=0, window_right=1),
    Mask(causal=True, window_left=1),
    Mask(causal=True, documents=((0, 1), (3, 1), (1, 0), (0, 1))),
    Mask(window_left=1, alignment="top-left", documents=((1, 1), (1, 1), (2, 1))),
    Mask(pattern="predicate:2"),
    Mask(window_left=40, pattern="block-sparse:16:50:1"),
]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def draw(problem, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (problem.shape_q, problem.shape_k, problem.shape_v, problem.shape_o)
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def exactly(problem, q, k, v, do):
    """o, lse, dq, dk, dv by the formulas, in mpmath, as nested dicts of index -> number."""
    allowed = problem.mask.allowed(problem.seqlen_q, problem.seqlen_k)
    scale, cap = mpmath.mpf(problem.scale), mpmath.mpf(problem.softcap)
    o, lse, dq, dk, dv = {}, {}, {}, {}, {}
    for x, shape in ((dq, problem.shape_q), (dk, problem.shape_k), (dv, problem.shape_v)):
        x.update(dict.fromkeys(itertools.product(*map(range, shape)), mpmath.mpf(0)))
    for b in range(problem.batch):
        for h in range(problem.heads_q):
            g = h // problem.group
            for i in range(problem.seqlen_q):
                keys = [int(j) for j in allowed[i].nonzero()[0]]
                qi = [mpmath.mpf(x) for x in q[b, h, i].tolist()]
                doi = [mpmath.mpf(x) for x in do[b, h, i].tolist()]
                kk = {j: [mpmath.mpf(x) for x in k[b, g, j].tolist()] for j in keys}
                vv = {j: [mpmath.mpf(x) for x in v[b, g, j].tolist()] for j in keys}
                raw = {j: scale * mpmath.fdot(qi, kk[j]) for j in keys}
                s = {j: cap * mpmath.tanh(x / cap) if cap else x for j, x in raw.items()}
                slope = {j: 1 - mpmath.tanh(x / cap) ** 2 if cap else 1 for j, x in raw.items()}
                total = mpmath.fsum(mpmath.exp(x) for x in s.values())
                lse[b, h, i] = mpmath.log(total) if keys else -mpmath.inf
                p = {j: mpmath.exp(x) / total for j, x in s.items()}
                for d in range(problem.head_dim_v):
                    o[b, h, i, d] = mpmath.fsum(p[j] * vv[j][d] for j in keys)
                delta = mpmath.fsum(doi[d] * o[b, h, i, d] for d in range(problem.head_dim_v))
                for j in keys:
                    ds = p[j] * (mpmath.fdot(doi, vv[j]) - delta) * slope[j] * scale
                    for d in range(problem.head_dim):
                        dq[b, h, i, d] += ds * kk[j][d]
                        dk[b, g, j, d] += ds * qi[d]
                    for d in range(problem.head_dim_v):
                        dv[b, g, j, d] += p[j] * doi[d]
    return o, lse, dq, dk, dv


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_agrees_with_50_digits(mask, softcap):
    mask = mask.resized(4, 3)
    problem = Problem(
        heads_q=2,
        seqlen_q=4,
        seqlen_k=3,
        head_dim=2,
        head_dim_v=3,
        mask=mask,
        softcap=softcap,
        softmax_scale=-1.3,
    )
    q, k, v, do = draw(problem)
    forward = reference.forward(problem, q, k, v)
    grads = reference.backward(problem, q, k, v, do)
    with mpmath.workdps(50):
        expected = exactly(problem, q, k, v, do)
    got = (forward.o, forward.lse, grads.dq, grads.dk, grads.dv)
    for ours, exact in zip(got, expected, strict=True):
        assert len(exact) == ours.numel()
        for index, value in exact.items():
            assert float(ours[index]) == pytest.approx(float(value), rel=1e-13, abs=1e-14)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (5, 9), (150, 90), (90, 150)])
def test_agrees_with_autograd(mask, seqlen_q, seqlen_k):
    mask = mask.resized(seqlen_q, seqlen_k)
    problem = Problem(
        batch=1 if mask.documents else 2,
        heads_q=6,
        heads_kv=2,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=7,
        head_dim_v=5,
        mask=mask,
        softcap=2.0,
    )
    q, k, v, do = draw(problem)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    ql, kl, vl = leaves
    s = ql @ kl.repeat_interleave(3, 1).mT * problem.scale
    s = 2.0 * torch.tanh(s / 2.0)
    allowed = torch.from_numpy(mask.allowed(seqlen_q, seqlen_k))
    p = torch.softmax(torch.where(allowed, s, -1e300), -1) * allowed
    o = p @ vl.repeat_interleave(3, 1)
    o.backward(do)
    forward = reference.forward(problem, q, k, v)
    grads = reference.backward(problem, q, k, v, do)
    torch.testing.assert_close(forward.o, o.detach(), rtol=1e-11, atol=1e-12)
    lse = torch.logsumexp(torch.where(allowed, s, -torch.inf), -1).detach()
    torch.testing.assert_close(forward.lse, lse, rtol=1e-11, atol=1e-12)
    for ours, leaf in zip((grads.dq, grads.dk, grads.dv), leaves, strict=True):
        torch.testing.assert_close(ours, leaf.grad, rtol=1e-10, atol=1e-12)


def test_fully_masked_rows_give_zeros_and_minus_infinity():
    problem = Problem(seqlen_q=5, seqlen_k=2, head_dim=4, head_dim_v=4, mask=Mask(causal=True))
    q, k, v, do = draw(problem)
    forward = reference.forward(problem, q, k, v)
    assert (forward.o[..., :3, :] == 0).all()
    assert (forward.lse[..., :3] == -torch.inf).all()
    assert (reference.backward(problem, q, k, v, do).dq[..., :3, :] == 0).all()


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 3), (3, 0), (0, 0)])
def test_empty_sequences_are_legal(seqlen_q, seqlen_k):
    problem = Problem(seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=4, head_dim_v=2)
    q, k, v, do = draw(problem)
    forward = reference.forward(problem, q, k, v)
    assert forward.o.shape == problem.shape_o
    assert (forward.lse == -torch.inf).all()
    grads = reference.backward(problem, q, k, v, do)
    assert all((x == 0).all() for x in (forward.o, grads.dq, grads.dk, grads.dv))


def test_logits_beyond_the_range_of_exp_are_no_trouble():
    problem = Problem(seqlen_q=2, seqlen_k=2, head_dim=1, head_dim_v=1, softmax_scale=1e4)
    q = torch.tensor([1.0, -1.0]).reshape(problem.shape_q)
    k = torch.tensor([1.0, 0.5]).reshape(problem.shape_k)
    v = torch.tensor([3.0, 7.0]).reshape(problem.shape_v)
    forward = reference.forward(problem, q, k, v)
    assert forward.o.flatten().tolist() == [3.0, 7.0]
    assert forward.lse.flatten().tolist() == [1e4, -5e3]


def test_expanded_heads_count_as_their_copies():
    problem = Problem(heads_q=4, heads_kv=4, seqlen_q=9, seqlen_k=9, head_dim=8, head_dim_v=8)
    q, k, v, do = (x[:, :1].expand_as(x) for x in draw(problem))
    copies = [x.contiguous() for x in (q, k, v, do)]
    assert torch.equal(
        reference.backward(problem, q, k, v, do).dk, reference.backward(problem, *copies).dk
    )


@pytest.mark.slow
def test_16384_by_16384_takes_less_than_2_gb():
    code = """
        import torch
        from pathlib import Path
        from fa_verify import reference
        from fa_verify.masks import Mask
        from fa_verify.problem import Problem
        torch.set_num_threads(1)
        problem = Problem(seqlen_q=16384, seqlen_k=16384, head_dim=64, head_dim_v=64, mask=Mask())
        x = torch.randn(problem.shape_q).half()
        reference.forward(problem, x, x, x)
        window = Problem(seqlen_q=16384, seqlen_k=16384, head_dim=64, head_dim_v=64,
                         mask=Mask(causal=True, window_left=4096))
        reference.backward(window, x, x, x, x)
        # Not ru_maxrss, which counts the process that started this one.
        print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 2 << 20
