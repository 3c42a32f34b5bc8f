"""The parts of the diagnosis: each says what is so, and nothing where nothing is."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from fa_verify import Capabilities, Kernel, Outputs, loader, reference
from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.case import Case
from fa_verify.diagnosis import counts, dropout, explain, model, places, rows, splits
from fa_verify.diagnosis.asked import NAN_ALONE
from fa_verify.diagnosis.beside import Beside
from fa_verify.diagnosis.evidence import gather
from fa_verify.diagnosis.hypothesis import Hypothesis
from fa_verify.diagnosis.incidents import explain as of_incident
from fa_verify.diagnosis.incidents import likeliest
from fa_verify.diagnosis.knobs import RIGHT, Knobs
from fa_verify.diagnosis.loops import forward_loops, row_loops, visited
from fa_verify.diagnosis.neighbours import longer_shorter, moderate, simpler
from fa_verify.diagnosis.patterns import unwritten
from fa_verify.diagnosis.predictions import Forward
from fa_verify.diagnosis.repair import mend
from fa_verify.diagnosis.score import Fit
from fa_verify.diagnosis.spread import unclear_output
from fa_verify.inputs import materialise
from fa_verify.terms import Terms
from fa_verify.trial import Trial
from fa_verify.zoo import defects
from fa_verify.zoo.outcomes import place
from tests.test_diagnosis import FULL, GQA, Plain, incident

torch.set_num_threads(1)

FORWARD = explain.Pass(names=("o", "lse"), backward=False)
GRADIENTS = explain.Pass(names=("dq", "dk", "dv"), backward=True)
NEVER = math.inf


def trial_of(case, defect="", plain=None):
    plain = plain or Plain(defect)
    declared = Capabilities(window=True, softcap=True, head_dims_v=range(1, 257))
    kernel = Kernel(
        name="plain", forward=plain.forward, backward=plain.backward, capabilities=declared
    )
    return Trial(kernel, Case.parse(case.replace("pass=bwd", "pass=fwd")), Setup(), CpuBackend())


def witness(case, defect="", plain=None):
    trial = trial_of(case, defect, plain)
    return explain.Witness(trial, gather(trial))


class LongOnly(Plain):
    """Has its defect where there are more than 50 keys."""

    def has(self, name):
        return super().has(name) and self.long

    def forward(self, problem, q, k, v):
        self.long = problem.seqlen_k > 50
        return super().forward(problem, q, k, v)


LONG = [f"pass=fwd h=2 s=40x{n} d=32 dtype=float16 seed={n}" for n in (70, 85, 90)]
SHORT = "pass=fwd h=2 s=40x45 d=32 dtype=float16 seed=4"


def test_a_cause_must_be_idle_on_cases_that_pass():
    seen = [witness(LONG[0], "padded keys"), witness(SHORT.replace("45", "48"), "padded keys")]
    found = explain.explain(FORWARD, seen, NEVER)
    assert found.text.startswith("zero-padded keys count in the softmax denominator")
    assert "is idle on 1 that pass" in found.text


@pytest.mark.parametrize(("cases", "said"), [(3, True), (2, False)])
def test_a_cause_that_only_some_cases_have_needs_three(cases, said):
    seen = [witness(case, plain=LongOnly("last block skipped")) for case in LONG[:cases]]
    seen.append(witness(SHORT, plain=LongOnly("last block skipped")))
    found = explain.explain(FORWARD, seen, NEVER)
    assert found is not None
    assert (not found.hypothesis.fitted) is said  # else the key where the loop ends is read off lse
    assert not said or "but would break others, which pass: only some cases have it" in found.text


def test_neighbours_are_affordable_and_lack_one_feature_each():
    case = Case.parse("pass=bwd b=3 h=8/2 s=900x64 d=256 dtype=float16 mask=l5 cap=2.0 seed=1")
    near = moderate(case, plain=True)
    p = near.problem
    assert p.heads_q * (p.head_dim + p.head_dim_v) <= 2 * 9 * 160
    assert p.group > 1
    assert p.heads_kv > 1
    assert (p.seqlen_q, p.seqlen_k) == (149, 83)
    found = [x.problem for x in simpler(near)]
    assert len(set(found)) == len(found)
    assert all(x != p for x in found)
    assert sum(x.softcap == 0 for x in found) == 1


def test_a_key_more_tells_a_boundary_from_all_that_lies_beyond_it():
    case = Case.parse("pass=fwd s=1x17 d=16 dtype=float16 mask=docs1x17 seed=1")
    lengths = [(x.problem.seqlen_q, x.problem.seqlen_k) for x in longer_shorter(case)]
    assert lengths == [(1, 18), (1, 16), (2, 17)]
    one = dataclasses.replace(case, problem=case.problem.resized(1, 1))
    assert len(list(longer_shorter(one))) == 2
    seen = [witness("pass=fwd s=1x1 d=16 dtype=float16 seed=1", plain=OneKey())]
    assert "the last key is skipped" in explain.explain(FORWARD, seen, NEVER).text
    seen += [witness(str(more), plain=OneKey()) for more in longer_shorter(seen[0].trial.case)]
    found = explain.explain(FORWARD, seen, NEVER)
    assert found is None or "the last key is skipped" not in found.text


class OneKey(Plain):
    """A lone key is left out, and no other."""

    def forward(self, problem, q, k, v):
        found = super().forward(problem, q, k, v)
        if problem.seqlen_k > 1:
            return found
        return Outputs(torch.zeros_like(found.o), torch.full_like(found.lse, -torch.inf))


def test_splits_merged_rightly_are_attention_and_wrongly_are_not():
    evidence = witness("pass=fwd h=2 s=5x33 d=16 dtype=float32 seed=3").evidence
    right = model.forward(evidence.problem, evidence.q, evidence.k, evidence.v)
    assert {(3, 11, True), (3, 16, False)} <= set(splits.splits(evidence))
    merge = splits.Merging(evidence)
    for how in splits.MERGES:
        name = "lse" if how == "largest" else "o"
        assert not torch.allclose(merge(11, how)[name], right[name], atol=1e-6)
    whole = merge(33, "equal")
    assert torch.allclose(whole["o"], right["o"], atol=1e-7)


def test_rows_fit_a_denominator_and_find_a_missing_key():
    class Halved(Plain):
        def forward(self, problem, q, k, v):
            found = super().forward(problem, q, k, v)
            o = found.o.float()
            o[:, :, 3] *= 0.5
            return Outputs(o.to(q.dtype), found.lse)

    (said,) = rows.denominator(witness(FULL, plain=Halved()).evidence)
    assert "each wrong row of o is a number times what is due, though lse is right" in said[0]
    assert not list(rows.denominator(witness(FULL).evidence))

    class Lost(Plain):
        def visible(self, problem, keys):
            return super().visible(problem, keys) & (torch.arange(keys) != 41)

    assert list(rows.missing_key(witness(FULL, plain=Lost()).evidence)) == [41]
    assert not list(rows.missing_key(witness(FULL).evidence))


TERMS = "bias=hk alibi=1 sinks=1 dropout=0.3 dlse=1"


@pytest.mark.parametrize("mask", ["", "mask=causal", "mask=l3.r2.topleft cap=2.0"])
def test_the_model_with_terms_is_the_reference(mask):
    case = Case.parse(f"pass=bwd b=2 h=4/2 s=9x13 d=8 dtype=float32 {mask} {TERMS} seed=3")
    x, problem = materialise(case), case.problem
    keep = torch.rand(2, 4, 9, 13, generator=torch.Generator().manual_seed(0)) > problem.dropout
    terms = Terms(bias=x.bias, slopes=x.alibi_slopes, sinks=x.sinks, dlse=x.dlse, keep=keep)
    q, k, v, do = (t.double() for t in (x.q, x.k, x.v, x.do))
    beside = Beside.of(problem, terms)
    found = model.forward(problem, q, k, v, RIGHT, beside)
    right = reference.forward(problem, q, k, v, terms)
    assert torch.allclose(found["lse"], right.lse)
    assert torch.allclose(found["o"], right.o, atol=1e-6)
    grads = model.backward(problem, (q, k, v, do), right.o, right.lse, RIGHT, beside)
    due = reference.backward(problem, q, k, v, do, terms)
    for name in ("dq", "dk", "dv"):
        assert torch.allclose(grads[name], getattr(due, name), atol=1e-5, rtol=1e-5)


class Ones(Plain):
    """Adds terms exp(0) to each l: what a block's padding comes to, or splits without keys."""

    def __init__(self, many):
        super().__init__("")
        self.many = many

    def forward(self, problem, q, k, v):
        found = super().forward(problem, q, k, v)
        lse = torch.logaddexp(found.lse, torch.tensor(float(self.many)).log())
        return Outputs((found.o * torch.exp(found.lse - lse)[..., None]).to(q.dtype), lse)


