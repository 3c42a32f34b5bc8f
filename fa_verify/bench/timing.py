"""Times of contestants side by side: CUDA graphs of launches, replayed in turns.

A graph leaves the host out: what is timed is the device. The launches of a graph go through several
sets of inputs in turn, which together do not fit the device's L2. In each round every contestant
has its turn, so that a clock that drifts meets all alike. The median of the rounds counts.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Stopwatch", "peak"]

_MATRIX = 8192  # rows and columns of torch.mm: past 4096 the rate of an H100 is flat
_ROUNDS = 5


@dataclasses.dataclass(slots=True)
class Stopwatch:
    """Launches of one contestant, captured.

    Attributes:
        graph: Of `launches` launches.
        launches: How many.
        functions: That were captured. They hold what the launches read: a graph does not, and the
            next capture gives all memory that nobody holds back to the driver.
        rounds: Milliseconds a launch of each round.
    """

    graph: torch.cuda.CUDAGraph
    launches: int
    functions: Sequence[Callable[[], object]]
    rounds: list[float] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, functions: Sequence[Callable[[], object]], milliseconds: float) -> Stopwatch:
        """Capture about `milliseconds` of launches that take the functions in turn."""
        stream = torch.cuda.current_stream()
        for function in functions:  # compiles, tunes, fills caches
            function()
        once = _elapsed(functions[0])
        turns = max(1, round(milliseconds / max(once, 1e-3) / len(functions)))
        graph = torch.cuda.CUDAGraph()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(turns):
                for function in functions:
                    function()
        graph.replay()
        return cls(graph, turns * len(functions), functions)

    def turn(self) -> None:
        """Time one replay."""
        self.rounds.append(_elapsed(self.graph.replay) / self.launches)

    @property
    def median(self) -> float:
        """Milliseconds a launch."""
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median."""
        return (max(self.rounds) - min(self.rounds)) / self.median


def peak(dtype: torch.dtype, milliseconds: float) -> float:
    """10^12 operations a second of a large torch.mm."""
    pairs = [
        tuple(torch.randn(_MATRIX, _MATRIX, device="cuda", dtype=dtype) for _ in range(2))
        for _ in range(2)
    ]
    out = torch.empty(_MATRIX, _MATRIX, device="cuda", dtype=dtype)
    watch = Stopwatch.of(
        [functools.partial(torch.mm, a, b, out=out) for a, b in pairs], milliseconds
    )
    for _ in range(_ROUNDS):
        watch.turn()
    return 2.0 * _MATRIX**3 / watch.median / 1e9


def _elapsed(function: Callable[[], object]) -> float:
    """Milliseconds on the device."""
    begin, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    begin.record()
    function()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))
