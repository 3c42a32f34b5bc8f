"""torch's own operations in half precision, rounded where CUDA rounds.

CUDA's pointwise kernels compute in float32 ("opmath") and round once, and its norms keep sums and
statistics in float32; the CPU's round after each step, which is further from the truth than tests
that compare a kernel with torch allow. What only CUDA counts, integers in `histc`, is counted too.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch._ops import HigherOrderOperator

_HALF = (torch.float16, torch.bfloat16)
# How many of the results have the inputs' dtype on CUDA: not the saved mean and rstd
# (layer_norm_kernel.cu, Normalization.cuh).
_NORMS = {
    "aten::native_batch_norm": 1,
    "aten::native_batch_norm_backward": 1,
    "aten::native_layer_norm": 1,
    "aten::native_layer_norm_backward": 3,
    "aten::native_group_norm_backward": 3,
}


def as_on_cuda(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on CPU tensors; in half precision, in float32 and rounded once."""
    if func is torch.ops.aten.histc.default and not args[0].dtype.is_floating_point:
        return func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)  # Summary.cu, histc
    rounded = 0 if isinstance(func, HigherOrderOperator) else _rounded(func)
    if not rounded:
        return func(*args, **kwargs)
    dtypes = [x.dtype for x in args if isinstance(x, torch.Tensor) and x.dtype.is_floating_point]
    half = bool(dtypes) and dtypes[0] in _HALF and kwargs.get("dtype") is None
    norm = func._schema.name in _NORMS  # noqa: SLF001 - statistics among the arguments are float32 already
    if not half or not (norm or len(set(dtypes)) == 1):
        return func(*args, **kwargs)
    wide = func(*map(_wide, args), **kwargs)
    if isinstance(wide, tuple):
        return tuple(_narrow(x, dtypes[0]) if i < rounded else x for i, x in enumerate(wide))
    return _narrow(wide, dtypes[0])


@lru_cache(maxsize=4096)
def _rounded(func: Any) -> int:
    """How many results are computed in float32 and rounded; 0: the CPU's way is as good."""
    schema = func._schema  # noqa: SLF001 - torch offers no other way
    if any(x.alias_info is not None for x in (*schema.arguments, *schema.returns)):
        return 0
    return 1 if torch.Tag.pointwise in func.tags else _NORMS.get(schema.name, 0)


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _HALF else value


def _narrow(value: Any, dtype: torch.dtype) -> Any:
    floats = isinstance(value, torch.Tensor) and value.dtype == torch.float32
    return value.to(dtype) if floats else value
