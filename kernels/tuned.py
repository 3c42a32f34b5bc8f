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

__all__ = ["Tuned"]

_TABLES = Path(__file__).with_name("tables")


class Tuned:
    """A kernel with its autotuner: ``tuned[grid](...)`` launches it.

    Args:
        kernel: A ``triton.jit`` function.
        configs: Configurations to choose from.
        key: Names of the arguments that the choice depends on.
    """

    def __init__(self, kernel, configs, key) -> None:
        self._name = kernel.fn.__name__
        self._key = key
        self._asked = None  # the key being tuned
        prune = {"early_config_prune": self._prune}
        self._tuner = triton.autotune(configs, key=key, prune_configs_by=prune)(kernel)

    def __getitem__(self, grid):  # noqa: ANN204
        """Return the function that launches this grid."""
        return functools.partial(self._launch, grid)

    def _launch(self, grid, *arguments, **keywords):  # noqa: ANN002, ANN003
        self._tuner[grid](*arguments, **keywords)
        if self._asked is not None:
            timings = getattr(self._tuner, "configs_timings", {})
            if len(timings) > 1:  # tuned just now
                _keep(self._name, self._asked, timings)
            self._asked = None

    def _prune(self, configs, arguments, **keywords):  # noqa: ANN003
        """The configuration known to be fastest, or all."""
        if triton.runtime.driver.active.get_active_torch_device().type != "cuda":
            return configs  # nothing is timed there, and every configuration is to be checked
        values = arguments | keywords
        self._asked = ",".join(f"{name}={values[name]}" for name in self._key)
        best = _best(self._name, self._asked)
        return [config for config in configs if _text(config) == best] or configs


def _text(config):
    """A configuration in words that do not change with Triton's version."""
    values = config.kwargs | {"num_warps": config.num_warps, "num_stages": config.num_stages}
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
