"""Causes that are sums in 16 bits, sinks that are not counted, and keys that begin elsewhere."""

import dataclasses
import types

import pytest
import torch

from fa_verify import Grads, Outputs
from fa_verify.case import Case
from fa_verify.diagnosis import explain, mistaken, model
from fa_verify.diagnosis.beside import NOTHING
from fa_verify.diagnosis.hypothesis import Hypothesis, Prediction
from fa_verify.diagnosis.incidents import explain as said_of
from fa_verify.diagnosis.knobs import RIGHT, Knobs
from fa_verify.diagnosis.logits import summed
from fa_verify.diagnosis.score import Fit
from fa_verify.inputs import materialise
from tests.test_diagnosis import Plain, explained
from tests.test_diagnosis_causes import inputs, seen_at


def incident(kind, argument, *, detail="", line=1, coordinates=None):
    found = seen_at(kind, argument, line, detail)
    return dataclasses.replace(found, coordinates=coordinates)


def test_a_sum_in_16_bits_rounds_each_addition():
    ones = torch.tensor([2048.0, 1.0, 1.0], dtype=torch.float64)
    assert float(summed(ones, "float16")) == 2048.0  # whose neighbour is 2050
    assert float(summed(torch.ones(5, dtype=torch.float64), "bfloat16")) == 5.0
    assert float(summed(torch.full((64,), 0.1, dtype=torch.float64), "bfloat16")) != 6.4


def test_the_sum_of_a_row_in_float16_shows_in_lse_alone_beyond_its_rounding():
    problem, (q, k, v, _) = inputs("pass=bwd h=1 s=3x70 d=8 dtype=bfloat16 seed=3")
    right = model.forward(problem, q, k, v, RIGHT)["lse"]
    wrong = model.forward(problem, q, k, v, Knobs(sum_dtype="float16", block_n=128))["lse"]
    p = torch.exp(model.logits(problem, q, k, RIGHT)[0])
    m = model.logits(problem, q, k, RIGHT)[0].amax(-1)
    due = m + torch.log(summed(p * torch.exp(-m)[..., None], "float16"))
    assert torch.equal(wrong, due) or float((wrong - due).abs().max()) < 2.0**-10
    assert float((wrong - right).abs().max()) > 2.0**-14
    assert not Knobs(sum_dtype="float16").strays
    assert Knobs(sum_dtype="float16").rounds


def test_dq_is_rounded_at_each_block_that_is_added():
    problem, tensors = inputs("pass=bwd h=1 s=3x70 d=8 dtype=float16 seed=3")
    given = model.forward(problem, *tensors[:3], RIGHT)
    of = (problem, tuple(tensors), given["o"], given["lse"])
    right = model.backward(*of, RIGHT)
    whole = model.backward(*of, Knobs(dq_dtype="float16", block_n=128))
    blocks = model.backward(*of, Knobs(dq_dtype="float16", block_n=16))
    assert torch.equal(whole["dq"], right["dq"])  # one block: rounded once, as it is stored
    assert not torch.equal(blocks["dq"], right["dq"])
    assert float((blocks["dq"] - right["dq"]).abs().max()) < 0.01
    for name in ("dk", "dv"):
        assert torch.equal(blocks[name], right[name])


def test_a_sink_that_is_not_counted_leaves_the_sum_of_the_keys():
    problem, (q, k, v, _) = inputs("pass=bwd h=1 s=3x7 d=8 dtype=float32 seed=3")
    sinks = torch.tensor([2.0], dtype=torch.float64)
    beside = dataclasses.replace(NOTHING, sinks=sinks)
    bare = model.forward(problem, q, k, v, RIGHT)
    wrong = model.forward(problem, q, k, v, Knobs(sink_in_sum=False), beside)
    assert torch.allclose(wrong["o"], bare["o"], atol=1e-6)
    assert torch.allclose(wrong["lse"], bare["lse"], atol=1e-6)
    far = dataclasses.replace(NOTHING, sinks=sinks + 500.0)  # all weights vanish beside it
    lost = model.forward(problem, q, k, v, Knobs(sink_in_sum=False, empty_by_l=True), far)
    assert bool((lost["o"] == 0).all())
    assert bool((lost["lse"] == 502.0).all())


@pytest.mark.parametrize(
    ("case", "token"),
    [
        ("pass=fwd b=2 s=3x5 d=8 dtype=float32 seed=3", {(0, 4): (0, 4), (1, 0): (0, 3)}),
        (
            "pass=fwd s=6x9 d=8 dtype=float32 mask=docs2x4-4x5 seed=3",
            {(0, 3): (0, 3), (0, 4): (0, 2), (0, 8): (0, 6)},
        ),
    ],
)
def test_keys_that_begin_where_queries_do_are_tokens_of_others(case, token):
    problem = Case.parse(case).problem
    x = materialise(Case.parse(case))
    evidence = types.SimpleNamespace(problem=problem, k=x.k.double(), v=x.v.double())
    found = dict(mistaken.packed(evidence))
    (text, loaded) = next(iter(found.items()))
    assert text.startswith("keys of a sequence begin where its queries do")
    k = loaded["k"]()
    for (b, at), (other, source) in token.items():
        assert torch.equal(k[b, :, at], evidence.k[other, :, source])
    assert set(found[f"in v alone, {text}"]) == {"v"}


