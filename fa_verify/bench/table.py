"""Tables of what was timed: TFLOP/s, the share of the matrix peak, the ratio to each peer.

Of decoding: microseconds, the share of the bandwidth, the ratio to the fastest peer.
"""

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
    batch = f"B {point.batch:3} " if point.direction == "decode" else ""
    return f"{heading(point)} {batch}N {point.seqlen:6}  " + "  ".join(
        f"{t.name} {_figure(t)}" for t in timed
    )


def heading(point: Point) -> str:
    """What points of one table share."""
    if point.direction == "decode":
        return f"decode {_SHORT[point.dtype]} D {point.head_dim}"
    mask = "causal" if point.causal else "full"
    return f"{point.direction} {_SHORT[point.dtype]} D {point.head_dim} {mask}"


def markdown(roof: Roof, timed: Sequence[Timed]) -> str:
    """The report: a table for each direction, dtype, head_dim and mask, a row for each length."""
    lines = [
        f"# Attention on {roof.device}",
        "",
        f"torch {roof.torch}, Triton {roof.triton}. TFLOP/s: 4 b h N^2 D operations forward, 2.5",
        "times that backward, half of it causal; medians of rounds in which all took turns.",
        "Decoding: one query a sequence, 8 query heads to each of 4 key heads; microseconds.",
        "Peak: torch.mm in the same run, "
        + ", ".join(
            f"{_SHORT[name]} {rate:.0f} TFLOP/s" for name, rate in sorted(roof.tflops.items())
        )
        + (f", reading {roof.terabytes:.2f} TB/s" if roof.terabytes else "")
        + ".",
        "",
    ]
    tables: defaultdict[str, defaultdict[Point, list[Timed]]]
    tables = defaultdict(lambda: defaultdict(list))
    for one in timed:
        tables[heading(one.point)][one.point].append(one)
    for name, rows in tables.items():
        decode = next(iter(rows)).direction == "decode"
        lines += [f"## {name}", "", *(_decode_table if decode else _table)(roof, rows), ""]
    failed = sorted({f"{one.name}: {one.error}" for one in timed if one.error})
    lines += [f"* {text}" for text in failed]
    return "\n".join(lines).rstrip() + "\n"


def _names(rows: dict[Point, list[Timed]]) -> tuple[list[str], list[str], list[str]]:
    """Of all contestants, kernels, and peers."""
    names = list(dict.fromkeys(one.name for row in rows.values() for one in row))
    peers = [name for name in PEERS if name in names]
    return names, [name for name in names if name not in peers], peers


def _table(roof: Roof, rows: dict[Point, list[Timed]]) -> Iterator[str]:
    names, own, peers = _names(rows)
    head = ["N", *names, *(f"{name} of peak" for name in own)]
    head += [f"{name} / {other}" for name in own for other in peers]
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---:|" * len(head)
    for point, row in sorted(rows.items(), key=lambda item: item[0].seqlen):
        rate = {one.name: one.tflops for one in row}
        top = roof.tflops.get(point.dtype, 0.0)
        cells = [str(point.seqlen)]
        cells += [f"{rate[name]:.0f}" if rate.get(name) else "-" for name in names]
        cells += [_ratio(rate.get(name), top) for name in own]
        cells += [_ratio(rate.get(name), rate.get(other)) for name in own for other in peers]
        yield "| " + " | ".join(cells) + " |"


def _decode_table(roof: Roof, rows: dict[Point, list[Timed]]) -> Iterator[str]:
    names, own, peers = _names(rows)
    head = ["batch", "keys", *names, *(f"{name} of bandwidth" for name in own), "fastest peer"]
    head += [f"{name} / fastest" for name in own]
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---:|" * len(head)
    for point, row in sorted(rows.items(), key=lambda item: (item[0].batch, item[0].seqlen)):
        took = {one.name: one for one in row if one.milliseconds}
        rivals = [name for name in peers if name in took]
        fastest = min(rivals, key=lambda name: took[name].milliseconds, default="")
        best = took[fastest].terabytes if fastest else 0.0
        rate = {name: one.terabytes for name, one in took.items()}
        cells = [str(point.batch), str(point.seqlen)]
        cells += [_figure(took[name]) if name in took else "-" for name in names]
        cells += [_ratio(rate.get(name), roof.terabytes) for name in own]
        cells += [fastest or "-", *(_ratio(rate.get(name), best) for name in own)]
        yield "| " + " | ".join(cells) + " |"


def _figure(one: Timed) -> str:
    """TFLOP/s, or of decoding the microseconds that it took."""
    if one.error:
        return "-"
    decode = one.point.direction == "decode"
    return f"{1e3 * one.milliseconds:.1f}" if decode else f"{one.tflops:.0f}"


def _ratio(over: float | None, under: float | None) -> str:
    return f"{over / under:.2f}" if over and under else "-"
