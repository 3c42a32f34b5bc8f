"""Lines: where a kernel computes what a cause speaks of. No edit proves them to be at fault."""

from __future__ import annotations

import ast
import functools
import linecache
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fa_verify.backends.cpu import CpuBackend
from fa_verify.diagnosis.explain import OR
from fa_verify.diagnosis.incidents import operand, plain
from fa_verify.trial import Trial
from fa_verify.ttir.mutation.outline import Line, Outline

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["said", "suspected"]

_SECONDS = 15.0  # of one run: a machine may be busy
_MOST = 2  # statements that are named: more name none
_GRADIENTS = frozenset({"dq", "dk", "dv"})
_UNKNOWN = "no known defect"
_T = r"(?:q|k|v|o|do|dq|dk|dv|lse|delta|bias|dbias)"
_STACKED = {"k": "kv", "v": "kv", "q": "qkv"}  # what may hold it as well


def suspected(trial: Trial, cause: str) -> tuple[str, list[Line]]:
    """What is computed where, as the beginning of a sentence, and the lines; ("", []) if unclear.

    Args:
        trial: Of the pass that goes wrong.
        cause: What is known of it.
    """
    first = cause.partition(OR)[0]
    if first.startswith(_UNKNOWN):
        return "", []
    pattern = next((rule[0] for rule in _RULES if re.search(rule[0], first)), None)
    if pattern is None:
        return "", []
    outline = Outline()
    backend = CpuBackend(seconds=_SECONDS, alteration=outline)
    run = Trial(trial.kernel, trial.case, trial.setup, backend, independent=False)
    run.execution  # noqa: B018 - it is run for what is noted
    match, noted = re.search(pattern, first), _concerned(first, list(outline.found))
    assert match is not None  # noqa: S101 - for mypy: it did match
    for text, look in (rule[1:] for rule in _RULES if rule[0] == pattern):
        lines = look(match, noted)
        apart = {_statement(line.file, line.line): line for line in reversed(lines)}
        if 0 < len(apart) <= _MOST:
            return text.format(**match.groupdict()), list(reversed(apart.values()))
    return "", []


def said(text: str, lines: Sequence[Line]) -> str:
    """The lines as a sentence."""
    places = [
        f"{Path(line.file).name}:{line.line} `{linecache.getline(line.file, line.line).strip()}`"
        for line in lines
    ]
    return f"{text} at " + " and ".join(places) if places else ""


def _concerned(cause: str, lines: list[Line]) -> list[Line]:
    """Those of kernels that write what the cause is about."""
    backward = [line for line in lines if _GRADIENTS & {plain(x) for x in line.writes}]
    alone = re.match(r"in (d[qkv](?: and d[qkv])*),", cause)
    names = set(re.findall(r"d[qkv]", alone[1])) if alone else set()
    wanted = [line for line in lines if names & {plain(x) for x in line.writes}]
    return wanted or (backward if "in the backward pass" in cause and backward else lines)


def _address(match: re.Match[str], lines: list[Line], *kinds: str) -> list[Line]:
    """Of the argument that is named, or of one that holds it beside others, kind by kind."""
    name = match["name"]
    for other in (name, _STACKED.get(name, name)):
        mine = [x for x in lines if operand(x.name) == other]
        found = [x for kind in kinds for x in mine if x.kind == kind]
        if found:
            return found
    return []


def _rows(match: re.Match[str], lines: list[Line]) -> list[Line]:
    """Where rows are told apart: after heads, if there is such a line."""
    return _address(match, lines, "address") or _address(match, lines, "base")


def _moved(match: re.Match[str], lines: list[Line], kind: str) -> list[Line]:
    return _address(match, lines, kind)


def _whole(match: re.Match[str], lines: list[Line]) -> list[Line]:
    return _address(match, lines, "base", "address")


def _heads(match: re.Match[str], lines: list[Line]) -> list[Line]:
    """The quotient that the addresses of k and v have in common, and that of q has not."""
    del match
    places = {
        name: {(x.file, x.line) for x in lines if x.kind == "index" and operand(x.name) == name}
        for name in "qkv"
    }
    both = (places["k"] & places["v"]) - places["q"]
    return [x for x in lines if x.kind == "index" and (x.file, x.line) in both]


def _all(match: re.Match[str], lines: list[Line], kind: str, names: str = "") -> list[Line]:
    del match
    return [x for x in lines if x.kind == kind and re.search(names, x.name.lower())]


_Look = Callable[[re.Match[str], list[Line]], list[Line]]
_on, _base = (functools.partial(_moved, kind=kind) for kind in ("advance", "base"))
_KEPT_L, _KEPT_ACC = r"denominator l is summed in b?float16", r"accumulator acc"
# What a cause says, what is computed then, where; of one cause's the first that is found counts.
_RULES: tuple[tuple[str, str, _Look], ...] = (
    (r"the pointer to (?P<name>[qkv]) advances", "the pointer to {name} is moved on", _on),
    *(
        (pattern, "the address of {name} is computed", look)
        for pattern, look in (
            (r"\w+ is read in the place of (?P<name>[qkv]|do)\b", _base),
            (rf"\b(?P<name>{_T}) is addressed with", _whole),
            (rf"\b(?:heads|sequences|offset of a head) of (?P<name>{_T})\b", _base),
            (rf"\b(?:rows|columns) of (?P<name>{_T})\b", _rows),
            (rf"\b(?P<name>{_T})'s batch and head strides are swapped", _base),
            (rf"\b(?P<name>{_T})'s [\w ]+ strides are swapped", _whole),
            (r"\bin (?P<name>[kv]) alone", _base),
            (rf"\b(?P<name>{_T}) of (?:the first|query)", _base),
            (r"\b(?P<name>lse|delta)(?: and delta)? (?:is|are) read at", _base),
        )
    ),
    (r"reads? (?:the )?key head", "the key head is computed", _heads),
    *(
        (pattern, text, functools.partial(_all, kind=kind, names=names))
        for pattern, text, kind, names in (
            (r"the block table|the table's row", "the table is read", "base", r"table|ind"),
            (r"the loop over .*? (?:begins|skips its first)", "the loop begins", "begin", ""),
            (r"the loop over .*? (?:ends|leaves out|is rounded)", "the loop ends", "end", ""),
            (r"\blse (?:is|adds|subtracts)", "lse is computed", "stored", r"lse|^l$|^m$"),
            (r"softcap's|after the softcap", "the cap is used", "use", "cap"),
            (r"ALiBi", "the slopes are used", "use", r"slope|alibi"),
            (r"\bsink is (?:taken|scaled|missing)", "the sink is used", "use", "sink"),
            (r"\bbias\b", "the bias is used", "use", "bias"),
            (_KEPT_L, "it is rounded", "narrowed", "rows"),
            (_KEPT_L, "l is summed", "sum", ""),
            (r"\b(?:denominator|from) l\b", "l is summed", "sum", ""),
            (_KEPT_ACC, "it is rounded", "narrowed", "tile"),
            (_KEPT_ACC, "acc is added up", "product", ""),
            (r"\b(?:from|to) acc\b", "acc is added up", "product", ""),
            (r"softmax_scale|log2\(e\)|the scale is 1", "the scale is used", "use", "scale"),
            (r"mask|causal|window|diagonal", "row and key are compared", "comparison", ""),
        )
    ),
)  # fmt: skip


@functools.cache
def _statement(file: str, line: int) -> tuple[str, int]:
    """The statement that a line is part of."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return file, line
    starts = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    return file, max(starts, default=line)
