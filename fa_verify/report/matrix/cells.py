"""`Cell`: the cases of one kernel, variant and precision, counted so that two can be added."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec

from fa_verify.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fa_verify.record import TensorStats
    from fa_verify.report.result import Result

__all__ = ["Cell", "Errors", "cell"]

# Of errors it is counted between which powers of 2 they lie, in ulps. Up to the first one counts as
# no error; past the last one no bit of float32's 24 is right.
_EXACT: Final = -6
_MANY: Final = 24


class Errors(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One tensor's errors in some cases.

    Attributes:
        cases: In which some element has a bound.
        elements: How many; inconclusive: of these, how many the bound says nothing about.
        ratio: Largest err/bound under the deterministic bound.
        ulp: Largest error in ulps of the output format, at the largest element of its row.
        ulps: How many cases' largest error is at most 2^n ulps and more than half of it, by n.
        bias: Sum over the cases of their mean err/bound, positive where a result is too large;
            bias_squares: of their squares.
    """

    cases: int = 0
    elements: int = 0
    inconclusive: int = 0
    ratio: float = 0.0
    ulp: float = 0.0
    ulps: dict[int, int] = {}
    bias: float = 0.0
    bias_squares: float = 0.0

    def __add__(self, other: Errors) -> Errors:
        """Those of both."""
        return Errors(
            cases=self.cases + other.cases,
            elements=self.elements + other.elements,
            inconclusive=self.inconclusive + other.inconclusive,
            ratio=max(self.ratio, other.ratio),
            ulp=max(self.ulp, other.ulp),
            ulps=dict(Counter(self.ulps) + Counter(other.ulps)),
            bias=self.bias + other.bias,
            bias_squares=self.bias_squares + other.bias_squares,
        )

    @property
    def typical_ulp(self) -> float:
        """A power of 2 of ulps that half of the cases' largest errors are within, or less."""
        seen, half = 0, sum(self.ulps.values()) / 2
        for power, cases in sorted(self.ulps.items()):
            seen += cases
            if seen >= half:
                return min(self.ulp, 2.0**power) if power > _EXACT else 0.0
        return 0.0

    @property
    def lean(self) -> float:
        """Mean over the cases of their mean err/bound; 0 of no case."""
        return self.bias / max(1, self.cases)

    @property
    def lean_error(self) -> float | None:
        """Standard error of `lean`, each case a sample; None of one case."""
        if self.cases < 2:
            return None
        spread = self.bias_squares / self.cases - self.lean**2
        return math.sqrt(max(0.0, spread) / (self.cases - 1))


class Cell(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Some cases, counted.

    Attributes:
        cases: How many; failed, inconclusive, refused (unsupported) and broken (the harness was):
            of these, how many had another verdict than pass.
        tensors: Errors by the name of the tensor.
    """

    cases: int = 0
    failed: int = 0
    inconclusive: int = 0
    refused: int = 0
    broken: int = 0
    tensors: dict[str, Errors] = {}

    def __add__(self, other: Cell) -> Cell:
        """Those of both."""
        tensors = dict(self.tensors)
        for name, errors in other.tensors.items():
            tensors[name] = tensors[name] + errors if name in tensors else errors
        return Cell(
            cases=self.cases + other.cases,
            failed=self.failed + other.failed,
            inconclusive=self.inconclusive + other.inconclusive,
            refused=self.refused + other.refused,
            broken=self.broken + other.broken,
            tensors=tensors,
        )

    @property
    def ratio(self) -> float | None:
        """Largest err/bound of any tensor."""
        return max((errors.ratio for errors in self.tensors.values()), default=None)

    @property
    def verified(self) -> int:
        """Cases that passed or failed."""
        return self.cases - self.inconclusive - self.refused - self.broken


def cell(results: Iterable[Result]) -> Cell:
    """Some results, counted."""
    verdicts: list[Verdict] = []
    found: dict[str, list[TensorStats]] = {}
    for result in results:
        verdicts.append(result.verdict)
        for name, stats in result.record.tensors.items():
            found.setdefault(name, []).append(stats)
    return Cell(
        cases=len(verdicts),
        failed=verdicts.count(Verdict.FAIL),
        inconclusive=verdicts.count(Verdict.INCONCLUSIVE),
        refused=verdicts.count(Verdict.UNSUPPORTED),
        broken=verdicts.count(Verdict.ERROR),
        tensors={name: _errors(stats) for name, stats in found.items()},
    )


def _power(ulp: float) -> int:
    """The least n, from `_EXACT` to `_MANY`, such that the error is at most 2^n ulps."""
    if ulp <= 2.0**_EXACT:
        return _EXACT
    mantissa, exponent = math.frexp(ulp)
    return min(_MANY, exponent - (mantissa == 0.5))


def _errors(stats: list[TensorStats]) -> Errors:
    # Without an element there is nothing to be off.
    leans = [one.bias for one in stats if one.elements > one.inconclusive]
    return Errors(
        cases=len(leans),
        elements=sum(one.elements for one in stats),
        inconclusive=sum(one.inconclusive for one in stats),
        ratio=max(one.ratio for one in stats),
        ulp=max(one.ulp for one in stats),
        ulps=dict(Counter(_power(one.ulp) for one in stats)),
        bias=math.fsum(leans),
        bias_squares=math.fsum(lean * lean for lean in leans),
    )
