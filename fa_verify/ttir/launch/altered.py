"""Lets an `Alteration` change the grid and the arguments of each launch."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from triton.runtime.jit import JITFunction

from fa_verify.ttir.options import Parameters

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.ttir.options import Alteration, Grid


@contextmanager
def altered(alteration: Alteration) -> Iterator[None]:
    """Ask it at each launch, when autotuning and heuristics have chosen their constants."""
    run = JITFunction.run

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        if warmup or len(args) > len(self.arg_names):  # Triton says what is wrong with the latter
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        whole = {**{p.name: p.default for p in self.params if p.has_default}, **given}
        parameters = Parameters(
            run_time=tuple(p.name for p in self.params if not p.is_constexpr and p.name in given),
            counted=frozenset(_counted(self, grid, whole) if callable(grid) else ()),
            blocks=frozenset(() if callable(grid) else _blocks(self, whole)),
        )
        programs = _programs(grid, whole)
        programs, given = alteration.launch(self.__name__, programs, given, parameters)
        return run(self, grid=programs, warmup=warmup, **given)

    with patch.object(JITFunction, "run", launch):
        yield


def _programs(grid: Any, given: dict[str, Any]) -> Grid:
    whole = (*(grid(given) if callable(grid) else grid), 1, 1)
    return whole[0], whole[1], whole[2]


def _counted(function: Any, grid: Any, given: dict[str, Any]) -> Iterator[str]:
    """Constants that change a grid that is a function."""
    for name, value in _sizes(function, given):
        others = (2 * value, value // 2)
        if any(_programs(grid, {**given, name: x}) != _programs(grid, given) for x in others):
            yield name


def _blocks(function: Any, given: dict[str, Any]) -> Iterator[str]:
    """Constants that are called a block."""
    return (name for name, _ in _sizes(function, given) if "BLOCK" in name.upper())


def _sizes(function: Any, given: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Constants that may be somebody's extent."""
    for p in function.params:
        value = given.get(p.name)
        if p.is_constexpr and type(value) is int and value >= 2:
            yield p.name, value
