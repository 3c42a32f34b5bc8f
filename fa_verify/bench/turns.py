"""One point: every contestant prepared, checked against the first, and timed in turns."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch

from fa_verify.bench import contestants
from fa_verify.bench.points import Timed
from fa_verify.bench.timing import Stopwatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from fa_verify.bench.contestants import Contestant
    from fa_verify.bench.points import Point

__all__ = ["DeviceLostError", "take"]

# Sets of inputs: at least two, and as many as exceed an H200's 50 MB of L2 threefold; at 16,384
# tokens of 2048 columns two exceed it sevenfold.
_SETS, _BYTES = 2, 150 << 20
_WORDS = 200  # of an error
# Turns after which a point ends if every contestant's spread is small: twice what is usual, 0.4 to
# 1.6% (medians of 700 rows of an H200).
_ENOUGH, _STEADY = 3, 0.03


class DeviceLostError(Exception):
    """A contestant broke the process's context on the device: nothing more runs in it."""


def take(
    point: Point,
    running: Sequence[Contestant],
    rounds: int,
    milliseconds: float,
    at: Callable[[str], None],
) -> list[Timed]:
    """Time all contestants of one point.

    Args:
        point: The problem.
        running: The contestants.
        rounds: Most turns of each.
        milliseconds: Of launches in a turn.
        at: Told the name of the contestant that runs next.

    Raises:
        DeviceLostError: The one named last ended the context.
    """
    count = max(_SETS, -(-_BYTES // point.bytes_read))
    sets = [contestants.inputs(point, "cuda", seed) for seed in range(count)]
    watches: dict[str, Stopwatch] = {}
    errors: dict[str, str] = {}
    differences: dict[str, float] = {}
    first: tuple[Tensor, ...] | None = None
    for one in running:
        at(one.name)
        try:
            functions = [one.prepare(point, given) for given in sets]
            results = functions[0]()
            first = first or results
            differences[one.name] = _difference(first, results)
            watches[one.name] = Stopwatch.of(functions, milliseconds)
        except Exception as error:  # noqa: BLE001 - any contestant may refuse, in any words
            errors[one.name] = _text(error)
            _survey(error)
    for turn in range(rounds):
        if turn >= _ENOUGH and all(watch.spread < _STEADY for watch in watches.values()):
            break
        for name, watch in watches.items():
            at(name)
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


def _survey(error: Exception) -> None:
    """Raise if the device does not answer any more after an error."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        raise DeviceLostError(_text(error)) from error


def _text(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:_WORDS]


def _difference(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Largest |difference| of results."""
    return max(float((x.float() - y.float()).abs().max()) for x, y in zip(a, b, strict=True))
