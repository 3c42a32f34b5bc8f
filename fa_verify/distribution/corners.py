"""`Corner`: a part of the default distribution that a campaign visits before it draws at random.

Limits of the formats that kernels count in, and what defects were found to hide in. Each is wide
enough for a kind of defect, and all that it does not name is drawn as ever.
"""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["CORNERS", "MODEST", "NO_TERMS", "PLAIN", "Corner"]

NO_TERMS = "none"  # of a corner's TERMS: nothing beside q, k and v

_FORMS = (
    *("DTYPES", "HEAD_DIMS", "MASKS", "SOFTCAPS", "LAYOUTS", "TERMS", "DOCUMENTS", "PATTERNS"),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Corner:
    """What is left of the tables.

    Attributes:
        name: What is special.
        tables: Name of a table and the entries kept of it; of entries that are classes of shape,
            their names.
        backward: Always or never a backward pass; None: as ever.
        deepest: The largest head dims that the kernel takes.
        order: "more queries" or "more keys" swaps lengths that are the other way round.
        axis: Which axis (batch, heads, seqlen, head_dim) a huge layout stretches; None: any.
    """

    name: str
    tables: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    backward: bool | None = None
    deepest: bool = False
    order: str = ""
    axis: int | None = None

    def kept(self, table: str) -> tuple[Any, ...]:
        """The entries kept of a table; empty: all."""
        return dict(self.tables).get(table, ())

    @property
    def of_a_form(self) -> bool:
        """Whether it chooses something that a kernel is compiled for."""
        return self.deepest or any(name in _FORMS for name, _ in self.tables)

    def __str__(self) -> str:
        """What is kept, as docs/distribution.md states it."""
        parts = [f"{name} {', '.join(map(_text, kept))}" for name, kept in self.tables]
        if self.backward is not None:
            parts.append("backward" if self.backward else "forward")
        parts += ["the largest head dims"] if self.deepest else []
        parts += [self.order] if self.order else []
        if self.axis is not None:
            parts.append(f"apart by {('sequence', 'head', 'row', 'column')[self.axis]}")
        return "; ".join(parts)


def _text(entry: Any) -> str:
    return " ".join(map(str, entry)) if isinstance(entry, tuple) else str(entry)


PLAIN = Corner(name="")
MODEST = Corner(
    name="",
    tables=(("SHAPES", ("medium", "edge", "small", "decode", "long", "tall", "wide")),),
)

_ONE_SIDED = (
    *((False, True, False, "bottom-right"), (False, False, True, "bottom-right")),
    (False, True, False, "top-left"),
)
_TWO_SIDED = ((False, True, True, "bottom-right"), (False, True, True, "top-left"))
_CAUSAL = ((True, False, False, "bottom-right"),)
# Where a few queries see all of many keys, which a mask that is aligned top-left hides.
_SEEN = ((False, False, False, "bottom-right"), (True, False, False, "bottom-right"))
_GROUPS = ((2, 6, 2), (3, 8, 2))
# A multiple of a large block is one of the smaller blocks too.
_BESIDE = (("RELATIONS", ("congruent",)), ("SHAPES", ("medium",)), ("BLOCKS", (64, 128)))
_HUGE = (("LAYOUTS", ("huge",)), ("DTYPES", ("float16", "bfloat16")))
_APART = (*_HUGE, ("SHAPES", ("small",)), ("HEADS", ((3, 4, 4),)))

CORNERS = (
    Corner(
        name="rows that see no key",
        tables=(("MASKS", _CAUSAL), ("SHAPES", ("medium",)), ("RELATIONS", ("unequal",))),
        order="more queries",
    ),
    Corner(
        name="several key heads, each with a group",
        tables=(("HEADS", _GROUPS), ("SHAPES", ("small",))),
        backward=True,
    ),
    Corner(
        name="offsets past 2^31 by sequence",
        tables=_APART,
        axis=0,
    ),
    Corner(
        name="a window that hides a key or two",
        tables=(
            *(("WINDOWS", ("hides little",)), ("HIDDEN", (1, 2))),
            *(("MASKS", _ONE_SIDED), ("SHAPES", ("small", "medium"))),
        ),
    ),
    Corner(
        # Bits that depend on an order or on batch mates take ordinary numbers and many terms, and
        # show best where no rounding to 16 bits follows.
        name="sums in many parts, of several sequences",
        tables=(
            *(("HEADS", ((2, 1, 1), (3, 2, 2))), ("SHAPES", ("decode",)), ("MASKS", _SEEN)),
            *(("DTYPES", ("float32",)), ("SCALES", (None,)), ("LOGITS", (1.0,))),
            *(("QK", ("normal",)), ("V", ("normal",)), ("DO", ("normal",))),
        ),
        backward=True,
    ),
    Corner(
        name="one key after a block's end",
        tables=(*_BESIDE, ("NEARNESS", (1,)), ("MASKS", _CAUSAL)),
    ),
    Corner(
        name="the largest head dims",
        tables=(("HEADS", _GROUPS), ("SHAPES", ("small",))),
        backward=True,
        deepest=True,
    ),
    Corner(
        name="keys that 16 bits cannot count",
        tables=(("SHAPES", ("giant",)), ("HEAD_DIMS", (16, 32, 8)), ("MASKS", _SEEN)),
    ),
    Corner(
        name="a saturated softcap",
        tables=(
            ("SOFTCAPS", (1.0, 5.0)),
            ("LOGITS", (30.0, 100.0)),
            ("QK", ("normal",)),
            ("SHAPES", ("small", "medium")),
            ("SCALES", (None, 1.0)),
        ),
    ),
    Corner(
        # Neither saturated nor so small that tanh(x) is x: the error of tanh shows.
        name="a softcap where it bends",
        tables=(
            *(("SOFTCAPS", (1.0,)), ("LOGITS", (1.0,)), ("QK", ("normal",)), ("SCALES", (None,))),
            *(("DTYPES", ("float32",)), ("DOT_PRECISIONS", ("ieee",))),
            ("SHAPES", ("small", "medium", "large")),
        ),
    ),
    Corner(
        name="offsets past 2^31 by head",
        tables=_APART,
        axis=1,
    ),
    Corner(
        name="thousands of keys, all of them seen",
        tables=(("SHAPES", ("decode",)), ("MASKS", _SEEN)),
    ),
    Corner(
        name="a negative scale",
        tables=(("SCALES", (-0.1, -1.0)), ("SHAPES", ("medium", "small"))),
    ),
    Corner(
        name="a window's ends beside a block",
        tables=(*_BESIDE, ("WINDOWS", ("small",)), ("MASKS", _TWO_SIDED)),
    ),
    Corner(
        # The last row alone is that far: in its block, or as the one row where the last begins.
        name="offsets past 2^31 by row",
        tables=(
            *(*_HUGE, ("SHAPES", ("small", "medium")), ("HEADS", ((1, 1, 1), (3, 4, 4)))),
            *(("LENGTH_KINDS", ("beside a block",)), ("SIDES", (1,)), ("BLOCKS", (16, 128))),
            *(("RELATIONS", ("congruent",)), ("NEARNESS", (0,))),
        ),
        axis=2,
    ),
    Corner(
        # Kernels have paths of their own for it, which few cases drawn at random would take.
        name="what fast paths are made for",
        tables=(
            *(("HEAD_DIMS", (64, 128, 80, 96)), ("HEAD_DIM_V", ("same",)), ("SOFTCAPS", (0.0,))),
            *(("DTYPES", ("float16", "bfloat16")), ("LAYOUTS", ("bhsd", "bshd"))),
            *(("MASKS", (*_CAUSAL, (False, False, False, "bottom-right"))), ("TERMS", (NO_TERMS,))),
            ("SHAPES", ("medium", "large")),
        ),
        backward=True,
    ),
    Corner(
        name="one key before a block's end",
        tables=(*_BESIDE, ("NEARNESS", (-1, -2, 2)), ("MASKS", _CAUSAL)),
    ),
    Corner(
        # A running maximum of 0 is a number like others, and a row that has it has seen keys.
        name="logits of 0, in several blocks",
        tables=(("QK", ("zeros",)), ("SHAPES", ("wide", "medium", "large"))),
    ),
    Corner(
        name="no query, or no key",
        tables=(("SHAPES", ("edge",)), ("EDGE_LENGTHS", (0,))),
    ),
    Corner(
        name="more heads than an axis of a grid counts",
        tables=(("SHAPES", ("crowd",)), ("HEAD_DIMS", (16, 8, 1))),
        backward=False,
    ),
    Corner(
        name="offsets past 2^31 by column",
        tables=_APART,
        axis=3,
    ),
    Corner(
        name="a million logits a head",
        tables=(("SHAPES", ("large",)),),
    ),
    Corner(
        # A group's heads as rows of one block, of 16 as a rule.
        name="more than sixteen heads a group",
        tables=(("HEADS", ((1, 20, 1),)), ("SHAPES", ("small",))),
        backward=True,
    ),
    Corner(
        name="a window of whole blocks",
        tables=(
            *(("RELATIONS", ("equal",)), ("LENGTH_KINDS", ("blocks",)), ("BLOCKS", (64, 128))),
            *(("SHAPES", ("large",)), ("WINDOWS", ("anything",))),
            ("MASKS", (*_TWO_SIDED, *_ONE_SIDED)),
        ),
    ),
)
