import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_verify.case import Case
from fa_verify.errors import InvalidInputError
from fa_verify.record import CaseRecord, End, FailureRecord, Shrunk, Start, TensorStats
from fa_verify.report.faults import families
from fa_verify.report.headline import beside, caveats, headline, word
from fa_verify.report.summary import exit_code, finished, summarise
from fa_verify.report.text import clean, lines, number, shorten
from fa_verify.verdict import Verdict

CASE = Case.parse("pass=fwd s=128x128 d=64 dtype=float16 seed=1")
SMALL = Case.parse("pass=fwd s=1x1 d=1 dtype=float16 seed=1")
WRONG = FailureRecord(check="numerics", title="o outside its bound", message="o[0]", tensor="o")


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_the_lines_does_not_matter(run, seed):
    found = run(cases=120)
    shuffled = list(found)
    random.Random(seed).shuffle(shuffled)  # noqa: S311  # no secret
    assert summarise(shuffled) == summarise(found)


def test_the_files_of_workers_merge(run):
    start, *middle, end = run(cases=120)
    half = len(middle) // 2
    workers = [start, *middle[:half], end, start, *middle[half:], end]
    merged, alone = summarise(workers), summarise([start, *middle, end])
    assert (merged.rows, merged.faults, merged.total) == (alone.rows, alone.faults, alone.total)
    assert (merged.facts.files, merged.facts.complete) == (2, True)
    assert merged.facts.seconds == alone.facts.seconds  # they ran side by side


def test_runs_one_after_another_add_their_time(run):
    start, *middle, end = run(cases=12)
    fields = {name: getattr(start, name) for name in start.__struct_fields__}
    later = Start(**{**fields, "started": "2026-01-03T00:00:00+00:00"})
    assert summarise([start, *middle, end, later, end]).facts.seconds == 2 * end.seconds


def test_a_run_that_was_interrupted_has_not_passed(run):
    passed = [x for x in run(cases=30) if getattr(x, "verdict", "pass") == "pass"]
    assert word(summarise(passed)) == "PASS"
    assert word(summarise(passed[:-1])) == "INCOMPLETE"


def test_a_killed_run_says_so(run):
    summary = summarise(run(cases=30)[:-1])
    assert not summary.facts.complete
    assert "killed" in " ".join(caveats(summary))


def test_a_summary_learns_that_its_run_has_ended(run):
    found = run(cases=30)
    summary = summarise(found[:-1])
    assert finished(summary, found[0], found[-1]) == summarise(found) != summary


def test_counts_add_up(run):
    summary = summarise(run(cases=300))
    assert summary.cases == sum(summary.total.values()) == 300
    assert sum(row.cases for row in summary.rows) == sum(g.cases for g in summary.groups) == 300
    for row in summary.rows:
        parts = [
            group
            for group in summary.groups
            if (group.kernel, group.precision) == (row.kernel, row.precision)
        ]
        assert sum(part.cases for part in parts) == row.cases
        worst = max(part.tensors["o"].ratio for part in parts if "o" in part.tensors)
        assert row.tensors["o"].ratio == worst


def test_the_worst_ratio_comes_with_its_case(line):
    small = line(SMALL, tensors={"o": TensorStats(elements=1, ratio=0.9, ulp=1.0)})
    large = line(CASE, tensors={"o": TensorStats(elements=99, ratio=0.2, ulp=3.0)})
    tensor = summarise([small, large]).rows[0].tensors["o"]
    assert (tensor.ratio, tensor.ratio_case) == (0.9, str(SMALL))
    assert (tensor.ulp, tensor.ulp_case) == (3.0, str(CASE))
    assert tensor.elements == 100


def test_float32_is_split_by_the_precision_of_its_dots(run):
    precisions = {row.precision for row in summarise(run(cases=30)).rows}
    assert precisions == {"float16", "bfloat16", "float32/ieee", "float32/tf32", "float32/tf32x3"}


def test_failures_with_one_key_are_one_fault_shown_at_its_smallest_case(line):
    large = line(CASE, verdict="fail", failures=(WRONG,))
    small = line(SMALL, verdict="fail", failures=(WRONG,))
    (fault,) = summarise([large, large, Shrunk(original=str(CASE), record=small)]).faults
    assert (fault.cases, fault.of, fault.case) == (2, 2, str(SMALL))
    assert str(SMALL) in fault.replay


def test_a_fault_that_only_shrinking_met_is_shown_and_not_counted(line):
    other = FailureRecord(check="nonfinite", title="NaN in o", message="")
    small = line(SMALL, verdict="fail", failures=(other,))
    summary = summarise(
        [line(CASE, verdict="fail", failures=(WRONG,)), Shrunk(original="", record=small)]
    )
    assert {fault.title: fault.cases for fault in summary.faults} == {
        "o outside its bound": 1,
        "NaN in o": 0,
    }


