"""Pins one autotune configuration: nothing is timed, no other configuration runs."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources, PTXASError

if TYPE_CHECKING:
    from collections.abc import Iterator

# What Triton's autotuner takes as "this configuration does not fit here", and goes on.
_DOES_NOT_FIT = (OutOfResources, CompileTimeAssertionFailure, PTXASError)


@contextmanager
def pinned(
    index: int, configs: dict[str, int], chosen: dict[str, str] | None = None
) -> Iterator[None]:
    """Run configuration `index` modulo the number offered.

    If the tuner's prune_configs_by rejects that configuration for the arguments at hand, the index
    counts among those it keeps. Where it does not fit (as Triton's autotuner means it) the
    next one runs. Nothing is tuned, so reset_to_zero zeroes nothing, as in every launch on a GPU
    but the first of a key: a launcher that relies on it is wrong from the second call on.

    Args:
        index: Which.
        configs: Function name to the number offered; filled as functions run.
        chosen: Function name to the configuration that ran last; filled likewise.
    """

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        name = self.base_fn.__name__
        configs[name] = len(self.configs)
        unfit: Exception | None = None
        for config in _in_turn(self, index, kwargs):
            if chosen is not None:
                chosen[name] = str(config)
            if config.pre_hook is not None:
                config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
            try:
                result = self.fn.run(*args, **kwargs, **config.all_kwargs())
            except _DOES_NOT_FIT as error:
                unfit = error
                continue
            self.best_config, self.nargs = config, None
            return result
        raise unfit or AssertionError(name)

    with patch.object(Autotuner, "run", run):
        yield


def _in_turn(tuner: Any, index: int, kwargs: dict[str, Any]) -> Iterator[Any]:
    """The pinned configuration, then the others in the order offered, round and round once."""
    kept, config = tuner.configs, tuner.configs[index % len(tuner.configs)]
    if len(kept) > 1:
        kept = tuner.prune_configs(kwargs)
        if not kept:
            msg = f"{tuner.base_fn.__name__}: prune_configs_by left no configuration"
            raise ValueError(msg)
        if config not in kept:
            config = kept[index % len(kept)]
    first = kept.index(config)
    yield from (*kept[first:], *kept[:first])
