"""`bench`: how fast kernels are on a device, side by side with PyTorch's own attention."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING

import msgspec
import torch
import triton
from rich.console import Console
from rich.text import Text

from fa_verify import loader
from fa_verify.bench import contestants, table
from fa_verify.bench.points import Roof, Timed, decodes, grid
from fa_verify.bench.reading import bandwidth
from fa_verify.bench.timing import Stopwatch, peak
from fa_verify.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from fa_verify.bench.contestants import Contestant
    from fa_verify.bench.points import Pass, Point
    from fa_verify.problem import DType

__all__ = ["bench"]

_NOTHING = 3
# Sets of inputs: at least two, and as many as exceed an H200's 50 MB of L2 threefold; at 16,384
# tokens of 2048 columns two exceed it sevenfold.
_SETS, _BYTES = 2, 150 << 20
_WORDS = 200  # of an error


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
        budget: Seconds after which no point is begun; None: no limit.

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
    running = [*map(contestants.kernel, kernels.values()), *map(contestants.peer, peers)]
    begin = time.monotonic()
    timed: list[Timed] = []
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        roof = Roof(
            device=torch.cuda.get_device_name(),
            torch=torch.__version__,
            triton=triton.__version__,
            tflops={name: peak(getattr(torch, name), milliseconds) for name in dtypes},
            terabytes=bandwidth(milliseconds) if "decode" in directions else 0.0,
        )
        square = [direction for direction in directions if direction != "decode"]
        points = [
            *grid(square, dtypes, head_dims, causal=causal, seqlens=seqlens, tokens=tokens),
            *(decodes(dtypes, head_dims, batches, keys) if "decode" in directions else ()),
        ]
        for point in points:
            if budget is not None and time.monotonic() - begin > budget:
                console.print(f"--budget: {budget:.0f} s are over, the rest is left out")
                break
            row = _point(point, running, rounds, milliseconds)
            timed += row
            console.print(table.line(row), markup=False, soft_wrap=True)
            _write(folder, roof, timed)
    for path in ("bench.jsonl", "bench.md"):
        console.print(Text(str(folder / path), style="dim"), soft_wrap=True)
    return 0 if any(not one.peer and not one.error for one in timed) else _NOTHING


def _point(
    point: Point, running: Sequence[Contestant], rounds: int, milliseconds: float
) -> list[Timed]:
    """Time all contestants of one point, in turns."""
    count = max(_SETS, -(-_BYTES // point.bytes_read))
    sets = [contestants.inputs(point, "cuda", seed) for seed in range(count)]
    watches: dict[str, Stopwatch] = {}
    errors: dict[str, str] = {}
    differences: dict[str, float] = {}
    first: tuple[Tensor, ...] | None = None
    for one in running:
        try:
            functions: list[Callable[[], tuple[Tensor, ...]]] = [
                one.prepare(point, given) for given in sets
            ]
            results = functions[0]()
            first = first or results
            differences[one.name] = _difference(first, results)
            watches[one.name] = Stopwatch.of(functions, milliseconds)
        except Exception as error:  # noqa: BLE001 - any contestant may refuse, in any words
            errors[one.name] = " ".join(f"{type(error).__name__}: {error}".split())[:_WORDS]
    for _ in range(rounds):
        for watch in watches.values():
            watch.turn()
    row = [
        Timed(
            point=point,
            name=one.name,
            peer=one.peer,
            milliseconds=watches[one.name].median if one.name in watches else 0.0,
            spread=watches[one.name].spread if one.name in watches else 0.0,
            difference=differences.get(one.name, 0.0),
            error=errors.get(one.name, ""),
        )
        for one in running
    ]
    watches.clear()
    gc.collect()  # graphs keep their memory until they are gone
    return row


def _difference(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Largest |difference| of results."""
    return max(float((x.float() - y.float()).abs().max()) for x, y in zip(a, b, strict=True))


def _write(folder: Path, roof: Roof, timed: Sequence[Timed]) -> None:
    """Write both files anew: what was timed before an interruption is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    encoder = msgspec.json.Encoder(order="deterministic")
    lines = [encoder.encode(line) + b"\n" for line in (roof, *timed)]
    (folder / "bench.jsonl").write_bytes(b"".join(lines))
    (folder / "bench.md").write_text(table.markdown(roof, timed), encoding="utf-8")
