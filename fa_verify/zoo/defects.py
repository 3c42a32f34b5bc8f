"""`Defect`: one known defect, read from ``rows/*.toml``, and how it is planted.

A row of a table is ``[name]`` with these keys:

    defect  What is wrong, in a sentence.
    source  Where it was reported, owner/repository#issue; none for defects of our own.
    tag     "ttir" or "launcher": planted in a kernel or in its launcher. "gpu-only": Triton IR
            cannot show it. "not-yet": needs a kernel with a feature that none here has. "meta": a
            defect of harnesses, which a test of ours covers.
    why     Why a gpu-only or not-yet row is not planted, or is simulated.
    test    The test that covers a meta row.
    kernel  Which kernel it is planted in, "file.py:name"; a name alone is one of ``launch.py``
            ("flash").
    patch   [file, old, new] texts: old must occur exactly once in that file.
    apart   dtypes for each of which the defect is planted and reported apart.
    causes  Parts of a sentence of diagnosis: one that holds any of them names the cause rightly.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import shutil
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa_verify.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["KERNELS", "Defect", "lines", "planted", "rows"]

KERNELS = Path(__file__).parent / "kernels"
_ROWS = Path(__file__).parent / "rows"
_KEYS = ("defect", "source", "tag", "why", "test", "kernel", "patch", "apart", "causes")
_TAGS = ("ttir", "launcher", "gpu-only", "not-yet", "meta")
_DECLARED = "_CAPABILITIES = Capabilities(\n"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """One row; `dtype` is set where it stands for one of the row's `apart`.

    Raises:
        InvalidInputError: The row says nothing of how it is covered.
    """

    name: str
    defect: str
    tag: str
    source: str = ""
    why: str = ""
    test: str = ""
    kernel: str = "flash"
    patch: tuple[tuple[str, str, str], ...] = ()
    causes: tuple[str, ...] = ()
    dtype: str = ""

    def __post_init__(self) -> None:
        """Reject rows that nothing covers."""
        covered = {
            "ttir": self.patch,
            "launcher": self.patch,
            "gpu-only": self.why,
            "not-yet": self.why and not self.patch,
            "meta": self.test and not self.patch,
        }
        if not covered.get(self.tag):
            msg = (
                f"{self.name}: tag={self.tag!r} must be one of {', '.join(_TAGS)}, with a patch, "
                "a reason (why) or a test as it needs"
            )
            raise InvalidInputError(msg)

    @property
    def must_be_caught(self) -> bool:
        """Whether an escape is a failure of the oracle."""
        return self.tag in ("ttir", "launcher")


def rows(tables: Sequence[Path] = ()) -> tuple[Defect, ...]:
    """Every defect of the tables (none: the zoo's), in their order."""
    found: list[Defect] = []
    for file in tables or sorted(_ROWS.glob("*.toml")):
        for name, row in tomllib.loads(file.read_text(encoding="utf-8")).items():
            found.extend(_read(name, row))
    return tuple(found)


def _read(name: str, row: dict[str, Any]) -> list[Defect]:
    unknown = set(row) - set(_KEYS)
    if unknown:
        msg = f"{name}: keys {', '.join(sorted(unknown))} are none of {', '.join(_KEYS)}"
        raise InvalidInputError(msg)
    fields = {key: value for key, value in row.items() if key != "apart"}
    fields["patch"] = tuple(tuple(edit) for edit in row.get("patch", ()))
    fields["causes"] = tuple(row.get("causes", ()))
    return [
        Defect(name=f"{name} ({dtype})" if dtype else name, dtype=dtype, **fields)
        for dtype in row.get("apart", [""])
    ]


def planted(defects: Sequence[Defect], folder: Path, kernels: Path = KERNELS) -> dict[Defect, str]:
    """Copies of the folder of kernels with one defect each, in a folder of its own; their targets.

    Raises:
        InvalidInputError: A patch's text does not occur exactly once.
    """
    return {
        defect: _plant(defect, folder / f"{index:03d}", kernels)
        for index, defect in enumerate(defects)
    }


def _plant(defect: Defect, folder: Path, kernels: Path) -> str:
    shutil.copytree(kernels, folder, ignore=shutil.ignore_patterns("__pycache__"))
    patch = defect.patch
    if defect.dtype:
        patch = (*patch, ("launch.py", _DECLARED, f'{_DECLARED}    dtypes=("{defect.dtype}",),\n'))
    for name, old, new in patch:
        file = folder / name
        text = file.read_text(encoding="utf-8")
        if text.count(old) != 1:
            msg = f"{defect.name}: {old!r} occurs {text.count(old)} times in {name}; must be once"
            raise InvalidInputError(msg)
        file.write_text(text.replace(old, new), encoding="utf-8")
    where, _, kernel = defect.kernel.rpartition(":")
    return f"{folder / (where or 'launch.py')}:{kernel}"


def lines(defect: Defect, target: str, kernels: Path = KERNELS) -> frozenset[str]:
    """The lines of a planted kernel's statements that the defect changed, "file.py:7".

    A launcher has none: no line of a kernel is to blame for it.

    Args:
        defect: The row.
        target: Where it was planted.
        kernels: The folder that was copied for it.
    """
    if defect.tag == "launcher":
        return frozenset()
    folder = Path(target.rpartition(":")[0]).parent
    found = set()
    for name in {name for name, _, _ in defect.patch if not name.startswith("launch")}:
        right, wrong = ((f / name).read_text(encoding="utf-8") for f in (kernels, folder))
        matcher = difflib.SequenceMatcher(
            None, right.splitlines(), wrong.splitlines(), autojunk=False
        )
        changed = {
            line
            for kind, _, _, first, end in matcher.get_opcodes()
            if kind != "equal"
            for line in (range(first + 1, end + 1) if end > first else (first, first + 1))
        }
        statements = _statements(wrong)
        changed |= {x for s in statements if not changed.isdisjoint(s) for x in s}
        found |= {f"{name}:{line}" for line in changed}
    return frozenset(found)


def _statements(source: str) -> list[range]:
    """The lines of each statement, of a compound one its head."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            found.append(range(node.lineno, max(end, node.lineno) + 1))
    return found
