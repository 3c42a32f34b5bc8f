"""torch.compile while kernels are executed: functions run as they are.

Dynamo compiles nothing while a mode watches torch's operations, and refuses `fullgraph=True` then;
and kernels that Inductor would generate are not what is executed.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def uncompiled() -> Iterator[None]:
    """Let `torch.compile` return its function, and what it made before run the function."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch, "compile", _compile))
        # Dynamo takes a second to load, and nobody compiled anything without it. A stance cannot be
        # taken by what a compiled function calls, where nothing is compiled anyway.
        if "torch._dynamo" in sys.modules and not get_eval_frame_callback():
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _compile(model: Any = None, **_: Any) -> Any:
    """Stand for torch.compile, also as a decorator with options."""
    return (lambda fn: fn) if model is None else model
