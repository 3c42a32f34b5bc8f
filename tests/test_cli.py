import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
import torch

from fa_verify import checking, cli
from fa_verify.errors import UnwritableError


def run(*arguments, timeout=120):
    """The command line in a process of its own: exit code and output."""
    result = subprocess.run(
        [sys.executable, "-c", "from fa_verify.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "COLUMNS": "120"},
    )
    return result.returncode, result.stdout + result.stderr


def check(target, folder, *options):
    kept = ("--examples", str(folder / "kept"))
    return run("check", target, "--report", str(folder), *kept, "-n", "1", "--cases", "3", *options)


def test_a_right_kernel_passes_and_leaves_a_report(tmp_path):
    code, output = check("tests/targets/plain.py:right", tmp_path)
    assert code == 0, output
    assert "PASS" in output
    assert {p.suffix for p in tmp_path.iterdir()} == {".jsonl", ".html", ".md"}
    (record,) = tmp_path.glob("*.jsonl")
    kinds = [json.loads(line)["type"] for line in record.read_text().splitlines()]
    assert kinds == ["start", "case", "case", "case", "end"]


def test_a_wrong_kernel_fails_with_a_line_that_replays_it(tmp_path):
    code, output = run(
        "check",
        "tests/targets/wrong.py:wrong",
        "--no-examples",
        "--report",
        str(tmp_path),
        "-n",
        "2",
        "--cases",
        "20",
    )
    assert code == 1, output
    lines = re.findall(r"fa-verify (replay .*)", output)
    (line, *_) = [line for line in lines if "s=3x1 d=1 " in line] or [""]  # three queries
    assert line, output
    code, output = run(*shlex.split(line))
    assert code == 1, output


@pytest.mark.parametrize(
    ("name", "title"),
    [("hangs", "hangs"), ("dies", "the worker died"), ("explodes", "raised"), ("raises", "raised")],
)
def test_a_kernel_that_breaks_its_process_is_a_failure_with_its_case(tmp_path, name, title):
    code, output = check(
        f"tests/targets/wrong.py:{name}", tmp_path, "--timeout", "1s", "--budget", "40s"
    )
    assert code == 1, output
    assert title in output
    assert "pass=" in output


def test_a_bare_function_that_refuses_is_unsupported_and_nothing_is_verified(tmp_path):
    code, output = check("tests/targets/wrong.py:bare", tmp_path)
    assert code == 3, output
    assert "head_dim: not today" in output
    assert check("tests/targets/wrong.py:bare", tmp_path, "--strict")[0] == 1


def test_a_file_without_kernels_verifies_nothing(tmp_path):
    (tmp_path / "empty.py").write_text("")
    assert check(str(tmp_path / "empty.py"), tmp_path)[0] == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "tests/targets/none.py"],
        ["check", "tests/targets/plain.py", "--budget", "soon"],
        ["check", "tests/targets/plain.py", "--cases", "0"],
        ["replay", "tests/targets/plain.py:right", "pass=fwd s=1x1 d=999 dtype=float16 seed=0"],
        ["replay", "tests/targets/plain.py:right", "__import__('os').system('true')"],
        ["check", "tests/targets/plain.py", "--backend", "cuda"],
        ["check", "tests/targets/plain.py", "--report", "/proc/none"],
        ["report", "none.jsonl"],
        ["nonsense"],
    ],
)
def test_misuse_exits_with_2(arguments, capsys):
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a device")
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2, capsys.readouterr()


def test_list_shows_what_a_kernel_declares(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["list", "tests/targets/plain.py"])
    assert stop.value.code == 0
    assert "tests/targets/plain.py:right" in capsys.readouterr().out


def test_a_killed_run_keeps_what_it_recorded(tmp_path):
    command = [sys.executable, "-u", "-c", "from fa_verify.cli import main; main()"]
    options = ["check", "tests/targets/plain.py:right", "--report", str(tmp_path), "-n", "1"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()  # the first case is done
        process.kill()
    code, output = run("report", str(tmp_path), "-o", str(tmp_path / "again"))
    assert code == 0, output
    assert "killed" in (tmp_path / "again" / "report.md").read_text()


def test_a_run_that_is_terminated_writes_its_report(tmp_path):
    command = [sys.executable, "-u", "-c", "from fa_verify.cli import main; main()", "check"]
    options = ["tests/targets/plain.py:right", "--budget", "60s", "--no-examples"]
    options += ["-n", "1", "--backend", "cpu", "--report", str(tmp_path)]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()  # the first case is done
        process.terminate()
        process.send_signal(signal.SIGTERM)  # as `timeout` does: to the process and to its group
        said = process.stdout.read()
    assert process.returncode == 130
    assert "interrupted; what follows is of the cases until then" in said
    assert "passed" in said
    assert {path.suffix for path in tmp_path.iterdir()} == {".jsonl", ".html", ".md"}


def test_a_file_without_a_kernel_names_the_functions_that_can_be_checked(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def attend(q, k, v, causal=False): ...\n")
    code, output = run("check", str(path))
    assert code == 3
    assert f"fa-verify check {path}:attend" in output.replace("\n", "")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted; what follows is of the cases until then"),
        (UnwritableError("record=x: cannot be written (full)"), 2, "(full); what follows is of"),
    ],
)
def test_what_was_recorded_until_a_run_ended_early_is_shown(
    tmp_path, monkeypatch, capsys, error, code, said
):
    class Ends(checking.Writer):
        def write(self, line):
            if getattr(self, "lines", 0) == 3:  # the start, and two cases
                raise error
            self.lines = getattr(self, "lines", 0) + 1
            super().write(line)

    monkeypatch.setattr(checking, "Writer", Ends)
    monkeypatch.setenv("COLUMNS", "120")
    arguments = ("check", "tests/targets/plain.py:right", "--no-examples", "-n", "1")
    with pytest.raises(SystemExit) as ended:
        cli.main([*arguments, "--cases", "6", "--report", str(tmp_path)])
    output = capsys.readouterr().out
    assert ended.value.code == code
    assert said in output
    assert "1 kernel, 3 of 3 cases passed" in output  # with the one that could not be written
    (record,) = tmp_path.glob("*.jsonl")
    kinds = [json.loads(line)["type"] for line in record.read_text().splitlines()]
    assert kinds == ["start", "case", "case"]
    assert {path.suffix for path in tmp_path.iterdir()} == {".jsonl", ".html", ".md"}
