"""Each check is tripped by a fault seeded for it, and left alone by a right kernel."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from fa_verify import Capabilities, Grads, Kernel, Outputs, checks
from fa_verify.backends.base import Incident, Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.case import Case
from fa_verify.checks import (
    contract,
    determinism,
    invariants,
    masking,
    memory,
    metamorphic,
    nonfinite,
    numerics,
    places,
    reruns,
    unmodified,
)
from fa_verify.checks.where import describe, ranges
from fa_verify.trial import Trial

torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other

CASE = "pass=bwd b=2 h=4/2 s=24x40 d=20/12 dtype=float16 seed=3"
FORWARD = CASE.replace("bwd", "fwd")
CAUSAL = "pass=bwd b=2 h=2 s=40x24 d=16 dtype=float16 mask=causal seed=3"  # 16 rows see no key
PROMISES = Capabilities(head_dims_v=range(1, 257), deterministic=True, batch_invariant=True)


def scores(problem, q, k):
    keys = k.float().repeat_interleave(problem.group, dim=1)
    allowed = torch.from_numpy(problem.mask.allowed(problem.seqlen_q, problem.seqlen_k))
    logits = torch.einsum("bhid,bhjd->bhij", q.float(), keys) * problem.scale
    return torch.where(allowed, logits, -torch.inf)


def forward(problem, q, k, v):
    """A right forward pass in plain float32, one head at a time so that it is batch invariant."""
    s = scores(problem, q, k)
    m = s.amax(-1, keepdim=True)
    m = torch.where(torch.isinf(m), 0.0, m)
    p = torch.exp(s - m)
    total = p.sum(-1, keepdim=True)
    values = v.float().repeat_interleave(problem.group, dim=1)
    o = torch.empty(problem.shape_o)
    for b in range(problem.batch):
        for h in range(problem.heads_q):
            o[b, h] = p[b, h] @ values[b, h]
    o = o / torch.where(total == 0, 1.0, total)
    return Outputs(o.to(q.dtype), (m + torch.log(total)).squeeze(-1))


def backward(problem, q, k, v, outputs, do):
    p = torch.exp(scores(problem, q, k) - outputs.lse[..., None])
    p = torch.where(torch.isinf(outputs.lse)[..., None], 0.0, p)
    keys, values = (x.float().repeat_interleave(problem.group, dim=1) for x in (k, v))
    delta = (do.float() * outputs.o.float()).sum(-1, keepdim=True)
    ds = p * (do.float() @ values.mT - delta)
    dq = ds @ keys * problem.scale
    dk = ds.mT @ q.float() * problem.scale
    dv = p.mT @ do.float()
    grouped = (problem.batch, problem.heads_kv, problem.group, problem.seqlen_k, -1)
    dk, dv = (x.reshape(grouped).sum(2) for x in (dk, dv))
    return Grads(*(x.to(q.dtype) for x in (dq, dk, dv)))


def trial(case=CASE, *, fwd=forward, bwd=backward, promises=PROMISES, setup=None, independent=True):
    kernel = Kernel(name="plain", forward=fwd, backward=bwd, capabilities=promises)
    setup = setup or Setup()
    return Trial(kernel, Case.parse(case), setup, CpuBackend(), independent=independent)


def changed(change):
    """The right forward pass with its outputs changed in place."""

    def fwd(problem, q, k, v):
        outputs = forward(problem, q, k, v)
        return change(outputs) or outputs

    return fwd


def titles(check, subject):
    return [failure.title for failure in check(subject)]


@pytest.mark.parametrize("case", [CASE, CAUSAL, "pass=bwd s=0x5 d=8 dtype=float32 seed=1"])
@pytest.mark.parametrize("independent", [True, False])
def test_a_right_kernel_has_no_failure(case, independent):
    subject = trial(case, independent=independent)
    assert [f for check in checks.ALL for f in check(subject)] == []


@pytest.mark.parametrize("rerun", reruns.RERUNS, ids=lambda rerun: rerun[0])
def test_a_right_kernel_passes_every_rerun(rerun):
    _, applies, check = rerun
    subjects = [trial(CASE), trial(CAUSAL)]
    promising = dataclasses.replace(PROMISES, isolates_masked_nan=True)
    if rerun[0] == "same launch again":  # where the order of the programs is not ours to choose
        subjects = [trial(CASE, setup=Setup(schedule="reverse"))]
    if rerun[0] == "other poison":  # on a card; tests/fences has kernels that fail
        subjects = [trial(CASE, setup=Setup(backend="cuda"))]
    if rerun[0] == "hidden NaN":
        subjects = [trial(CAUSAL, promises=promising, fwd=isolating, bwd=None)]
    applicable = [subject for subject in subjects if applies(subject)]
    assert applicable
    assert [f for subject in applicable for f in check(subject)] == []


def isolating(problem, q, k, v):
    seen = torch.from_numpy(problem.mask.allowed(problem.seqlen_q, problem.seqlen_k))
    o, lse = torch.zeros(problem.shape_o), torch.full(problem.shape_lse, -torch.inf)
    s = scores(problem, q, k)
    for i in range(problem.seqlen_q):
        j = seen[i]
        if j.any():
            lse[:, :, i] = torch.logsumexp(s[:, :, i, j], -1)
            weights = torch.softmax(s[:, :, i, j], -1)
            o[:, :, i] = torch.einsum("bhj,bhjd->bhd", weights, v[:, :, j].float())
    return Outputs(o.to(q.dtype), lse)


def test_contract_sees_shape_dtype_and_aliasing():
    def fwd(problem, q, k, v):
        outputs = forward(problem, q, k, v)
        return Outputs(outputs.o[..., :-1].float(), outputs.lse.double())

    found = titles(contract.check, trial(fwd=fwd, bwd=None, case=CASE.replace("bwd", "fwd")))
    assert "o has the wrong shape" in found
    assert "o has the wrong dtype" in found
    assert "lse has the wrong dtype" in found

    def same(problem, q, k, v, outputs, do):
        grads = backward(problem, q, k, v, outputs, do)
        return Grads(q, grads.dk, grads.dv)

    assert titles(contract.check, trial(bwd=same)) == ["dq aliases q"]


def test_contract_sees_an_exception():
    def fwd(*_):
        msg = "no"
        raise ValueError(msg)

    assert titles(contract.check, trial(fwd=fwd)) == ["forward raised ValueError"]


def test_numerics_says_where_how_far_and_how_many():
    def shift(outputs):
        outputs.o[1, 2, 3:5, 7] += 1.0

    subject = trial(FORWARD, fwd=changed(shift))
    (failure,) = numerics.check(subject)
    assert failure.title == "o outside its bound"
    assert "2 of 2304 elements outside: batches 1 of 2, heads 2 of 4, rows 3..4 of 24" in (
        failure.message
    )
    assert "±" in failure.message
    assert "ulp" in failure.message


def test_gradients_of_a_wrong_forward_are_judged_end_to_end():
    def scale(outputs):
        outputs.lse.add_(0.5)

    subject = trial(fwd=changed(scale))
    found = {f.title: f for f in numerics.check(subject)}
    assert set(found) == {f"{n} outside its bound" for n in ("lse", "dq", "dk", "dv")}
    assert "given the observed" not in found["dv outside its bound"].message


def test_nonfinite_sees_nan_inf_and_wrong_empty_rows():
    def spoil(outputs):
        outputs.o[0, 0, 30, 0] = torch.nan
        outputs.o[0, 0, 31, 0] = torch.inf
        outputs.o[0, 0, 2, 0] = 1.0
        outputs.lse[0, 0, 3] = torch.inf

    found = titles(nonfinite.check, trial(CAUSAL, fwd=changed(spoil), bwd=None))
    assert found == [
        "o has NaN",
        "o has inf",
        "o of a fully masked row is not 0",
        "lse of a fully masked row is not -inf",
    ]


def test_nonfinite_says_where_a_nan_was_born():
    def spoil(outputs):
        outputs.o[0, 1, 20, 3] = torch.nan

    subject = trial(CAUSAL, fwd=changed(spoil), bwd=None)
    born = Incident(
        kind="nan-born", kernel="fwd", file="k.py", line=7, source="  p = tl.exp(s - m)",
        argument="o_ptr", program_id=(1, 0, 0), coordinates=(0, 1, 20, 3), offset=99, count=1,
        detail="arith.subf of -inf, -inf gave NaN",
    )  # fmt: skip
    other = dataclasses.replace(born, argument="do_ptr", line=8)
    subject.execution = dataclasses.replace(subject.execution, notes=(other, born))
    (failure,) = [f for f in nonfinite.check(subject) if f.title == "o has NaN"]
    assert (failure.location, failure.source) == ("k.py:7", "p = tl.exp(s - m)")
    assert failure.message.endswith("fwd: arith.subf of -inf, -inf gave NaN")
    subject.execution = dataclasses.replace(subject.execution, notes=())
    (failure,) = [f for f in nonfinite.check(subject) if f.title == "o has NaN"]
    assert failure.location == ""


def test_nonfinite_takes_the_declared_lse_of_an_empty_row():
    def zero(outputs):
        outputs.lse[torch.isinf(outputs.lse)] = 0.0

    promises = dataclasses.replace(PROMISES, empty_row_lse=0.0)
    subject = trial(CAUSAL.replace("bwd", "fwd"), fwd=changed(zero), promises=promises)
    assert titles(nonfinite.check, subject) == []


def test_memory_reports_line_argument_and_lanes():
    subject = trial()
    incident = Incident(
        kind="out-of-bounds-read", kernel="fwd", file="k.py", line=7, source="  x = tl.load(p)",
        argument="k", program_id=(1, 0, 0), coordinates=(0, 0, 40, 3), offset=99, count=5,
        detail="past the end",
    )  # fmt: skip
    holes = torch.zeros(2, 4, 24, 12, dtype=torch.bool)
    holes[..., 8:] = True
    subject.execution = dataclasses.replace(
        subject.execution, incidents=(incident, incident), unwritten={"o": holes}
    )
    (failure,) = memory.check(subject)
    assert failure.location == "k.py:7"
    assert failure.source == "x = tl.load(p)"
    assert "element (0, 0, 40, 3), 10 lanes in all" in failure.message
    hint = dataclasses.replace(
        incident,
        kind="false-hint",
        argument="",
        coordinates=None,
        detail="the assumption is false",
    )
    subject.execution = dataclasses.replace(subject.execution, incidents=(hint,))
    (failure,) = memory.check(subject)
    assert failure.title == "false-hint"
    assert failure.message == "fwd, program (1, 0, 0): 5 lanes in all: the assumption is false"
    (hole,) = memory.unwritten(subject)
    assert "head_dim 8..11 of 12" in hole.message


def test_unmodified_sees_elements_and_slack():
    def writes(problem, q, k, v):
        outputs = forward(problem, q, k, v)
        k[0, 0, 1, 2] += 1
        return outputs

    assert titles(unmodified.check, trial(fwd=writes)) == ["k was modified"]

    def spills(problem, q, k, v):
        outputs = forward(problem, q, k, v)
        k.as_strided((1,), (1,), k.storage_offset() + k.numel()).fill_(0)
        return outputs

    assert titles(unmodified.check, trial(fwd=spills)) == [
        "out-of-bounds-write into the slack of k"
    ]


def test_hull_and_value_gradient_sum():
    def far(outputs):
        outputs.o[0, 0, 0, 0] = 30.0

    subject = trial(fwd=changed(far))
    assert titles(invariants.hull, subject) == ["o outside the hull of v"]

    def lost(problem, q, k, v, outputs, do):
        grads = backward(problem, q, k, v, outputs, do)
        grads.dv[:, :, -1] = 0
        return grads

    assert titles(invariants.value_gradient_sum, trial(bwd=lost)) == [
        "the sum of dv differs from the sum of do"
    ]


def test_hull_extremes_are_those_of_every_interval():
    v = torch.randn(1, 1, 37, 2, dtype=torch.float64)
    lo, hi = Case.parse(
        "pass=fwd s=50x37 d=2 dtype=float32 mask=l9.r3 seed=0"
    ).problem.mask.intervals(50, 37)
    low, high = invariants._extremes(v, lo, hi)
    for i, (a, b) in enumerate(zip(lo, hi, strict=True)):
        if a < b:
            assert torch.equal(low[0, 0, i], v[0, 0, a:b].amin(0))
            assert torch.equal(high[0, 0, i], v[0, 0, a:b].amax(0))


def leaky(problem, q, k, v):
    """Every row gets a little of the last value, whatever the mask says."""
    outputs = forward(problem, q, k, v)
    return Outputs(outputs.o + 1e-3 * v[:, :, -1:], outputs.lse)


def test_masking_sees_a_hidden_value_that_leaks():
    subject = trial(CAUSAL.replace("bwd", "fwd"), fwd=leaky)
    assert titles(masking.finite, subject) == ["hidden keys reach o"]


def test_masking_sees_nan_when_isolation_is_promised():
    promises = dataclasses.replace(PROMISES, isolates_masked_nan=True)
    case = CAUSAL.replace("bwd", "fwd")
    assert titles(masking.isolates_nan, trial(case, promises=promises)) == ["hidden keys reach o"]


def test_determinism_sees_a_result_that_changes():
    calls = []

    def noisy(problem, q, k, v):
        calls.append(1)
        outputs = forward(problem, q, k, v)
        return Outputs(outputs.o + 1e-3 * len(calls), outputs.lse)

    assert titles(determinism.repeated, trial(FORWARD, fwd=noisy)) == ["o differs between runs"]


def test_determinism_without_the_promise_judges_each_run_by_its_bound():
    calls = []

    def noisy(step):
        def fwd(problem, q, k, v):
            calls.append(1)
            outputs = forward(problem, q, k, v)
            return Outputs(outputs.o + step * (len(calls) - 1), outputs.lse)

        return fwd

    loose = dataclasses.replace(PROMISES, deterministic=False)
    calls.clear()
    assert titles(determinism.repeated, trial(fwd=noisy(1e-5), promises=loose)) == []
    calls.clear()
    assert titles(determinism.repeated, trial(fwd=noisy(1.0), promises=loose)) == [
        "o leaves its bound when run again"
    ]


def test_metamorphic_relations_see_their_faults():
    def ordered(problem, q, k, v):  # weights the keys by their position
        weight = torch.linspace(0.5, 1.5, problem.seqlen_k)[:, None].to(v.dtype)
        return forward(problem, q, k, v * weight)

    assert titles(metamorphic.key_permutation, trial(fwd=ordered)) == [
        "o depends on the order of the keys"
    ]
    assert titles(metamorphic.values_of_one, trial(fwd=ordered)) == ["V = 1 does not give 1"]

    def unshifted(problem, q, k, v):  # no maximum subtracted
        p = torch.exp(scores(problem, q, k).to(torch.float16)).float()
        total = p.sum(-1, keepdim=True)
        values = v.float().repeat_interleave(problem.group, dim=1)
        return Outputs(((p / total) @ values).to(q.dtype), torch.log(total).squeeze(-1))

    found = titles(metamorphic.row_shift, trial(fwd=unshifted))
    assert "lse does not follow a shift of the logits" in found

    def first_head(problem, q, k, v):
        return forward(problem, q, k[:1, :1].expand_as(k), v)

    found = titles(places.other_places, trial(fwd=first_head))
    assert "o depends on its place in the batch" in found
    assert any(
        "o depends on its batch mates" in titles(places.sequence_alone, trial(case, fwd=first_head))
        for case in (CASE, CASE.replace("seed=3", "seed=4"), CASE.replace("seed=3", "seed=5"))
    )


def test_a_sequence_is_the_same_in_any_batch():
    alone = "pass=bwd h=4/2 s=24x40 d=16 dtype=float32 seed={}"

    def splitting(problem, q, k, v):  # the keys in as many parts as there are sequences
        parts, step = [], -(-problem.seqlen_k // problem.batch)
        for at in range(0, problem.seqlen_k, step):
            part = dataclasses.replace(problem, seqlen_k=min(step, problem.seqlen_k - at))
            parts.append(forward(part, q, k[:, :, at : at + step], v[:, :, at : at + step]))
        lse = torch.logsumexp(torch.stack([x.lse for x in parts]), 0)
        return Outputs(sum(x.o * torch.exp(x.lse - lse)[..., None] for x in parts), lse)

    def leaking(problem, q, k, v):  # the next sequence's first value
        outputs = forward(problem, q, k, v)
        return Outputs(outputs.o + 1e-8 * v.roll(1, 0)[:, :1, :1], outputs.lse)

    def strided(problem, q, k, v):  # the batch stride of v in the place of k's
        outputs = forward(problem, q, k, v)
        return Outputs(outputs.o, outputs.lse + 1e-3 * torch.arange(problem.batch)[:, None, None])

    for seed in range(5):
        case = alone.format(seed)
        assert titles(places.sequence_among_others, trial(case)) == []
        split = trial(case, fwd=splitting)
        assert "o depends on its batch" in titles(places.sequence_among_others, split)
        tolerant = trial(case, fwd=splitting, promises=Capabilities())
        assert titles(places.sequence_among_others, tolerant) == []
        found = titles(places.sequence_among_others, trial(case, fwd=leaking))
        assert "o depends on its batch" in found
        found = titles(places.sequence_among_others, trial(case, fwd=strided))
        assert "lse depends on its batch" in found
    far = trial(CASE.replace("seed=3", "q=bhsd.b2147483648 seed=3"))
    assert not places.fits_among_others(far)
    assert places.fits_among_others(trial(CASE))
    assert not places.fits_among_others(trial(CASE.replace("seed=3", "dropout=0.5 seed=3")))


def test_a_kernel_may_refuse_problems_that_nobody_drew():
    def particular(problem, q, k, v):  # head dims in eights, one layout for all, pairs of sequences
        if problem.head_dim % 8 or problem.batch % 2 or len({q.stride(), k.stride()}) > 1:
            msg = "not taken"
            raise ValueError(msg)
        return forward(problem, q, k, v)

    def unshifted(problem, q, k, v):
        o, lse = forward(problem, q, k, v).o, torch.logsumexp(scores(problem, q, k), -1)
        return Outputs(o, lse - 1.0 * (problem.head_dim > 16))

    case = "pass=fwd b=2 h=2 s=24x24 d=16 dtype=float16 seed=3"
    eights = Capabilities(head_dims=range(8, 257, 8))
    for check in (metamorphic.row_shift, metamorphic.values_of_one, places.sequence_alone):
        assert not titles(check, trial(case, fwd=particular, promises=None))
        assert not titles(check, trial(case, promises=eights))
    assert titles(metamorphic.row_shift, trial(case, fwd=unshifted, promises=eights))


@pytest.mark.parametrize(("scale", "room"), [(1e-3, False), (2e-3, True)])
def test_logits_are_shifted_where_the_format_has_such_a_number(scale, room):
    """Of a scale of 1e-3 a column of 2^16 would be due, which is beyond float16."""
    subject = trial(f"pass=fwd s=7x9 d=8 dtype=float16 scale={scale} seed=3")
    assert metamorphic.has_room_for_shift(subject) == room


def test_a_card_compiles_wider_heads_for_some_forms_only():
    def forms(setup, independent):
        return {
            d
            for d, seed in itertools.product((16, 24, 32, 40, 48, 64, 80, 96), range(40))
            if "row shift"
            in reruns.chosen(
                trial(
                    CASE.replace("d=20/12 ", f"d={d} ").replace("seed=3", f"seed={seed}"),
                    setup=setup,
                    independent=independent,
                )
            )
        }

    card = Setup(backend="cuda")
    assert len(forms(Setup(), independent=True)) == 8
    assert 0 < len(forms(card, independent=True)) < 6
    assert len(forms(card, independent=False)) == 8


def test_an_independent_case_gets_few_reruns_and_a_searched_one_all():
    promised = {"shuffled order", "one sequence alone"}
    small, larger = trial(), trial(CASE.replace("s=24x40", "s=300x400"))
    assert promised <= set(reruns.chosen(small))
    assert len(reruns.chosen(small)) <= 3
    assert len(reruns.chosen(larger)) == 1
    assert len(reruns.chosen(trial(promises=Capabilities()))) == 1
    assert len(reruns.chosen(trial(independent=False))) == 8
    names = {
        name
        for seed in range(60)
        for name in reruns.chosen(trial(CASE.replace("seed=3", f"seed={seed}")))
    }
    assert len(names) == 8


def test_statistics_are_finite_and_complete():
    def spoil(outputs):
        outputs.o[0, 0, 0, 0] = torch.nan

    right, wrong = (
        checks.statistics(trial()),
        checks.statistics(trial(fwd=changed(spoil), bwd=None)),
    )
    assert set(right) == {"o", "lse", "dq", "dk", "dv"}
    assert all(0 < stats.ratio <= 1 for stats in right.values())
    assert right["o"].rule_2x is not None
    assert wrong["o"].ratio > 1e300
    assert wrong["o"].worst == (0, 0, 0, 0)


def test_the_bias_of_a_tensor_is_that_of_its_sizes():
    def shrinks(outputs):
        return Outputs((outputs.o.double() * (1 - 2e-3)).half(), outputs.lse + 1e-6)

    right, wrong = checks.statistics(trial()), checks.statistics(trial(fwd=changed(shrinks)))
    assert abs(right["o"].bias) < 0.003
    assert wrong["o"].bias < -0.01  # o is of either sign, and its mean error near 0
    assert wrong["lse"].bias > right["lse"].bias + 0.02


def test_ranges_and_places():
    assert ranges([0, 1, 2, 5]) == "0..2, 5"
    wrong = torch.zeros(1, 2, 4, 8, dtype=torch.bool)
    wrong[0, :, 1:3, 5:] = True
    assert describe("o", wrong) == "every head, rows 1..2 of 4, head_dim 5..7 of 8"


class Elsewhere(CpuBackend):
    """A backend whose device is not the CPU's: torch's meta device stands for a card's memory."""

    device = "meta"

    def run(self, kernel, problem, inputs, setup, *, backward):
        self.given = inputs
        here = Trial(kernel, self.case, setup, CpuBackend()).pristine
        return super().run(kernel, problem, here, setup, backward=backward)


def test_a_small_case_is_judged_on_the_cpu_wherever_it_ran(monkeypatch):
    kernel = Kernel(name="plain", forward=forward, backward=backward, capabilities=PROMISES)
    backend = Elsewhere()
    backend.case = Case.parse(CASE)
    monkeypatch.setattr("fa_verify.trial._ON_THE_CPU", 1 << 13)
    small = Trial(kernel, backend.case, Setup(), backend)
    assert small.device == "cpu"
    small.rerun(small.pristine)
    assert (backend.given.q.device.type, small.pristine.q.device.type) == ("meta", "cpu")
    assert backend.given.k.stride() == small.pristine.k.stride()
    monkeypatch.setattr("fa_verify.trial._ON_THE_CPU", 0)
    assert Trial(kernel, backend.case, Setup(), backend).device == "meta"
