"""A process that times points; a fault on the device ends it, and the next one goes on.

What was timed before is kept, the contestant that broke it is named, and the others of the point
are timed without it.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
from typing import TYPE_CHECKING, Any

import msgspec

from fa_verify.bench.points import Pass, Point, Roof, Timed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.connection import Connection

    from fa_verify.problem import DType

__all__ = ["Child", "Order", "serve"]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What every point is timed with.

    Attributes:
        targets: Kernels, as `loader.load` reads them.
        peers: Which of `points.PEERS`.
        dtypes: Of the points: the matrix peak is measured in each.
        directions: Of the points: decoding needs the memory's bandwidth.
        rounds: Turns of each contestant.
        milliseconds: Of launches in a turn.
    """

    targets: tuple[str, ...]
    peers: tuple[str, ...]
    dtypes: tuple[DType, ...]
    directions: tuple[Pass, ...]
    rounds: int
    milliseconds: float


class Lost(msgspec.Struct, frozen=True):
    """A child's last words."""

    error: str


def serve(pipe: Connection, order: Order) -> None:
    """Run in the child: send the roof, then a row for each (point, names left out) received."""
    import torch  # noqa: PLC0415 - the parent needs neither torch nor a context
    import triton  # noqa: PLC0415

    from fa_verify import loader  # noqa: PLC0415
    from fa_verify.bench import contestants, turns  # noqa: PLC0415
    from fa_verify.bench.reading import bandwidth  # noqa: PLC0415
    from fa_verify.bench.timing import peak  # noqa: PLC0415

    kernels = {k.target: k for target in order.targets for k in loader.load(target)}
    running = [*map(contestants.kernel, kernels.values()), *map(contestants.peer, order.peers)]
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        roof = Roof(
            device=torch.cuda.get_device_name(),
            torch=str(torch.__version__),  # a class of torch's own, which msgspec does not encode
            triton=triton.__version__,
            tflops={name: peak(getattr(torch, name), order.milliseconds) for name in order.dtypes},
            terabytes=bandwidth(order.milliseconds) if "decode" in order.directions else 0.0,
        )
        pipe.send(roof)
        gc.freeze()  # each point ends with a collection: 0.2 s of a point's 0.4 to 0.6
        while (asked := pipe.recv()) is not None:
            point, without = asked
            chosen = [one for one in running if one.name not in without]
            try:
                row = turns.take(point, chosen, order.rounds, order.milliseconds, pipe.send)
            except Exception as error:  # noqa: BLE001 - told to the parent, which starts another
                pipe.send(Lost(str(error)))
                return
            pipe.send(row)
            gc.freeze()  # as well what was compiled for this point


class Child:
    """The process, started anew when it has ended.

    Args:
        order: What it times with.
        names: All contestants, and whether each is a peer.
        target: What it runs.
        start_method: Of multiprocessing; a fork would inherit a context.

    Attributes:
        roof: Of the first process; None before it has started.
    """

    def __init__(
        self,
        order: Order,
        names: dict[str, bool],
        target: Callable[[Connection, Order], None] = serve,
        start_method: str = "spawn",
    ) -> None:
        self._context: Any = multiprocessing.get_context(start_method)
        self._order, self._names, self._target = order, names, target
        self._process: Any = None
        self._pipe: Any = None
        self.roof: Roof | None = None

    def start(self) -> None:
        """Start it, unless it runs."""
        if self._process is not None:
            return
        self._pipe, end = self._context.Pipe()
        self._process = self._context.Process(target=self._target, args=(end, self._order))
        self._process.start()
        end.close()  # so that a child that has ended is heard
        roof = self._pipe.recv()
        self.roof = self.roof or roof

    def row(self, point: Point, left_out: Mapping[str, str] | None = None) -> list[Timed]:
        """What each contestant took for a point, in the order of their names.

        Args:
            point: The problem.
            left_out: Contestants that do not run, and why.
        """
        errors = dict(left_out or {})
        while len(errors) < len(self._names):
            running, said = "", None
            try:
                self.start()
                self._pipe.send((point, tuple(errors)))
                while isinstance(said := self._pipe.recv(), str):
                    running = said
            except (EOFError, OSError):
                said = Lost("")
            if isinstance(said, list):
                timed = {one.name: one for one in said}
                return [timed.get(name) or self._lost(point, name, errors) for name in self._names]
            code = self._end()
            running = running or next(name for name in self._names if name not in errors)
            errors[running] = said.error or f"its process ended with exit code {code}"
        return [self._lost(point, name, errors) for name in self._names]

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            with contextlib.suppress(OSError):  # it ended by itself
                self._pipe.send(None)
            self._end()

    def _end(self) -> int | None:
        self._process.join()
        code: int | None = self._process.exitcode
        self._pipe.close()
        self._process = None
        return code

    def _lost(self, point: Point, name: str, errors: dict[str, str]) -> Timed:
        return Timed(point=point, name=name, peer=self._names[name], error=errors[name])
