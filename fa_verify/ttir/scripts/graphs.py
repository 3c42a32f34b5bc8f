"""CUDA graphs: what a program does during a capture is noted, and runs at each replay.

As on a GPU nothing is computed while a graph is captured: results are memory that nobody wrote,
found anew at the same place after each replay, and asking for a value is an error. Each replay is
watched as if the program had launched all of it there. What the graph holds stays alive.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import _disable_current_modes

from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.launch import session
from fa_verify.ttir.launch.allocations import EMPTY
from fa_verify.ttir.scripts.devices import is_composite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fa_verify.ttir.launch.allocations import Allocations
    from fa_verify.ttir.scripts.devices import Devices

_SYNCHRONISES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_META = torch.device("meta")
_pools = count(1)
# What was recorded lies below these.
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)  # noqa: SLF001
_KEYS = _KEYS | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)  # noqa: SLF001


class Recording(session.Recorder):
    """Notes operations on the GPU's tensors, and launches, instead of running them."""

    supports_higher_order_operators = True

    def __init__(self, devices: Devices, run: session.Run) -> None:
        """Start empty."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Callable[[], object]] = []
        self._devices, self._run = devices, run

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """See `Allocations`."""
        return False

    def launch(self, step: Callable[[], object]) -> None:
        """Note a launch (called by the driver)."""
        self.steps.append(step)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Note an operation and return where its results will be."""
        del types
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator) or not self._concerns(args, kwargs):
            return func(*args, **kwargs)
        if is_composite(func):  # in inference mode nobody took it apart
            with self:
                return func.decompose(*args, **kwargs)
        if func.namespace != "aten":
            return self._custom(func, args, kwargs)
        _check(func, args, kwargs)
        returns = func._schema.returns  # noqa: SLF001 - torch offers no other way
        if torch.Tag.inplace_view in func.tags or any(
            x.alias_info is not None and not x.alias_info.is_write for x in returns
        ):
            return func(*args, **kwargs)  # views hold no numbers
        if func._schema.name in EMPTY:  # noqa: SLF001
            result = func(*args, **kwargs)
            self.steps.append(lambda: _allocations().poison(result))
            return result
        results = self._results(func, args, kwargs)
        fresh = [x for x, due in zip(results, returns, strict=True) if due.alias_info is None]

        def step() -> None:
            made = func(*args, **kwargs)
            made = (made,) if len(returns) == 1 else made or ()
            new = [x for x, due in zip(made, returns, strict=True) if due.alias_info is None]
            for target, value in zip(_tensors(fresh), _tensors(new), strict=True):
                target.copy_(value)

        self.steps.append(step)
        return results[0] if len(returns) == 1 else tuple(results) or None

    def _concerns(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        tensors = list(_tensors((args, *kwargs.values())))
        if not tensors:
            return self._devices.asked is not False
        return any(map(self._devices.holds, tensors))

    def _custom(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let an operator of somebody's own note what it consists of."""
        before = len(self.steps)
        result = func(*args, **kwargs)
        if len(self.steps) == before and _some((args, *kwargs.values(), result)):
            self._give_up(f"{func.name()} in a CUDA graph: it is no Python function")
        return result

    def _results(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """What is written to by `args`, and new memory for the rest."""
        schema = func._schema  # noqa: SLF001
        written = {
            name: args[i] if i < len(args) else kwargs.get(argument.name)
            for i, argument in enumerate(schema.arguments)
            if argument.alias_info is not None
            for name in argument.alias_info.before_set
        }
        shapes: Any = ()
        if any(due.alias_info is None for due in schema.returns):
            shapes = self._shapes(func, args, kwargs)
            shapes = (shapes,) if len(schema.returns) == 1 else shapes
        return [
            self._allocated(shapes[i])
            if due.alias_info is None
            else written[next(iter(due.alias_info.before_set))]
            for i, due in enumerate(schema.returns)
        ]

    def _shapes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {**kwargs, "generator": None} if "generator" in kwargs else kwargs
        given = {**given, "device": _META} if given.get("device") is not None else given
        if not _some((args, *kwargs.values())):
            given = {**given, "device": _META}
        with _disable_current_modes(), torch._C.DisableTorchFunction():  # noqa: SLF001
            try:
                return func(*self._meta(args), **{k: self._meta(x) for k, x in given.items()})
            except NotImplementedError:
                self._give_up(f"{func.name()} in a CUDA graph: its result's shape is not known")

    def _meta(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.ndim == 0 and not self._devices.holds(value):
                return value  # a number
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
        if isinstance(value, list | tuple):
            return type(value)(self._meta(x) for x in value)
        return value

    def _allocated(self, shape: Any) -> Any:
        if isinstance(shape, torch.Tensor):
            made = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device="cpu")
            _allocations().poison(made)
            self._devices.put(made)
            return made
        return [self._allocated(x) for x in shape] if isinstance(shape, list | tuple) else shape

    def _give_up(self, what: str) -> None:
        with self._run.noting():
            raise Unsupported(what)


def _check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise as CUDA does where the CPU would have to know a value."""
    if _SYNCHRONISES.isdisjoint(func.tags) or kwargs.get("output_size") is not None:
        return
    if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put):
        masks = [x for x in _tensors((args[1],)) if x.dtype in (torch.bool, torch.uint8)]
        if not masks:
            return
    session.refuse_while_capturing()


def _allocations() -> Allocations:
    return session.current().allocations


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _some(values: Any) -> bool:
    return next(_tensors(values), None) is not None


class Graph:
    """torch.cuda.CUDAGraph."""

    devices: Devices  # of the process, set where torch's class is replaced

    def __init__(self, keep_graph: bool = False) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Hold nothing yet."""
        del keep_graph
        self._recording: Recording | None = None
        self._under_way: Recording | None = None
        self._pool: tuple[int, int] = (0, 0)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_: Any) -> None:
        """Note from now on.

        Raises:
            RuntimeError: A graph is being captured, or this one has been.
        """
        del capture_error_mode
        if self._recording is not None:
            msg = "This CUDAGraph instance already owns a captured graph. Call reset() first."
            raise RuntimeError(msg)
        session.refuse_while_capturing()
        run = session.current()
        self._pool = pool or (0, next(_pools))
        self._under_way = Recording(self.devices, run)
        self._under_way.__enter__()  # type: ignore[no-untyped-call]
        run.recorder = self._under_way

    def capture_end(self) -> None:
        """Note no more.

        Raises:
            RuntimeError: Nothing is being captured here.
        """
        if self._under_way is None:
            msg = "capture_end() without capture_begin()"
            raise RuntimeError(msg)
        self._under_way.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        session.current().recorder = None
        self._recording, self._under_way = self._under_way, None

    def replay(self) -> None:
        """Run what was noted.

        Raises:
            RuntimeError: There is nothing, or a graph is being captured.
        """
        if self._recording is None:
            msg = "Called CUDAGraph::replay without a preceding successful capture."
            raise RuntimeError(msg)
        session.refuse_while_capturing()
        with (
            torch._C._AutoDispatchBelowAutograd(),  # noqa: SLF001
            torch._C._ExcludeDispatchKeyGuard(_KEYS),  # noqa: SLF001
        ):
            for step in self._recording.steps:
                step()

    def reset(self) -> None:
        """Forget."""
        self._recording = None

    def instantiate(self) -> None:
        """Nothing has to be made ready."""

    def register_generator_state(self, generator: Any) -> None:
        """Numbers are drawn anew at each replay in any case."""

    def pool(self) -> tuple[int, int]:
        """Name of the memory that the graph uses; nothing is used twice here."""
        return self._pool

    def enable_debug_mode(self) -> None:
        """See `debug_dump`."""

    def debug_dump(self, debug_path: str) -> None:
        """Refuse.

        Raises:
            Unsupported: Always.
        """
        self._refuse(f"CUDAGraph.debug_dump({debug_path!r})")

    def raw_cuda_graph(self) -> int:
        """Refuse.

        Raises:
            Unsupported: Always.
        """
        return self._refuse("CUDAGraph.raw_cuda_graph")

    def raw_cuda_graph_exec(self) -> int:
        """Refuse.

        Raises:
            Unsupported: Always.
        """
        return self._refuse("CUDAGraph.raw_cuda_graph_exec")

    @staticmethod
    def _refuse(what: str) -> int:
        with session.current().noting():
            msg = f"{what}: there is no driver that holds the graph"
            raise Unsupported(msg)


def graph_pool_handle() -> tuple[int, int]:
    """torch.cuda.graph_pool_handle."""
    return 0, next(_pools)
