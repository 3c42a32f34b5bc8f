"""What the processes of a campaign do meanwhile: for scripts that run one.

`follow` has each process note what it is at, and until when; `table` adds that up.
"""

from __future__ import annotations

import collections
import functools
import os
import time
from pathlib import Path

STAGES = ("start", "compile", "wait", "ahead", "case", "idle")
"""Until the process is ready; Triton compiles or loads; another process compiles the same kernel;
the rest of running a case to compile for it; the rest of a case; nothing."""


def follow(folder):
    """Have the processes of pools that are made from now on write into a folder."""
    from fa_verify import worker

    worker.start = functools.partial(start, folder)  # of this process, that pools are made in


def start(folder, *args, **kwargs):
    """In a process of a pool: prepare it, and note what it does from then on."""
    from triton.runtime.jit import JITFunction

    from fa_verify import worker
    from fa_verify.ttir.launch import once

    notes = Notes(folder)
    notes.begin("start", _born())
    worker.start(*args, **kwargs)
    notes.end()
    once._compile = notes.timed("compile", once._compile)  # noqa: SLF001
    JITFunction._do_compile = notes.timed("wait", JITFunction._do_compile)  # noqa: SLF001
    worker.compile_ahead = notes.timed("ahead", worker.compile_ahead)
    worker.run = notes.timed("case", worker.run)


def _born():
    """When this process began, on the clock of `time.monotonic`."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic() - (boot - int(fields[19]) / os.sysconf("SC_CLK_TCK"))


class Notes:
    """Spans of time of one thread, each under the innermost stage that runs."""

    def __init__(self, folder):
        """Write into the process's own file in a folder."""
        self._file = (Path(folder) / f"{os.getpid()}.spans").open("a", encoding="ascii")
        self._stages = []
        self._since = 0.0

    def begin(self, stage, at=None):
        """A stage begins, within the one that runs."""
        now = time.monotonic() if at is None else at
        self._note(now)
        self._stages.append(stage)

    def end(self):
        """The innermost stage ends."""
        self._note(time.monotonic())
        self._stages.pop()

    def _note(self, now):
        if self._stages:
            self._file.write(f"{self._stages[-1]} {self._since} {now}\n")
            self._file.flush()
        self._since = now

    def timed(self, stage, function):
        """The function, its time noted under a stage."""

        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            self.begin(stage)
            try:
                return function(*args, **kwargs)
            finally:
                self.end()

        return wrapper


def table(folder, begin, end, parts, processes):
    """Lines: how many processes were at each stage on average, in each part of the time."""
    step = (end - begin) / parts
    spent = [collections.Counter() for _ in range(parts)]
    for path in Path(folder).glob("*.spans"):
        for line in path.read_text(encoding="ascii").splitlines():
            words = line.split()
            if len(words) == 3:  # a process may have ended within a line
                _add(spent, words[0], float(words[1]) - begin, float(words[2]) - begin, step)
    for part in spent:
        part["idle"] = max(0.0, processes * step - sum(part.values()))
    marks = " ".join(f"{(i + 1) * step:7.0f}" for i in range(parts))
    yield f"of the processes, on average: {marks}"
    for stage in STAGES:
        yield f"{stage:>29}: " + " ".join(f"{part[stage] / step:7.1f}" for part in spent)


def _add(spent, stage, begin, end, step):
    for i, part in enumerate(spent):
        part[stage] += max(0.0, min(end, (i + 1) * step) - max(begin, i * step))
