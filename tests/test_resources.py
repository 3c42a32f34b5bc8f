import json
import os
import subprocess
import sys
from types import SimpleNamespace

import msgspec
import pytest

from fa_verify.errors import InvalidInputError
from fa_verify.resources import chips, compiled, findings
from fa_verify.resources.build import Build, Usage, read, write

TARGETS = "tests/targets/compiled.py"
CASE = "pass=fwd s=64x64 d=64 dtype={} seed=0"


def run(*arguments):
    """The command line in a process of its own: exit code and output."""
    result = subprocess.run(
        [sys.executable, "-c", "from fa_verify.cli import main; main()", "resources", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "COLUMNS": "120"},
    )
    return result.returncode, result.stdout + result.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the planted kernels were compiled, and what they were found to be."""
    folder = tmp_path_factory.mktemp("resources")
    options = ("--arch", "sm_80,sm_90,gfx942", "--cases", "1", "-n", "2")
    places = ("--report", str(folder), "--cache", str(folder / "cache"))
    code, output = run(TARGETS, *options, *places, "--save", str(folder / "base.jsonl"))
    assert code == 1, output
    (folder / "output").write_text(output)
    return folder


@pytest.fixture(scope="module")
def builds(folder):
    return {(b.kernel, b.chip, b.index): b for b in read(folder / "resources.jsonl")}


def kinds(build):
    return {(finding.kind, finding.fails) for finding in build.findings}


@pytest.mark.slow
def test_a_modest_kernel_uses_tensor_cores_and_has_no_finding(builds):
    for chip, core in (("sm_80", "mma"), ("sm_90", "wgmma"), ("gfx942", "mfma")):
        build = builds["modest", chip, 0]
        assert build.findings == ()
        assert set(build.usage.matrix) == {core}
        assert build.usage.dots == {"f16": 1}
        assert 16 <= build.usage.registers <= chips.CHIPS[chip].registers
        assert build.usage.spill_stores == build.usage.spill_loads == build.usage.stack == 0
        assert 0 < build.usage.shared <= chips.CHIPS[chip].shared


@pytest.mark.slow
def test_a_kernel_with_too_many_values_spills(builds):
    for chip in ("sm_80", "sm_90"):
        usage = builds["spills", chip, 0].usage
        assert usage.registers == 255
        assert min(usage.spill_stores, usage.spill_loads, usage.stack) > 1000
        (finding,) = findings.judge(
            [builds["spills", chip, 0]], findings.Limits(spills=1000, stack=100)
        )[0].findings[:1]
        assert finding.kind == "spills"
        assert finding.fails


@pytest.mark.slow
def test_shared_memory_is_held_against_the_chip(builds):
    assert builds["roomy", "sm_80", 0].usage.shared > 163 * 1024
    assert kinds(builds["roomy", "sm_80", 0]) == {("does not fit", True)}
    assert 163 * 1024 < builds["roomy", "sm_90", 0].usage.shared <= 227 * 1024
    assert kinds(builds["roomy", "sm_90", 0]) == set()


@pytest.mark.slow
def test_a_configuration_that_does_not_fit_is_no_fault_where_another_does(builds):
    assert kinds(builds["roomy_tuned", "sm_80", 0]) == set()
    assert kinds(builds["roomy_tuned", "sm_80", 1]) == {("does not fit", False)}


@pytest.mark.slow
def test_tf32_fails_where_ieee_was_asked(builds):
    for chip in ("sm_80", "sm_90"):
        assert kinds(builds["tf32", chip, 0]) == {("tf32", True)}
        assert builds["tf32", chip, 0].usage.tf32 > 0
        ieee = builds["ieee", chip, 0]
        assert ieee.findings == ()
        assert (ieee.usage.tf32, ieee.usage.matrix) == (0, {})


@pytest.mark.slow
def test_a_product_that_misses_the_tensor_cores_is_told(builds):
    tiny = builds["tiny", "gfx942", 0]
    assert kinds(tiny) == {("no tensor cores", False)}
    (judged,) = findings.judge([tiny], findings.Limits(tensor_cores=True))
    assert kinds(judged) == {("no tensor cores", True)}


@pytest.mark.slow
def test_what_does_not_compile_is_told_in_the_compilers_words(folder):
    output = (folder / "output").read_text()
    assert "FAIL fp8 on sm_80: " in output
    assert "fp8e4nv not supported" in output
    assert "FAIL fp8 on sm_90" not in output
    lines = [json.loads(x) for x in (folder / "resources.jsonl").read_text().splitlines()]
    refused = {(x["kernel"], x["chip"]): x["fails"] for x in lines if x["type"] == "refusal"}
    assert refused["fp8", "sm_80"]
    assert not refused["stubborn", "sm_80"]  # not the compiler's word: `check` judges it


@pytest.mark.slow
def test_a_kernel_that_launches_nothing_is_no_pass(tmp_path):
    options = ("--arch", "sm_90", "--cases", "1", "-n", "1", "--no-cache")
    code, output = run(f"{TARGETS}:stubborn", *options, "--report", str(tmp_path))
    assert code == 3, output
    assert "note stubborn on sm_90: RuntimeError: no such library on this machine" in output


@pytest.mark.slow
def test_a_launcher_that_looks_at_results_finds_them(builds):
    assert builds["peeks", "sm_90", 0].usage.registers > 0


@pytest.mark.slow
def test_launchers_find_the_chip_that_they_are_compiled_for(builds):
    rows = {chip: builds["asks", chip, 0].config for chip in ("sm_80", "sm_90", "gfx942")}
    assert rows == {
        "sm_80": "M=32 N=64 K=64",
        "sm_90": "M=64 N=64 K=64",
        "gfx942": "M=16 N=64 K=64",
    }


@pytest.mark.slow
def test_a_second_run_compiles_nothing_and_compares_with_the_first(folder, tmp_path):
    options = ("--arch", "sm_90", "--cases", "1", "-n", "1", "--cache", str(folder / "cache"))
    target = f"{TARGETS}:modest"
    base = ("--baseline", str(folder / "base.jsonl"), "--report", str(tmp_path))
    code, output = run(target, *options, *base)
    assert code == 0, output
    assert "1 build of 1 kernel, 0 failing, 1 in the baseline, 1 compiled before" in output
    stricter = tmp_path / "stricter.jsonl"
    (modest,) = [
        b for b in read(folder / "base.jsonl") if (b.kernel, b.chip) == ("modest", "sm_90")
    ]
    less = msgspec.structs.replace(modest.usage, registers=modest.usage.registers - 1)
    write(stricter, [msgspec.structs.replace(modest, usage=less)])
    code, output = run(target, *options, "--baseline", str(stricter), "--report", str(tmp_path))
    assert code == 1, output
    assert "regression: registers" in output
    slack = ("--slack", "1", "--report", str(tmp_path))
    assert run(target, *options, "--baseline", str(stricter), *slack)[0] == 0
    code, output = run(target, *options, "--max-shared", "100", "--report", str(tmp_path))
    assert code == 1, output
    assert "shared memory, the limit is 100" in output


def build(usage, *, index=0, form="", chip="sm_90", dtype="float16", dot=""):
    return Build(
        kernel="k", target="k.py:k", function="f", location="k.py:1", chip=chip, config="",
        index=index, form=form, case=CASE.format(dtype) + dot, usage=usage,
    )  # fmt: skip


def judged(usage, before=None, **limits):
    (one,) = findings.judge(
        [build(usage)], findings.Limits(**limits), [build(before)] if before else []
    )
    return [finding.text for finding in one.findings]


@pytest.mark.parametrize(
    ("kind", "words", "fails", "usage"),
    [
        ("layouts", "2 products", True, {"repeated": 2, "matrix": {"mma": 1}}),
        ("operands", "2 registers", False, {"rewritten": 2, "matrix": {"wgmma": 1}}),
        ("descriptors", "2 descriptors", False, {"lost": 2, "matrix": {"wgmma": 1}}),
    ],
)
def test_a_fault_of_a_compiler_is_told(kind, words, fails, usage):
    (one,) = findings.judge([build(Usage(registers=9, **usage))], findings.Limits())
    (finding,) = one.findings
    assert finding.kind == kind
    assert words in finding.text
    assert one.fails is fails


GOOD = Usage(registers=100, shared=1000, matrix={"wgmma": 4}, dots={"f16": 1})


@pytest.mark.parametrize(
    ("worse", "said"),
    [
        ({"registers": 101}, "registers 100 -> 101"),
        ({"spill_stores": 8}, "bytes spilled 0 -> 8"),
        ({"spill_loads": 8}, "bytes spilled 0 -> 8"),
        ({"matrix": {}}, "4 wgmma instructions -> none"),
        ({"matrix": {"mma": 64}}, "4 wgmma instructions -> none"),
        (
            {"shared": 300_000},
            "could run in the baseline: 300000 bytes of shared memory, sm_90 has 232448",
        ),
        ({"error": "no"}, "could run in the baseline: no"),
    ],
)
def test_a_regression_fails_and_an_improvement_does_not(worse, said):
    bad = msgspec.structs.replace(GOOD, **worse)
    assert said in judged(bad, GOOD)
    assert not judged(GOOD, bad)
    assert not judged(GOOD, GOOD)
    assert said not in judged(bad)


def test_limits_are_inclusive():
    full = msgspec.structs.replace(GOOD, spill_stores=3, spill_loads=4, stack=16)
    most = {"registers": 100, "spills": 7, "stack": 16, "shared": 1000}
    assert judged(full, **most) == []
    for name, limit in most.items():
        assert len(judged(full, **{**most, name: limit - 1})) == 1


def test_a_configuration_counts_as_fitting_only_if_all_that_it_launches_fits():
    big = Usage(shared=300_000)
    both = [build(GOOD, form="a"), build(big, form="b"), build(big, form="c", index=1)]
    assert [b.fails for b in findings.judge(both, findings.Limits())] == [False, True, True]
    third = [*both, build(GOOD, form="d", index=2)]
    assert not any(b.fails for b in findings.judge(third, findings.Limits()))


def test_of_what_cannot_run_only_that_is_said():
    stub = Usage(registers=4, shared=1000, columns=576, dots={"f16": 1})
    fits = build(GOOD, form="fits", index=1, chip="sm_100")
    pair = [build(stub, chip="sm_100"), fits]
    first, second = findings.judge(pair, findings.Limits(tensor_cores=True, registers=100))
    assert kinds(first) == {("does not fit", False)}
    assert kinds(second) == set()


def test_tf32_that_the_kernel_does_not_ask_for_is_told_and_tf32x3_is_not_tf32():
    def said(dots, dot=""):
        usage = Usage(tf32=3, matrix={"mma": 3}, dots=dots)
        (one,) = findings.judge([build(usage, dtype="float32", dot=dot)], findings.Limits())
        return [finding.kind for finding in one.findings]

    assert said({"f32 ieee": 1}) == ["tf32"]
    assert said({"f32 tf32": 1}) == ["tf32"]
    assert said({"f32 tf32x3": 1}) == []
    assert said({"f32 tf32": 1}, " dot=tf32") == []


def test_instructions_are_counted_by_kind():
    ptx = """
        mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r1}, {%r2};
        @p wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%r1};
        tcgen05.mma.cta_group::1.kind::tf32 [%r1];
        // wgmma.fence only
        wgmma.fence.sync.aligned;
    """
    log = (
        "ptxas info    : 0 bytes gmem\n    8 bytes stack frame, 4 bytes spill stores, "
        "16 bytes spill loads\nptxas info    : Used 255 registers, used 1 barriers"
    )
    ttir = (
        "%1 = tt.dot %a, %b, %c, inputPrecision = tf32 : tensor<16x16xf32> * tensor<16x16xf32>\n"
        "%2 = tt.dot %a, %b, %c : tensor<16x16xf32, #e> * tensor<16x16xf32, #e>\n"
        "%3 = tt.dot %a, %b, %c {maxNumImpreciseAcc = 9 : i32} : "
        "tensor<16x16xf8E5M2> * tensor<16x16xf8E5M2>\n"
    )
    usage = compiled.usage_of(
        {"ptx": ptx, "ttir": ttir, "ttgir": "", "cubin": b""},
        SimpleNamespace(shared=7, tmem_size=64),
        log,
    )
    assert usage == Usage(
        registers=255, stack=8, spill_stores=4, spill_loads=16, shared=7, columns=64, tf32=2,
        matrix={"mma": 1, "tcgen05": 1, "wgmma": 1},
        dots={"f32 tf32": 1, "f32 ieee": 1, "f8E5M2": 1},
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="said nothing of registers"):
        compiled.usage_of({"ptx": ptx, "ttir": ttir}, SimpleNamespace(shared=7), "")


def test_misuse_is_told(tmp_path):
    with pytest.raises(InvalidInputError, match=r"arch='sm_1': must be one of sm_75"):
        chips.parse("sm_90,sm_1")
    with pytest.raises(InvalidInputError, match="make one with --save"):
        read(tmp_path / "missing.jsonl")
    (tmp_path / "torn.jsonl").write_text("{")
    with pytest.raises(InvalidInputError, match="save it again"):
        read(tmp_path / "torn.jsonl")
