"""`bench`: how fast kernels are on a device, side by side with PyTorch's own attention."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
import torch
from rich.console import Console
from rich.text import Text

from fa_verify import loader
from fa_verify.bench import beforehand, table
from fa_verify.bench.child import Child, Order
from fa_verify.bench.points import decodes, grid
from fa_verify.errors import InvalidInputError
from fa_verify.record import writing

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fa_verify.bench.points import Pass, Point, Roof, Timed
    from fa_verify.problem import DType

__all__ = ["bench"]

_NOTHING = 3
_COMPILING = 0.5  # of the budget: flex_attention compiles for each point, 2 s forward, 5 s backward
_UNREADY = "unavailable: not compiled within its part of --budget"


def bench(
    targets: Sequence[str],
    folder: Path,
    *,
    directions: Sequence[Pass],
    dtypes: Sequence[DType],
    head_dims: Sequence[int],
    causal: Sequence[bool],
    seqlens: Sequence[int],
    tokens: int,
    batches: Sequence[int],
    keys: Sequence[int],
    peers: Sequence[str],
    rounds: int,
    milliseconds: float,
    budget: float | None,
    workers: int | None,
) -> int:
    """Time kernels and peers, print, write bench.jsonl and bench.md, return the exit code.

    Args:
        targets: Kernels, as `loader.load` reads them.
        folder: Where the files go.
        directions: Passes.
        dtypes: Of q, k and v.
        head_dims: Of q, k and v.
        causal: With the causal mask, without, or both.
        seqlens: Of queries and of keys.
        tokens: Batch times seqlen of each point.
        batches: Sequences of each point of decoding.
        keys: Keys a sequence of each point of decoding.
        peers: Which of `points.PEERS`.
        rounds: Turns of each contestant at a point.
        milliseconds: Of launches in a turn.
        budget: Seconds after which no point is begun, and part of which is for compiling
            beforehand; None: no limit.
        workers: Processes that compile beforehand; None: what is needed is compiled when it is.

    Returns:
        0; 3 where no kernel was timed.

    Raises:
        InvalidInputError: There is no CUDA device, or no kernel.
    """
    if not torch.cuda.is_available():
        msg = "device=None: bench times kernels on a CUDA device and torch sees none; run it there"
        raise InvalidInputError(msg)
    kernels = {kernel.target: kernel for target in targets for kernel in loader.load(target)}
    if not kernels:
        msg = f"targets={', '.join(targets)}: no Kernel found; name a file or folder that has some"
        raise InvalidInputError(msg)
    console = Console(highlight=False)
    begin = time.monotonic()
    square = [direction for direction in directions if direction != "decode"]
    points = [
        *grid(square, dtypes, head_dims, causal=causal, seqlens=seqlens, tokens=tokens),
        *(decodes(dtypes, head_dims, batches, keys) if "decode" in directions else ()),
    ]
    order = Order(
        targets=tuple(targets),
        peers=tuple(peers),
        dtypes=tuple(dtypes),
        directions=tuple(directions),
        rounds=rounds,
        milliseconds=milliseconds,
    )
    unready: frozenset[Point] = frozenset()
    if workers is not None:
        limit = None if budget is None else _COMPILING * budget
        failed, unready = beforehand.compile_all(targets, peers, points, workers, limit)
        took = f"compiled in {time.monotonic() - begin:.0f} s"
        console.print(f"{took}; failed: {', '.join(sorted(set(failed))) or 'none'}", markup=False)
    child = Child(order, {k.name: False for k in kernels.values()} | dict.fromkeys(peers, True))
    timed: list[Timed] = []
    try:
        for point in points:
            if budget is not None and time.monotonic() - begin > budget:
                console.print(f"--budget: {budget:.0f} s are over, the rest is left out")
                break
            row = child.row(point, {beforehand.FLEX: _UNREADY} if point in unready else None)
            timed += row
            console.print(table.line(row), markup=False, soft_wrap=True)
            if child.roof is not None:
                _write(folder, child.roof, timed)
    finally:
        child.close()
    for path in ("bench.jsonl", "bench.md"):
        console.print(Text(str(folder / path), style="dim"), soft_wrap=True)
    return 0 if any(not one.peer and not one.error for one in timed) else _NOTHING


def _write(folder: Path, roof: Roof, timed: Sequence[Timed]) -> None:
    """Write both files anew: what was timed before an interruption is kept."""
    encoder = msgspec.json.Encoder(order="deterministic")
    lines = [encoder.encode(line) + b"\n" for line in (roof, *timed)]
    with writing("report", folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "bench.jsonl").write_bytes(b"".join(lines))
        (folder / "bench.md").write_text(table.markdown(roof, timed), encoding="utf-8")
