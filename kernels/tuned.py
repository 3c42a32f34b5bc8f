"""Kernels whose descriptors follow the configuration, autotuned; what is known of cards.

The fastest configurations of an H200 are in tables/, with the times that made them so. On any other
card the autotuner tries all of them once, and its choices are kept in the user's cache.
"""

import contextlib
import functools
import json
import os
from pathlib import Path

import torch
import triton
from triton.runtime.autotuner import Autotuner

__all__ = ["Tuned", "pinned"]

_TABLES = Path(__file__).with_name("tables")


class Tuned:
    """A kernel with its configurations: ``tuned[grid](...)`` launches it with the fastest.

    Args:
        kernel: A ``triton.jit`` function.
        configs: Configurations to choose from.
        key: Names of the arguments that the choice depends on.
    """

    def __init__(self, kernel, configs, key) -> None:
        self._kernel, self._configs, self._key = kernel, configs, key
        self._name = kernel.fn.__name__
        self._chosen = {}  # configuration by key, or None: not known yet
        self._tuner = triton.autotune(configs, key=key)(kernel)

    def __getitem__(self, grid):  # noqa: ANN204
        """Return the function that launches this grid."""
        return functools.partial(self._launch, grid)

    def _launch(self, grid, *arguments, **keywords):  # noqa: ANN002, ANN003
        values = dict(zip(self._kernel.arg_names, arguments, strict=False)) | keywords
        key = ",".join(f"{name}={values[name]}" for name in self._key)
        config = self._known(key)
        if config is not None:
            if config.pre_hook is not None:
                config.pre_hook(values | config.all_kwargs())
            self._kernel[grid](*arguments, **keywords, **config.all_kwargs())
            return
        self._tuner[grid](*arguments, **keywords)
        timings = getattr(self._tuner, "configs_timings", {})
        if timings and _tuning():
            self._chosen[key] = min(timings, key=lambda config: timings[config][0])
            _keep(self._name, key, timings)

    def _known(self, key):
        """The configuration known to be this card's fastest, None if none is."""
        if not _tuning():
            return None
        if key not in self._chosen:
            best = _best(self._name, key)
            found = [config for config in self._configs if _text(config) == best]
            self._chosen[key] = found[0] if found else None
        return self._chosen[key]


def pinned():
    """Whether fa_verify runs one configuration, in the place of the autotuner's own method."""
    return Autotuner.run.__module__ != Autotuner.__module__


def _tuning():
    """Whether the fastest configuration is wanted, on a card, and not the one that a test pins."""
    return not pinned() and triton.runtime.driver.active.get_active_torch_device().type == "cuda"


def _text(config):
    """A configuration in words that do not change with Triton's version."""
    on = {name: value for name, value in config.kwargs.items() if value is not False}
    values = on | {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.maxnreg:
        values["maxnreg"] = config.maxnreg
    return " ".join(f"{name}={value}" for name, value in values.items())


def _card():
    return torch.cuda.get_device_name().replace(" ", "_")


def _kept():
    """File of the user's cache for this card and this Triton."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "fa_verify" / f"{_card()}-triton-{triton.__version__}.json"


def _best(name, key):
    """The configuration known to be this card's fastest: of the committed table, or the cache."""
    for path in (_TABLES / f"{_card()}.json", _kept()):
        found = _read(path).get(name, {}).get(key)
        if found:
            return found["best"]
    return None


def _read(path):
    """The table of a file; empty if there is none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text(encoding="utf-8"))
    return {}


def _keep(name, key, timings):
    """Add what was found to the user's cache, if that can be written."""
    milliseconds = {_text(config): times[0] for config, times in timings.items()}
    found = {"best": min(milliseconds, key=milliseconds.get), "milliseconds": milliseconds}
    path = _kept()
    table = _read(path)
    table.setdefault(name, {})[key] = found
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        draft.write_text(json.dumps(table, indent=1, sort_keys=True), encoding="utf-8")
        draft.replace(path)
