import io

import pytest
from rich.console import Console

from fa_verify.case import Case
from fa_verify.record import FailureRecord, TensorStats
from fa_verify.report import compare as comparison
from fa_verify.report.changes import Limits
from fa_verify.report.compare import compare
from fa_verify.report.summary import summarise

CASES = [Case.parse(f"pass=fwd s=128x128 d=64 dtype=float16 seed={n}") for n in range(100)]
OTHERS = [Case.parse(f"pass=fwd s=128x128 d=64 dtype=float16 seed={n}") for n in range(100, 200)]
SOFTCAP = [Case.parse(f"pass=fwd s=8x8 d=64 dtype=float16 cap=30.0 seed={n}") for n in range(40)]
WRONG = FailureRecord(
    check="numerics",
    title="o outside its bound",
    message="o[0]: got 1",
    location="flash.py:10",
    source="o = acc / l",
)


def passing(line, ratio=0.5, cases=CASES, **fields) -> list:
    return [
        line(case, tensors={"o": TensorStats(elements=1, ratio=ratio)}, **fields) for case in cases
    ]


def kinds(base, head, **options) -> list[str]:
    found = compare(summarise(base), summarise(head), **options)
    assert found.exit_code == (1 if found.regressions else 0)
    return [change.kind for change in found.regressions]


def shown(found) -> str:
    file = io.StringIO()
    comparison.show(Console(file=file, width=100, highlight=False), found)
    return file.getvalue()


def test_a_run_against_itself_has_no_regression(run):
    summary = summarise(run())
    found = compare(summary, summary)
    assert not found.regressions
    assert found.exit_code == 0


@pytest.mark.parametrize("seed", range(20))
def test_two_runs_of_the_same_kernels_with_other_seeds_have_no_regression(run, seed):
    base = run(cases=400, broken=False, seed=1000)
    head = run(cases=400, broken=False, seed=seed)
    assert kinds(base, head) == []


def test_a_longer_run_is_not_worse_for_having_looked_further(run):
    longer = run(cases=2000, broken=False)
    assert kinds(run(cases=200, broken=False), longer) == []
    assert kinds(run(cases=200, broken=False, seed=9), longer) == []


def test_the_case_that_only_the_longer_run_saw_is_not_compared(line):
    beyond = passing(line, ratio=0.9, cases=OTHERS[:1])
    assert kinds(passing(line), passing(line) + beyond) == []


@pytest.mark.parametrize(("after", "expected"), [(0.5, []), (0.54, []), (0.56, ["worse"])])
def test_a_worst_ratio_may_grow_by_a_tenth(line, after, expected):
    assert kinds(passing(line), passing(line, ratio=after)) == expected


def test_the_tenth_is_a_parameter(line):
    limits = Limits(growth=0.01, floor=0.0)
    assert kinds(passing(line), passing(line, ratio=0.51), limits=limits) == ["worse"]


def test_growth_of_a_tiny_ratio_concerns_nobody(line):
    assert kinds(passing(line, ratio=0.0001), passing(line, ratio=0.009)) == []


def test_a_large_growth_is_seen_without_common_cases(run):
    base = run(cases=400, broken=False, seed=1)
    assert "worse" in kinds(base, run(cases=400, broken=False, seed=2, factor=2.5))


def test_a_new_failure_is_a_regression_and_is_not_also_called_worse(line):
    failing = line(
        CASES[0],
        verdict="fail",
        failures=(WRONG,),
        tensors={"o": TensorStats(elements=1, ratio=90.0)},
    )
    head = [failing, *passing(line)[1:]]
    assert kinds(passing(line), head) == ["new failure"]
    detail = compare(summarise(passing(line)), summarise(head)).regressions[0].detail
    assert "base passed 1 of these cases" in detail


def test_a_failure_on_a_case_that_base_never_ran_says_so(line):
    head = [*passing(line), line(OTHERS[0], verdict="fail", failures=(WRONG,))]
    (change,) = compare(summarise(passing(line)), summarise(head)).regressions
    assert "may be older than this change" in change.detail


