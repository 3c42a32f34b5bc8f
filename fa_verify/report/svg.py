"""Small charts as inline SVG: axes, ticks, points with tooltips. Knows nothing of kernels.

Colours come from the page's style sheet by class, so that one drawing serves light and dark.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from markupsafe import Markup, escape

__all__ = ["Axis", "Mark", "Point", "Series", "categories", "decades", "lengths", "panel", "steps"]

_LEFT, _RIGHT, _TOP, _BOTTOM = 36, 12, 22, 32
_GRID: Final = 2  # pixels: points closer than this are one
_EDGE: Final = 3  # pixels from the frame at which a clamped point is drawn


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Where a value lies between the ends of an axis.

    Attributes:
        label: What it shows, written below; a vertical axis is named by the chart's title.
        place: Value to 0 .. 1; outside means beyond the axis, and is drawn at its end.
        ticks: Values that get a line, and their text.
    """

    label: str
    place: Callable[[float], float]
    ticks: tuple[tuple[float, str], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One value, with a tooltip if it has a label."""

    x: float
    y: float
    label: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """A spread at one x: a line from low to high and a bar at the middle."""

    x: float
    low: float
    middle: float
    high: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Things of one colour.

    Attributes:
        css: Class that the style sheet colours.
        cloud: Points drawn small and without a tooltip.
        points: Points drawn large, each with its tooltip.
        marks: Spreads.
    """

    css: str
    cloud: Sequence[Point] = ()
    points: Sequence[Point] = ()
    marks: Sequence[Mark] = ()


def decades(low: float, high: float) -> Axis:
    """A log10 axis; 0 lies below it."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    step = 1 if last - first <= 6 else 2 if last - first <= 12 else 4  # labels that fit
    return Axis(
        label="",
        place=lambda value: (math.log10(value) - first) / (last - first) if value > 0 else -1.0,
        ticks=tuple((10.0**e, _power(e)) for e in range(first, last + 1, step)),
    )


def lengths(label: str, high: float) -> Axis:
    """A log2 axis for lengths that may be 0: log2(1 + length)."""
    top = math.log2(1 + max(high, 15))
    ticks = [(0.0, "0")] + [(4.0**n, f"{4**n}") for n in range(1, math.floor(top / 2 + 1e-9) + 1)]
    if len(ticks) > 7:  # labels that fit
        ticks = [ticks[0], *ticks[2::2]]
    return Axis(label=label, place=lambda value: math.log2(1 + value) / top, ticks=tuple(ticks))


def steps(label: str, high: float, step: int) -> Axis:
    """A linear axis from 0."""
    top = step * max(1, math.ceil(high / step))
    ticks = tuple((float(n), str(n)) for n in range(0, top + 1, step))
    return Axis(label=label, place=lambda value: value / top, ticks=ticks)


def categories(label: str, names: Sequence[str]) -> Axis:
    """Names side by side; name i is at i + 0.5."""
    ticks = tuple((index + 0.5, name) for index, name in enumerate(names))
    return Axis(label=label, place=lambda value: value / max(1, len(names)), ticks=ticks)


def panel(
    title: str,
    series: Iterable[Series],
    x: Axis,
    y: Axis,
    *,
    size: tuple[int, int] = (222, 170),
    rule: float | None = None,
) -> Markup:
    """One chart; the values above `rule` are set apart.

    Args:
        title: Above the chart, and what a screen reader says.
        series: In drawing order.
        x: Horizontal axis.
        y: Vertical axis.
        size: Width and height in pixels.
        rule: The y value above which the ground is tinted, None for none.
    """
    width, height = size
    inner = (width - _LEFT - _RIGHT, height - _TOP - _BOTTOM)

    def spot(value_x: float, value_y: float) -> tuple[float, float]:
        right = _LEFT + min(1.0, max(0.0, x.place(value_x))) * inner[0]
        down = _TOP + (1 - min(1.0, max(0.0, y.place(value_y)))) * inner[1]
        return right, min(max(down, _TOP + _EDGE), _TOP + inner[1] - _EDGE)

    parts = [
        (
            f'<svg class="chart" viewBox="0 0 {width} {height}"'
            f' role="img" aria-label="{escape(title)}">'
        ),
        f'<text class="chart-title" x="{_LEFT}" y="14">{escape(title)}</text>',
    ]
    parts += [_tick_y(y.place(value), text, width, inner[1]) for value, text in y.ticks]
    parts += [_tick_x(x.place(value), text, height, inner[0]) for value, text in x.ticks]
    parts.append(
        f'<text x="{_LEFT + inner[0] / 2:.0f}" y="{height - 4}"'
        f' text-anchor="middle">{escape(x.label)}</text>'
    )
    if rule is not None:
        level = (1 - y.place(rule)) * inner[1]
        parts.append(
            f'<rect class="over" x="{_LEFT}" y="{_TOP}" width="{inner[0]}" height="{level:.1f}"/>'
            f'<path class="rule" d="M{_LEFT} {_TOP + level:.1f}h{inner[0]}"/>'
        )
    drawn = list(series)
    parts += [_cloud(one, spot) for one in drawn if one.cloud]
    for one in drawn:
        parts += [_mark(mark, one.css, spot) for mark in one.marks]
        parts += [_dot(point, one.css, spot, above=y.place(point.y) > 1) for point in one.points]
    return Markup("".join([*parts, "</svg>"]))  # noqa: S704  # every text above is escaped


_Spot = Callable[[float, float], tuple[float, float]]


def _power(exponent: int) -> str:
    return f"{10.0**exponent:g}" if -3 <= exponent <= 3 else f"1e{exponent}"  # short


def _tick_y(place: float, text: str, width: int, height: int) -> str:
    down = _TOP + (1 - place) * height
    return (
        f'<path class="grid" d="M{_LEFT} {down:.1f}H{width - _RIGHT}"/>'
        f'<text x="{_LEFT - 4}" y="{down + 3:.1f}" text-anchor="end">{escape(text)}</text>'
    )


def _tick_x(place: float, text: str, height: int, width: int) -> str:
    right, base = _LEFT + place * width, height - _BOTTOM
    return (
        f'<path class="grid" d="M{right:.1f} {_TOP}V{base}"/>'
        f'<text x="{right:.1f}" y="{base + 12}" text-anchor="middle">{escape(text)}</text>'
    )


def _cloud(series: Series, spot: _Spot) -> str:
    """All small points as one path of zero-length strokes: a tenth of the bytes of circles."""
    cells = set()
    for point in series.cloud:
        right, down = spot(point.x, point.y)
        cells.add((round(right / _GRID) * _GRID, round(down / _GRID) * _GRID))
    path = "".join(f"M{right} {down}h0" for right, down in sorted(cells))
    return f'<path class="cloud {series.css}" d="{path}"/>'


def _mark(mark: Mark, css: str, spot: _Spot) -> str:
    right, low = spot(mark.x, mark.low)
    _, high = spot(mark.x, mark.high)
    _, middle = spot(mark.x, mark.middle)
    return (
        f'<path class="spread {css}" d="M{right:.1f} {low:.1f}V{high:.1f}"/>'
        f'<path class="median {css}" d="M{right - 4:.1f} {middle:.1f}h8"/>'
    )


def _dot(point: Point, css: str, spot: _Spot, *, above: bool) -> str:
    right, down = spot(point.x, point.y)
    title = f"<title>{escape(point.label)}</title>" if point.label else ""
    if above:  # beyond the axis: an arrow head at the edge
        arrow = f"M{right - 3.5:.1f} {down + 3:.1f}h7l-3.5-6z"
        return f'<path class="dot {css}" d="{arrow}">{title}</path>'
    return f'<circle class="dot {css}" cx="{right:.1f}" cy="{down:.1f}" r="2.6">{title}</circle>'
