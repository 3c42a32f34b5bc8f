"""What compute-sanitizer's log, or an instrumented process, says of kernels. No torch.

The log is text: its XML has other names in each release, its text has had these for ten years.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Finding", "Log", "asserted", "parse"]

_PREFIX: Final = "========="
# "at copy+0xa0 in file.py:9"; before CUDA 12.3 "at 0xa0 in file.py:9:copy"
_PLACE: Final = re.compile(
    r"\bat (?:(?P<kernel>[\w.$]+)(?:\([^)]*\))?\+)?0x[0-9a-f]+"
    r"(?: in (?P<file>[^\s:]+):(?P<line>\d+)(?::(?P<late>[\w.$]+))?)?"
)
_ADDRESS: Final = re.compile(
    r"allocation at (?P<allocation>0x[0-9a-f]+) of size|^Address (?P<address>0x[0-9a-f]+)"
)
_SKIPPED: Final = re.compile(r"(?:ERROR|RACECHECK) SUMMARY:|Saved host backtrace|Host Frame:")
_SUMMARY: Final = re.compile(r"(?:ERROR|RACECHECK) SUMMARY:")
_HAZARDS: Final = re.compile(r"\[(\d+) hazards?\]")
_WORDS: Final = re.compile(r"^(?:Error|Warning|Info): ")
# CUDA's device-side assert, as its runtime prints it.
_ASSERT: Final = re.compile(
    r"^(?P<file>\S+?):(?P<line>\d+): (?P<kernel>.*?): block: \[(?P<block>[\d,]+)\], "
    r"thread: \[(?P<thread>[\d,]+)\] Assertion `(?P<said>.*)` failed"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One kind of fault at one line, however many threads have it.

    Attributes:
        title: "Invalid __global__ write of size 4 bytes".
        kernel: The function's name; file and line in it, "" and 0 if the tool does not know.
        count: How often.
        detail: All that was said of the first.
        address: Where, or of the nearest allocation; 0 if nothing is said of it.
    """

    title: str
    kernel: str
    file: str
    line: int
    count: int
    detail: str
    address: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """A log, read.

    Attributes:
        findings: Faults of kernels, in order of occurrence.
        remarks: What else it says: why it cannot run, API calls that failed.
        complete: It has its last line.
    """

    findings: tuple[Finding, ...]
    remarks: tuple[str, ...]
    complete: bool


def parse(text: str) -> Log:
    """Read a log of compute-sanitizer."""
    found, remarks = [], []
    for block in _blocks(text):
        finding = _finding(block)
        if finding is not None:
            found.append(finding)
        elif not block[0].startswith("Warning: Race reported"):  # its docs: no race is certain
            remarks.append(" ".join(block))
    return Log(
        findings=_merged(found),
        remarks=tuple(remarks),
        complete=_SUMMARY.search(text) is not None,
    )


def asserted(text: str) -> tuple[Finding, ...]:
    """Device-side assertions that failed, as Triton's instrumentation reports faults."""
    return _merged(
        Finding(
            title=match["said"],
            kernel=match["kernel"],
            file=match["file"],
            line=int(match["line"]),
            count=1,
            detail=f"by thread ({match['thread']}) in block ({match['block']})",
        )
        for match in map(_ASSERT.match, text.splitlines())
        if match is not None
    )


def _blocks(text: str) -> Iterator[list[str]]:
    """Lines that belong together: from one at the margin up to the next, or to an empty one."""
    block: list[str] = []
    for raw in text.splitlines():
        if not raw.startswith(_PREFIX):
            continue
        line = raw.removeprefix(_PREFIX)
        margin = not line.startswith("  ")
        if (not line.strip() or margin) and block:
            yield block
            block = []
        line = line.strip()
        if line and line != "COMPUTE-SANITIZER" and not _SKIPPED.match(line):
            block.append(line)
    if block:
        yield block


def _finding(block: list[str]) -> Finding | None:
    """A block as a finding, if it names a place in a kernel."""
    places = [match for line in block if (match := _PLACE.search(line)) is not None]
    head, severity = _WORDS.sub("", block[0]), _WORDS.match(block[0])
    if not places or (severity is not None and severity[0] != "Error: "):
        return None
    place = places[0]
    hazards = next((int(m[1]) for line in block if (m := _HAZARDS.search(line))), 1)
    near = next((m[m.lastgroup or 0] for line in block if (m := _ADDRESS.search(line))), "0")
    race = "access at" in head  # its first line holds a place
    return Finding(
        title=_title(head) if race or "hazard" in head else head.rstrip("."),
        kernel=place["kernel"] or place["late"] or "",
        file=place["file"] or "",
        line=int(place["line"] or 0),
        count=hazards,
        detail="; ".join(block if race else block[1:]),
        address=int(near, 16),
    )


def _title(head: str) -> str:
    """Without what differs between threads and lines."""
    return re.sub(r"( access)? at .*| detected at.*", r"\1", head)


def _merged(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """The same fault of several threads as one, the first thread's words kept."""
    merged: dict[tuple[str, str, str, int], Finding] = {}
    for one in found:
        key = (one.title, one.kernel, one.file, one.line)
        first = merged.get(key)
        merged[key] = one if first is None else _more(first, one.count)
    return tuple(merged.values())


def _more(finding: Finding, count: int) -> Finding:
    return dataclasses.replace(finding, count=finding.count + count)
