"""The same launch many times: a result that moves is seen, a right kernel's is left alone."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from triton.runtime.jit import JITFunction

from fa_verify import Arithmetic, Capabilities, Grads, Kernel, Outputs, bounds, campaign, loader
from fa_verify.backends import company, make
from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.case import Case
from fa_verify.checks import determinism, stress
from fa_verify.errors import InvalidInputError
from fa_verify.inputs import materialise
from fa_verify.pool import Pool
from fa_verify.record import CaseRecord
from fa_verify.trial import Trial
from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.launch.forced import forced

CASE = "pass=bwd b=2 h=4/2 s=24x200 d=16 dtype=float32 seed=3"
PROMISES = Capabilities(deterministic=True, batch_invariant=True)
LOOSE = Capabilities()
ATOMICS = Arithmetic(dq_atomics=True)


def probabilities(problem, q, k):
    keys = k.double().repeat_interleave(problem.group, dim=1)
    return torch.softmax(q.double() @ keys.mT * problem.scale, -1), keys


def forward(problem, q, k, v):
    p, keys = probabilities(problem, q, k)
    o = p @ v.double().repeat_interleave(problem.group, dim=1)
    lse = torch.logsumexp(q.double() @ keys.mT * problem.scale, -1)
    return Outputs(o.to(q.dtype), lse.float())


def gradients(problem, q, k, v, outputs, do, dq_of):
    """Right gradients in float64, but for dq: `dq_of` sums its parts, one a block of 16 keys."""
    keys, values = (x.double().repeat_interleave(problem.group, dim=1) for x in (k, v))
    p = torch.exp(q.double() @ keys.mT * problem.scale - outputs.lse.double()[..., None])
    delta = (do.double() * outputs.o.double()).sum(-1, keepdim=True)
    ds = p * (do.double() @ values.mT - delta) * problem.scale
    blocks = [slice(at, at + 16) for at in range(0, problem.seqlen_k, 16)]
    dq = dq_of([(ds[..., block] @ keys[:, :, block]).float() for block in blocks])
    shape = (problem.batch, problem.heads_kv, problem.group, problem.seqlen_k, -1)
    dk, dv = ((x.mT @ y.double()).reshape(shape).sum(2) for x, y in ((ds, q), (p, do)))
    return Grads(*(x.to(q.dtype) for x in (dq, dk, dv)))


def trial(dq_of=sum, *, fwd=forward, promises=LOOSE, arithmetic=ATOMICS, runs=6, case=CASE):
    def backward(*args):
        return gradients(*args, dq_of)

    kernel = Kernel(
        name="plain",
        forward=fwd,
        backward=backward,
        capabilities=promises,
        arithmetic=arithmetic,
    )
    return Trial(kernel, Case.parse(case), Setup(stress=runs), CpuBackend())


def titles(check, subject):
    return [failure.title for failure in check(subject)]


def shuffling(bits):
    """Sums in another order each time, each rounded to so many bits."""
    calls = itertools.count()

    def total(parts):
        order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(next(calls)))
        acc = torch.zeros_like(parts[0])
        for index in order.tolist():
            significand, exponent = torch.frexp(acc + parts[index])
            acc = torch.ldexp(torch.round(significand * 2**bits) / 2**bits, exponent)
        return acc

    return total


@pytest.mark.parametrize("promises", [PROMISES, LOOSE])
def test_a_right_kernel_is_left_alone(promises):
    assert titles(stress.check, trial(promises=promises, arithmetic=Arithmetic())) == []


def test_a_promise_is_held_to_the_bit_in_every_run():
    calls = itertools.count()

    def moves(problem, q, k, v):  # once, in the fourth run
        outputs = forward(problem, q, k, v)
        outputs.o[1, 2, 3, 4] *= 1 + 2.0**-22 * (next(calls) == 3)
        return outputs

    failure, *_ = stress.check(trial(fwd=moves, promises=PROMISES))  # dq, dk then move as well
    assert failure.title == "o moves from run to run"
    assert failure.message.startswith("o[1, 2, 3, 4] lies between")
    assert "7 runs of one launch" in failure.message
    assert "1 of 3072 elements" in failure.message
    calls = itertools.count()
    assert titles(stress.check, trial(fwd=moves, promises=LOOSE)) == []
    calls = itertools.count()
    assert titles(stress.check, trial(fwd=moves, promises=PROMISES, runs=0)) == []


def test_atomic_sums_move_by_what_their_order_explains():
    right = trial(shuffling(24))
    assert titles(stress.check, right) == []
    assert (right.dq_spread < 0.2 * right.backward_bounds[0].det).any()


@pytest.mark.parametrize("check", [stress.check, determinism.repeated])
def test_sums_of_thirteen_bits_move_more_than_an_order_explains(check):
    # Each run is within its bound: float16 inputs allow dS, and so dq, an error of 2^-11.
    case = CASE.replace("float32", "float16")
    kernel = trial(shuffling(13), case=case)
    assert titles(check, trial(shuffling(24), case=case)) == []
    expected = "dq moves from run to run", "dq differs by more than its order explains"
    assert titles(check, kernel) in [[title] for title in expected]


def test_every_run_of_an_unpromising_kernel_must_stay_in_its_bound():
    calls = itertools.count()

    def jumps(problem, q, k, v):
        outputs = forward(problem, q, k, v)
        outputs.o.add_(0.5 * (next(calls) == 2))
        return outputs

    (failure,) = stress.check(trial(fwd=jumps))
    assert failure.title == "o moves from run to run"
    assert "programs shuffled:4" in failure.message


@pytest.mark.parametrize(
    "case",
    [
        "pass=bwd b=2 h=4/2 s=40x300 d=64 dtype=float16 seed=3",
        "pass=bwd s=33x300 d=32 dtype=float32 qk.values=two-level logits=4.0 seed=3",
        "pass=bwd s=70x200 d=32 dtype=bfloat16 mask=causal cap=5.0 seed=3",
        "pass=bwd s=33x200 d=16 dtype=float32 dot=tf32 v.values=heavy-tails seed=3",
        "pass=bwd s=33x200 d=16 dtype=float32 dot=tf32x3 qk.values=dominant-key seed=3",
    ],
)
def test_the_projects_atomic_kernel_stays_within_its_spread(case):
    (kernel,) = loader.load("kernels/flash_attention.py:flash_atomic")
    setup = Setup(config=3, stress=3)
    assert titles(stress.check, Trial(kernel, Case.parse(case), setup, CpuBackend())) == []


@pytest.mark.parametrize("seed", [0, 1])
def test_what_tf32_leaves_of_a_delta_that_cancels_may_be_summed_in_any_order(seed):
    # dP - delta is 0, but for the low bits of do, which the dots cut off and delta keeps.
    (kernel,) = loader.load("kernels/flash_attention.py:flash_atomic")
    values = "qk.values=dominant-key v.values=ones"
    case = Case.parse(f"pass=bwd s=200x65 d=96 dtype=float32 dot=tf32 {values} seed={seed}")
    setup = Setup(config=2, stress=6)
    assert titles(stress.check, Trial(kernel, case, setup, CpuBackend())) == []


def test_a_prescaled_k_weighs_what_is_summed():
    case = CASE.replace("float32", "bfloat16")
    q, k = (
        trial(arithmetic=Arithmetic(dq_atomics=True, prescaled=which), case=case).dq_spread
        for which in ("q", "k")
    )
    assert (k > q).all()


def test_setups_read_back_and_old_lines_are_read():
    setup = Setup(backend="cuda", config=2, warps=8, stages=3, beside="twin", stress=12)
    assert Setup.parse(str(setup)) == setup
    old = "backend=cuda config=3 schedule=forward float=hardware"
    assert str(Setup.parse(old)) == old
    for bad in ("warps=x", "stress=-1", "beside=crowd"):
        with pytest.raises(InvalidInputError, match=bad.partition("=")[0]):
            Setup.parse(bad)


def test_forced_options_reach_every_launch_and_what_they_break_is_no_verdict(monkeypatch):
    seen = []

    def run(_self, *_args, **kwargs):
        seen.append(kwargs)
        if kwargs["num_warps"] > 8:
            msg = "out of resource"
            raise RuntimeError(msg)

    monkeypatch.setattr(JITFunction, "run", run)
    kernel = JITFunction(test_setups_read_back_and_old_lines_are_read)
    with forced(num_warps=8, num_stages=1):
        kernel.run(num_warps=4, grid=(1,))
    with forced(num_warps=16), pytest.raises(Unsupported, match="num_warps=16: out of resource"):
        kernel.run(grid=(1,))
    with forced():
        kernel.run(num_warps=4)
    assert [kwargs["num_warps"] for kwargs in seen] == [8, 16, 4]
    assert seen[0] == {"num_warps": 8, "num_stages": 1, "grid": (1,)}


def test_a_stressed_case_meets_every_configuration_and_other_options():
    setup = Setup(backend="cuda", config=9, float_model="hardware", stress=12)
    record = CaseRecord(
        kernel="k", target="t", source_hash="", case=CASE, verdict="pass", configs=4,
        setup=str(dataclasses.replace(setup, config=1)),
    )  # fmt: skip
    found = campaign.further(setup, record)
    assert [s.config for s in found[:3]] == [0, 2, 3]
    assert all(s.stress == 0 and s.backend == "cuda" for s in found)
    assert [bool(s.warps) for s in found] == [False, False, False, True, True]
    on_cpu = dataclasses.replace(setup, backend="cpu")
    assert len(campaign.further(on_cpu, record)) == 3


def test_one_case_in_sixteen_is_stressed():
    (kernel,) = loader.load("kernels/flash_attention.py:flash")
    plan = campaign.Plan(cases=96, seed=5, stress=True)
    stressed = [s.stress > 0 for _, s in campaign.drawn(kernel, plan)]
    assert [i for i, found in enumerate(stressed) if found] == [11, 27, 43, 59, 75, 91]
    plain = dataclasses.replace(plan, stress=False)
    assert not any(setup.stress for _, setup in campaign.drawn(kernel, plain))


class _Late:
    def result(self):
        raise TimeoutError


def test_a_compiler_that_takes_too_long_over_forced_options_is_no_failure():
    (kernel,) = loader.load("kernels/flash_attention.py:flash")
    pool = Pool(1, timeout=1, memory=1 << 30, cap=False)
    case = Case.parse(CASE)
    verdicts = [
        pool.result(_Late(), kernel, case, setup).verdict
        for setup in (Setup(backend="cuda"), Setup(backend="cuda", warps=2))
    ]
    pool.stop()
    assert verdicts == ["fail", "unsupported"]


def test_a_twin_has_other_numbers_and_the_same_slack():
    case = Case.parse("pass=bwd h=4/2 s=5x7 d=8 dtype=float16 q=bshd.s8 v=bhsd.shared seed=1")
    inputs = materialise(case)
    twin = company.negated(inputs)
    assert torch.equal(twin.q, -inputs.q)
    assert torch.equal(twin.v, -inputs.v)
    assert torch.equal(twin.k, inputs.k)
    assert torch.equal(twin.do, inputs.do)
    slack = torch.empty(0, dtype=twin.q.dtype).set_(twin.q.untyped_storage())
    assert int(slack.isnan().sum()) > 64


needs_a_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_a_card
@pytest.mark.parametrize("beside", ["nothing", "load", "twin"])
def test_a_launch_returns_its_own_result_in_any_company(beside):
    inputs = materialise(Case.parse(CASE), device="cuda")
    found = company.launched(beside, lambda x: x.q * 2 + x.v.sum(), inputs)
    torch.cuda.synchronize()
    assert torch.equal(found, inputs.q * 2 + inputs.v.sum())


@needs_a_card
def test_a_workspace_that_two_streams_share_is_seen_beside_a_twin():
    shared = torch.empty(2 * 4 * 24, device="cuda")

    def workspace(problem, q, k, v):
        right = forward(problem, q, k, v)
        shared.copy_(right.lse.flatten())
        for _ in range(20):  # time for the twin to write
            shared.mul_(1.0)
        return Outputs(right.o, shared.clone().reshape(problem.shape_lse))

    kernel = Kernel(name="plain", forward=workspace, capabilities=PROMISES)
    setup = Setup(backend="cuda", float_model="hardware", stress=12)
    case = Case.parse(CASE.replace("bwd", "fwd"))
    failures = list(stress.check(Trial(kernel, case, setup, make("cuda"))))
    assert [f.title for f in failures] == ["lse moves from run to run"]
    assert "0 of 4 run again" in failures[0].message
    assert failures[0].diagnosis.startswith("launches on two streams share memory")


def test_nothing_is_said_of_the_spread_where_dq_may_overflow():
    case = "pass=bwd s=24x40 d=16 dtype=float16 v.values=near-max do.values=near-max seed=3"
    subject = trial(case=case)
    overflow = subject.backward_bounds[0].overflow_ok
    assert overflow.any()
    assert subject.dq_spread[overflow].isinf().all()


def test_the_spread_is_that_of_the_declared_dtype_and_bound_by_the_bound():
    subject = trial()
    x, outputs = subject.pristine, subject.execution.outputs
    wide, fine = (
        bounds.dq_spread(
            subject.case.problem, Arithmetic(block_n=block), x.q, x.k, x.v, x.do,
            o=outputs.o, lse=outputs.lse, dq=subject.backward_bounds[0],
        )
        for block in (16, 64)
    )  # fmt: skip
    assert (fine < wide).all()
    assert (wide < 2 * subject.backward_bounds[0].det).all()


@pytest.mark.parametrize("seed", [1, 2])
def test_the_spread_reckons_with_sums_that_are_all_operand_roundings(seed):
    # V = 1 makes the exact dS zero: what is added comes from TF32's rounding of do, and its sizes
    # sum to no less than the dq that came out.
    (kernel,) = loader.load("kernels/flash_attention.py:flash_atomic")
    case = Case.parse(
        "pass=bwd h=2/1 s=160x65 d=96 dtype=float32 dot=tf32 qk.values=dominant-key v.values=ones "
        f"seed={seed}"
    )
    subject = Trial(kernel, case, Setup(config=1), make("cpu"))
    dq = subject.execution.grads.dq.double().abs()
    assert (dq > 1e3 * subject.backward_bounds[0].reference.abs()).any()
    blocks = -(-case.problem.seqlen_k // 16)
    assert (subject.dq_spread >= 2 * (blocks - 1) * 2.0**-24 * dq).all()
