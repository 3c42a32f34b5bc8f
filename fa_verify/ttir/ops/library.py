"""tt.extern_elementwise: a library's functions by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.numbers.floats import CARRIER, Array, round_to
from fa_verify.ttir.ops.libdevice import find

if TYPE_CHECKING:
    from fa_verify.ttir.lowering.lower import Lowering, Rule, Step
    from fa_verify.ttir.syntax.ir import Op


def extern_elementwise(op: Op, low: Lowering) -> Step:
    """tt.extern_elementwise: libdevice's."""
    symbol = op.attrs.get("symbol", "").strip('"')
    found = find(symbol)
    if found is None:
        msg = f"the library function {symbol}"
        raise Unsupported(msg)
    function, scalar = found, op.results[0].type.scalar
    narrow = op.results[0].type.is_float and scalar not in ("f32", "f64")

    def apply(*xs: Array) -> Array:
        result: Array = function(*xs)
        return round_to(result, scalar) if narrow else result.astype(CARRIER[scalar], copy=False)

    return low.nary(op, apply)


RULES: dict[str, Rule] = {"tt.extern_elementwise": extern_elementwise}
