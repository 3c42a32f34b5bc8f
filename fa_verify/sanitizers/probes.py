"""One small kernel a tool, with a fault that the tool must see, else it does not work here."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["PROBES"]

_SIZE: Final = 128


@triton.jit
def _store_past(x, SIZE: tl.constexpr):  # noqa: ANN001, ANN202, N803
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(x + i, i)


@triton.jit
def _unwritten(x, y, SIZE: tl.constexpr):  # noqa: ANN001, ANN202, N803
    i = tl.arange(0, SIZE)
    tl.store(y + i, tl.load(x + i))


@triton.jit
def _shared_race(x, SIZE: tl.constexpr):  # noqa: ANN001, ANN202, N803
    i = tl.arange(0, SIZE)
    read = tl.inline_asm_elementwise(
        """{
        .shared .align 4 .b32 word[1];
        .reg .u32 place;
        mov.u32 place, word;
        st.shared.b32 [place], $1;
        ld.shared.b32 $0, [place];
        }""",
        "=r,r",
        [i],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.store(x + i, read)


@triton.jit
def _barrier(x, SIZE: tl.constexpr):  # noqa: ANN001, ANN202, N803
    i = tl.arange(0, SIZE)
    same = tl.inline_asm_elementwise(  # a barrier of thread 0 alone, which all threads reach
        """{
        bar.warp.sync 1;
        mov.b32 $0, $1;
        }""",
        "=r,r",
        [i],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.store(x + i, same)


@triton.jit
def _global_race(x):  # noqa: ANN001, ANN202
    tl.store(x, tl.program_id(0))


def _words() -> torch.Tensor:
    return torch.zeros(_SIZE, dtype=torch.int32, device="cuda")


PROBES: Final[Mapping[str, Callable[[], object]]] = {
    "store_past": lambda: _store_past[(2,)](_words(), _SIZE),
    "unwritten": lambda: _unwritten[(1,)](torch.empty_like(_words()), _words(), _SIZE),
    "shared_race": lambda: _shared_race[(1,)](_words(), _SIZE),
    "barrier": lambda: _barrier[(1,)](_words(), _SIZE),
    "global_race": lambda: _global_race[(64,)](_words()),
}
