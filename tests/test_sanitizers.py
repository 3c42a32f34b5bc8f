import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from fa_verify import ttir
from fa_verify.backends.base import Setup
from fa_verify.case import Case
from fa_verify.inputs import materialise
from fa_verify.record import Sanitized
from fa_verify.report import html, markdown, sanitized
from fa_verify.report.headline import caveats, word
from fa_verify.report.summary import exit_code, summarise
from fa_verify.sanitizers import child, session
from fa_verify.sanitizers.findings import asserted, parse
from fa_verify.sanitizers.probes import PROBES
from fa_verify.sanitizers.tools import TOOLS

LOGS = Path("tests/sanitizers")


def run(*arguments):
    """The command line in a process of its own: exit code and output."""
    result = subprocess.run(
        [sys.executable, "-c", "from fa_verify.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "COLUMNS": "120"},
    )
    return result.returncode, result.stdout + result.stderr


def log(name):
    """What compute-sanitizer 2025.3 said of planted faults on an H200."""
    return parse((LOGS / f"{name}.log").read_text())


@pytest.mark.parametrize(
    ("name", "title", "kernel", "line", "count", "detail"),
    [
        (
            "memcheck-store", "Invalid __global__ write of size 4 bytes", "store_past", 10, 4,
            "and is 1 bytes after the nearest allocation at 0x7fd88c800000 of size 800 bytes",
        ),
        (
            "memcheck-before", "Invalid __global__ read of size 4 bytes", "load_before", 23, 3,
            "28 bytes before the nearest allocation",
        ),
        (
            "initcheck", "Uninitialized __global__ memory read of size 4 bytes", "copy", 30, 3,
            "Address 0x7f96e6800400",
        ),
        (
            "racecheck-analysis", "Race reported between Write access", "smem_race", 46, 127,
            "and Write access at smem_race+0x80",
        ),
        (
            "racecheck-hazards", "Potential WAW hazard", "smem_race", 46, 3,
            "Current Value : 32, Incoming Value : 33",
        ),
        (
            "synccheck", "Barrier error detected. Divergent thread(s) in warp",
            "divergent_barrier", 58, 2, "by thread (0,0,0) in block (0,0,0)",
        ),
    ],
)  # fmt: skip
def test_a_tools_log_is_read(name, title, kernel, line, count, detail):
    (finding,) = log(name).findings
    assert finding.title == title
    assert (finding.kernel, finding.line, finding.count) == (kernel, line, count)
    assert finding.file.endswith("faults.py")
    assert detail in finding.detail
    assert "Host Frame" not in finding.detail
    assert log(name).remarks == ()


def test_addresses_are_kept():
    assert log("memcheck-store").findings[0].address == 0x7FD88C800000
    assert log("initcheck").findings[0].address == 0x7F96E6800400
    assert log("racecheck-analysis").findings[0].address == 0


@pytest.mark.parametrize("name", ["memcheck-right", "racecheck-right"])
def test_the_log_of_a_right_kernel_has_nothing(name):
    assert log(name) == log("memcheck-right")
    assert log(name).complete
    assert log(name).findings == log(name).remarks == ()


def test_a_tool_that_cannot_run_says_so_and_its_log_is_not_complete():
    for name, said in (("no-cuda", "before first instrumented API call"), ("no-program", "valid")):
        assert said in log(name).remarks[0]
        assert not log(name).complete
    refused = parse("========= COMPUTE-SANITIZER\n========= Error: Device not supported. Please\n")
    assert refused.remarks == ("Error: Device not supported. Please",)


def test_warnings_of_races_are_no_findings():
    text = (LOGS / "racecheck-analysis.log").read_text().replace("Error: Race", "Warning: Race")
    assert parse(text).findings == parse(text).remarks == ()


def test_device_side_assertions_are_findings():
    line = "{}:12: f: block: [3,0,0], thread: [{},0,0] Assertion `Buffer has writes.` failed.\n"
    said = "warm\n" + "".join(line.format("/home/me/k.py", i) for i in range(4))
    (finding,) = asserted(said)
    assert (finding.title, finding.count, finding.line) == ("Buffer has writes.", 4, 12)
    assert asserted("nothing\n") == ()


@pytest.mark.parametrize("layout", ["", " q=bhsd.s8", " q=bhsd.at3", " q=bshd.s1.at8"])
def test_a_moved_tensor_ends_its_allocation_and_keeps_its_alignment(layout):
    case = Case.parse(f"pass=fwd h=2/2 s=3x5 d=16 dtype=float16 seed=0{layout}")
    q = materialise(case).q
    there = child.moved(q, "cpu")
    assert torch.equal(there, q)
    assert there.stride() == q.stride()
    last = sum((n - 1) * s for n, s in zip(q.shape, q.stride(), strict=True))
    assert there.untyped_storage().nbytes() == 2 * (there.storage_offset() + last + 1)
    assert there.storage_offset() == q.storage_offset() % 8


def watched(path, *arguments):
    """What the watched process does, on the CPU executor, and what that saw."""
    with ttir.redirected(), ttir.execute() as run_:
        child.main(str(path), *arguments)
    return msgspec.json.decode(path.read_bytes(), type=child.Report), run_


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("store_past", "out-of-bounds-write"),
        ("unwritten", "uninitialised-read"),
        ("global_race", "race"),
    ],
)
def test_a_planted_fault_is_one(tmp_path, name, kind):
    report, run_ = watched(tmp_path / "report", "probe", name)
    assert kind in {incident.kind for incident in run_.incidents}
    assert report.done
    assert set(report.kernels) == {f"_{name}"}


