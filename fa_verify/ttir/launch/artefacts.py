"""What a GPU would have been given, made when somebody asks: `kernel.asm["ptx"]` and its like.

The executor stops at TTIR. Triton's own NVIDIA backend goes on from there, for the same target and
with the same options, when a script or a test looks at ttgir, llir, ptx, cubin or sass.
"""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from triton._C.libtriton import ir
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import compiler

if TYPE_CHECKING:
    from collections.abc import Iterator

_LATER = ("ttgir", "llir", "ptx", "cubin")


class Artefacts(compiler.AsmDict):  # type: ignore[misc]
    """The stages of one kernel by name, those after TTIR on demand."""

    def __init__(self, known: dict[str, Any], metadata: Any, language: Any) -> None:
        """Start from what was compiled."""
        super().__init__(known)
        self._metadata, self._language = metadata, language

    def __contains__(self, key: object) -> bool:
        """Whether there is such a stage, made or not."""
        return key in _LATER or super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a stage, made if need be."""
        try:
            return self[key]
        except KeyError:
            return default

    def __missing__(self, key: str) -> Any:
        """Go on compiling."""
        if key in _LATER:
            self.update(_compile(self["ttir"], self._metadata, self._language, _LATER)[0])
            return self[key]
        return super().__missing__(key)


def scratch_bytes(text: str, metadata: Any, language: Any) -> int | None:
    """Global memory that a program needs for itself; None where Triton cannot go on that far."""
    try:
        _, fields = _compile(text, metadata, language, ("ttgir", "llir"))
    except Exception:  # noqa: BLE001 - whatever its passes raise, the kernel runs here
        return None
    size: int | None = fields.get("global_scratch_size")
    return size


def _compile(
    text: str, metadata: Any, language: Any, wanted: tuple[str, ...]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The stages, and what they add to the metadata."""
    fields = metadata._asdict()
    backend = CUDABackend(fields["target"])
    stages: dict[str, Any] = {}
    options = backend.parse_options({name: _hashable(x) for name, x in fields.items()})
    backend.add_stages(stages, options, language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ttir")
        path.write_text(text, encoding="utf-8")
        module = ir.parse_mlir_module(str(path), context)
    module.context = context
    made: dict[str, Any] = {}
    for name in wanted:
        module = stages[name](module, fields)
        made[name] = module if isinstance(module, bytes) else str(module)
    return made, fields


def _hashable(value: Any) -> Any:
    """A list as the tuple that it was before JSON."""
    return tuple(_hashable(x) for x in value) if isinstance(value, list) else value


@contextmanager
def on_demand() -> Iterator[None]:
    """Let kernels that are compiled meanwhile show every stage."""
    begin = compiler.CompiledKernel.__init__

    def __init__(self: Any, src: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        begin(self, src, *args, **kwargs)
        self.asm = Artefacts(self.asm, self.metadata, src.language)

    with patch.object(compiler.CompiledKernel, "__init__", __init__):
        yield
