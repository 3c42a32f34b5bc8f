"""`Branch`: an `if`, a loop or a mask of a kernel's source, and which of its ways were seen.

What a constexpr decides is not in the IR of one launch: the source says which lines an `if` holds,
the records which of them ran.
"""

from __future__ import annotations

import ast
import dataclasses
from collections import Counter, defaultdict
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
_COMPUTING = (
    ast.AugAssign,
    ast.BinOp,
    ast.BoolOp,
    ast.Call,
    ast.Compare,
    ast.Subscript,
    ast.UnaryOp,
)
_HINTS = ("multiple_of", "max_contiguous", "max_constancy", "assume", "static_assert")
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
        told = {line for line, way, _ in whole.ways if way in _BOTH}
        for line in set(_traceless(tree)) - told:
            if "then" not in found.get((line, "if"), {"then"}):
                del found[line, "if"]
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


def _traceless(tree: ast.Module) -> Iterator[int]:
    """Lines of the `if`s that may be taken without an operation of their own in the IR.

    What is assigned names and constants alone leaves none, nor do hints; and where the same is
    computed twice the compiler keeps one of the lines.
    """
    everywhere = Counter(_computed([tree]))
    for node in ast.walk(tree):
        if isinstance(node, ast.If):
            within = Counter(_computed(node.body))
            if not any(everywhere[text] == count for text, count in within.items()):
                yield node.lineno


def _computed(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """The text of each expression that computes something, and each return."""
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        if isinstance(node, ast.Return):
            yield f"return in line {node.lineno}"
        hint = isinstance(node, ast.Call) and ast.unparse(node.func).endswith(_HINTS)
        if isinstance(node, _COMPUTING) and not hint:
            yield ast.unparse(node)


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
