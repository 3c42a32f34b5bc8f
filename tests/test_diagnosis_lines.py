"""Where a kernel computes what a cause speaks of, and edits that only mend."""

from pathlib import Path

import pytest

from fa_verify import loader
from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.case import Case
from fa_verify.checks import memory, numerics
from fa_verify.diagnosis import lines
from fa_verify.diagnosis.repair import mend
from fa_verify.trial import Trial
from fa_verify.ttir.mutation.repairs import Repairs
from fa_verify.zoo import defects
from fa_verify.zoo.outcomes import place

HELD_OUT = Path(__file__).parent / "held_out"
FORWARD = "pass=fwd h=4/2 s=5x33 d=16 dtype=float16 mask=causal seed=0"
BACKWARD = "pass=bwd h=4/2 s=5x33 d=16 dtype=float16 mask=causal seed=0"


def trial(target, case, backend=None):
    (kernel,) = loader.load(target)
    return Trial(kernel, Case.parse(case), Setup(), backend or CpuBackend(), independent=False)


def held_out(name):
    return f"{HELD_OUT / 'kernels' / f'{name}.py'}:attention"


@pytest.fixture
def planted(tmp_path):
    def plant(name):
        rows = defects.rows([HELD_OUT / "others.toml"])
        (row,) = (row for row in rows if row.name == name)
        target = defects.planted([row], tmp_path / name, HELD_OUT / "kernels")[row]
        return target, defects.lines(row, target, HELD_OUT / "kernels")

    return plant


@pytest.mark.parametrize(
    ("kernel", "case", "cause", "text"),
    [
        ("tutorial", FORWARD, "the heads of v are addressed with k's stride", "v_ptrs = v_ptr +"),
        ("tutorial", FORWARD, "the pointer to v advances from block", "v_ptrs += BLOCK_N * svn"),
        ("tutorial", FORWARD, "GQA: query head h reads key head h", "head_kv = head // group"),
        ("tutorial", FORWARD, "lse is in base 2, not natural", "lse = (m_i + tl.math.log2("),
        ("tutorial", FORWARD, "the rescale factor is omitted from acc when", "acc = tl.dot(p.to("),
        ("tutorial", FORWARD, "the causal mask is off by one", "rows[:, None] + shift >= keys"),
        ("tutorial", BACKWARD, "in dq, do is addressed with o's strides", "do_ptr + batch * sob"),
        ("described", FORWARD, "the loop over keys ends one key too early", "end = tl.minimum("),
        ("described", FORWARD, "the softcap's argument is not divided by", ""),  # it has none here
        ("described", FORWARD, "in v alone, every query head reads", "v_view = _view(v_ptr +"),
        ("stacked", BACKWARD, "in dq, do is addressed with q's strides", "do = _tile(do_ptr, fr"),
        ("tutorial", FORWARD, "no known defect explains it; the scale", ""),
        ("tutorial", FORWARD, "exp2 is a polynomial of degree 3", ""),
    ],
)
def test_a_cause_names_the_line_that_computes_it(kernel, case, cause, text):
    target = held_out(kernel)
    said = lines.said(*lines.suspected(trial(target, case), cause))
    assert text in said
    assert bool(said) == bool(text)


def test_a_helper_that_several_tensors_go_through_gives_way_to_its_call():
    cause = "in dk and dv, do is addressed with q's strides"
    _, found = lines.suspected(trial(held_out("stacked"), BACKWARD), cause)
    source = Path(found[0].file).read_text().splitlines()[found[0].line - 1]
    assert source.strip().startswith("do = _tile(")


def test_without_an_edit_in_time_the_line_of_the_cause_is_said(planted):
    target, due = planted("do-by-rows-of-o")
    case = "pass=bwd h=2 s=3x2 d=16 dtype=float16 do=bshd seed={}"
    cause = "in the backward pass, the rows of do are addressed with o's stride"
    said = mend([trial(target, case.format(seed)) for seed in (0, 1)], 0.0, cause)
    assert said.startswith("the address of do is computed at described.py:")
    assert place([f"{cause}; {said}"], ["/a/described.py:1"], due)[1] == "right"
    right = [trial(held_out("described"), case.format(seed)) for seed in (0, 1)]
    assert mend(right, 0.0, cause) == ""


@pytest.mark.parametrize(
    ("name", "cause", "line"),
    [
        ("l-in-fp16 (float16)", "the denominator l is summed in float16 instead", "l = l.to("),
        ("acc-rounded-each-block (float16)", "the accumulator acc is kept in float16", "acc.to("),
        ("lse-without-log-l", "lse is the row maximum: log(l) is missing", "tl.store("),
        (None, "the denominator l is summed in float16 instead", "l = l * rescale + tl.sum(p, 1)"),
        (None, "the accumulator acc is kept in float16", "acc = tl.dot(p.to("),
    ],
)
def test_of_what_is_kept_in_half_the_line_that_rounds_it_is_said(tmp_path, name, cause, line):
    """Where none rounds it, the line that adds it up."""
    target = f"{defects.KERNELS / 'launch.py'}:flash"
    if name:
        row = next(row for row in defects.rows() if row.name == name)
        target = defects.planted([row], tmp_path)[row]
    said = lines.said(*lines.suspected(trial(target, FORWARD), cause))
    assert line in said
    assert said.count(".py:") == 1


def test_an_overflow_comes_before_the_accesses_that_it_leads_outside(tmp_path):
    (row,) = (row for row in defects.rows() if row.name == "stride-overflow-cache")
    target = defects.planted([row], tmp_path)[row]
    case = "pass=fwd b=3 s=1x1 d=1 dtype=bfloat16 q=bhsd.b1073741824 seed=0"
    first, *others = memory.check(trial(target, case))
    assert first.title.startswith("integer-overflow")
    assert any(other.title.startswith("out-of-bounds") for other in others)


@pytest.mark.parametrize(
    ("name", "case", "says"),
    [
        ("dq-unscaled", BACKWARD, "a product is multiplied by scale"),
        ("dq-stored-not-added", BACKWARD, "the store of dq_ptr adds to what is there"),
        ("stacked-heads-modulo", FORWARD.replace("4/2", "6/2"), "a % b is a / group"),
        ("v-of-the-query-head", FORWARD, "g is used in place of h"),
    ],
)
def test_what_was_left_out_is_put_back(planted, name, case, says):
    target, due = planted(name)

    def fails(**alteration):
        backend = CpuBackend(seconds=60, **alteration)
        run = trial(target, case, backend)
        return bool(run.execution.error or run.execution.incidents or [*numerics.check(run)])

    assert fails()
    looked = Repairs()
    assert not trial(target, case, CpuBackend(seconds=60, alteration=looked)).execution.error
    edits = [
        repair
        for repair, at in looked.found.items()
        if at.says == says and f"{Path(at.file).name}:{at.line}" in due
    ]
    if "in place of" in says and not edits:
        pytest.skip("this Triton does not say which variables values are")
    assert [edit for edit in edits if not fails(alteration=edit)]