def test_terms_too_many_in_l_are_counted():
    few = "pass=fwd h=2 s=12x27 d=32 dtype=float32 seed=2"
    seen = witness(few, plain=Ones(5)).evidence
    ((block, found),) = counts.padded(seen, [64, 32])  # 27 + 5
    assert block == 32
    assert torch.allclose(found.values["lse"], seen.seen["lse"].got, atol=1e-5)
    assert not list(counts.padded(seen, [64, 128]))
    assert len(list(counts.ones_added(seen))) == 1
    assert not list(counts.ones_added(witness(few, plain=Ones(0.4)).evidence))
    assert not list(counts.ones_added(witness(few).evidence))


def test_where_a_loop_ends_is_read_off_lse():
    class Short(Plain):
        def visible(self, problem, keys):
            return super().visible(problem, keys) & (torch.arange(keys) < 17)

    ended = witness(FULL, plain=Short())
    ((end, _),) = counts.keys_reached(Forward(ended.trial, ended.evidence))
    assert end == 17
    right = witness(FULL)
    assert not list(counts.keys_reached(Forward(right.trial, right.evidence)))


def dropping(share, seed):
    """A kernel that keeps a share, drawn by this seed, where 0.75 by seed 0 is due."""

    def keep(problem, share, seed):
        made = torch.Generator().manual_seed(seed)
        return torch.rand(16, 16, generator=made).expand(1, 1, 16, 16) < share

    def forward(problem, q, k, v, *, dropout_seed):
        p = torch.softmax(q.float() @ k.float().mT * problem.scale, -1)
        p = p * keep(problem, share, seed) / (1 - problem.dropout)
        lse = torch.logsumexp(q.float() @ k.float().mT * problem.scale, -1)
        return Outputs((p @ v.float()).to(q.dtype), lse)

    kernel = Kernel(
        name="dropping",
        forward=forward,
        dropout_keep=lambda problem, seed, device: keep(problem, 0.75, 0),
        capabilities=Capabilities(dropout=True, gqa=False, backward=False),
    )
    case = Case.parse("pass=fwd s=16x16 d=64 dtype=float32 dropout=0.25 seed=1")
    return Trial(kernel, case, Setup(), CpuBackend())


