"""What of torch asks for a GPU beside tensors and launches: files, profilers, checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.profiler
from torch.cuda import nvtx
from torch.utils import checkpoint

from fa_verify.ttir.scripts.devices import GPU

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fa_verify.ttir.scripts.devices import Devices

_RANGES = ("range_push", "range_pop", "range_start", "range_end", "mark")


def frontends(devices: Devices) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Each module, and the names in it that are replaced."""
    yield torch, {"load": _load(torch.load, devices)}
    yield nvtx, dict.fromkeys(_RANGES, lambda *_, **__: 0)
    profiler: Any = torch.profiler.profile.__base__  # torch names it privately
    yield profiler, {"__init__": _on_the_cpu(profiler.__init__)}
    checks = checkpoint._allowed_determinism_checks_to_fns  # noqa: SLF001 - a table, not a hook
    yield checkpoint, {"_allowed_determinism_checks_to_fns": checks | {"default": _facts(devices)}}


def _load(original: Callable[..., Any], devices: Devices) -> Callable[..., Any]:
    """torch.load: what was saved on cuda, or is asked for there, is believed to be there."""

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        named = isinstance(map_location, str | torch.device)
        asked = named and torch.device(map_location).type == "cuda"

        def place(storage: Any, location: str) -> Any:
            if asked or location.startswith("cuda"):
                devices.put(torch.empty(0, dtype=torch.uint8).set_(storage))
            return storage

        ours = asked or map_location is None
        return original(f, place if ours else map_location, *args, **kwargs)

    return load


def _on_the_cpu(init: Callable[..., None]) -> Callable[..., None]:
    """A profiler's __init__ without the activity that only a CUDA build records."""

    def without_cuda(self: Any, *, activities: Any = None, **kwargs: Any) -> None:
        kinds = torch.profiler.ProfilerActivity
        if activities is not None:
            activities = [kind for kind in activities if kind != kinds.CUDA] or [kinds.CPU]
        init(self, activities=activities, **kwargs)

    return without_cuda


def _facts(devices: Devices) -> Callable[[torch.Tensor], dict[str, Any]]:
    """What checkpoint compares of a recomputed tensor; where it is, by belief."""

    def facts(x: torch.Tensor) -> dict[str, Any]:
        device = GPU if devices.holds(x) else x.device
        return {"shape": x.shape, "dtype": x.dtype, "device": device}

    return facts
