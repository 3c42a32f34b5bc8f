"""The parts of the diagnosis: each says what is so, and nothing where nothing is."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from fa_verify import Capabilities, Kernel, Outputs, loader
from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.case import Case
from fa_verify.diagnosis import explain, model, places, rows, splits
from fa_verify.diagnosis.evidence import gather
from fa_verify.diagnosis.incidents import explain as of_incident
from fa_verify.diagnosis.incidents import likeliest
from fa_verify.diagnosis.knobs import RIGHT, Knobs
from fa_verify.diagnosis.neighbours import moderate, simpler
from fa_verify.diagnosis.patterns import unwritten
from fa_verify.diagnosis.predictions import Forward
from fa_verify.diagnosis.repair import mend
from fa_verify.diagnosis.spread import unclear_output
from fa_verify.trial import Trial
from fa_verify.zoo import defects
from fa_verify.zoo.outcomes import place
from tests.test_diagnosis import FULL, GQA, Plain, incident

torch.set_num_threads(1)

FORWARD = explain.Pass(names=("o", "lse"), backward=False)
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
    assert (found is not None) is said
    assert not said or "but would break others, which pass: only some cases have it" in found.text


def test_neighbours_are_affordable_and_lack_one_feature_each():
    case = Case.parse("pass=bwd b=3 h=8/2 s=900x64 d=256 dtype=float16 mask=l5 cap=2.0 seed=1")
    near = moderate(case, plain=True)
    p = near.problem
    assert p.heads_q * (p.head_dim + p.head_dim_v) <= 2 * 9 * 160
    assert p.group > 1
    assert p.heads_kv > 1
    assert (p.seqlen_q, p.seqlen_k) == (149, 81)
    found = [x.problem for x in simpler(near)]
    assert len(set(found)) == len(found)
    assert all(x != p for x in found)
    assert sum(x.softcap == 0 for x in found) == 1


def test_splits_merged_rightly_are_attention_and_wrongly_are_not():
    evidence = witness("pass=fwd h=2 s=5x33 d=16 dtype=float32 seed=3").evidence
    right = model.forward(evidence.problem, evidence.q, evidence.k, evidence.v)
    counted = dict(splits.splits(evidence))
    assert counted[3] == 11
    for how in splits.MERGES:
        assert not torch.allclose(splits.merged(evidence, 11, how)["o"], right["o"], atol=1e-6)
    whole = splits.merged(evidence, 33, "equal")
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
