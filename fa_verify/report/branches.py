"""`Branch`: an `if`, a loop or a mask of a kernel's source, and which of its ways were seen.

What a constexpr decides is not in the IR of one launch: the source says which lines an `if` holds,
the records which of them ran.
"""

from __future__ import annotations

import ast
import dataclasses
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from fa_verify.ran import SourceRan, merged

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Branch", "branches"]

_BOTH = frozenset({"then", "else"})
_SAID = {
    "if": {
        _BOTH: "ran both ways",
        frozenset({"then"}): "always taken",
        frozenset({"else"}): "never taken",
        frozenset(): "never reached",
    },
    "loop": {
        frozenset({"loop", "no loop"}): "ran, and was skipped",
        frozenset({"loop"}): "ran, never skipped",
        frozenset({"no loop"}): "never entered",
        frozenset(): "never reached",
    },
    "mask": {
        frozenset({"shown", "hidden"}): "true and false",
        frozenset({"shown"}): "never false",
        frozenset({"hidden"}): "never true",
        frozenset(): "never reached",
    },
}
_DUE = {"if": _BOTH, "loop": frozenset({"loop"}), "mask": frozenset({"shown", "hidden"})}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One place where a kernel may go different ways.

    Attributes:
        file: Its source; line: where in it; source: the text there.
        kind: "if", "loop" or "mask".
        met: Which ways were seen.
    """

    file: str
    line: int
    source: str
    kind: str
    met: frozenset[str]

    @property
    def due(self) -> int:
        """How many ways there are to see."""
        return len(_DUE[self.kind])

    @property
    def seen(self) -> int:
        """How many of them were seen."""
        return len(self.met & _DUE[self.kind])

    @property
    def said(self) -> str:
        """What was seen, in words."""
        return _SAID[self.kind][self.met]


def branches(file: str, runs: Iterable[SourceRan]) -> tuple[Branch, ...]:
    """The branches of a file's kernels over all cases; without the source only what the IR has."""
    distinct = sorted(set(runs), key=str)
    try:
        text = Path(file).read_text(encoding="utf-8")
        tree: ast.Module | None = ast.parse(text)
    except (OSError, SyntaxError, ValueError):
        text, tree = "", None
    whole = merged(distinct)
    found: defaultdict[tuple[int, str], set[str]] = defaultdict(set)
    for line, way, met in whole.ways:
        kind = {"then": "if", "else": "if", "loop": "loop", "no loop": "loop"}.get(way, "mask")
        found[line, kind].update({way} if met else ())
    if tree is not None:
        for function in _kernels(tree, whole):
            for one in distinct:
                active = bool(one.ran & _lines([function]))
                for node, ways in _visited(function.body, one, active=active):
                    found[node.lineno, "if"].update(ways)
    lines = text.splitlines()
    return tuple(
        Branch(
            file=file,
            line=line,
            source=lines[line - 1].strip() if line <= len(lines) else "",
            kind=kind,
            met=frozenset(met),
        )
        for (line, kind), met in sorted(found.items())
    )


def _kernels(tree: ast.Module, whole: SourceRan) -> Iterator[ast.FunctionDef]:
    """The functions that were compiled."""
    compiled = whole.ran | whole.idle
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and compiled & _lines(node.body):
            yield node


def _lines(nodes: Sequence[ast.stmt]) -> frozenset[int]:
    return frozenset(
        line for node in nodes for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    )


def _visited(
    body: Sequence[ast.stmt], one: SourceRan, *, active: bool
) -> Iterator[tuple[ast.If, set[str]]]:
    """Each `if` and the ways that one case went; `active`: whether the case came here at all."""
    for node in body:
        if isinstance(node, (ast.For, ast.While, ast.With)):
            yield from _visited(node.body, one, active=active and bool(one.ran & _lines(node.body)))
        if not isinstance(node, ast.If):
            continue
        told = {way for line, way, met in one.ways if line == node.lineno and met} & _BOTH
        then = "then" in told or bool(one.ran & _lines(node.body))
        other = "else" in told or bool(one.ran & _lines(node.orelse)) or (active and not then)
        yield node, {way for way, went in (("then", then), ("else", other)) if went}
        yield from _visited(node.body, one, active=then)
        yield from _visited(node.orelse, one, active=other)
        active = active and (other or not isinstance(node.body[-1], ast.Return))
