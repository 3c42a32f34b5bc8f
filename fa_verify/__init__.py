"""Numerical-correctness and fuzz-testing harness for Triton attention kernels.

Names load on first use: the pytest plugin lives in this package, and other people's test runs must
not pay for NumPy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fa_verify.arithmetic import Arithmetic
    from fa_verify.capabilities import Capabilities
    from fa_verify.documents import cu_seqlens
    from fa_verify.errors import UnsupportedProblemError
    from fa_verify.kernel import Grads, Kernel, Outputs
    from fa_verify.masks import Mask
    from fa_verify.pages import Pages, paged
    from fa_verify.problem import Problem

__all__ = [
    "Arithmetic",
    "Capabilities",
    "Grads",
    "Kernel",
    "Mask",
    "Outputs",
    "Pages",
    "Problem",
    "UnsupportedProblemError",
    "cu_seqlens",
    "paged",
]

_HOMES = {
    "Arithmetic": "arithmetic",
    "Capabilities": "capabilities",
    "Grads": "kernel",
    "Kernel": "kernel",
    "Mask": "masks",
    "Outputs": "kernel",
    "Pages": "pages",
    "Problem": "problem",
    "UnsupportedProblemError": "errors",
    "cu_seqlens": "documents",
    "paged": "pages",
}


def __getattr__(name: str) -> object:
    """Load a public name from its module."""
    if name not in _HOMES:
        msg = f"module 'fa_verify' has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(importlib.import_module(f"fa_verify.{_HOMES[name]}"), name)
