"""Which charts a report has: err/bound against length, head_dim and precision, and errors in ulps.

A run may hold 20,000 cases: the worst case of every bin is always drawn, with a tooltip that gives
its line; of the rest an evenly spaced sample is drawn as a cloud.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from fa_verify.report import svg
from fa_verify.report.result import TENSORS, Result, compared
from fa_verify.report.text import clean, number

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from markupsafe import Markup

    from fa_verify.record import TensorStats
    from fa_verify.report.summary import Summary

__all__ = ["KernelCharts", "charts"]

_CLOUD: Final = 40_000  # small points on the page, about 9 bytes each
_TOOLTIPS: Final = 5_000  # about 200 bytes each
_BINS: Final = 12
_KERNELS: Final = 12  # with charts
_RATIOS: Final = (1e-3, 1e4)  # of the axis: what is beyond is drawn at its end
_ULPS: Final = (1e-1, 1e9)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelCharts:
    """The charts of one kernel.

    Attributes:
        kernel: Its name.
        overview: err/bound by precision, and ulps by precision.
        by_length: err/bound against seqlen_k, a panel for each precision.
        by_head_dim: Likewise against head_dim.
    """

    kernel: str
    overview: tuple[Markup, ...]
    by_length: tuple[Markup, ...]
    by_head_dim: tuple[Markup, ...]


def charts(summary: Summary) -> list[KernelCharts]:
    """Charts of each kernel that compared anything, failing kernels first, at most a dozen."""
    compared: defaultdict[str, list[Result]] = defaultdict(list)
    for result in summary.results:
        if result.record.tensors:
            compared[result.kernel].append(result)
    names = sorted(compared, key=lambda name: (name not in summary.failed, name))[:_KERNELS]
    panels = sum(len(_by_precision(compared[name])) for name in names)
    series = max(1, 2 * panels * len(TENSORS))
    density = _Density(
        sample=max(20, _CLOUD // series), bins=max(4, min(_BINS, _TOOLTIPS // series))
    )
    return [_kernel(name, compared[name], density) for name in names]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Density:
    """How many small points a series has, and in how many bins its worst cases are sought."""

    sample: int
    bins: int


def _kernel(name: str, results: Sequence[Result], density: _Density) -> KernelCharts:
    groups = _by_precision(results)
    longest = max(result.case.problem.seqlen_k for result in results)
    widest = max(result.case.problem.head_dim for result in results)
    ratio = _axis([s.ratio for r in results for s in r.record.tensors.values()], *_RATIOS)
    ulps = _axis([s.ulp for r in results for s in r.record.tensors.values()], *_ULPS)
    length = svg.lengths("seqlen_k", longest)
    head_dim = svg.steps("head_dim", widest, 64 if widest > 128 else 32)  # ticks
    return KernelCharts(
        kernel=name,
        overview=(
            _spread(
                "Error / bound by precision", groups, ratio, lambda stats: stats.ratio, rule=1.0
            ),
            _spread("Error in ulps by precision", groups, ulps, lambda stats: stats.ulp),
        ),
        by_length=tuple(
            _scatter(
                key,
                found,
                length,
                ratio,
                measure=lambda r: r.case.problem.seqlen_k,
                density=density,
            )
            for key, found in groups.items()
        ),
        by_head_dim=tuple(
            _scatter(
                key,
                found,
                head_dim,
                ratio,
                measure=lambda r: r.case.problem.head_dim,
                density=density,
            )
            for key, found in groups.items()
        ),
    )


def _by_precision(results: Sequence[Result]) -> dict[str, list[Result]]:
    groups: defaultdict[str, list[Result]] = defaultdict(list)
    for result in results:
        groups[result.precision].append(result)
    return dict(sorted(groups.items()))


def _axis(values: Sequence[float], lowest: float, highest: float) -> svg.Axis:
    """As much of lowest to highest as the values need, and at least 0.1 to 10."""
    least = min((value for value in values if value > 0), default=lowest)
    return svg.decades(max(lowest, min(least, 0.1)), min(highest, max([10.0, *values])))


def _label(result: Result, tensor: str, stats: TensorStats) -> str:
    return (
        f"{tensor}: err/bound {number(stats.ratio)}, {number(stats.ulp)} ulps\n"
        f"{clean(result.record.case)}"
    )


def _tensors(results: Sequence[Result]) -> tuple[str, ...]:
    return compared({name for result in results for name in result.record.tensors})


def _scatter(
    title: str,
    results: Sequence[Result],
    x: svg.Axis,
    y: svg.Axis,
    *,
    measure: Callable[[Result], float],
    density: _Density,
) -> Markup:
    series = []
    for tensor in _tensors(results):
        found = [
            (measure(result), result.record.tensors[tensor], result)
            for result in results
            if tensor in result.record.tensors
        ]
        worst: dict[int, tuple[float, str, svg.Point]] = {}
        for value, stats, result in found:
            cell = math.floor(min(1.0, x.place(value)) * density.bins)
            best = worst.get(cell)
            if best is None or (stats.ratio, result.record.case) > best[:2]:
                point = svg.Point(value, stats.ratio, _label(result, tensor, stats))
                worst[cell] = (stats.ratio, result.record.case, point)
        stride = max(1, math.ceil(len(found) / density.sample))
        series.append(
            svg.Series(
                css=f"t-{tensor}",
                cloud=[svg.Point(value, stats.ratio) for value, stats, _ in found[::stride]],
                points=[point for _, _, point in worst.values()],
            )
        )
    return svg.panel(title, series, x, y, rule=1.0)


def _spread(
    title: str,
    groups: dict[str, list[Result]],
    y: svg.Axis,
    measure: Callable[[TensorStats], float],
    rule: float | None = None,
) -> Markup:
    series = []
    names = _tensors([result for results in groups.values() for result in results])
    for place, tensor in enumerate(names):
        marks, points = [], []
        for index, results in enumerate(groups.values()):
            found = [result for result in results if tensor in result.record.tensors]
            if not found:
                continue
            x = index + (place + 1) / (len(names) + 1)
            values = [measure(result.record.tensors[tensor]) for result in found]
            worst = max(found, key=lambda r: (measure(r.record.tensors[tensor]), r.record.case))
            label = _label(worst, tensor, worst.record.tensors[tensor])
            marks.append(svg.Mark(x, min(values), statistics.median(values), max(values)))
            points.append(svg.Point(x, max(values), label))
        series.append(svg.Series(css=f"t-{tensor}", marks=marks, points=points))
    axis = svg.categories("worst (dot), median (bar) and least of the cases", tuple(groups))
    return svg.panel(title, series, axis, y, size=(540, 220), rule=rule)
