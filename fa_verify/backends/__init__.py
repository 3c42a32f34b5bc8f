"""Where kernels run: `cpu` over `fa_verify.ttir`, and `cuda`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fa_verify.backends.base import Backend

__all__ = ["make", "resolve"]


def resolve(name: str) -> str:
    """Turn auto into cuda where torch sees a device, else cpu."""
    import torch  # noqa: PLC0415 - only this question needs it

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def make(name: str, *, seconds: float | None = None, memory: int = 8 << 30) -> Backend:
    """The backend called "cpu" or "cuda".

    Args:
        name: Which.
        seconds: Wall-clock limit of one execution.
        memory: Bytes that a worker may use; the executor keeps its intermediates to half of it.

    Raises:
        InvalidInputError: cuda was asked for and torch sees no device.
    """
    if name == "cuda":
        from fa_verify.backends.cuda import CudaBackend  # noqa: PLC0415 - needs a device

        return CudaBackend()
    from fa_verify.backends.cpu import CpuBackend  # noqa: PLC0415 - loads Triton

    return CpuBackend(seconds=seconds, memory_limit=memory // 2)