def test_nothing_is_read_past_the_last_token():
    case = "pass=fwd b=2 s=7x5 d=8 dtype=float32 seed=3"
    x = materialise(Case.parse(case))
    evidence = types.SimpleNamespace(
        problem=Case.parse(case).problem, k=x.k.double(), v=x.v.double()
    )
    k = next(iter(dict(mistaken.packed(evidence)).values()))["k"]()
    assert bool(torch.isnan(k[1, :, 3:]).all())
    assert torch.equal(k[1, :, 0], evidence.k[1, :, 2])
    same = Case.parse("pass=fwd b=2 s=5x5 d=8 dtype=float32 seed=3").problem
    assert not list(mistaken.packed(types.SimpleNamespace(problem=same, k=x.k, v=x.v)))


def test_what_leaves_elements_unexplained_gives_way_to_what_explains_all():
    def item(name, explained, rounding=False):
        hypothesis = Hypothesis(name, lambda: Prediction({}), rounding=rounding)
        return 10.0, hypothesis, Fit(explained=explained, reproduced=1.0, gain=9.0, overall=9.0)

    near = [item("early", 0.98), item("whole", 1.0), item("a format", 0.95, rounding=True)]
    assert [h.sentence for _, h, _ in explain._whole(near)] == ["whole", "a format"]
    near = [item("early", 0.97), item("late", 0.98)]
    assert explain._whole(near) == near  # neither explains far more


@pytest.mark.parametrize(
    ("causes", "gain", "alone", "said"),
    [
        (3, explain.NAN_ALONE, True, 0),
        (3, explain.NAN_ALONE, False, 3),
        (3, 2 * explain.NAN_ALONE, True, 3),
        (2, explain.NAN_ALONE, True, 2),
    ],
)
def test_nan_alone_speaks_for_no_cause_where_any_stray_read_explains_it(causes, gain, alone, said):
    fit = Fit(explained=1.0, reproduced=1.0, gain=gain, overall=1.0)
    items = [(5.0, Hypothesis(f"cause {n}", lambda: Prediction({})), fit) for n in range(causes)]
    assert len(explain._picked(items, [], alone=alone)) == said


def test_lse_of_blind_rows_is_no_running_maximum():
    """Both make it 0; of the two the one that says so is named first."""

    class Zero(Plain):
        def forward(self, problem, q, k, v):
            found = super().forward(problem, q, k, v)
            return Outputs(found.o, found.lse.masked_fill(found.lse.isneginf(), 0.0))

    case = "pass=fwd h=2 s=40x21 d=16 dtype=float32 mask=causal seed=4"
    (first, *_) = (f.diagnosis for f in explained(case, kernel=Zero()) if f.diagnosis)
    assert first.startswith("rows that see no key are not treated apart")
    low = "pass=fwd h=2 s=21x40 d=16 dtype=float32 seed=4"
    assert not explained(low, kernel=Zero())


@pytest.mark.parametrize(
    ("defect", "said"),
    [
        ("dv of dS", "dv is made of dS in the place of P"),
        ("no P", "dS lacks the factor P"),
    ],
)
def test_a_factor_in_anothers_place_is_named(defect, said):
    class Crossed(Plain):
        def backward(self, problem, q, k, v, outputs, do):
            q, k, v, do, o = (x.double() for x in (q, k, v, do, outputs.o))
            keys, values = (x.repeat_interleave(problem.group, dim=1) for x in (k, v))
            p = torch.exp(q @ keys.mT * problem.scale - outputs.lse.double()[..., None])
            slope = do @ values.mT - (do * o).sum(-1, keepdim=True)
            ds = slope * problem.scale * (1.0 if defect == "no P" else p)
            dk, dv = ds.mT @ q, (ds if defect == "dv of dS" else p).mT @ do
            shape = (problem.batch, problem.heads_kv, problem.group)
            dk, dv = (x.reshape(*shape, *x.shape[2:]).sum(2) for x in (dk, dv))
            return Grads(*(x.to(torch.float32) for x in (ds @ keys, dk, dv)))

    case = "pass=bwd h=4/2 s=21x37 d=16 dtype=float32 seed=4"
    found = explained(case, kernel=Crossed())
    assert any(said in f.diagnosis for f in found)
    assert all("model with this defect" in f.diagnosis for f in found[:1])


def test_a_table_that_is_read_outside_is_to_blame_for_what_follows():
    problem = Case.parse("pass=fwd h=3/3 s=17x16 d=64 dtype=bfloat16 seed=1").problem
    shape = "past the end of table (shape (1, 2), strides (2, 1))"
    table = incident("out-of-bounds-read", "table", detail=f"up to 3 elements {shape}", line=56)
    key = incident("out-of-bounds-read", "k_ptr", coordinates=(1515870811, 0, 0, 0), line=60)
    text = said_of(key, (table, key), problem)
    assert "reads outside the table: its row is not that of the sequence" in text
    assert text.startswith("follows at a.py:56")
    assert "table" not in said_of(key, (key,), problem)


def test_v_alone_past_the_cache_is_no_stride():
    problem = Case.parse("pass=fwd s=3x39 d=8 dtype=float32 seed=1").problem
    past = incident("uninitialised-read", "v_ptr", coordinates=(4, 7, 0, 0))
    pages = incident("uninitialised-read", "v_pages", coordinates=(4, 7, 0, 0))
    for found in (past, pages):
        assert "in slots past the cache's length" in said_of(found, (found,), problem)
    inside = incident("uninitialised-read", "v_ptr", coordinates=(4, 2, 0, 0))
    assert "though k is not" in said_of(inside, (inside,), problem)