def test_every_tool_has_its_planted_fault_but_consan():
    assert {tool.probe for tool in TOOLS.values()} - {""} == set(PROBES)
    assert [name for name, tool in TOOLS.items() if not tool.probe] == ["consan"]


def test_the_watched_process_runs_a_case_and_says_what_it_launched(tmp_path):
    case = "pass=fwd s=70x5 d=64 dtype=float16 q=bhsd.s8 seed=3"
    path = tmp_path / "report"
    report, run_ = watched(path, "case", "tests/targets/watched.py:right", case, "0")
    assert (report.done, report.error) == (True, "")
    assert report.kernels["copy"].endswith("watched.py")
    assert report.tensors["q"][1] == 2 * (69 * 72 + 64)
    assert run_.incidents == []
    _, run_ = watched(path, "case", "tests/targets/watched.py:past", case, "0")
    assert {incident.kind for incident in run_.incidents} == {"out-of-bounds-write"}


FAKE = """#!{python}
import json, os, shutil, sys
arguments = sys.argv[1:]
tool = arguments[arguments.index("--tool") + 1]
log = arguments[arguments.index("--log-file") + 1]
report, kind, *rest = arguments[arguments.index("fa_verify.sanitizers.child") + 1 :]
assert os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
said = {{"device": "Fake", "done": True, "tensors": {{"q": [0x7fd88c800000, 800]}}}}
if tool == "synccheck":
    print("Error: Device not supported")
    open(log, "w").write("========= COMPUTE-SANITIZER\\n========= Error: Device not supported.\\n")
    sys.exit(1)
json.dump(said, open(report, "w"))
found = {{"memcheck": "memcheck-store", "initcheck": "initcheck"}}
blind = tool == "racecheck"  # does not even see what is planted for it
bad = not blind and (kind == "probe" or rest[0].endswith(":past") and tool == "memcheck")
shutil.copy(f"tests/sanitizers/{{found[tool] if bad else 'memcheck-right'}}.log", log)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A compute-sanitizer that says what the real one said, and sees no race."""
    path = tmp_path / "bin" / "compute-sanitizer"
    path.parent.mkdir()
    path.write_text(FAKE.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
    return path


def check(target, folder, *options):
    words = (
        "--backend",
        "cpu",
        "--cases",
        "2",
        "-n",
        "2",
        "--no-examples",
        "--report",
        str(folder),
    )
    return run("check", f"tests/targets/watched.py:{target}", *words, *options)


def test_a_finding_is_a_failure_in_every_report(tmp_path, fake):
    code, output = check("past", tmp_path, "--sanitizer", "memcheck", "--sanitizer-cases", "2")
    assert code == 1, output
    assert "sanitizer:memcheck" in output
    assert "Invalid __global__ write of size 4 bytes" in output
    assert "past: memcheck found faults in 2 of 2 cases" in output
    for name in ("report.html", "report.md"):
        text = (tmp_path / name).read_text()
        assert "write of size 4 bytes" in text
        assert "memcheck found faults in 2 of 2 cases" in text
    (record,) = tmp_path.glob("*.jsonl")
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    failures = [f for x in lines if x["type"] == "case" for f in x.get("failures", ())]
    seen = [f for f in failures if f["check"] == "sanitizer:memcheck"]
    assert len(seen) == 2
    assert seen[0]["location"] == "/home/me/faults.py:10"
    assert seen[0]["tensor"] == "q"
    assert "in store_past, 4 times; the first: at store_past+0xa0" in seen[0]["message"]
    replays = [x["replay"] for x in lines if "sanitizer=memcheck" in x.get("setup", "")]
    assert len(replays) == 2
    assert all("sanitizer=memcheck" in replay for replay in replays)
    again = tmp_path / "again"
    assert run("report", str(tmp_path), "-o", str(again))[0] == 0
    assert (again / "report.md").read_text() == (tmp_path / "report.md").read_text()


def test_a_right_kernel_passes_and_says_what_watched_it(tmp_path, fake):
    tools = ("--sanitizer", "memcheck", "--sanitizer", "initcheck")
    code, output = check("right", tmp_path, *tools)
    assert code == 0, output
    assert "watched  right: initcheck found nothing in 4 cases" in output
    assert "watched  right: memcheck found nothing in 4 cases" in output
    assert "PASS" in output


@pytest.mark.parametrize(
    ("tool", "why"),
    [
        ("synccheck", "Error: Device not supported."),
        ("racecheck", "does not see a fault planted for it"),
    ],
)
def test_a_tool_that_does_not_work_is_unavailable_and_no_pass(tmp_path, fake, tool, why):
    code, output = check("right", tmp_path, "--sanitizer", tool)
    assert code == 3, output
    assert f"right: {tool} unavailable: {why}" in output
    assert "INCOMPLETE" in output
    assert "PASS" not in output
    assert f"{tool} unavailable" in (tmp_path / "report.md").read_text()


def test_without_the_toolkit_or_a_card_a_sanitizer_is_unavailable(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(session, "find", lambda: None)
    assert "not found" in session.probe(TOOLS["memcheck"], 5.0)
    if not torch.cuda.is_available():
        reason = session.probe(TOOLS["gsan"], 60.0)
        assert reason in ("torch sees no CUDA device", "this Triton has no gsan")


def test_a_replay_line_runs_under_its_sanitizer_again(fake):
    case = "pass=fwd s=70x5 d=64 dtype=float16 seed=3"
    setup = "backend=cuda config=0 schedule=forward float=hardware sanitizer=memcheck"
    assert str(Setup.parse(setup)) == setup
    code, output = run("replay", "tests/targets/watched.py:past", case, "--setup", setup)
    assert code == 1, output
    code, output = run("replay", "tests/targets/watched.py:right", case, "--setup", setup)
    assert code == 0, output
    bad = setup.replace("memcheck", "magic")
    code, output = run("replay", "tests/targets/watched.py:right", case, "--setup", bad)
    assert code == 2, output
    assert "sanitizer='magic'" in output


def test_a_hung_process_is_killed_and_no_pass(tmp_path, fake):
    fake.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(100)\n")
    assert session.probe(TOOLS["memcheck"], 1.0) == "no end in 1 s"


def line(**fields):
    return Sanitized(kernel="k", target="k.py:k", tool="memcheck", **fields)


def test_summaries_never_take_an_unavailable_tool_for_a_pass():
    clean, gone = line(cases=4, asked=4), line(unavailable="no card")
    assert exit_code(summarise([clean])) == 0
    assert word(summarise([clean])) == "PASS"
    assert exit_code(summarise([gone])) == 3
    assert word(summarise([gone])) == "INCOMPLETE"
    assert caveats(summarise([gone])) == ["k: memcheck unavailable: no card"]
    for render in (html.render, markdown.render):
        assert "memcheck unavailable: no card" in render(summarise([gone]))
        assert "memcheck found nothing in 4 cases" in render(summarise([clean]))
    some = line(cases=3, asked=4, failed=1, reason="no end in 9 s")
    assert list(sanitized.sentences([some])) == [
        "k: memcheck found faults in 1 of 3 cases (1 more did not run: no end in 9 s)"
    ]
