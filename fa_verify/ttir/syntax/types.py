"""Types as MLIR writes them."""

from __future__ import annotations

import re
from functools import lru_cache

from fa_verify.ttir.syntax.ir import Type

_SHAPE = re.compile(r"^((?:\d+x)*)(.*)$")
_SCALAR = re.compile(r"^(?:i\d+|index|b?f\d+\w*|none)$")
_SIGNED = re.compile(r"^[us](i\d+)$")  # descriptors say which integers they hold


@lru_cache(maxsize=4096)
def parse_type(text: str) -> Type:  # noqa: PLR0911 - one a form of type
    """Parse one type as MLIR writes it."""
    if text.startswith("tensor<"):
        inner = text[7:-1]
        match = _SHAPE.match(inner)
        dims, rest = (match[1], match[2]) if match else ("", inner)
        element = parse_type(rest.split(",")[0] if not rest.startswith("!") else rest)
        shape = tuple(int(x) for x in dims.split("x") if x)
        return Type(element.scalar, shape, element.pointee, element.unsigned)
    if text.startswith("!tt.ptr<"):
        inner = text[8:-1]
        return Type("ptr", (), parse_type(re.sub(r",\s*\d+$", "", inner)))
    if text.startswith("!tt.tensordesc"):
        return Type("desc", (), _block_type(text[text.index("<") + 1 : -1]))
    if _SCALAR.match(text):
        return Type(text)
    if signed := _SIGNED.match(text):
        return Type(signed[1], unsigned=text.startswith("u"))
    if text.startswith("<"):
        return _block_type(text[1:-1])
    return Type("none", (), None)


def _block_type(inner: str) -> Type:
    inner = inner.split(",", maxsplit=1)[0]
    return parse_type(
        inner if inner.startswith("tensor<") or "x" not in inner else f"tensor<{inner}>"
    )
