"""`fa-verify selftest`: what it runs, says, writes and returns."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from fa_verify import campaign, loader
from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.case import Case
from fa_verify.record import CaseRecord
from fa_verify.selftest import selftest as run_selftest
from fa_verify.verdict import Verdict
from fa_verify.verify import verify
from fa_verify.zoo.defects import KERNELS
from fa_verify.zoo.operators import OPERATORS, applied
from fa_verify.zoo.outcomes import Outcome, named, totals
from fa_verify.zoo.table import render

TARGET = "fa_verify/zoo/kernels/launch.py:flash"


FIRST = (
    *(
        "hd-hardcoded",
        "q-load-no",
        "k-load-no",
        "zero-times",
        "padded-keys",
        "o-by-qs",
        "lse-store",
    ),
    *("rescale-missing", "maximum-starts", "acc-rounded-each-block (float16)", "tf32-default"),
    *("scale-missing", "causal-one-key", "dq-unscaled", "delta-missing", "dq-nonatomic"),
)


def selftest(folder, *options, timeout=120):
    command = [sys.executable, "-c", "from fa_verify.cli import main; main()", "selftest"]
    done = subprocess.run(
        [*command, "--report", str(folder), "-n", "1", *options],
        capture_output=True, text=True, timeout=timeout, check=False,
        env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    found = folder / "selftest.json"
    outcomes = json.loads(found.read_text()) if found.exists() else []
    return done.returncode, done.stdout + done.stderr, {o["name"]: o for o in outcomes}


def test_a_defect_is_caught_and_named_beside_a_right_kernel(tmp_path):
    code, said, outcomes = selftest(
        tmp_path, "--only", "rescale-missing-in-l", "--only", "decode", "--cases", "3"
    )
    assert code == 0, said
    defect, right = outcomes["rescale-missing-in-l"], outcomes["decode"]
    assert defect["caught"]
    assert "numerics" in defect["checks"]
    assert "l is not rescaled" in defect["defect"]
    assert (right["tag"], right["caught"], right["cases"]) == ("right", False, 3)
    assert "1 of 1 defects caught" in (tmp_path / "selftest.md").read_text()


def test_an_escape_is_a_failure(tmp_path):
    # A sign is lost: it takes a negative scale to see it, which the first case has not.
    code, said, outcomes = selftest(tmp_path, "--only", "negative-scale", "--cases", "1")
    assert code == 1, said
    assert not outcomes["negative-scale"]["caught"]
    assert "negative-scale escaped" in said


def test_an_interrupt_leaves_what_was_decided(tmp_path, monkeypatch):
    def half(kernels, _, listener):
        assert len(kernels) == 2
        for _ in range(3):  # of one kernel all cases pass, of the other none ran
            listener.record(
                CaseRecord(
                    kernel=kernels[0].name, target=kernels[0].target, source_hash="", case="",
                    setup="", verdict=Verdict.PASS,
                )
            )  # fmt: skip
        raise KeyboardInterrupt

    monkeypatch.setattr(campaign, "run", half)
    code = run_selftest(None, tmp_path, only=("decode", "rescale-missing-in-l"), cases=3)
    assert code == 130
    (only,) = json.loads((tmp_path / "selftest.json").read_text())
    assert only["cases"] == 3


def test_operators_are_put_on_a_target(tmp_path):
    code, said, outcomes = selftest(
        tmp_path, TARGET, "--only", "lse-in", "--cases", "2", "--others",
    )  # fmt: skip
    assert code == 0, said
    assert outcomes["lse-in-base-2"]["caught"]
    assert outcomes["lse-in-base-2"]["others"]["KernelBench"] is False  # which looks at o alone
    assert "| KernelBench | 0 of 1 |" in (tmp_path / "selftest.md").read_text()


@pytest.mark.slow
def test_the_first_defects_are_caught_in_few_cases_and_named(tmp_path):
    only = [word for name in FIRST for word in ("--only", name)]
    code, said, outcomes = selftest(tmp_path, *only, "--cases", "100", timeout=600)
    assert code == 0, said
    assert len(outcomes) == 17
    assert all(o["caught"] and o["cases"] <= 20 for o in outcomes.values()), said
    assert all(o["cause"] == "right" for o in outcomes.values()), said


def test_a_name_of_no_defect_is_misuse(tmp_path):
    code, said, _ = selftest(tmp_path, "--only", "nothing-of-the-kind")
    assert code == 2
    assert "names no defect" in said


def test_operators_know_where_they_show():
    (kernel,) = loader.load(TARGET)
    forward = dataclasses.replace(kernel, backward=None)
    needy = [o for o in OPERATORS if o.needs == "backward"]
    assert needy
    assert all(o.shows_on(kernel) and not o.shows_on(forward) for o in needy)
    assert applied(TARGET, "mask-ignored").name == "mask-ignored"
    for needed in ("documents", "patterns"):
        undeclared = dataclasses.replace(kernel, capabilities=None)
        operators = [o for o in OPERATORS if o.needs == needed]
        assert operators
        assert not any(o.shows_on(undeclared) for o in operators)


@pytest.mark.parametrize("name", ["documents-ignored", "document-takes-a-key", "gaps-ignored"])
def test_operators_of_documents_and_gaps_are_caught(name):
    target = f"{KERNELS / 'launch.py'}:masked_forward"
    line = "pass=fwd s=20x30 d=16 dtype=float32 seed=1 mask=docs5x0-9x20-6x10.pattern:prefix:9"
    right, wrong = loader.load(target)[0], applied(target, name)
    for kernel, verdict in ((right, "pass"), (wrong, "fail")):
        assert verify(Case.parse(line), kernel, Setup(), CpuBackend()).verdict == verdict


@pytest.mark.parametrize(
    ("diagnoses", "said", "cause"),
    [
        ([], "", "unknown"),
        (["", "no known defect explains it"], "no known defect explains it", "unknown"),
        (["no known defect explains it", "the scale"], "the scale", "right"),
        (["the mask", "the scale"], "the mask", "wrong"),
    ],
)
def test_the_first_cause_named_counts(diagnoses, said, cause):
    assert named(diagnoses, ["the scale"]) == (said, cause)


def outcome(**fields):
    return Outcome(**{"name": "x", "defect": "a defect", "tag": "ttir", "kernel": "flash"} | fields)


def test_what_counts_against_the_oracle():
    caught = {"caught": True, "cases": 3, "seconds": 1.5, "cause": "right"}
    assert outcome().bad
    assert not outcome(**caught).bad
    assert not outcome(tag="gpu-only").bad
    assert outcome(tag="right", **caught).bad
    assert outcome(harness=1, **caught).bad


def test_totals_and_table():
    outcomes = [
        outcome(name="a", caught=True, cases=2, seconds=1.0, cause="right", small="s|q"),
        outcome(name="b", caught=True, cases=8, seconds=3.0, cause="unknown", source="X#1"),
        outcome(name="c", cases=300),
        outcome(name="d", tag="meta", kernel="", why="tests/t.py::t"),
        outcome(name="flash", tag="right", cases=9),
    ]
    found = totals(outcomes[:3])
    assert (found.defects, found.caught, found.cases, found.seconds) == (3, 2, 5, 2.0)
    assert (found.right, found.wrong, found.unknown) == (1, 0, 1)
    text = render(outcomes, "two of three")
    assert "| all | 3 | 2 (66.7%) | 5 | 2.0 | 1 (50%) | 0 | 1 |" in text
    assert "| c | ttir | **not caught** | 300 |" in text
    assert "Right kernels: flash passed (9 cases)." in text
    assert "| d |" in text