def test_causes_come_before_consequences(run):
    checks = [fault.check for fault in summarise(run(cases=400)).faults]
    assert checks == ["memory", "nonfinite", "numerics", "timeout"]


def test_a_failing_case_without_a_failure_is_still_a_fault(line):
    (fault,) = summarise([line(CASE, verdict="fail", reason="lost")]).faults
    assert fault.title == "lost"


def test_values_of_one_refusal_are_collected(line):
    reasons = [*(f"head_dim={d}" for d in (33, 40, 128, 33)), "softcap"]
    notes = summarise([line(CASE, verdict="unsupported", reason=r) for r in reasons]).notes
    assert [(note.reason, note.cases) for note in notes] == [
        ("head_dim=33, 40, 128", 4),
        ("softcap", 1),
    ]


def test_kernels_that_share_a_name_are_told_apart_by_file(line):
    summary = summarise([line(CASE, file="a.py"), line(CASE, file="b.py")])
    assert summary.kernels == ("a.py:flash", "b.py:flash")


def verdict_lines(line, *verdicts) -> list[CaseRecord]:
    return [line(CASE, verdict=verdict) for verdict in verdicts]


@pytest.mark.parametrize(
    ("verdicts", "code", "strict", "said"),
    [
        ((), 3, 3, "NOTHING VERIFIED"),
        (("pass",), 0, 0, "PASS"),
        (("pass", "unsupported"), 0, 1, "PASS"),
        (("pass", "inconclusive"), 0, 0, "PASS"),
        (("unsupported",), 3, 1, "NOTHING VERIFIED"),
        (("inconclusive",), 3, 3, "NOTHING VERIFIED"),
        (("error",), 4, 4, "ERROR"),
        (("error", "unsupported"), 4, 1, "ERROR"),
        (("pass", "error"), 4, 4, "ERROR"),
        (("fail", "error", "pass"), 1, 1, "FAIL"),
    ],
)
def test_exit_codes(line, verdicts, code, strict, said):
    summary = summarise(verdict_lines(line, *verdicts))
    assert exit_code(summary) == code
    assert exit_code(summary, strict=True) == strict
    assert word(summary) == said


def test_nothing_that_is_not_a_pass_is_called_one(line):
    for verdict in Verdict:
        if verdict is not Verdict.PASS:
            assert "passed" not in headline(summarise([line(CASE, verdict=verdict.value)]))


@pytest.mark.parametrize(("inconclusive", "code"), [(10, 0), (11, 1)])
def test_strict_counts_elements_without_a_bound(line, inconclusive, code):
    stats = TensorStats(elements=1000, inconclusive=inconclusive)
    summary = summarise([line(CASE, tensors={"dq": stats})])
    assert exit_code(summary) == 0
    assert exit_code(summary, strict=True) == code
    assert any("says nothing" in caveat for caveat in caveats(summary)) == bool(code)


def test_a_large_tensor_hides_no_inconclusive_one(line):
    found = {"o": TensorStats(elements=10**6), "dq": TensorStats(elements=100, inconclusive=50)}
    assert exit_code(summarise([line(CASE, tensors=found)]), strict=True) == 1


@pytest.mark.parametrize("field", ["case", "verdict"])
def test_a_line_of_another_version_is_refused(line, field):
    record = line(CASE)
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    with pytest.raises(InvalidInputError, match="nonsense"):
        summarise([CaseRecord(**{**fields, field: "nonsense"})])


def test_only_an_end_is_no_run():
    summary = summarise([End(seconds=1.0, cases=0, exit_code=3)])
    assert not summary.facts.complete
    assert exit_code(summary) == 3


@given(st.text())
def test_cleaned_text_is_one_printable_line(text):
    assert clean(text).isprintable()
    assert all(line.isprintable() for line in lines(text))
    assert len(shorten(text, 12)) <= 12


@given(st.floats(min_value=0.0, allow_nan=False, allow_infinity=False))
def test_numbers_are_short(value):
    assert len(number(value)) <= 6


