"""The same launch many times under stress: whether anything moves, where, how far, beside what."""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

import torch

from fa_verify.bounds import FORMATS
from fa_verify.checks.observed import compare, comparisons, sound
from fa_verify.checks.rerun import agree, differing, outputs, screen
from fa_verify.checks.where import describe
from fa_verify.verdict import Failure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.trial import Trial

__all__ = ["check"]

_TWIN = "beside its twin on another stream"
_ON_THE_CARD: tuple[tuple[str, dict[str, str]], ...] = (
    ("run again", {}),
    ("beside a load", {"beside": "load"}),
    (_TWIN, {"beside": "twin"}),
)
_SHARED = (
    "launches on two streams share memory that the launcher keeps between calls, or a part of a "
    "launch runs on another stream than its caller's"
)


def check(trial: Trial) -> Iterator[Failure]:
    """Run the launch `Setup.stress` times more, and judge all runs of a sound case together.

    On a card it runs alone, beside a load, and beside a twin of itself, in turn; on the CPU in
    other orders of its programs. A kernel that is declared deterministic gives the same bits in all
    of them; dq that is summed by atomics moves by no more than its order explains (B50); all else
    stays within its bound. Gradients are conditional on o and lse, so those of a run with another
    o or lse count only where the bits are promised.
    """
    execution = trial.execution
    unfit = execution.error or execution.incidents or execution.unwritten
    if not trial.setup.stress or unfit or not all(map(sound, comparisons(trial).values())):
        return
    promised = trial.kernel.capabilities
    exact = promised is not None and promised.deterministic
    parts = comparisons(trial)
    first = {name: x for name, x in outputs(execution).items() if name in parts}
    seen = {name: _Range.of(x) for name, x in first.items()}
    for number in range(trial.setup.stress):
        how, setup = _way(trial, number)
        again = trial.rerun(trial.pristine, backward=trial.case.backward, **setup)  # type: ignore[arg-type]
        found = list(screen(again, how))
        if found:
            yield from found
            return
        results = outputs(again)
        same = agree(first, results)
        alike = all(same.get(name, True) for name in ("o", "lse"))
        for name, extent in seen.items():
            if name in results and (exact or alike or name in ("o", "lse")):
                extent.add(results[name], how, same=same[name])
    for name, extent in seen.items():
        if extent.moved:
            yield from _judge(trial, name, extent, exact=exact)


def _way(trial: Trial, number: int) -> tuple[str, dict[str, str]]:
    """What the launch meets in its so manieth further run."""
    if trial.setup.backend == "cuda":
        return _ON_THE_CARD[number % len(_ON_THE_CARD)]
    order = f"shuffled:{(trial.case.seed + number) % 2**32}" if number else "reverse"
    return f"programs {order}", {"schedule": order}


@dataclasses.dataclass(slots=True)
class _Range:
    """What a tensor was in all runs.

    Attributes:
        first: In the run that is judged by itself.
        low: The least of each element, float64; NaN where it once was NaN; high likewise.
        changed: bool, where a run differed from the first.
        runs: How many further runs there were, by what they met; moved: in which anything moved.
    """

    first: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    changed: torch.Tensor
    runs: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    moved: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    @classmethod
    def of(cls, first: torch.Tensor) -> _Range:
        wide = first.to(torch.float64)
        return cls(first, wide, wide, torch.zeros_like(first, dtype=torch.bool))

    def add(self, x: torch.Tensor, how: str, *, same: bool) -> None:
        self.runs[how] += 1
        if not same:
            self.moved[how] += 1
            self.changed |= differing(self.first, x)
            wide = x.to(torch.float64)
            self.low, self.high = torch.minimum(self.low, wide), torch.maximum(self.high, wide)


def _judge(trial: Trial, name: str, extent: _Range, *, exact: bool) -> Iterator[Failure]:
    part = comparisons(trial)[name]
    bounded = part.bounded
    spread = (extent.high - extent.low).nan_to_num(nan=torch.inf)
    if exact:
        wrong, allowed = extent.changed, bounded.det
        because = "of its bound, and the kernel is declared deterministic"
    elif name == "dq" and trial.kernel.arithmetic.dq_atomics and part.conditional:
        allowed = trial.dq_spread
        wrong = extent.changed & ~(spread <= allowed) & allowed.isfinite()
        because = "of what the order of its sums explains"
    else:
        allowed = bounded.det
        ends = [
            compare(trial, name, end, bounded, conditional=part.conditional)
            for end in (extent.low, extent.high)
        ]
        wrong = extent.changed & torch.stack([(e.ratio > 1) | e.broken for e in ends]).any(0)
        because = "of its bound, which each run must keep"
    if not bool(wrong.any()):
        return
    far = torch.where(wrong, spread, -1.0)
    index = part.worst(far)
    place = ", ".join(map(str, index))
    least, most = float(extent.low[index]), float(extent.high[index])
    steps = float(spread[index] / FORMATS[part.dtype].ulp(bounded.reference[index]))
    share = float(spread[index] / allowed[index])
    met = ", ".join(f"{extent.moved[how]} of {n} {how}" for how, n in extent.runs.items())
    yield Failure(
        check="determinism",
        title=f"{name} moves from run to run",
        message=(
            f"{name}[{place}] lies between {least:.9g} and {most:.9g} in "
            f"{1 + extent.runs.total()} runs of one launch: {steps:.3g} ulp, {share:.3g} "
            f"{because}; it moved in {met}; {int(wrong.sum())} of {wrong.numel()} elements: "
            f"{describe(name, wrong)}"
        ),
        tensor=name,
        diagnosis=_SHARED if extent.moved.total() == extent.moved[_TWIN] > 1 else "",
    )