def test_what_a_kernel_drops_is_read_off_its_results():
    assert "another seed, counter or index" in dropout.other_draw(dropping(0.75, 5))
    assert "it keeps 2" in dropout.other_draw(dropping(0.25, 5))
    assert dropout.other_draw(dropping(0.75, 0)) == ""


def test_places_of_right_results():
    class Swapped(Plain):
        def forward(self, problem, q, k, v):
            found = super().forward(problem, q, k, v)
            return Outputs(found.o.flip(1).contiguous(), found.lse)

    ((_, said, _),) = places.misplaced(witness(FULL, plain=Swapped()).evidence, ("o",))
    assert said == "the heads of o are in another order: head 0 holds that of 1"

    class Gone(Plain):
        def forward(self, problem, q, k, v):
            found = super().forward(problem, q, k, v)
            found.o[:, :, 32:] = 0
            return found

    gone = witness(FULL, plain=Gone()).evidence
    ((said, _),) = places.zeros(gone, ("o",))
    assert said.startswith("rows 32..39 of 40 of o are 0")
    assert not list(places.misplaced(gone, ("o",)))
    right = witness(FULL).evidence
    assert not list(places.zeros(right, ("o",)))
    assert not list(places.misplaced(right, ("o",)))


def test_nan_of_hidden_keys_is_unclear_and_of_visible_ones_is_not():
    seen = torch.tensor([[True, False], [True, True]])
    x = {name: torch.ones(1, 1, 2, 1, dtype=torch.float64) for name in "qkv"}
    x["v"] = x["v"].clone()
    x["v"][0, 0, 1] = torch.nan
    o = torch.full((1, 1, 2, 1), torch.nan, dtype=torch.float64)
    assert unclear_output(seen, x, o).flatten().tolist() == [True, False]
    assert not unclear_output(seen, x, torch.zeros_like(o)).any()


