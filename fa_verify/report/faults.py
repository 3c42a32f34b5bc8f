"""Failures that are the same fault as one `Fault`, and reasons that are the same as one `Note`."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from fa_verify.record import FailureRecord, kind_of
from fa_verify.report.result import Result, work
from fa_verify.report.text import lines
from fa_verify.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Family", "Fault", "Note", "families", "find_faults", "find_notes"]

# A stray access explains wrong numbers, never the other way round: causes come first.
_CAUSES_FIRST: Final = (
    *("memory", "unwritten", "inputs", "crash", "timeout", "nonfinite"),
    *("masking", "numerics", "determinism", "metamorphic", "dropout", "contract"),
)
_VALUES_SHOWN: Final = 6
_FOLLOWS: Final = re.compile(r"^follows from .*? at (?P<location>[^\s:]+:\d+)")
_NUMBER: Final = re.compile(r"\d+")
_ASSIGNMENT: Final = re.compile(r"(?P<name>[\w .]+)=(?P<value>\S+)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """All failures of one kernel with the same check, title and line.

    Attributes:
        kernel: Its name in this summary.
        target: ``file.py:name`` to load it by.
        check: Which check saw it.
        title: A few words.
        location: "file:line" in the kernel, or "".
        source: The text of that line, or "".
        tensor: Which tensor or argument, or "".
        diagnosis: The likely cause, or "".
        cases: How many cases have it, of `of` that the kernel was verified on; 0 when only the
            shrinking met it.
        precisions: In which precisions, sorted; directions: in which passes.
        everywhere: Whether these are all the precisions that the kernel was verified in.
        case: The smallest case known, a shrunk one as a rule.
        message: What was measured there.
        replay: The command that reproduces it.
        seen: The lines of all cases that have it.
    """

    kernel: str
    target: str
    check: str
    title: str
    location: str
    source: str
    tensor: str
    diagnosis: str
    cases: int
    of: int
    precisions: tuple[str, ...]
    directions: tuple[str, ...]
    everywhere: bool
    case: str
    message: str
    replay: str
    seen: frozenset[str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A fault to look at, and what need not be looked at before it is mended.

    Attributes:
        first: The one to look at.
        others: The same kind of fault at other lines, or through other arguments.
        hence: Faults of another kind that are said to follow from one of these, or have its cause.
        beside: Faults without a line or a cause, all of whose cases have one of these as well.
    """

    first: Fault
    others: tuple[Fault, ...]
    hence: tuple[Fault, ...]
    beside: tuple[Fault, ...] = ()

    @property
    def explained(self) -> bool:
        """Whether a line or a cause is known."""
        return bool(self.first.location or self.hence or _cause(self.first.diagnosis))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Why cases of a kernel did not reach pass or fail.

    Attributes:
        kernel: Its name in this summary.
        verdict: unsupported, inconclusive or error.
        reason: In the words of the record; values of one name are collected ("head_dim=33, 40").
        cases: How many.
        case: The smallest of them.
        replay: The command that reproduces it.
    """

    kernel: str
    verdict: Verdict
    reason: str
    cases: int
    case: str
    replay: str

    @property
    def lines(self) -> list[str]:
        """The reason line by line, cleaned; a traceback has its error first."""
        found = lines(self.reason) or ["no reason given"]
        return found if len(found) == 1 else [found[-1], *found]


def find_faults(results: Sequence[Result], shrunk: Sequence[Result] = ()) -> tuple[Fault, ...]:
    """Every fault, by kernel, causes before consequences, then the more frequent first.

    Args:
        results: The cases of the run.
        shrunk: The small cases that were made of them; they show a fault, and are not counted.
    """
    members: defaultdict[tuple[str, ...], list[tuple[Result, FailureRecord]]] = defaultdict(list)
    verified: defaultdict[str, list[str]] = defaultdict(list)  # precision of each case
    for result in results:
        if result.verified:
            verified[result.kernel].append(result.precision)
    for result in (*results, *shrunk):
        if result.verdict is Verdict.FAIL:
            for failure in {_key(failure): failure for failure in _failures(result)}.values():
                members[result.kernel, *_key(failure)].append((result, failure))
    counted = {id(result) for result in results}
    faults = [
        _fault(found, sum(id(result) in counted for result, _ in found), verified[key[0]])
        for key, found in members.items()
    ]
    return tuple(sorted(faults, key=_fault_order))


def families(faults: Sequence[Fault]) -> tuple[Family, ...]:
    """The faults, each once, in the order of the first of each family."""
    at = {(f.kernel, _spot(f.location)): f for f in reversed(faults) if f.location}
    caused = {(f.kernel, _cause(f.diagnosis)): f for f in reversed(faults)}
    alike: defaultdict[tuple[str, str, str], list[Fault]] = defaultdict(list)
    hence: defaultdict[tuple[str, str, str], list[Fault]] = defaultdict(list)
    for fault in faults:
        root = _root(fault, at)
        if cause := _cause(root.diagnosis):
            root = caused[root.kernel, cause]
        if _kind(root) == _kind(fault):
            alike[_kind(fault)].append(fault)
        else:
            hence[_kind(root)].append(fault)
    return _together(
        [
            Family(first=some[0], others=tuple(some[1:]), hence=tuple(hence.pop(kind, ())))
            for kind, some in alike.items()
        ]
    )


def _together(found: Sequence[Family]) -> tuple[Family, ...]:
    """With what nothing explains put beside an earlier family that all of its cases have too."""
    kept: list[Family] = []
    for family in found:
        mine = (family.first, *family.others)
        seen = frozenset[str]().union(*(f.seen for f in mine))
        for index, other in enumerate(kept if not family.explained else ()):
            theirs = (other.first, *other.others, *other.hence)
            if other.first.kernel != family.first.kernel:
                continue
            if seen <= frozenset[str]().union(*(f.seen for f in theirs)):
                kept[index] = dataclasses.replace(other, beside=(*other.beside, *mine))
                break
        else:
            kept.append(family)
    return tuple(kept)


def _cause(diagnosis: str) -> str:
    """A cause without its evidence and the numbers of its case; "" where none is known."""
    text = diagnosis.removeprefix("follows from the forward pass: ").partition(" (a model ")[0]
    return "" if text.startswith(("no known defect", "follows from")) else _NUMBER.sub("", text)


def _root(fault: Fault, at: Mapping[tuple[str, str], Fault]) -> Fault:
    """What a fault follows from in the end, by what the diagnoses say."""
    passed = [fault]
    while found := _FOLLOWS.search(passed[-1].diagnosis):
        cause = at.get((fault.kernel, _spot(found["location"])))
        if cause is None:
            break
        if cause in passed:  # each is said to follow from the other
            return fault
        passed.append(cause)
    return passed[-1]


def _spot(location: str) -> str:
    """File and line without the folder, which may be shown relative or not."""
    return location.rpartition("/")[2]


def _kind(fault: Fault) -> tuple[str, str, str]:
    return fault.kernel, fault.check, kind_of(fault.title)


def find_notes(results: Sequence[Result]) -> tuple[Note, ...]:
    """Every reason, errors first, then by kernel, the more frequent first."""
    members: defaultdict[tuple[str, Verdict, str], list[Result]] = defaultdict(list)
    for result in results:
        if not result.verified:
            match = _ASSIGNMENT.fullmatch(result.record.reason)
            name = match["name"] if match else result.record.reason
            members[result.kernel, result.verdict, name].append(result)
    rank = {Verdict.ERROR: 0, Verdict.INCONCLUSIVE: 1, Verdict.UNSUPPORTED: 2}
    notes = []
    for (kernel, verdict, _), found in members.items():
        smallest = min(found, key=_size)
        notes.append(
            Note(
                kernel=kernel,
                verdict=verdict,
                reason=_reason([result.record.reason for result in found]),
                cases=len(found),
                case=smallest.record.case,
                replay=smallest.record.replay,
            )
        )
    return tuple(sorted(notes, key=lambda n: (rank[n.verdict], n.kernel, -n.cases, n.reason)))


def _failures(result: Result) -> tuple[FailureRecord, ...]:
    title = result.record.reason or "failed without saying why"
    return result.record.failures or (FailureRecord(check="unknown", title=title, message=""),)


def _key(failure: FailureRecord) -> tuple[str, str, str]:
    return failure.check, failure.title, failure.location


def _size(result: Result) -> tuple[int, int, str, str]:
    text = result.record.case
    return work(result.case), len(text), text, result.record.replay


def _fault(
    found: Sequence[tuple[Result, FailureRecord]], cases: int, verified: Sequence[str]
) -> Fault:
    result, failure = min(found, key=lambda pair: _size(pair[0]))
    precisions = {result.precision for result, _ in found}
    return Fault(
        kernel=result.kernel,
        target=result.record.target,
        check=failure.check,
        title=failure.title,
        location=failure.location,
        source=failure.source,
        tensor=failure.tensor,
        diagnosis=failure.diagnosis,
        cases=cases,
        of=len(verified),
        precisions=tuple(sorted(precisions)),
        directions=tuple(sorted({result.direction for result, _ in found}, reverse=True)),
        everywhere=len(precisions) > 1 and precisions >= set(verified),
        case=result.record.case,
        message=failure.message,
        replay=result.record.replay,
        seen=frozenset(result.record.case for result, _ in found),
    )


def _fault_order(fault: Fault) -> tuple[str, bool, int, int, str, str]:
    known = fault.check in _CAUSES_FIRST
    rank = _CAUSES_FIRST.index(fault.check) if known else len(_CAUSES_FIRST)
    nowhere = not fault.location  # a line to look at is worth more than the rank
    return fault.kernel, nowhere, rank, -fault.cases, fault.title, fault.location


def _reason(reasons: Sequence[str]) -> str:
    unique = sorted(set(reasons), key=lambda text: (len(text), text))  # 33 before 128
    if len(unique) == 1:
        return unique[0]
    name = unique[0].partition("=")[0]
    values = [text.partition("=")[2] for text in unique[:_VALUES_SHOWN]]
    more = f" and {len(unique) - _VALUES_SHOWN} more" if len(unique) > _VALUES_SHOWN else ""
    return f"{name}={', '.join(values)}{more}"
