"""``python -m fa_verify.ttir``: scripts and test suites written for a GPU."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fa_verify.ttir.__main__ import main
from fa_verify.ttir.options import Incident
from fa_verify.ttir.scripts.wording import REMEDIES, incidents_text

KERNEL = """
import sys
from concurrent.futures import ThreadPoolExecutor
import pytest, torch, triton, triton.language as tl

@triton.jit
def add_one(x_ptr, y_ptr, n, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if MASKED:
        x = tl.load(x_ptr + i, mask=i < n)
    else:
        x = tl.load(x_ptr + i)  # past the end
    tl.store(y_ptr + i, x + 1, mask=i < n)

@triton.jit
def strange(x_ptr):
    tl.inline_asm_elementwise("strange $0;", "=r,r", [tl.load(x_ptr)], tl.int32, False, 1)

def run(masked, check=True):
    x = torch.randn(100, device="cuda")
    assert x.is_cuda
    y = torch.empty_like(x)
    add_one[(2,)](x, y, 100, 64, masked)
    if check:
        torch.testing.assert_close(y, x + 1)
    return y, x + 1
"""
SCRIPT = (
    KERNEL
    + """
word = sys.argv[1]
if word == "strange":
    try:
        strange[(1,)](torch.ones(1, device="cuda", dtype=torch.int32))
    except Exception:
        print("fallback")
elif word == "dumps":
    try:
        torch.cuda.CUDAGraph().debug_dump("graph.dot")
    except Exception:
        print("fallback")
elif word == "threads":
    with ThreadPoolExecutor(1) as pool:
        print(pool.submit(torch.zeros, 3, device="cuda").exception())
elif word == "graph":
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_in_graph = run(True, check=False)
    graph.replay()
    torch.testing.assert_close(*run_in_graph)
else:
    run(word != "bad")
print("arguments:", *sys.argv[1:])
if word == "raises":
    raise KeyError("the script's own")
sys.exit(7 if word == "exits" else 0)
"""
)
SUITE = (
    KERNEL
    + """
@pytest.mark.parametrize("masked", [True, False])
def test_add_one(masked):
    run(masked)

def test_strange():
    strange[(1,)](torch.ones(1, device="cuda", dtype=torch.int32))

def test_wrong():
    assert add_one is strange
"""
)
BAD_LINE = 1 + SCRIPT.splitlines().index("        x = tl.load(x_ptr + i)  # past the end")


def tool(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "fa_verify.ttir", *arguments],
        cwd=cwd, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tool")
    (folder / "script.py").write_text(SCRIPT)
    (folder / "test_suite.py").write_text(SUITE)
    return folder


def test_an_incident_is_named_and_fails_the_script(folder):
    done = tool("script.py", "bad", "-m", "--config", cwd=folder)
    assert done.returncode == 1
    assert done.stdout == "arguments: bad -m --config\n"
    assert f"script.py:{BAD_LINE}: out-of-bounds-read in add_one: x_ptr" in done.stderr
    assert done.stderr.count("usual remedy: mask the load") == 1
    assert "x = tl.load(x_ptr + i)  # past the end" in done.stderr


def test_a_clean_script_ends_well(folder):
    done = tool("script.py", "good", cwd=folder)
    assert done.returncode == 0
    assert "1 launch of 1 kernel, no incident" in done.stderr


@pytest.mark.parametrize(
    ("word", "code", "said"),
    [
        ("exits", 7, "no incident"),
        ("raises", 1, 'KeyError: "the script\'s own"'),
        (
            "strange",
            1,
            "unsupported: cannot run the PTX instruction strange (tt.elementwise_inline_asm)",
        ),
        ("dumps", 1, "unsupported: cannot run CUDAGraph.debug_dump"),
        ("threads", 1, "unsupported: cannot run cuda in a thread"),
        ("graph", 0, "1 launch of 1 kernel, no incident"),
    ],
)
def test_the_exit_code_is_the_scripts_own(folder, capsys, monkeypatch, word, code, said):
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main([str(folder / "script.py"), word]) == code
    err = capsys.readouterr().err
    assert said in err
    assert "runpy" not in err


def test_tests_fail_one_by_one_also_in_workers(folder):
    done = tool("-m", "pytest", "-n", "2", "-W", "error", "-p", "no:cacheprovider", cwd=folder)
    assert done.returncode == 1
    assert "2 failed, 1 passed, 1 unsupported" in done.stdout
    assert (
        "FAILED test_suite.py::test_add_one[False] - out-of-bounds-read in add_one" in done.stdout
    )
    assert f"out-of-bounds-read in add_one, line {BAD_LINE}\n" in done.stdout
    assert "FAILED test_suite.py::test_wrong" in done.stdout
    assert f"test_suite.py:{BAD_LINE}: out-of-bounds-read in add_one: x_ptr" in done.stdout
    assert "UNSUPPORTED test_suite.py::test_strange: cannot run" in done.stdout
    assert "2 launches of 1 kernel, watched" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give a script, or -m and a module"),
        (["nowhere.py"], "script='nowhere.py': no such file"),
        (["-m", "nowhere"], "module='nowhere': cannot be found"),
        (["--schedule", "parallel", "script.py"], "schedule='parallel'"),
        (["--config", "-1", "script.py"], "config=-1"),
        (["--float", "real", "script.py"], "float='real'"),
    ],
)
def test_misuse_is_told(folder, capsys, monkeypatch, arguments, said):
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


ROUNDING = """
import torch
import triton
import triton.language as tl

@triton.jit
def cancel(x_ptr, o_ptr):
    x = tl.load(x_ptr)
    tl.store(o_ptr, x * x - tl.load(x_ptr + 1))

def left():
    x = torch.tensor([1 + 2.0**-23, 1 + 2.0**-22], device="cuda")
    o = torch.empty(1, device="cuda")
    cancel[(1,)](x, o)
    return o.item()

def test_left():
    assert left() == 2.0**-46

if __name__ == "__main__":
    print(left())
"""


@pytest.mark.parametrize(("model", "left"), [("hopper", 0.0), ("hopper-bits", 2.0**-46)])
def test_the_float_model_is_chosen_by_name(tmp_path, model, left):
    (tmp_path / "test_rounding.py").write_text(ROUNDING)
    done = tool("--float", model, "test_rounding.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{left}\n")
    tested = tool("--float", model, "-m", "pytest", "-q", "test_rounding.py", cwd=tmp_path)
    assert tested.returncode == (0 if left else 1)


NOTED = """
import pytest, torch, triton, triton.language as tl

@triton.jit
def log(x_ptr, o_ptr):
    tl.store(o_ptr, tl.sqrt(tl.load(x_ptr)))

@pytest.mark.parametrize("value", [-4.0, -1.0, 4.0])
def test_root(value):
    o = torch.zeros(1, device="cuda")
    log[(1,)](torch.full((1,), value, device="cuda"), o)
"""


def test_notes_are_told_once_and_fail_nothing(tmp_path):
    (tmp_path / "test_noted.py").write_text(NOTED)
    done = tool("-m", "pytest", "-n", "2", "-p", "no:cacheprovider", cwd=tmp_path)
    assert (done.returncode, "3 passed" in done.stdout) == (0, True)
    assert "NOTE (no failure; 2 tests, such as test_noted.py::test_root[-1.0])" in done.stdout
    assert done.stdout.count("test_noted.py:6: nan-born in log: o_ptr") == 1


def test_every_kind_has_a_remedy():
    text = (Path(__file__).parents[2] / "docs" / "executor.md").read_text()
    table = text.split("\n## Sanitizer\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (?:note )?`([a-z-]+)`(?:, `-write`)? \|", table, re.MULTILINE)
    assert {*rows, "out-of-bounds-write"} == set(REMEDIES)


def test_an_access_that_follows_from_an_overflow_is_mended_with_it():
    fields = {
        "kernel": "add", "file": "k.py", "line": 7, "source": "", "argument": "x", "offset": -9,
        "program_id": (0, 0, 0), "coordinates": None, "count": 1, "detail": "",
    }  # fmt: skip
    outside = Incident(kind="out-of-bounds-read", **fields)
    wrapped = Incident(kind="integer-overflow", **fields)
    assert "usual remedy: mask the load" in incidents_text([outside])
    assert incidents_text([outside, wrapped]).count("usual remedy: widen a factor") == 2