def test_key_heads_past_the_last_are_read_where_they_would_lie():
    found = witness(GQA)
    predict = Forward(found.trial, found.evidence)
    o = predict(Knobs(kv_head="same")).values["o"]
    right = predict(RIGHT).values["o"]
    assert torch.equal(o[0, 0], right[0, 0])
    assert torch.isnan(o[1, 2:]).all()  # of the last sequence nothing follows
    assert torch.isfinite(o[0, 2:4]).all()  # of the first one the second does


PAST = (
    "up to {0} elements past the end of k (shape ({1}), strides ({2})); the mask let it through: "
    "it is true there"
)


def test_the_rest_of_a_tile_is_a_missing_mask_and_another_overrun_is_not():
    problem = Case.parse("pass=fwd h=2 s=40x70 d=80 dtype=float16 seed=5").problem
    strides = "1, 2, 70, 80", "11200, 5600, 80, 1"
    tile = incident(coordinates=(0, 2, 0, 0), offset=11200, detail=PAST.format(800, *strides))
    assert of_incident(tile, (), problem) == (
        "no boundary handling: the load of k reads on past the end, up to the end of a tile; its "
        "mask does not stop at seqlen_k"
    )
    odd = incident(coordinates=(0, 2, 0, 0), offset=11200, detail=PAST.format(801, *strides))
    assert of_incident(odd, (), problem).startswith("no known defect explains it")
    later = incident(coordinates=(0, 2, 1, 0), offset=11280, detail=PAST.format(800, *strides))
    assert of_incident(later, (), problem).startswith("no known defect explains it")
    assert "does not stop at seqlen_k" in likeliest(tile, [((tile,), problem), ((odd,), problem)])
    few = [((x,), problem) for x in (tile, odd, odd)]
    assert likeliest(tile, few).startswith("no known defect explains it")


def test_rows_that_end_with_the_keys_are_counted():
    problem = Case.parse("pass=bwd h=1 s=149x81 d=16 dtype=float16 seed=5").problem
    holes = torch.zeros(1, 1, 149, 16, dtype=torch.bool)
    holes[:, :, 96:] = True
    other = dataclasses.replace(problem, seqlen_q=64)
    passing = torch.zeros(1, 1, 64, 16, dtype=torch.bool)
    said = unwritten("dq", holes, [(holes, problem), (passing, other)])
    assert said.endswith("counts blocks of seqlen_k where seqlen_q is due")
    holes[:, :, 100] = False
    assert "counts blocks" not in unwritten("dq", holes, [(holes, problem)])


