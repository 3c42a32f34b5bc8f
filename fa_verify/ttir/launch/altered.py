"""Lets an `Alteration` change the grid and the arguments of each launch."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from triton.runtime.jit import JITFunction

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.ttir.options import Alteration


@contextmanager
def altered(alteration: Alteration) -> Iterator[None]:
    """Ask it at each launch, when autotuning and heuristics have chosen their constants."""
    run = JITFunction.run

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        if warmup or len(args) > len(self.arg_names):  # Triton says what is wrong with the latter
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        whole = grid({**_defaults(self), **given}) if callable(grid) else grid
        padded = (*whole, 1, 1, 1)[:3]
        constants = frozenset(p.name for p in self.params if p.is_constexpr)
        padded, given = alteration.launch(self.__name__, padded, given, constants)
        return run(self, grid=padded, warmup=warmup, **given)

    with patch.object(JITFunction, "run", launch):
        yield


def _defaults(function: Any) -> dict[str, Any]:
    """What is not given, as a grid's function may ask for it."""
    return {p.name: p.default for p in function.params if p.has_default}