def test_reports_load_neither_torch_nor_triton():
    script = (
        "import sys, fa_verify.report.files, fa_verify.report.table\n"
        "print([name for name in ('torch', 'triton') if name in sys.modules])"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_runs_of_several_versions_of_a_kernel_are_not_mixed_in_silence(line):
    record = line(CASE)
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    changed = CaseRecord(**{**fields, "source_hash": "ba9876543210"})
    assert summarise([record, changed]).mixed == ("flash",)
    assert "several versions" in " ".join(caveats(summarise([record, changed])))


def test_a_case_that_ran_twice_is_not_two_cases_in_silence(line):
    assert summarise([line(CASE), line(CASE), line(SMALL)]).repeats == 1
    assert "ran twice" in " ".join(caveats(summarise([line(CASE), line(CASE)])))


def test_the_total_of_a_case_is_no_stage(line):
    summary = summarise([line(CASE, seconds={"kernel": 1.0, "total": 3.0})])
    assert summary.facts.stages == (("kernel", 1.0), ("other", 2.0))
    assert summary.rows[0].seconds == 3.0


def test_possible_faults_are_counted_line_by_line_and_fail_nothing(line):
    seen = ("read-back at k.py:3 in k: tl.load(p)",)
    summary = summarise([line(CASE, possible=seen), line(SMALL, possible=seen)])
    assert f"flash: possibly {seen[0]} (2 cases)." in caveats(summary)
    assert exit_code(summary) == 0


def _failure(title, location, diagnosis="", check="memory"):
    return FailureRecord(
        check=check, title=title, message="", location=location, diagnosis=diagnosis
    )


def test_a_fault_gathers_those_of_its_kind_and_those_that_follow_from_it(line):
    failures = (
        _failure("integer-overflow", "a.py:3"),
        _failure("integer-overflow", "a.py:9"),
        _failure(
            "out-of-bounds-read through q", "a.py:5", "follows from the integer-overflow at a.py:9"
        ),
        _failure("out-of-bounds-read through k", "a.py:6"),
        _failure("race through o", "a.py:7", "follows from the race through o at a.py:7: circular"),
        _failure(
            "o has NaN",
            "",
            "follows from the out-of-bounds-read through q at /x/a.py:5: no mask",
            check="nonfinite",
        ),
    )
    faults = summarise([line(CASE, verdict="fail", failures=failures)]).faults
    found = [
        (f.first.location, [o.location for o in f.others], {h.title for h in f.hence})
        for f in families(faults)
    ]
    overflow, read, race = sorted(found)
    assert overflow == ("a.py:3", ["a.py:9"], {"out-of-bounds-read through q", "o has NaN"})
    assert read == ("a.py:6", [], set())
    assert race == ("a.py:7", [], set())


SCALE = "softmax_scale is missing (a model with this defect reproduces {} failing cases)"


def test_faults_with_one_cause_are_one_entry(line):
    """Whatever check saw them and whatever numbers their case has."""
    failures = (
        _failure("o is wrong", "", SCALE.format(3), check="numerics"),
        _failure("lse is wrong", "", SCALE.format(12), check="nonfinite"),
        _failure(
            "dq is wrong",
            "",
            f"follows from the forward pass: {SCALE.format(3)}",
            check="numerics",
        ),
        _failure("dv is wrong", "", "the causal mask is off by one", check="metamorphic"),
    )
    faults = summarise([line(CASE, verdict="fail", failures=failures)]).faults
    found = {f.first.title: {x.title for x in (*f.others, *f.hence)} for f in families(faults)}
    assert found.pop("dv is wrong") == set()
    ((first, rest),) = found.items()
    assert {first, *rest} == {"o is wrong", "lse is wrong", "dq is wrong"}


def test_what_nothing_explains_is_shown_beside_what_all_of_its_cases_have_too(line):
    known = _failure("o is wrong", "", SCALE.format(3), check="numerics")
    unknown = _failure("v's pages differ", "", "no known defect explains it", check="metamorphic")
    both = line(CASE, verdict="fail", failures=(known, unknown))
    (family,) = families(summarise([both, line(SMALL, verdict="fail", failures=(known,))]).faults)
    assert [f.title for f in family.beside] == ["v's pages differ"]
    assert ("with it", "v's pages differ, in 1 case") in list(beside(family))
    alone = line(SMALL, verdict="fail", failures=(unknown,))  # another fault, or a symptom: unclear
    assert len(families(summarise([both, alone]).faults)) == 2
    located = _failure("v's pages differ", "a.py:3", check="metamorphic")
    assert (
        len(families(summarise([line(CASE, verdict="fail", failures=(known, located))]).faults))
        == 2
    )


def test_faults_that_follow_from_each_other_are_both_shown(line):
    failures = (
        _failure("race through o", "a.py:3", "follows from the unwritten at a.py:4"),
        _failure("unwritten", "a.py:4", "follows from the race through o at a.py:3"),
    )
    faults = summarise([line(CASE, verdict="fail", failures=failures)]).faults
    assert {family.first.title for family in families(faults)} == {"race through o", "unwritten"}
