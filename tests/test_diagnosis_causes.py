"""Causes of documents, heads, merges, terms and accesses: what each predicts is what is so."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from fa_verify import reference
from fa_verify.backends.base import Incident
from fa_verify.backends.cpu import CpuBackend
from fa_verify.case import Case
from fa_verify.diagnosis import OR, _joined, incidents, mistaken, model, packed, splits
from fa_verify.diagnosis.addressing import added_by
from fa_verify.diagnosis.beside import NOTHING
from fa_verify.diagnosis.evidence import Observation
from fa_verify.diagnosis.knobs import Knobs
from fa_verify.diagnosis.repair import mend
from fa_verify.diagnosis.score import Compared
from fa_verify.inputs import materialise
from fa_verify.terms import Terms
from fa_verify.ttir.mutation.repairs import Repairs
from tests.test_diagnosis_parts import planted, trials_of, witness  # noqa: F401 - a fixture

torch.set_num_threads(1)

DOCUMENTS = "pass=bwd h=4/2 s=9x14 d=8 dtype=float32 mask=causal.docs4x6-0x1-5x7 seed=3"


def inputs(text):
    case = Case.parse(text)
    x = materialise(case)
    return case.problem, [t.double() for t in (x.q, x.k, x.v, x.do)]


def without_last_keys(problem, q, k, v, do):
    """Each document by itself, its last key left out: o, lse, dq, dk, dv of the reference."""
    row = key = 0
    parts = {name: [] for name in ("o", "lse", "dq", "dk", "dv")}
    for rows, keys in problem.mask.documents:
        of_one = [x[:, :, row : row + rows] for x in (q, do)]
        theirs = [x[:, :, key : key + keys] for x in (k, v)]
        hidden = torch.zeros(1, 1, rows, keys, dtype=torch.float64)
        hidden[..., -1:] = -torch.inf
        mask = dataclasses.replace(problem.mask, documents=())
        alone = dataclasses.replace(
            problem, seqlen_q=rows, seqlen_k=keys, mask=mask, bias="qk", batch=1
        )
        terms = Terms(bias=hidden)
        right = reference.forward(alone, of_one[0], *theirs, terms)
        grads = reference.backward(alone, of_one[0], *theirs, of_one[1], terms)
        for name, found in parts.items():
            found.append(getattr(right if name in ("o", "lse") else grads, name))
        row, key = row + rows, key + keys
    return {name: torch.cat(found, dim=2) for name, found in parts.items()}


def test_ends_and_blocks_are_those_of_each_document():
    problem, (q, k, v, do) = inputs(DOCUMENTS)
    due = without_last_keys(problem, q, k, v, do)
    lost = Knobs(lost="last")
    found = model.forward(problem, q, k, v, lost)
    found |= model.backward(problem, (q, k, v, do), due["o"], due["lse"], lost)
    for name, value in due.items():
        assert torch.allclose(found[name], value, atol=1e-5), name
    whole = model.forward(problem, q, k, v, Knobs(without=(13, 14)))  # of the pack, not of each
    assert not torch.allclose(whole["o"], due["o"], atol=1e-5)


@pytest.mark.parametrize(
    ("lost", "left"),
    [
        ("", range(7)),
        ("last", range(6)),
        ("first", range(1, 7)),
        ("tail", range(4)),
        ("last block", range(4)),
        ("first block", range(4, 7)),
    ],
)
def test_keys_that_are_lost(lost, left):
    problem, _ = inputs("pass=bwd h=1 s=2x7 d=8 dtype=float32 seed=3")
    seen = model.visible(problem, Knobs(lost=lost, block_n=4), 7)
    assert seen.all(dim=0).nonzero().flatten().tolist() == list(left)


def test_documents_may_be_aligned_the_other_way():
    problem, _ = inputs(DOCUMENTS)
    found = model.visible(problem, Knobs(documents="other alignment"), 14)
    other = dataclasses.replace(problem.mask, alignment="top-left")
    assert torch.equal(found, torch.from_numpy(other.allowed(9, 14)))
    assert not torch.equal(found, model.visible(problem, Knobs(), 14))


def test_a_diagonal_by_packed_rows_is_no_row_s():
    problem, _ = inputs("pass=bwd h=4/2 s=3x5 d=8 dtype=float32 mask=causal seed=3")
    (by_rows, _, beside), _ = packed.diagonals(problem, NOTHING)
    assert "row * group + head" in by_rows
    for head in range(4):
        for row in range(3):
            seen = torch.isfinite(beside.bias[0, head, row]).nonzero().flatten().tolist()
            assert seen == [j for j in range(5) if j <= row * 2 + head % 2 + 2]
    assert not list(packed.diagonals(dataclasses.replace(problem, heads_kv=4), NOTHING))


def test_rows_of_other_heads():
    evidence = witness("pass=fwd b=2 h=4/2 s=3x5 d=8 dtype=float32 seed=3").evidence
    own = torch.arange(24).view(2, 4, 3).double()
    found = dict(mistaken.rows_of_heads(evidence, own))
    assert found["the query head with the key head's number"][1, :, 0].tolist() == [12, 12, 15, 15]
    assert found["its place if sequences had as many heads as there are key heads"][
        1, :, 0
    ].tolist() == [6, 9, 12, 15]
    assert found["the first sequence"][1, :, 0].tolist() == [0, 3, 6, 9]
    assert not any(torch.equal(x, own) for x in found.values())
    one = witness("pass=fwd h=1 s=3x5 d=8 dtype=float32 seed=3").evidence
    assert not list(mistaken.rows_of_heads(one, own[:1, :1]))


def test_only_k_or_v_of_another_head():
    seen = witness("pass=fwd h=4/2 s=3x5 d=8 dtype=float32 seed=3")
    x = seen.trial.pristine
    found = dict(mistaken.one_of_both(seen.trial, seen.evidence))
    loaded = found["in v alone, GQA: query head h reads key head h % heads_kv"]
    assert torch.equal(loaded["v"](), x.v[:, [0, 1, 0, 1]].double())
    assert torch.equal(loaded["k"](), x.k[:, [0, 0, 1, 1]].double())
    past = found["in v alone, GQA: query head h reads key head h"]["v"]()
    assert torch.isnan(past[:, 3]).any()  # there is no fourth key head


def test_merges_of_parts_that_are_not_divided():
    evidence = witness("pass=fwd h=1 s=3x8 d=8 dtype=float32 seed=3").evidence
    scores = evidence.q @ evidence.k.mT * evidence.problem.scale
    parts = scores.unflatten(-1, (2, 4))
    top = parts.amax(-1)
    p = torch.exp(parts - top[..., None])
    weight = torch.exp(top - top.amax(-1, keepdim=True))
    acc = torch.einsum("bhqsk,bhskd->bhqsd", p, evidence.v.unflatten(2, (2, 4)))
    right = (weight * p.sum(-1)).sum(-1, keepdim=True)
    due = {
        "l as it is": (weight[..., None] * acc).sum(-2) / p.sum(-1).sum(-1, keepdim=True),
        "acc as it is": acc.sum(-2) / right,
    }
    for how, o in due.items():
        assert torch.allclose(splits.Merging(evidence)(4, how)["o"], o, atol=1e-6), how


def test_sums_at_wrong_places_add_up():
    values = torch.arange(1.0, 7.0).view(1, 1, 3, 2).double()
    assert added_by(values, (6, 6, 2, 1)).flatten().tolist() == [1, 2, 3, 4, 5, 6]
    assert added_by(values, (6, 6, 1, 1)).flatten().tolist() == [1, 5, 9, 6, 0, 0]
    assert added_by(values, (6, 6, 4, 1)).flatten().tolist() == [1, 2, 0, 0, 3, 4]


def seen_at(kind, argument, line, detail, source="x = tl.load(p)"):
    return Incident(
        kind=kind, kernel="k", file="a.py", line=line, source=source, argument=argument,
        program_id=None, coordinates=None, offset=0, count=1, detail=detail,
    )  # fmt: skip


def test_what_is_read_past_a_table_leads_astray():
    problem, _ = inputs(DOCUMENTS)
    past = "up to 1 element past the end of {} (shape ({}), strides ({})); the access has no mask"
    table = seen_at("out-of-bounds-read", "starts_q", 7, past.format("starts_q", "4,", "1,"))
    after = seen_at("out-of-bounds-read", "q", 9, past.format("q", "1, 3, 2", "6, 2, 1"))
    both = (after, table)
    assert "the load of starts_q reads past its last entry" in incidents.explain(
        table, both, problem
    )
    assert incidents.explain(after, both, problem).startswith("follows at a.py:7: the load of star")
    assert "starts_q" not in incidents.explain(after, (after,), problem)


def test_between_whole_tiles_lies_no_rest():
    problem, _ = inputs(DOCUMENTS)
    detail = "between the elements of k, 1 from the nearest (shape (1, 3, 9, {}), strides (1, 1, 1, 1)); the access has no mask"  # noqa: E501
    for width, missing in ((32, False), (24, True)):
        found = seen_at("out-of-bounds-read", "k", 7, detail.format(width))
        found = dataclasses.replace(found, coordinates=(0, 0, 1, width))
        assert ("no boundary handling" in incidents.explain(found, (found,), problem)) == missing


@pytest.mark.parametrize(
    ("detail", "offset", "said"),
    [
        (
            "1 element before the beginning of q (shape (1, 1, 4), strides (4, 4, 1))",
            -1,
            "negative",
        ),
        (
            "1 past the end of q (shape (1, 0, 4), strides (4, 4, 1))",
            0,
            "a tensor without elements",
        ),
    ],
)
def test_accesses_that_no_length_guards(detail, offset, said):
    problem, _ = inputs(DOCUMENTS)
    found = dataclasses.replace(seen_at("out-of-bounds-read", "q", 7, detail), offset=offset)
    assert said in incidents.explain(found, (found,), problem)
    usual = dataclasses.replace(found, detail=detail.replace("0, 4", "1, 4"), offset=4)
    assert said not in incidents.explain(usual, (usual,), problem)


def test_memory_that_no_launch_wrote():
    problem, _ = inputs(DOCUMENTS)
    for name, said in (("dq_ptr", "zeroed first"), ("part_lse", "left it unwritten")):
        found = seen_at("uninitialised-read", name, 7, "")
        assert said in incidents.explain(found, (found,), problem)
        pages = dataclasses.replace(found, argument="k_ptr", coordinates=(0, 0, 0, 0))
        assert said not in incidents.explain(pages, (pages,), problem)


@pytest.mark.parametrize("which", ["first", "last"])
def test_one_query_head_of_a_group(which):
    problem, tensors = inputs("pass=bwd h=4/2 s=5x6 d=8 dtype=float32 seed=3")
    q, k, v, do = tensors
    right = reference.forward(problem, q, k, v)
    knobs = Knobs(group_heads=which, group_dq=True)
    found = model.backward(problem, tensors, right.o, right.lse, knobs)
    kept = torch.zeros(4).index_fill_(0, torch.tensor([0, 2] if which == "first" else [1, 3]), 1.0)
    due = reference.backward(problem, q, k, v, do * kept.view(4, 1, 1).double())
    for name in ("dq", "dk", "dv"):
        assert torch.allclose(found[name], getattr(due, name), atol=1e-5), name


def test_updates_that_get_lost_are_told_by_any_of_their_races():
    problem, _ = inputs(DOCUMENTS)
    two = "program 1 writes another value than program 0"
    stored = seen_at("race", "dq", 9, two, source="tl.store(p, before + x)")
    read = seen_at("race", "dq", 9, "program 0 writes what program 1 read", source=stored.source)
    cases = [((stored,), problem), ((stored,), problem), ((read,), problem)]
    assert "by load, add and store" in incidents.likeliest(stored, cases)
    assert "by load, add and store" not in incidents.likeliest(stored, cases[:2])


def test_edits_of_several_lines_name_no_cause():
    one, two = "a.py:7: once x, all 2 failing cases pass", "a.py:9: once y, all 2 pass"
    assert _joined("", one) == one
    assert _joined("", one + OR + two).startswith("no known defect explains it; a.py:7")
    assert _joined("the scale is missing", one) == f"the scale is missing; {one}"


def test_a_case_whose_noise_hides_both_tells_nothing():
    reference_ = torch.full((1, 1, 4, 4), 1e-3, dtype=torch.float64)
    got = reference_ * 1.5
    wrong = torch.ones_like(reference_, dtype=torch.bool)
    seen = Compared(
        Observation(got=got, reference=reference_, det=reference_ / 4, written=wrong, wrong=wrong),
        "float32",
    )
    assert not seen.fit(reference_ * 2, None).clear  # its own bound is as far as the reference
    seen = Compared(
        Observation(got=got, reference=reference_, det=reference_ / 64, written=wrong, wrong=wrong),
        "float32",
    )
    assert seen.fit(reference_ * 1.5, None).clear


def test_lanes_that_a_mask_hides_may_be_the_fault(planted):  # noqa: F811
    target, lines = planted("fp8-nan-tail")
    cases = (
        "pass=fwd s=1x1 d=1 dtype=bfloat16 fp8=tensor seed=0",
        "pass=fwd s=5x40 d=16 dtype=bfloat16 fp8=tensor seed=1",
    )
    said = mend(trials_of(target, cases), 60.0)
    assert "once the load of v gives 0 where its mask hides" in said
    assert {said.partition(" ")[0]} <= lines
    looked = Repairs()
    (first, _) = trials_of(target, cases)
    again = type(first)(
        first.kernel, first.case, first.setup, CpuBackend(alteration=looked), independent=False
    )
    assert not again.execution.error
    names = {place.says for repair, place in looked.found.items() if "gives 0" in place.says}
    assert names == {"the load of v gives 0 where its mask hides"}  # the others' do


def test_infinities():
    assert math.isinf(float(model.forward(*_of_overflowing_sink())["lse"].max()))


def _of_overflowing_sink():
    problem, (q, k, v, _) = inputs("pass=bwd h=1 s=2x7 d=8 dtype=float32 seed=3")
    sinks = torch.tensor([200.0], dtype=torch.float64)
    beside = dataclasses.replace(NOTHING, sinks=sinks)
    return problem, q, k, v, Knobs(sink_in_maximum=False), beside


def test_a_mask_aligned_otherwise_in_loops_aligned_rightly():
    line = "pass=bwd h=1 s={}x{} d=8 dtype=float32 mask={} seed=3"
    long, _ = inputs(line.format(9, 5, "causal"))
    aligned = Knobs(shift=4, loop="as due", block_m=4, block_n=2)
    seen = model.visible(long, aligned, 5)
    ends = torch.tensor([0, 0, 0, 0, 4, 4, 4, 4, 5])  # last row + shift + 1, in whole blocks
    due = torch.arange(5) <= torch.arange(9)[:, None]
    assert torch.equal(seen, due & (torch.arange(5) < ends[:, None]))
    right = dataclasses.replace(aligned, shift=0)
    assert torch.equal(model.visible(long, right, 5), model.visible(long, Knobs(), 5))


def test_a_maximum_that_is_not_kept_leaves_the_last_block_visited():
    problem, (q, k, v, _) = inputs(
        "pass=bwd h=1 s=4x8 d=8 dtype=float32 mask=causal.topleft seed=3"
    )
    lost = Knobs(lost_maximum=True, empty_by_l=True, block_m=4, block_n=2)
    found = model.forward(problem, q, k, v, lost)
    part = reference.forward(  # the two keys that the loop of the only block of rows visits last
        dataclasses.replace(problem, seqlen_q=2, seqlen_k=2),
        q[:, :, 2:],
        k[:, :, 2:4],
        v[:, :, 2:4],
    )
    assert torch.allclose(found["o"][:, :, 2:], part.o, atol=1e-6)
    assert bool((found["o"][:, :, :2] == 0).all())
    assert bool(found["lse"].isneginf().all())
