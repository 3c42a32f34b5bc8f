"""Runs one process under one tool, and says how that went."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from fa_verify.sanitizers.child import Report
from fa_verify.sanitizers.findings import asserted, parse
from fa_verify.sanitizers.tools import find

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fa_verify.sanitizers.findings import Finding, Log
    from fa_verify.sanitizers.tools import Tool

__all__ = ["Session", "probe", "run"]

_CHILD: Final = "fa_verify.sanitizers.child"
_STALE: Final = 20.0  # seconds that a killed process has to be gone
_WORDS: Final = 300


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A process that ended.

    Attributes:
        findings: Faults of Triton kernels.
        report: What the process said.
        reason: Why nothing follows from there being no finding; "" if the kernels have run, and
            were watched.
    """

    findings: tuple[Finding, ...]
    report: Report
    reason: str


def probe(tool: Tool, timeout: float) -> str:
    """Why a tool is unavailable; "" if it sees the fault planted for it, or has none."""
    if not tool.probe:
        return "" if tool.mode in _modes() else f"this Triton has no {tool.mode}"
    session = run(tool, ["probe", tool.probe], timeout)
    if session.findings:
        return ""
    return session.reason or "does not see a fault planted for it"


def run(tool: Tool, arguments: Sequence[str], timeout: float) -> Session:
    """Run `child` under a tool, for at most `timeout` seconds."""
    binary = find()
    if binary is None and not tool.mode:
        return _refused("compute-sanitizer not found: it comes with the CUDA toolkit")
    if tool.mode and tool.mode not in _modes():
        return _refused(f"this Triton has no {tool.mode}")
    with tempfile.TemporaryDirectory(prefix="fa-verify-") as folder:
        report, log, said = (Path(folder, name) for name in ("report", "log", "said"))
        command = [sys.executable, "-m", _CHILD, str(report), *arguments]
        ended = _execute(tool.command(binary or "", log, command), tool, said, timeout)
        return _session(tool, _report(report), _text(log), _text(said), ended)


def _session(tool: Tool, report: Report | None, log: str, said: str, ended: str) -> Session:
    """Put together what the log, the process's output and its report tell."""
    read = parse("" if tool.mode else log)
    found = asserted(said) if tool.mode else read.findings
    known = report or Report()
    # Of torch's own kernels nothing follows: they may move memory that nobody wrote.
    ours = tuple(one for one in found if one.kernel in known.kernels or one.file.endswith(".py"))
    reason = _reason(tool, report, read, said, ended)
    return Session(findings=ours, report=known, reason=reason)


def _reason(tool: Tool, report: Report | None, read: Log, said: str, ended: str) -> str:
    """Why silence means nothing: the first of what there is to blame."""
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "")
    if report is not None and report.error:
        return report.error
    if read.remarks:
        return read.remarks[0][:_WORDS]
    if ended or report is None:
        return ": ".join(filter(None, (ended or "the process did not begin", last)))[:_WORDS]
    if not report.device:
        return "torch sees no CUDA device"
    if not report.done:
        return "the card did not finish"
    return "" if tool.mode or read.complete else "its log has no last line"


def _execute(command: Sequence[str], tool: Tool, said: Path, timeout: float) -> str:
    """Run to the end, or kill all of it; how it ended, "" if well."""
    with said.open("wb") as output:
        try:
            process = subprocess.Popen(  # noqa: S603 - our own command line
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=tool.environment(os.environ),
                start_new_session=True,
            )
        except OSError as error:
            return f"{command[0]}: {error.strerror}"
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(_STALE)
            return f"no end in {timeout:g} s"
    return f"exit code {code}" if code else ""


def _modes() -> frozenset[str]:
    """Instrumentation that this Triton's NVIDIA backend knows; its options name the mode."""
    from triton.backends.nvidia import compiler  # noqa: PLC0415 - loads Triton

    text = Path(compiler.__file__).read_text(encoding="utf-8")
    return frozenset(mode for mode in ("consan", "gsan") if f'"{mode}"' in text)


def _report(path: Path) -> Report | None:
    """None: the process has not come so far."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except (OSError, msgspec.DecodeError):
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _refused(reason: str) -> Session:
    return Session(findings=(), report=Report(), reason=reason)
