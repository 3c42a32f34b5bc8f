"""The two poisons, and where one is still there.

A poison is a 16-bit word, repeated, so that it is one whatever type is read there. The NaN is quiet
in fp16, bf16, fp32 and fp64 and is none that a chip makes (NVIDIA's results are 0x7FFF, and
0x7FFFFFFF); as an integer it is 32,763, 2,147,188,731 and larger. The finite one is 249.6 in fp16
and 1e17 in bf16 and fp32: whoever reads it and goes on returns something else.
"""

from __future__ import annotations

import torch

__all__ = ["FINITE", "NAN", "fill", "left", "whole"]

NAN = 0x7FFB
FINITE = 0x5BCD

_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def whole(word: int, nbytes: int) -> int:
    """The poison as an integer of so many bytes.

    >>> hex(whole(NAN, 4))
    '0x7ffb7ffb'
    """
    return int.from_bytes(word.to_bytes(2, "little") * (nbytes // 2), "little")


def fill(buffer: torch.Tensor, word: int) -> None:
    """Poison bytes; their number is a multiple of 8, and so is the address of the first."""
    buffer.view(torch.int64).fill_(whole(word, 8))


def left(tensor: torch.Tensor) -> torch.Tensor:
    """Where the NaN is still there: nobody wrote. Types of one byte cannot tell."""
    integer = _WORDS.get(tensor.element_size())
    if integer is None or tensor.is_complex():
        return torch.zeros_like(tensor, dtype=torch.bool)
    return tensor.view(integer) == whole(NAN, tensor.element_size())
