"""A matrix in words and numbers, the same in every format."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from fa_verify.report import text

if TYPE_CHECKING:
    from fa_verify.report.matrix.cells import Cell, Errors
    from fa_verify.report.matrix.places import Matrix, Place

__all__ = ["HOW", "bias", "headline", "missing", "remark", "told", "ulps"]

HOW: Final = (
    "A case counts under each variant that it is of: causal holds all that are causal, whatever "
    "else they are; plain has no mask, no softcap, nothing beside q, k and v, and heads and "
    "head_dims all alike. Errors in ulps: the first number, a power of 2, is what half of the "
    "cases are within; the second is the largest of all. An ulp is the output format's at the "
    "largest element of the row, of lse at its value: where all of a row cancels to almost 0, ulps "
    "are many. The bias is the mean of error / bound over a case's elements, averaged over the "
    "cases, plus or minus its standard error; above 0, results are too large (lse as a number, "
    "others in size)."
)

_DECIMALS: Final = 3  # of a per cent, before it takes an exponent


def headline(matrix: Matrix) -> str:
    """How many cases on which devices, and how many failed."""
    total = matrix.total
    where = "; ".join(
        f"{text.plural(place.total.cases, 'case')} on {text.clean(place.device)}"
        for place in matrix.places
    )
    worst = "" if total.ratio is None else f", worst err/bound {text.number(total.ratio)}"
    return f"{where or 'no case'}: {told(total)}{worst}"


def told(total: Cell) -> str:
    """Verdicts of some cases."""
    others = (
        (total.failed, "failed"),
        (total.broken, "ended in an error of the harness"),
        (total.inconclusive, "inconclusive"),
        (total.refused, "unsupported"),
    )
    some = [f"{text.count(number)} {what}" for number, what in others if number]
    return ", ".join([*([] if total.failed else ["none failed"]), *some])


def missing(place: Place, kernel: str) -> str:
    """The variants that no case of a kernel was of; "" where there are none."""
    names = place.without(kernel)
    return f"No case: {', '.join(names)}." if names else ""


def remark(cell: Cell) -> str:
    """What a reader must know of a cell beside its numbers; "" where nothing."""
    return f"{text.count(cell.failed)} FAILED" if cell.failed else ""


def ulps(errors: Errors) -> str:
    """What half of the cases are within, and the largest error of all.

    >>> from fa_verify.report.matrix.cells import Errors
    >>> ulps(Errors(ulp=19.2, ulps={0: 1, 1: 3, 5: 2}))
    '2.0 (19)'
    """
    return f"{text.number(errors.typical_ulp)} ({text.number(errors.ulp)})"


def bias(errors: Errors) -> str:
    """Mean and standard error in per cent of the bound.

    >>> from fa_verify.report.matrix.cells import Errors
    >>> bias(Errors(cases=4, bias=0.02, bias_squares=0.00016))
    '+0.5±0.2%'
    >>> bias(Errors(cases=1, bias=-0.02, bias_squares=0.0004)), bias(Errors())
    ('-2%', '-')
    """
    if not errors.cases:
        return "-"
    mean, error = 100 * errors.lean, errors.lean_error
    if error is None:
        return f"{mean:+.2g}%"
    error *= 100
    last = max(error, abs(mean) / 100)  # what the last digit shown may be
    if last < 10**-_DECIMALS:
        return f"{mean:+.0e}±{error:.0e}%".replace("e-0", "e-") if mean else "0%"
    decimals = max(0, -math.floor(math.log10(last)))
    return f"{mean:+.{decimals}f}±{error:.{decimals}f}%"
