"""torch.autocast("cuda") on CPU tensors: the CPU's autocast with CUDA's list of operations.

PyTorch documents which operations autocast to float32 on each device ("Autocast Op Reference"); the
lists of what autocasts to the lower precision agree as far as kernels' tests use them.
"""

from __future__ import annotations

import functools
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_HALF = (torch.float16, torch.bfloat16)
# "CUDA Ops that can autocast to float32"; sum and the norms only cast their result's type, which
# for a float32 accumulation is the same.
_FLOAT32 = (
    "acos", "asin", "binary_cross_entropy_with_logits", "cdist", "cosh", "cosine_embedding_loss",
    "cosine_similarity", "cumprod", "cumsum", "dist", "erfinv", "exp", "expm1", "group_norm",
    "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "layer_norm", "linalg_vector_norm",
    "log", "log10", "log1p", "log2", "log_softmax", "logsumexp", "margin_ranking_loss", "mse_loss",
    "multi_margin_loss", "multilabel_margin_loss", "nll_loss", "nll_loss2d", "norm",
    "poisson_nll_loss", "pow", "prod", "reciprocal", "renorm", "rsqrt", "sinh", "smooth_l1_loss",
    "soft_margin_loss", "softmax", "softplus", "sum", "tan", "triplet_margin_loss",
)  # fmt: skip
_KEY = "AutocastCPU"


@contextmanager
def autocasting() -> Iterator[None]:
    """Let autocast("cuda") work, and answer about it, on CPU tensors."""
    made: list[Any] = []

    def extend() -> None:
        """Give the CPU CUDA's list, once somebody autocasts: few programs do."""
        if not made:
            made.append(_extended())

    try:
        with (
            patch.multiple(torch, **_queries()),
            patch.object(torch.autocast, "__init__", _init(torch.autocast.__init__, extend)),
        ):
            yield
    finally:
        for library in made:
            library._destroy()  # noqa: SLF001


def _extended() -> Any:
    """Register CUDA's list of operations for the CPU's autocast, until it is destroyed."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that some are overridden is meant
        for name in _FLOAT32:
            packet = getattr(torch.ops.aten, name)
            for overload in packet.overloads():
                op = getattr(packet, overload)
                if not any(x.alias_info for x in op._schema.arguments):  # noqa: SLF001
                    library.impl(  # type: ignore[no-untyped-call]
                        op, _in_float32(op), _KEY, allow_override=True
                    )
    return library


def _in_float32(op: Any) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)  # noqa: SLF001

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):  # noqa: SLF001
            return op(*map(_wide, args), **{k: _wide(v) for k, v in kwargs.items()})

    return kernel


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _HALF else value


def _init(original: Any, extend: Callable[[], None]) -> Callable[..., None]:
    """autocast.__init__ with cuda's default dtype."""

    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            extend()
            device_type, dtype = "cpu", torch.float16 if dtype is None else dtype
        original(self, device_type, dtype, *args, **kwargs)

    return init


def _queries() -> dict[str, Any]:
    """What custom_fwd and custom_bwd ask about cuda's autocast."""

    def about_cpu(original: Any) -> Callable[..., Any]:
        def query(device_type: str = "cuda", *args: Any) -> Any:
            return original("cpu" if device_type == "cuda" else device_type, *args)

        return query

    names = ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled",
             "set_autocast_dtype")  # fmt: skip
    queries: dict[str, Any] = {name: about_cpu(getattr(torch, name)) for name in names}
    queries["get_autocast_gpu_dtype"] = functools.partial(torch.get_autocast_dtype, "cpu")
    return queries
