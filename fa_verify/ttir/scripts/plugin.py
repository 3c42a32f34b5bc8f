"""The pytest plugin behind ``python -m fa_verify.ttir -m pytest``: every test is an execution.

A test during which an incident happens fails. One that needs what cannot be run is reported as
"unsupported", which counts as a failure of the run. Notes fail nothing and are told at the end.
Loaded with ``-p`` on the command line, which xdist hands to its workers.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.launch.session import execute
from fa_verify.ttir.options import parse_options
from fa_verify.ttir.scripts.redirect import redirected
from fa_verify.ttir.scripts.wording import (
    counted,
    headline,
    incidents_text,
    watched_text,
    with_remedy,
)

if TYPE_CHECKING:
    from collections.abc import Generator

    from fa_verify.ttir.launch.session import Run
    from fa_verify.ttir.options import Options

_NAME = "fa_verify_ttir"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of `python -m fa_verify.ttir`, which hands them on."""
    group = parser.getgroup("fa_verify.ttir", "run Triton kernels on the CPU, watched")
    group.addoption("--ttir-schedule", default="forward", help="order of programs")
    group.addoption("--ttir-config", type=int, default=0, help="autotune configuration to pin")
    group.addoption("--ttir-float", default="hopper", help="how arithmetic is imitated")
    group.addoption("--ttir-no-sanitize", action="store_true", help="look for nothing")
    group.addoption("--ttir-no-benchmarks", action="store_true", help="do_bench runs nothing")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Switch the executor on before anything of the user's is imported."""
    given = early_config.known_args_namespace
    try:
        options = parse_options(
            schedule=given.ttir_schedule, config=given.ttir_config,
            sanitize=not given.ttir_no_sanitize, floats=given.ttir_float,
        )  # fmt: skip
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    early_config.pluginmanager.register(
        _Tests(options, benchmarks=not given.ttir_no_benchmarks), _NAME
    )


class _Tests:
    """Executions of one pytest process: one for collection, then one a test."""

    def __init__(self, options: Options, *, benchmarks: bool) -> None:
        self._options = options
        self._whole = ExitStack()
        self._whole.enter_context(redirected(benchmarks=benchmarks))
        self._begin()
        self._launches = 0
        self._kernels: set[str] = set()
        self._notes: dict[str, tuple[str, set[str]]] = {}  # place and kind: text, tests

    def _begin(self) -> None:
        self._execution = ExitStack()
        self._run = self._execution.enter_context(execute(self._options))
        self._seen = _Seen(self._run)

    def pytest_unconfigure(self) -> None:
        """Put everything back."""
        self._execution.close()
        self._whole.close()

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self) -> Generator[None, Any, Any]:
        """What a module's import does wrong is an error of its collection."""
        report = yield
        self._seen.mark(report)
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, Any, Any]:
        """A new execution for each test: its memory ends with it."""
        self._execution.close()
        self._begin()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        """Fail what an incident happened in."""
        report = yield
        self._seen.mark(report, call.excinfo)
        return report

    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        """Count what cannot be run on its own."""
        if getattr(report, "ttir_unsupported", None):
            return "unsupported", "U", "UNSUPPORTED"
        return None

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count launches and collect notes, those of xdist's workers included."""
        names = getattr(report, "ttir_launches", [])
        self._launches += len(names)
        self._kernels |= set(names)
        for key, text in getattr(report, "ttir_notes", []):
            self._notes.setdefault(key, (text, set()))[1].add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say what was watched, and what could not be run."""
        terminalreporter.section("fa_verify.ttir")
        for report in terminalreporter.stats.get("unsupported", ()):
            terminalreporter.write_line(f"UNSUPPORTED {report.nodeid}: {report.ttir_unsupported}")
        for text, tests in self._notes.values():
            told = f"{counted(len(tests), 'test')}, such as {min(tests)}"
            terminalreporter.write_line(f"NOTE (no failure; {told})\n{text}")
        watched = "watched" if self._options.sanitize else "not sanitized"
        ran = watched_text(self._launches, len(self._kernels))
        terminalreporter.write_line(f"{ran}, {watched}")


class _Seen:
    """How much of an execution has been reported already."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._incidents = self._notes = self._launches = self._unsupported = 0

    def mark(self, report: Any, excinfo: pytest.ExceptionInfo[BaseException] | None = None) -> None:
        """Turn what is new into the outcome of `report`."""
        run = self._run
        incidents = run.incidents[self._incidents :]
        unsupported = run.unsupported[self._unsupported :]
        report.ttir_launches = [launch.kernel for launch in run.launches[self._launches :]]
        report.ttir_notes = [
            (f"{note.file}:{note.line} {note.kind} {note.argument}", with_remedy(note))
            for note in run.notes[self._notes :]
        ]
        self._incidents, self._launches = len(run.incidents), len(run.launches)
        self._notes = len(run.notes)
        self._unsupported = len(run.unsupported)
        if not unsupported and excinfo is not None and isinstance(excinfo.value, Unsupported):
            unsupported = [excinfo.value]
        if incidents:
            # The first line is what the short summary shows.
            text = f"{headline(incidents)}\n{incidents_text(incidents)}"
            if report.outcome == "failed":
                report.sections.append(("fa_verify.ttir", text))
            else:
                report.outcome, report.longrepr = "failed", text
        elif unsupported:
            report.ttir_unsupported = str(unsupported[0])
            report.outcome, report.longrepr = "failed", f"unsupported: {unsupported[0]}"