def test_a_known_failure_is_known_after_an_edit_above_its_line(line):
    fields = {name: getattr(WRONG, name) for name in WRONG.__struct_fields__}
    moved = FailureRecord(**{**fields, "location": "flash.py:12"})
    other = FailureRecord(**{**fields, "location": "flash.py:30", "source": "o = o * scale"})
    base = [line(CASES[0], verdict="fail", failures=(WRONG,))]
    assert kinds(base, [line(CASES[0], verdict="fail", failures=(moved,))]) == []
    assert kinds(base, [line(CASES[0], verdict="fail", failures=(other,))]) == ["new failure"]


def test_a_known_failure_on_a_case_that_passed_is_a_regression(line):
    failing = [line(case, verdict="fail", failures=(WRONG,)) for case in CASES[:2]]
    base = [failing[0], *passing(line)[1:]]
    assert kinds(base, [*failing, *passing(line)[2:]]) == ["new failure"]
    assert kinds([*failing, *passing(line)[2:]], base) == []


def test_a_fault_that_is_gone_is_mentioned(line):
    base = [line(CASES[0], verdict="fail", failures=(WRONG,)), *passing(line)[1:]]
    found = compare(summarise(base), summarise(passing(line)))
    assert "flash: no longer seen: o outside its bound" in found.notes


@pytest.mark.parametrize("verdict", ["unsupported", "inconclusive", "error"])
def test_a_case_that_passed_and_is_no_longer_verified_is_a_loss(line, verdict):
    head = [line(CASES[0], verdict=verdict, reason="softcap"), *passing(line)[1:]]
    assert kinds(passing(line), head) == ["lost"]


def test_a_feature_that_is_gone_is_a_loss_without_common_cases(line):
    base = passing(line) + passing(line, cases=SOFTCAP[:30])
    refused = [line(case, verdict="unsupported") for case in SOFTCAP[30:]]
    found = compare(summarise(base), summarise(passing(line, cases=OTHERS) + refused))
    assert "softcap" in [change.what for change in found.regressions]


def test_a_rare_feature_that_head_did_not_draw_is_no_loss(line):
    base = passing(line) + passing(line, cases=SOFTCAP[:3])
    assert kinds(base, passing(line, cases=OTHERS)) == []


def test_a_kernel_that_is_gone_is_a_loss(line):
    base = passing(line) + passing(line, kernel="other")
    assert kinds(base, passing(line)) == ["lost"]


@pytest.mark.parametrize(("cases", "expected"), [(95, []), (80, ["fewer cases"])])
def test_fewer_cases(line, cases, expected):
    assert kinds(passing(line), passing(line, cases=CASES[:cases])) == expected


def test_a_variant_is_compared_with_what_it_replaces(line):
    variant = passing(line, ratio=0.9, kernel="flash_v2", file="v2.py")
    assert kinds(passing(line), variant) == ["worse"]


@pytest.mark.parametrize("empty", ["base", "head", "both"])
def test_nothing_verified_is_never_a_pass(line, empty):
    nothing = summarise([line(CASES[0], verdict="unsupported", reason="all")])
    full = summarise(passing(line))
    base = full if empty == "head" else nothing
    head = full if empty == "base" else nothing
    found = compare(base, head)
    assert found.exit_code == 3
    assert found.verdict == "NOTHING TO COMPARE"


def test_one_case_with_several_setups_counts_at_its_worst(line):
    worse = passing(line, ratio=0.9)
    assert kinds(passing(line) + worse, worse) == []
    assert kinds(passing(line), passing(line) + worse) == ["worse"]


def regressed(run, line):
    base = [*run(cases=300, broken=False), *passing(line, cases=SOFTCAP, kernel="third")]
    failing = [line(CASES[0], kernel="flash", verdict="fail", failures=(WRONG,))]
    head = [*run(cases=250, broken=False, factor=1.3), *failing]
    return compare(summarise(base), summarise(head))


def test_terminal(run, line, snapshot):
    snapshot("compare.txt", shown(regressed(run, line)))


def test_markdown(run, line, snapshot):
    snapshot("compare.md", comparison.markdown(regressed(run, line)))


def test_the_verdict_ends_the_log(run, line):
    assert shown(regressed(run, line)).splitlines()[-1].startswith("REGRESSION  new failure (1), ")
