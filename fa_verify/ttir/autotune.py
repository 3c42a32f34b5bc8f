"""Pins one autotune configuration: nothing is timed, no other configuration runs."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from triton.runtime.autotuner import Autotuner

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def pinned(index: int, configs: dict[str, int]) -> Iterator[None]:
    """Run configuration `index` modulo the number offered; note that number in `configs`.

    If the tuner's early_config_prune rejects that configuration for the arguments at hand, the
    index counts among those it keeps. As on a GPU, reset_to_zero takes effect when a key is tuned,
    that is the first time it is seen, and not after.
    """
    tuned: set[tuple[Any, ...]] = set()

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        configs[self.base_fn.__name__] = len(self.configs)
        config = self.configs[index % len(self.configs)]
        if len(self.configs) > 1:
            if self.early_config_prune is not None:
                kept = self.early_config_prune(self.configs, self.nargs, **kwargs)
                if config not in kept:
                    config = kept[index % len(kept)]
            every = {**self.nargs, **kwargs}
            key = (id(self), *(str(every.get(k)) for k in self.keys),
                   *(str(v.dtype) for v in every.values() if hasattr(v, "dtype")))  # fmt: skip
            if key not in tuned:
                tuned.add(key)
                self.pre_hook({**every, **config.all_kwargs()}, reset_only=True)
        self.best_config = config
        if config.pre_hook is not None:
            config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
        result = self.fn.run(*args, **kwargs, **config.all_kwargs())
        self.nargs = None
        return result

    with patch.object(Autotuner, "run", run):
        yield
