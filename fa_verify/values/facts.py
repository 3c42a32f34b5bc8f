"""What every family of values draws on: facts of the problem, streams of numbers, a few shapes."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "Facts", "Pair", "Rng", "Shape", "magnitudes", "signs", "stream"]

Array = npt.NDArray[np.float64]
Shape = tuple[int, int, int, int]
Pair = tuple[Array, Array]
Rng = np.random.Generator
_TENSORS = ("qk", "v", "do", "bias", "slopes", "sinks", "dlse", "dropout", "scales")
_WIDE_TOP = 2.0**112  # 2^16 products of this with numbers near 1 stay below float32's 2^128


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a family must know of the problem.

    Attributes:
        scale: The softmax scale in force.
        largest: Largest finite number of the storage dtype.
        smallest_normal: Smallest normal number of the storage dtype.
        unit_roundoff: 2^-precision of the storage dtype.
    """

    scale: float
    largest: float
    smallest_normal: float
    unit_roundoff: float

    @classmethod
    def of(cls, dtype: str, scale: float) -> Facts:
        """The facts of "float16", "bfloat16", "float32" or "float8_e4m3fn".

        >>> Facts.of("float16", 1.0).largest
        65504.0
        """
        precision, least, largest = {
            "float16": (11, -14, 65504.0),
            "bfloat16": (8, -126, (2.0 - 2.0**-7) * 2.0**127),
            "float32": (24, -126, (2.0 - 2.0**-23) * 2.0**127),
            "float8_e4m3fn": (4, -6, 448.0),
        }[dtype]
        return cls(
            scale=scale,
            largest=largest,
            smallest_normal=2.0**least,
            unit_roundoff=2.0**-precision,
        )

    @property
    def gain(self) -> float:
        """What a product q k must be for one unit of logit, within reason for scales near 0."""
        magnitude = min(max(abs(self.scale), 1e-2), 1e2)
        return math.copysign(1.0 / magnitude, self.scale)

    @property
    def top(self) -> float:
        """The largest magnitude whose dots with numbers near 1 stay finite in float32."""
        return min(self.largest, _WIDE_TOP)


def stream(seed: int, tensor: str) -> Rng:
    """The stream of "qk", "v", "bias", ...: changing one tensor's shape leaves the others alone."""
    key = np.random.SeedSequence(seed % 2**64, spawn_key=(_TENSORS.index(tensor),))
    return np.random.Generator(np.random.PCG64(key))


def signs(rng: Rng, shape: tuple[int, ...]) -> Array:
    """1 or -1, either as likely."""
    return rng.integers(0, 2, shape).astype(np.float64) * 2.0 - 1.0


def magnitudes(rng: Rng, shape: Shape, least: float, most: float) -> Array:
    """Magnitudes from 2^least to 2^most, of either sign."""
    return signs(rng, shape) * np.exp2(rng.uniform(least, most, shape))
