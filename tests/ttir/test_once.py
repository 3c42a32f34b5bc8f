"""A kernel is compiled by one process; another waits for it, or goes on."""

import subprocess
import sys

import pytest
from triton.runtime.jit import JITFunction

from fa_verify.ttir.launch import once


@pytest.fixture
def compiling(monkeypatch, tmp_path):
    """Where processes compile once; what they compile is put down in the list."""
    compiled = []
    monkeypatch.setattr(once, "_compile", lambda _, key, *rest: compiled.append((key, rest)) or key)
    monkeypatch.setattr(JITFunction, "_do_compile", JITFunction._do_compile)
    once.compile_once(tmp_path / "locks")
    return tmp_path / "locks", compiled


class _Kernel:
    def __init__(self, cache_key):
        self.cache_key = cache_key

    def compile(self, key):
        return JITFunction._do_compile(self, key, "signature", 0)


# Takes the lock of a file until it is killed.
HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "r+")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


def test_what_another_process_compiles_is_waited_for_or_left(compiling):
    folder, compiled = compiling
    one, other = _Kernel("source"), _Kernel("another source")
    assert one.compile("fp16") == "fp16"
    assert compiled == [("fp16", ("signature", 0))]
    (lock,) = folder.iterdir()
    command = [sys.executable, "-c", HOLD, str(lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        with once.impatient():
            with pytest.raises(once.Busy):
                one.compile("fp16")
            other.compile("fp16")  # another kernel, and another form of the same, are free
            one.compile("bf16")
        assert [key for key, _ in compiled] == ["fp16", "fp16", "bf16"]
        process.kill()  # its death gives the lock back, to whoever waits
        assert one.compile("fp16") == "fp16"
    assert len(compiled) == 4


def test_what_does_not_compile_gives_its_lock_back(compiling, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    folder, _ = compiling
    monkeypatch.setattr(once, "_compile", fail)
    for _ in range(2):
        with once.impatient(), pytest.raises(ZeroDivisionError):
            _Kernel("source").compile("fp16")
    assert len(list(folder.iterdir())) == 1


def test_launchers_that_catch_exceptions_let_it_pass():
    assert not issubclass(once.Busy, Exception)
