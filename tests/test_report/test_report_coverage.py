"""Which aspects came together, and which branches of the source ran."""

import pytest

from fa_verify.case import Case
from fa_verify.ran import SourceRan
from fa_verify.record import CaseRecord
from fa_verify.report.branches import branches
from fa_verify.report.coverage import place, reached
from fa_verify.report.summary import summarise

SOURCE = """\
def kernel(x, n, CAUSAL):
    start = 0
    if CAUSAL:
        start = mask(x)
    if n > 3:
        big = 1
    else:
        big = 2
    for i in range(n):
        if CAUSAL:
            return 7
        after = 8
    load(x, mask=n)


def launcher(x):
    if x:
        return 1
"""
PLAIN = "1-2 5 8-9 12-13 !6 5:tE 9:Ln 13:Sh"
CAUSAL = "1-2 4-5 8-9 11 13 !6 5:tE 9:Ln 13:SH"


def said(file, *runs):
    found = branches(str(file), [SourceRan.parse(run) for run in runs])
    return {branch.line: branch.said for branch in found}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "kernel.py"
    path.write_text(SOURCE, encoding="utf-8")
    return path


def test_a_constexpr_is_seen_by_the_lines_that_it_holds(file):
    assert said(file, PLAIN)[3] == "never taken"
    assert said(file, CAUSAL)[3] == "always taken"
    assert said(file, PLAIN, CAUSAL)[3] == "ran both ways"


@pytest.mark.parametrize(
    ("body", "known"),
    [
        ("lo, hi = 0, n", False),  # leaves no operation
        ("hi = tl.multiple_of(n, 16)", False),  # a hint: nor does that
        ("hi = n * BLOCK", False),  # computed before: merged with it, at that line
        ("hi = n + BLOCK", True),
        ("hi += BLOCK", True),
        ("hi = tl.cdiv(n, 16)", True),
        ("return", True),
    ],
)
def test_an_if_that_leaves_no_operation_is_not_said_to_be_never_taken(tmp_path, body, known):
    file = tmp_path / "kernel.py"
    head = ("def kernel(n, CAUSAL):", "rows = n * BLOCK", "if CAUSAL:")
    file.write_text("\n    ".join((*head, f"    {body}", "tl.store()")), encoding="utf-8")
    assert said(file, "2 5") == ({3: "never taken"} if known else {})
    assert said(file, "2 4-5") == {3: "always taken"}


def test_what_the_ir_decides_is_told_by_the_ir(file):
    assert said(file, PLAIN)[5] == "never taken"
    assert said(file, "1-2 5-6 9 12-13 !8 5:Te")[5] == "always taken"
    assert said(file, PLAIN.replace("tE", "TE"))[5] == "ran both ways"


def test_loops_and_masks(file):
    found = said(file, PLAIN)
    assert (found[9], found[13]) == ("ran, never skipped", "never false")
    assert said(file, CAUSAL)[13] == "true and false"
    assert said(file, "1-2 5 8 13 !6 !9-12 9:lN")[9] == "never entered"


def test_nothing_follows_a_return_and_a_launcher_is_no_kernel(file):
    assert said(file, CAUSAL)[10] == "always taken"
    assert said(file, PLAIN)[10] == "never taken"
    assert 17 not in said(file, PLAIN, CAUSAL)


def test_without_its_source_a_file_has_the_branches_of_the_ir(tmp_path):
    found = said(tmp_path / "gone.py", PLAIN)
    assert found == {5: "never taken", 9: "ran, never skipped", 13: "never false"}


def record(case, **fields):
    return CaseRecord(
        kernel="flash", target="flash.py:flash", source_hash="0", setup="", verdict="pass",
        case=case, **fields,
    )  # fmt: skip


def test_pairs_are_of_values_that_were_met():
    plain = "pass=fwd s=64x64 d=64 dtype=float16 seed=0"
    (one,) = summarise([record(plain)]).coverage
    assert (one.met, one.missing) == (one.due, ())
    (two,) = summarise([record(plain), record(plain + "1 mask=causal scale=0.5")]).coverage
    assert two.missing == (
        "mask causal, bottom-right with scale default",
        "mask none with scale above 0",
    )
    assert two.due - two.met == 2
    assert "99%" not in reached(one)
    assert "100% of pairs" in reached(one)


def test_a_case_that_did_not_run_reaches_nothing():
    refused = record("pass=fwd s=64x64 d=64 dtype=float16 seed=0")
    refused = CaseRecord(
        **{**{f: getattr(refused, f) for f in refused.__struct_fields__}, "verdict": "unsupported"}
    )
    assert summarise([refused]).coverage == ()


def test_the_line_names_what_never_ran(file):
    case = str(Case.parse("pass=fwd s=64x64 d=64 dtype=float16 seed=0"))
    (one,) = summarise([record(case, ran={str(file): PLAIN})]).coverage
    assert one.ways == (5, 9)
    text = reached(one)
    assert "5 of 9 ways of its branches" in text
    assert "kernel.py:3 `if CAUSAL:` never taken" in text
    assert "1 more" in text
    assert place(one.gaps[-1]).endswith("kernel.py:13 `load(x, mask=n)`")
