"""`place`: the line of a kernel's author at which an exception arose."""

from __future__ import annotations

import linecache
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["innermost", "place"]

# A mistake shows in these, and does not lie there. `<`: what has no file.
_OTHERS = (
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    str(Path(__file__).parents[1]),
    "<",
)


def innermost(error: BaseException) -> BaseException:
    """What a compiler said first, where it says again for every caller that it compiles."""
    while type(error.__cause__) is type(error):
        error = error.__cause__
    return error


def place(error: BaseException) -> str:
    """Where, as "file:line": in the kernel if it does not compile, or else in the launcher.

    "" where no line is the author's.
    """
    places = [*_launcher(error), *_compiled(innermost(error))]
    return places[-1] if places else ""


def _launcher(error: BaseException) -> Iterator[str]:
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith(_OTHERS):
            yield f"{file}:{line}"


def _compiled(error: BaseException) -> Iterator[str]:
    """In the function that Triton was compiling: it says the text, and the line in it."""
    source, line = getattr(error, "src", None), getattr(getattr(error, "node", None), "lineno", 0)
    if not isinstance(source, str) or not line:
        return
    files = {str(getattr(module, "__file__", "") or "") for module in list(sys.modules.values())}
    for file in sorted(file for file in files if file and not file.startswith(_OTHERS)):
        before, found, _ = "".join(linecache.getlines(file)).partition(source)
        if found:
            yield f"{file}:{before.count(chr(10)) + line}"
