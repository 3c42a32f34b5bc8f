import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from fa_verify.errors import InvalidInputError, UnwritableError
from fa_verify.record import (
    CaseRecord,
    End,
    FailureRecord,
    Shrunk,
    Start,
    TensorStats,
    Writer,
    read,
)

START = Start(
    version="0.1.0",
    command="fa-verify check kernels",
    seed=7,
    backend="cpu",
    device="CPU",
    python="3.11.9",
    torch="2.11.0",
    triton="3.6.0",
    platform="Linux",
    started="2026-01-02T03:04:05+00:00",
    targets=("kernels",),
)
CASE = CaseRecord(
    kernel="flash",
    target="kernels/flash.py:flash",
    source_hash="0123456789ab",
    case="pass=fwd s=3x5 d=80 dtype=float16 seed=7",
    setup="backend=cpu",
    verdict="fail",
    tensors={"o": TensorStats(elements=240, ratio=1.7976931348623157e308, worst=(0, 0, 1, 2))},
    failures=(FailureRecord(check="numerics", title="o outside its bound", message="o[0]: got 1"),),
    seconds={"kernel": 0.25},
)
LINES = (
    START,
    CASE,
    Shrunk(original=CASE.case, record=CASE),
    End(seconds=1.5, cases=1, exit_code=1),
)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "deep" / "record.jsonl"
    writer = Writer(path)
    for line in LINES:
        writer.write(line)
    writer.close()
    return path


def test_reads_back_what_was_written(path):
    assert tuple(read(path)) == LINES


def test_a_second_writer_appends(path):
    writer = Writer(path)
    writer.write(START)
    writer.close()
    assert tuple(read(path)) == (*LINES, START)


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path):
    writer = Writer(tmp_path / "record.jsonl")
    for number, line in enumerate(LINES, start=1):
        writer.write(line)
        assert len(list(read(tmp_path / "record.jsonl"))) == number
    writer.close()


def test_a_killed_process_loses_nothing(tmp_path):
    script = (
        "import os, pathlib, sys\n"
        "from fa_verify.record import End, Writer\n"
        "writer = Writer(pathlib.Path(sys.argv[1]))\n"
        "writer.write(End(seconds=1.0, cases=2, exit_code=0))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    path = tmp_path / "record.jsonl"
    process = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert process.returncode == -9
    assert list(read(path)) == [End(seconds=1.0, cases=2, exit_code=0)]


@pytest.mark.parametrize("missing", [1, 10, 100])
def test_a_torn_last_line_is_left_out(path, missing):
    data = path.read_bytes().rstrip(b"\n")
    path.write_bytes(data[:-missing])
    last = len(msgspec.json.encode(LINES[-1]))
    kept = LINES[:-1] if missing < last else LINES[:-2]
    assert tuple(read(path)) == kept


def test_a_torn_line_in_the_middle_is_an_error_with_its_number(path):
    lines = path.read_bytes().splitlines()
    lines[1] = lines[1][:-5]
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(InvalidInputError, match=r"line 2: not a record"):
        list(read(path))


@pytest.mark.parametrize(
    "line",
    [
        b'{"type":"unknown"}',
        b'{"type":"end","seconds":"fast","cases":1,"exit_code":0}',
        b'{"type":"end"}',
        b"[1, 2]",
        b'{"type":"end","seconds":NaN,"cases":1,"exit_code":0}',
        b"\x80\x04\x95",  # a pickle
    ],
)
def test_what_is_no_record_is_refused(tmp_path, line):
    path = tmp_path / "record.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(InvalidInputError, match="not a record"):
        list(read(path))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidInputError, match=r"absent\.jsonl"):
        list(read(tmp_path / "absent.jsonl"))


def test_blank_lines_are_no_lines(path):
    path.write_bytes(path.read_bytes().replace(b"\n", b"\n\n"))
    assert tuple(read(path)) == LINES


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_told_and_closing_is_quiet():
    writer = Writer(Path("/dev/full"))
    with pytest.raises(UnwritableError, match=r"record='/dev/full': cannot be written \(No space"):
        writer.write(End(seconds=0.0, cases=0, exit_code=0))
    writer.close()
