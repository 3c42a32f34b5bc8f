"""Where kernels run: `cpu` over `fa_verify.ttir`, and `cuda`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa_verify.errors import InvalidInputError

if TYPE_CHECKING:
    from fa_verify.backends.base import Backend
    from fa_verify.spool import Spool

__all__ = ["make", "resolve"]


def resolve(name: str) -> str:
    """Turn auto into cuda where torch sees a device, else cpu.

    Raises:
        InvalidInputError: cuda was asked for and torch sees no device.
    """
    import torch  # noqa: PLC0415 - only this question needs it

    if name == "cpu":
        return name
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        msg = "backend='cuda': torch sees no CUDA device; use --backend cpu"
        raise InvalidInputError(msg)
    return "cuda" if available else "cpu"


def make(
    name: str,
    *,
    seconds: float | None = None,
    memory: int = 8 << 30,
    spool: Spool | None = None,
) -> Backend:
    """The backend called "cpu" or "cuda".

    Args:
        name: Which.
        seconds: Wall-clock limit of one execution.
        memory: Bytes that a worker may use; the executor keeps its intermediates to half of it.
        spool: Told of each launch on a card before it is made.

    Raises:
        InvalidInputError: cuda was asked for and torch sees no device.
    """
    if resolve(name) == "cuda":
        from fa_verify.backends.cuda import CudaBackend  # noqa: PLC0415 - needs a device

        return CudaBackend(spool)
    from fa_verify.backends.cpu import CpuBackend  # noqa: PLC0415 - loads Triton

    return CpuBackend(seconds=seconds, memory_limit=memory // 2)