def test_documents_that_nobody_writes_are_told_by_their_rows():
    case = "pass=fwd h=2 s=50x50 d=16 dtype=float16 mask=docs{} seed=5"
    packs = [[3, 20, 27], [10, 40]]
    problems = [
        Case.parse(case.format("-".join(f"{n}x{n}" for n in lengths))).problem for lengths in packs
    ]

    def said(some):
        holes = [torch.zeros(1, 2, 50, 16, dtype=torch.bool) for _ in packs]
        for left, lengths in zip(holes, packs, strict=True):
            left[:] = torch.cat([some(n, i, lengths) for i, n in enumerate(lengths)])[:, None]
        return unwritten("o", holes[0], list(zip(holes, problems, strict=True)))

    assert said(lambda n, i, all_: torch.arange(n) >= n // 16 * 16).startswith(
        "the last, partial blocks of rows (of 16) of o are never written: the grid"
    )
    first = said(lambda n, i, all_: torch.arange(n) >= -(-all_[0] // 16) * 16)
    assert first.startswith("rows of o past the length of the first document (in blocks of 16)")
    last = said(lambda n, i, all_: torch.full((n,), i == len(all_) - 1))
    assert last.startswith("the last sequence or document of o is never written")
    odd = said(lambda n, i, all_: torch.arange(n) == 5)
    assert "document" not in odd
    assert "partial block" not in odd


def test_a_row_more_than_there_is_is_no_tile():
    problem = Case.parse("pass=fwd s=30x30 d=64 dtype=float16 seed=0").problem
    more = incident(
        argument="k", coordinates=(0, 0, 30, 0), offset=1920,
        detail="up to 64 elements past the end of k (shape (1, 1, 30, 64), "
        "strides (1920, 1920, 64, 1))",
    )  # fmt: skip
    assert of_incident(more, (), problem).startswith("no known defect explains it")
    assert "without a mask" not in of_incident(
        dataclasses.replace(more, detail=f"{more.detail}; the access has no mask"), (), problem
    )


def test_twice_as_many_rows_of_lse_as_there_are_end_a_tile():
    """A tile of columns is half full at least: it has not twice as many; one of rows may."""
    problem = Case.parse("pass=fwd h=3/3 s=32x32 d=64 dtype=float16 seed=0").problem
    more = incident(
        argument="lse", kind="out-of-bounds-write", coordinates=(0, 3, 0), offset=96,
        detail="up to 32 elements past the end of lse (shape (1, 3, 32), strides (96, 32, 1)); "
        "the access has no mask",
    )  # fmt: skip
    assert of_incident(more, (), problem).startswith("no boundary handling: the store of lse")


def test_where_nan_alone_agrees_what_strayed_is_named():
    fit = Fit(explained=1.0, reproduced=1.0, gain=NAN_ALONE, overall=1.0)
    first = witness(FULL)
    strays = (incident(argument="k_ptr", kind="neighbour-read"),)
    execution = dataclasses.replace(first.trial.execution, incidents=strays)
    first.trial.__dict__["execution"] = execution
    said = ["q is addressed with k2's strides", "query head h reads key head h", "k is late"]
    near = [(1.0, Hypothesis(text, dict), fit) for text in said]
    found = explain._of_strayed(near, first)
    assert [item[1].sentence for item in found] == said[1:]


def test_a_second_fault_does_not_hide_the_first():
    class Two(Plain):
        def forward(self, problem, q, k, v):
            found = super().forward(problem, q, k, v)
            if problem.seqlen_k == 61:
                found.lse.add_(torch.randn(found.lse.shape, generator=torch.manual_seed(0)))
            return found

    seen = [witness(case, plain=Two("no scale")) for case in LONG]
    other = witness("pass=fwd h=2 s=40x61 d=32 dtype=float16 seed=7", plain=Two("no scale"))
    assert explain.explain(FORWARD, [*seen, other], NEVER) is None
    found = explain.explain(FORWARD, [*seen, dataclasses.replace(other, far=True)], NEVER)
    assert found.text.startswith("softmax_scale is missing")
    assert "further cases fail for another reason" in found.text


SHORTER = ("pass=fwd s=1x2 d=16 dtype=float16 seed=0", "pass=fwd s=3x40 d=16 dtype=float16 seed=1")


def trials_of(target, cases=SHORTER):
    (kernel,) = loader.load(target)
    return [Trial(kernel, Case.parse(case), Setup(), CpuBackend()) for case in cases]


@pytest.fixture
def planted(tmp_path):
    def plant(name):
        (row,) = (row for row in defects.rows() if row.name == name)
        target = defects.planted([row], tmp_path / name)[row]
        return target, defects.lines(row, target)

    return plant


def test_an_edit_that_mends_all_cases_names_the_line(planted):
    target, lines = planted("last-key-skipped")
    said = mend(trials_of(target), 60.0)
    assert "`visible = (keys < seqlen_k - 1)[None, :]`: once a < b is a <= b" in said
    assert "all 2 failing cases pass" in said
    assert place([said], [], lines)[1] == "right"


def test_no_edit_is_named_where_nothing_fails_or_one_case_alone(planted):
    right = f"{defects.KERNELS / 'launch.py'}:flash"
    assert mend(trials_of(right), 60.0) == ""
    target, _ = planted("last-key-skipped")
    assert mend(trials_of(target, SHORTER[:1]), 60.0) == ""
    assert mend([trial_of(FULL, "no scale")], 60.0) == ""  # no kernel was launched


def test_the_lines_of_a_defect_are_those_of_its_statement(planted):
    assert planted("dout-noncontig")[1] == frozenset()  # in the launcher
    _, lines = planted("kv-strides-swapped")
    assert {"forward.py:63", "forward.py:64", "forward.py:84"} <= lines


@pytest.mark.parametrize("mask", ["", "causal", "causal.topleft", "l9.r4"])
@pytest.mark.parametrize("loops", [forward_loops, row_loops])
def test_loops_over_documents_go_wrong_in_each_as_in_one_alone(mask, loops):
    documents = ((40, 70), (0, 9), (33, 33), (50, 20))
    packs = "-".join(f"{queries}x{keys}" for queries, keys in documents)
    line = "pass=fwd s={}x{} d=16 dtype=float16{} seed=0"
    packed = line.format(123, 132, f" mask={'.'.join(filter(None, [mask, f'docs{packs}']))}")
    packed = Case.parse(packed).problem
    ways = [loop for _, loop in loops(packed)]
    assert ways
    for loop in ways:
        every = torch.ones(123, 132, dtype=torch.bool)
        found, row, key = visited(packed, every, loop, 16, 32), 0, 0
        for queries, keys in documents:
            own = f" mask={mask}" if mask else ""
            alone = Case.parse(line.format(queries, keys, own)).problem
            due = visited(alone, torch.ones(queries, keys, dtype=torch.bool), loop, 16, 32)
            assert torch.equal(found[row : row + queries, key : key + keys], due), loop
            row, key = row + queries, key + keys


@pytest.mark.parametrize(("lengths", "hurts"), [((30, 70), True), ((70, 70), False)])
def test_a_loop_without_the_shift_hurts_where_the_lengths_differ(lengths, hurts):
    line = "pass=fwd s={}x{} d=16 dtype=float16 mask={} seed=0"
    problem = Case.parse(line.format(*lengths, "causal")).problem
    seen = model.visible(problem, RIGHT, lengths[1])
    for loop in ("end unshifted", "rows begin unshifted"):
        got = visited(problem, seen, loop, 16, 16)
        assert bool((got != seen).any()) is hurts
        assert not bool((got & ~seen).any())
    window = Case.parse(line.format(lengths[1], lengths[0], "l9")).problem
    seen = model.visible(window, RIGHT, lengths[0])
    for loop in ("begin unshifted", "rows end unshifted"):
        assert bool((visited(window, seen, loop, 16, 16) != seen).any()) is hurts


class FirstOfGroup(Plain):
    """Reads delta of each group's first head, in dk and dv."""

    def backward(self, problem, q, k, v, outputs, do):
        right = super().backward(problem, q, k, v, outputs, do)
        first = torch.arange(problem.heads_q) // problem.group * problem.group
        moved = Outputs((outputs.o * do).sum(-1, keepdim=True)[:, first] / do / do.shape[-1])
        wrong = super().backward(problem, q, k, v, dataclasses.replace(outputs, o=moved.o), do)
        return dataclasses.replace(wrong, dq=right.dq)


@pytest.mark.parametrize(("heads", "named"), [("4/2", True), ("2/2", False)])
def test_what_belongs_to_a_row_may_be_read_at_another_head(heads, named):
    line = f"pass=bwd h={heads} s=20x24 d=32 dtype=float32 seed=5"
    plain = FirstOfGroup("")
    kernel = Kernel(name="plain", forward=plain.forward, backward=plain.backward)
    trial = Trial(kernel, Case.parse(line), Setup(), CpuBackend())
    found = explain.explain(GRADIENTS, [explain.Witness(trial, gather(trial))], NEVER)
    said = "in dk and dv, delta is read at the first head of the group"
    assert (found is not None and found.text.startswith(said)) is named
