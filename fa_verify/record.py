"""Records in JSON Lines: one line a case, written as it comes, so that a kill loses nothing.

Reading a record never executes code: msgspec decodes into the types below and refuses the rest.
No torch, no Triton.
"""

from __future__ import annotations

import contextlib
from typing import IO, TYPE_CHECKING

import msgspec

from fa_verify.errors import InvalidInputError, UnwritableError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = [
    "CaseRecord",
    "End",
    "FailureRecord",
    "Sanitized",
    "Shrunk",
    "Start",
    "TensorStats",
    "Writer",
    "kind_of",
    "read",
    "writing",
]


class TensorStats(msgspec.Struct, frozen=True, kw_only=True):
    """How one tensor compares with float64 and its bound.

    Attributes:
        elements: How many.
        inconclusive: Elements for which the bound says nothing.
        ratio: Largest err/bound under the deterministic bound; above 1 is a failure. JSON has no
            inf: a NaN or inf where a number is due counts as the largest float.
        ratio_prob: Largest err/bound under the probabilistic bound.
        ratio_median: Median err/bound (deterministic) over elements with a bound; of large tensors,
            over some thousands of them, evenly spaced.
        ulp: Largest error in ulps of the output format, at the largest reference of its row (of
            lse: at the reference).
        bias: Mean err/bound, positive where a result is too large: lse as a number, the others in
            size.
        rule_2x: Error over flash-attn's allowance (twice that of a half-precision PyTorch), for
            readers who know that rule; None when not computed.
        worst: Index of the worst element.
    """

    elements: int
    inconclusive: int = 0
    ratio: float = 0.0
    ratio_prob: float = 0.0
    ratio_median: float = 0.0
    ulp: float = 0.0
    bias: float = 0.0
    rule_2x: float | None = None
    worst: tuple[int, ...] = ()


class FailureRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`fa_verify.verdict.Failure` on disk."""

    check: str
    title: str
    message: str
    tensor: str = ""
    diagnosis: str = ""
    location: str = ""
    source: str = ""


def kind_of(title: str) -> str:
    """A failure's title without the argument.

    >>> kind_of("out-of-bounds-read through q")
    'out-of-bounds-read'
    """
    return title.partition(" through ")[0]


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """The first line of a run: what ran, where, and what would repeat it."""

    version: str
    command: str
    seed: int
    backend: str
    device: str
    python: str
    torch: str
    triton: str
    platform: str
    started: str
    targets: tuple[str, ...]
    false_alarm: float = 0.0  # at most, the probability that a right kernel fails one case


class CaseRecord(msgspec.Struct, frozen=True, kw_only=True, tag="case"):
    """One kernel on one case.

    Attributes:
        kernel: Its name; target: ``file.py:name``; source_hash: of the file.
        case: The case's line (`fa_verify.case.Case.parse` reads it).
        setup: backend, pinned configuration, schedule and float model on one line.
        verdict: A `fa_verify.verdict.Verdict`.
        reason: Why it is unsupported, inconclusive or an error; "" otherwise.
        tensors: Statistics of o, lse, dq, dk, dv as far as computed.
        failures: What is wrong, empty unless verdict is "fail".
        replay: The command that reproduces it.
        seconds: Seconds by stage: kernel (its first execution), checks (all the rest).
        configs: How many configurations the kernel offers.
        possible: What may be a fault and may be none, a line each; it decides nothing.
        ran: What of each source file ran (`fa_verify.ran.SourceRan.parse` reads it); CPU only.
    """

    kernel: str
    target: str
    source_hash: str
    case: str
    setup: str
    verdict: str
    reason: str = ""
    tensors: dict[str, TensorStats] = {}
    failures: tuple[FailureRecord, ...] = ()
    replay: str = ""
    seconds: dict[str, float] = {}
    checks: tuple[str, ...] = ()
    configs: int = 1
    possible: tuple[str, ...] = ()
    ran: dict[str, str] = {}


class Shrunk(msgspec.Struct, frozen=True, kw_only=True, tag="shrunk"):
    """A failure made small: the record of the smallest case found, and where it came from."""

    original: str
    record: CaseRecord


class Sanitized(msgspec.Struct, frozen=True, kw_only=True, tag="sanitized"):
    """What a sanitizer did for one kernel; the cases in which it found a fault are failures.

    Attributes:
        kernel: Its name; target: ``file.py:name``.
        tool: The sanitizer.
        cases: Cases that ran under it to their end, or in which it found something.
        asked: Cases that were to run.
        failed: Cases in which it found something.
        unavailable: Why it is no judge here; "" if it is.
        reason: Why the first of the cases that are missing is, "" if none is.
    """

    kernel: str
    target: str
    tool: str
    cases: int = 0
    asked: int = 0
    failed: int = 0
    unavailable: str = ""
    reason: str = ""


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """The last line: absent when the run was killed."""

    seconds: float
    cases: int
    exit_code: int


Line = Start | CaseRecord | Shrunk | Sanitized | End


@contextlib.contextmanager
def writing(what: str, path: Path) -> Iterator[None]:
    """Say that a file or folder cannot be written.

    Raises:
        UnwritableError: The operating system said so.
    """
    try:
        yield
    except OSError as error:
        msg = (
            f"{what}={str(path)!r}: cannot be written ({error.strerror}); make room, or choose "
            "another folder"
        )
        raise UnwritableError(msg) from error


class Writer:
    """Appends lines to a file, each flushed at once."""

    def __init__(self, path: Path) -> None:
        """Open the file for appending; its folder is made.

        Raises:
            UnwritableError: It cannot be written.
        """
        with writing("record", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = path.open("ab")
        self.path = path
        self._encoder = msgspec.json.Encoder()

    def write(self, line: Line) -> None:
        """Write one line and flush it.

        Raises:
            UnwritableError: The disk is full, or gone.
        """
        with writing("record", self.path):
            self._file.write(self._encoder.encode(line) + b"\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # of a line that could not be written
            self._file.close()


def read(path: Path) -> Iterator[Line]:
    """The lines of a file; a torn last line (the run was killed while writing) is left out.

    Raises:
        InvalidInputError: The file is missing or a line is not a record.
    """
    decoder = msgspec.json.Decoder(Line)
    try:
        data = path.read_bytes()
    except OSError as error:
        msg = (
            f"record={str(path)!r}: cannot be read ({error.strerror}); give a .jsonl file of a run"
        )
        raise InvalidInputError(msg) from error
    lines = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError as error:
            if number == len(lines):
                return
            msg = f"record={str(path)!r} line {number}: not a record of this version ({error})"
            raise InvalidInputError(msg) from error
