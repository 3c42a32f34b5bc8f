"""`Hypothesis`: a likely cause, with what a kernel that has it would have written on one case."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["Hypothesis", "Prediction"]


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """What would have been written.

    Attributes:
        values: Tensors by name.
        free: Where each says nothing; holes: where nobody would have written it.
        stray: Something would have been read that lies outside its tensor.
    """

    values: dict[str, torch.Tensor]
    free: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    holes: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    stray: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Hypothesis:
    """A likely cause.

    Attributes:
        sentence: For the kernel's author, in the words of this case.
        predict: What the kernel would have written.
        name: The same for this cause on every case; "" stands for the sentence.
        addressing: The cause is a wrong address, so it explains forbidden accesses as well.
        rounding: The cause is a format, which a looser declaration could allow.
        follows: The backward pass is right, given the o and lse that the forward pass wrote.
        fitted: A number, or one a row, was fitted to the results: it explains more by chance.
    """

    sentence: str
    predict: Callable[[], Prediction]
    name: str = ""
    addressing: bool = False
    rounding: bool = False
    follows: bool = False
    fitted: bool = False

    @property
    def key(self) -> str:
        """What tells it from other causes."""
        return self.name or self.sentence
