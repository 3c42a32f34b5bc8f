"""How a logical (batch, heads, seqlen, head_dim) tensor lies in memory.

Order of the axes, slack, broadcast, offset. Integers only: `fa_verify.inputs` makes the tensor.
"""

from __future__ import annotations

import dataclasses
import re

from fa_verify.errors import InvalidInputError

__all__ = ["BHSD", "BSHD", "Layout"]

_AXES = "bhsd"
_TEXT = re.compile(
    r"(?P<order>[bhsd]{4})(?P<pads>(?:\.[bhsd]\d+)*)(?P<shared>\.shared)?(?:\.at(?P<offset>\d+))?"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Strides of one tensor, in elements.

    Attributes:
        order: The four axes b, h, s, d from outermost to innermost; ``bshd`` is flash-attn's,
            ``bhsd`` PyTorch's, ``bhds`` a transposed K.
        pad: Slack in elements between neighbours along (batch, heads, seqlen, head_dim). The slack
            belongs to nobody: it is poisoned and no kernel may touch it. A packed QKV buffer
            (B, S, 3, H, D) is order ``bshd`` with a seqlen pad of 2*H*D.
        shared_heads: All heads are one (stride 0): an expanded view.
        offset: Elements before the first one (a storage offset).

    Raises:
        InvalidInputError: The order is no permutation of bhsd, or a number is negative.

    >>> Layout(order="bshd", pad=(0, 0, 8, 0)).strides((2, 3, 5, 16))
    (280, 16, 56, 1)
    >>> Layout.parse("bshd.s8.at4") == Layout(order="bshd", pad=(0, 0, 8, 0), offset=4)
    True
    """

    order: str = "bhsd"
    pad: tuple[int, int, int, int] = (0, 0, 0, 0)
    shared_heads: bool = False
    offset: int = 0

    def __post_init__(self) -> None:
        """Reject layouts that describe no tensor."""
        if sorted(self.order) != sorted(_AXES):
            msg = f"order={self.order!r}: must be a permutation of 'bhsd'"
            raise InvalidInputError(msg)
        if len(self.pad) != len(_AXES) or min(self.pad) < 0:
            msg = f"pad={self.pad}: four element counts (b, h, s, d), each at least 0"
            raise InvalidInputError(msg)
        if self.offset < 0:
            msg = f"offset={self.offset}: a storage offset is at least 0"
            raise InvalidInputError(msg)

    def strides(self, shape: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
        """Strides in elements of a (batch, heads, seqlen, head_dim) tensor of this shape."""
        strides = dict.fromkeys(_AXES, 0)
        extent = 1  # elements that one step along the next outer axis skips
        for axis in reversed(self.order):
            index = _AXES.index(axis)
            if axis == "h" and self.shared_heads:
                continue
            strides[axis] = extent + self.pad[index]
            extent = strides[axis] * max(1, shape[index])
        return strides["b"], strides["h"], strides["s"], strides["d"]

    def span(self, shape: tuple[int, int, int, int]) -> int:
        """Elements from the first to the last inclusive; 0 for an empty tensor."""
        if 0 in shape:
            return 0
        strides = self.strides(shape)
        return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))

    def __str__(self) -> str:
        """The text form that `parse` reads: ``bshd.s8.shared.at4``."""
        pads = "".join(f".{axis}{n}" for axis, n in zip(_AXES, self.pad, strict=True) if n)
        shared = ".shared" if self.shared_heads else ""
        return f"{self.order}{pads}{shared}" + (f".at{self.offset}" if self.offset else "")

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read the text form.

        Raises:
            InvalidInputError: The text is no layout.
        """
        match = _TEXT.fullmatch(text)
        parts = match["pads"].split(".")[1:] if match else []
        if match is None or len({part[0] for part in parts}) < len(parts):
            msg = f"layout={text!r}: expected ORDER[.AXISn...][.shared][.atN], e.g. 'bshd.s8.at4'"
            raise InvalidInputError(msg)
        pads = {part[0]: int(part[1:]) for part in parts}
        return cls(
            order=match["order"],
            pad=(pads.get("b", 0), pads.get("h", 0), pads.get("s", 0), pads.get("d", 0)),
            shared_heads=match["shared"] is not None,
            offset=int(match["offset"] or 0),
        )


BHSD = Layout()
BSHD = Layout(order="bshd")
