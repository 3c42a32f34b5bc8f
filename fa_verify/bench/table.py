"""Tables of what was timed: TFLOP/s, the share of the matrix peak, the ratio to each peer."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from fa_verify.bench.points import PEERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fa_verify.bench.points import Point, Roof, Timed

__all__ = ["heading", "line", "markdown"]

_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


def line(timed: Sequence[Timed]) -> str:
    """What the contestants took for one point, for the terminal."""
    point = timed[0].point
    return f"{heading(point)} N {point.seqlen:6}  " + "  ".join(
        f"{t.name} {t.tflops:.0f}" if not t.error else f"{t.name} -" for t in timed
    )


def heading(point: Point) -> str:
    """What points of one table share."""
    mask = "causal" if point.causal else "full"
    return f"{point.direction} {_SHORT[point.dtype]} D {point.head_dim} {mask}"


def markdown(roof: Roof, timed: Sequence[Timed]) -> str:
    """The report: a table for each direction, dtype, head_dim and mask, a row for each length."""
    lines = [
        f"# Attention on {roof.device}",
        "",
        f"torch {roof.torch}, Triton {roof.triton}. TFLOP/s: 4 b h N^2 D operations forward, 2.5",
        "times that backward, half of it causal; medians of rounds in which all took turns.",
        "Peak: torch.mm in the same run, "
        + ", ".join(f"{_SHORT[name]} {rate:.0f} TFLOP/s" for name, rate in roof.tflops.items())
        + ".",
        "",
    ]
    tables: defaultdict[str, defaultdict[int, list[Timed]]] = defaultdict(lambda: defaultdict(list))
    for one in timed:
        tables[heading(one.point)][one.point.seqlen].append(one)
    for name, rows in tables.items():
        lines += [f"## {name}", "", *_table(roof, rows), ""]
    failed = sorted({f"{one.name}: {one.error}" for one in timed if one.error})
    lines += [f"* {text}" for text in failed]
    return "\n".join(lines).rstrip() + "\n"


def _table(roof: Roof, rows: dict[int, list[Timed]]) -> Iterator[str]:
    names = list(dict.fromkeys(one.name for row in rows.values() for one in row))
    peers = [name for name in PEERS if name in names]
    own = [name for name in names if name not in peers]
    head = ["N", *names, *(f"{name} of peak" for name in own)]
    head += [f"{name} / {other}" for name in own for other in peers]
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---:|" * len(head)
    for seqlen, row in sorted(rows.items()):
        rate = {one.name: one.tflops for one in row}
        top = roof.tflops.get(row[0].point.dtype, 0.0)
        cells = [str(seqlen)]
        cells += [f"{rate[name]:.0f}" if rate.get(name) else "-" for name in names]
        cells += [_ratio(rate.get(name), top) for name in own]
        cells += [_ratio(rate.get(name), rate.get(other)) for name in own for other in peers]
        yield "| " + " | ".join(cells) + " |"


def _ratio(over: float | None, under: float | None) -> str:
    return f"{over / under:.2f}" if over and under else "-"
