"""Runs a script or module, written for a GPU, under the executor, and says what it found."""

from __future__ import annotations

import runpy
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from fa_verify.ttir.launch.session import execute
from fa_verify.ttir.scripts.redirect import redirected
from fa_verify.ttir.scripts.wording import incident_text, incidents_text, watched_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from fa_verify.ttir.launch.session import Run
    from fa_verify.ttir.options import Incident, Options

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def run_script(path: str, arguments: list[str], options: Options, *, benchmarks: bool) -> int:
    """Run a file as ``python path arguments`` would.

    Returns:
        The exit code: the script's own, 1 if it raised, and 1 instead of 0 after an incident or
        an operation that could not be run.
    """
    sys.path[0] = str(Path(path).resolve().parent)

    def action() -> object:
        return runpy.run_path(path, run_name="__main__")

    return _run(action, [path, *arguments], options, benchmarks=benchmarks)


def run_module(name: str, arguments: list[str], options: Options, *, benchmarks: bool) -> int:
    """Run a module as ``python -m name arguments`` would; returns as `run_script` does."""

    def action() -> object:
        return runpy.run_module(name, run_name="__main__", alter_sys=True)

    return _run(action, [name, *arguments], options, benchmarks=benchmarks)


def _run(
    action: Callable[[], object], argv: list[str], options: Options, *, benchmarks: bool
) -> int:
    saved, sys.argv = sys.argv, argv
    try:
        with redirected(benchmarks=benchmarks), execute(options, tell=_announce) as run:
            code = _exit_code(action)
    finally:
        sys.argv = saved
    _summarise(run)
    return code or int(bool(run.incidents or run.unsupported))


def _exit_code(action: Callable[[], object]) -> int:
    """Run to the end; print the traceback of what the script raised, without our own frames."""
    try:
        action()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BaseException as error:  # noqa: BLE001 - the script's, whatever it is
        traceback.print_exception(error.with_traceback(_of_script(error.__traceback__)))
        return 1
    return 0


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    rest = trace
    while rest is not None and (
        rest.tb_frame.f_code.co_filename == __file__
        or rest.tb_frame.f_globals.get("__name__") == "runpy"
    ):
        rest = rest.tb_next
    return rest or trace


def _announce(incident: Incident) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"fa_verify.ttir: {incident_text(incident)}\n")


def _summarise(run: Run) -> None:
    sys.stdout.flush()
    launches, kernels = len(run.launches), len({launch.kernel for launch in run.launches})
    lines = [f"fa_verify.ttir: {watched_text(launches, kernels)}"]
    if not run.options.sanitize:
        lines[0] += ", not sanitized"
    lines += [f"unsupported: {error}" for error in run.unsupported]
    if run.incidents:
        lines.append(incidents_text(run.incidents))
    elif run.options.sanitize:
        lines[0] += ", no incident"
    if run.notes:
        lines.append(incidents_text(run.notes, "note"))
    sys.stderr.write("\n".join(lines) + "\n")
