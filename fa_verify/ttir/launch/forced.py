"""Launches with other options than their caller gives: num_warps, num_stages."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from triton.runtime.jit import JITFunction

from fa_verify.ttir.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["forced"]


@contextmanager
def forced(**options: int) -> Iterator[None]:
    """Give every launch these options, whatever its caller or its configuration says.

    A kernel need not compile or fit under all of them: where it does not, whatever is raised
    becomes `Unsupported`, for no caller asked for this.
    """
    original = JITFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **(kwargs | options))
        except Exception as error:
            given = ", ".join(f"{name}={value}" for name, value in options.items())
            first, _, _ = str(error).partition("\n")
            what = f"{self.__name__} with {given}: {first}"
            raise Unsupported(what) from error

    if not options:
        yield
        return
    with patch.object(JITFunction, "run", run):
        yield
