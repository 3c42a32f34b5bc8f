"""`Point`: one problem that is timed; the grid of them. `Timed`: what one contestant took for it.

No torch: records are read, and tables made, where there is no device.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Literal

import msgspec

from fa_verify.masks import Mask
from fa_verify.problem import DType, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["PEERS", "Pass", "Point", "Roof", "Timed", "decodes", "grid", "spread_out"]

Pass = Literal["forward", "backward", "decode"]

PEERS = ("fa2", "cudnn", "efficient", "math", "flex")
_WIDTH = 2048  # heads times head_dim, as in flash-attention's published benchmarks
_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
_BACKWARD = 2.5  # products of the backward pass (5) to those of the forward pass (2)


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One problem and the pass that is timed.

    Attributes:
        direction: Which pass; "decode": forward, one query a sequence.
        dtype: Of q, k, v.
        head_dim: Of q, k and v.
        causal: Under the causal mask.
        seqlen: Of queries and of keys; of keys alone where one is decoded.
        batch: Sequences.
        heads: Of queries.
        heads_kv: Of keys; None: as many.
    """

    direction: Pass
    dtype: DType
    head_dim: int
    causal: bool
    seqlen: int
    batch: int
    heads: int
    heads_kv: int | None = None

    @property
    def queries(self) -> int:
        """Queries a sequence."""
        return 1 if self.direction == "decode" else self.seqlen

    @property
    def problem(self) -> Problem:
        """As kernels take it."""
        return Problem(
            batch=self.batch,
            heads_q=self.heads,
            heads_kv=self.heads_kv or self.heads,
            seqlen_q=self.queries,
            seqlen_k=self.seqlen,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim,
            dtype=self.dtype,
            mask=Mask(causal=self.causal),
        )

    @property
    def flops(self) -> float:
        """Floating-point operations, counted as in the FlashAttention papers."""
        forward = 4.0 * self.batch * self.heads * self.queries * self.seqlen * self.head_dim
        return forward * (_BACKWARD if self.direction == "backward" else 1) / (1 + self.causal)

    @property
    def bytes_read(self) -> int:
        """Bytes of q, k and v."""
        p = self.problem
        return _BYTES[self.dtype] * sum(map(math.prod, (p.shape_q, p.shape_k, p.shape_v)))


class Timed(msgspec.Struct, frozen=True, kw_only=True, tag="timed"):
    """What one contestant took for one point.

    Attributes:
        point: The problem.
        name: Of the kernel, or one of PEERS.
        peer: Whether it is one of PEERS.
        milliseconds: Median of the rounds; 0 where it did not run.
        spread: (slowest - fastest) / median of the rounds.
        difference: Largest |difference| of a result from that of the first contestant.
        error: Why it did not run.
    """

    point: Point
    name: str
    peer: bool
    milliseconds: float = 0.0
    spread: float = 0.0
    difference: float = 0.0
    error: str = ""

    @property
    def tflops(self) -> float:
        """Rate in 10^12 floating-point operations a second; 0 where it did not run."""
        return self.point.flops / self.milliseconds / 1e9 if self.milliseconds else 0.0

    @property
    def terabytes(self) -> float:
        """10^12 bytes of q, k and v read a second; 0 where it did not run."""
        return self.point.bytes_read / self.milliseconds / 1e9 if self.milliseconds else 0.0


class Roof(msgspec.Struct, frozen=True, kw_only=True, tag="roof"):
    """Where it was timed, and what the device's largest matrix products reach in the same run.

    Attributes:
        device: Name of the device.
        torch: Version; triton: version.
        tflops: 10^12 operations a second of torch.mm by dtype.
        terabytes: 10^12 bytes a second that a kernel reads which does nothing else.
    """

    device: str
    torch: str
    triton: str
    tflops: dict[str, float]
    terabytes: float = 0.0


def spread_out(items: Sequence[int]) -> list[int]:
    """The items in an order whose every beginning is spread over all: places by reversed bits.

    >>> spread_out([512, 1024, 2048, 4096, 8192, 16384])
    [512, 8192, 2048, 1024, 16384, 4096]
    """
    bits = (len(items) - 1).bit_length()
    places = sorted(range(len(items)), key=lambda place: f"{place:0{bits}b}"[::-1])
    return [items[place] for place in places]


def grid(
    directions: Sequence[Pass],
    dtypes: Sequence[DType],
    head_dims: Sequence[int],
    *,
    causal: Sequence[bool],
    seqlens: Sequence[int],
    tokens: int,
) -> Iterator[Point]:
    """Every point, `tokens` queries and about 2048 columns of all heads each.

    Length by length, so that a run that is cut short has some of everything.
    """
    for seqlen, direction, dtype, head_dim, hidden in itertools.product(
        spread_out(seqlens), directions, dtypes, head_dims, causal
    ):
        yield Point(
            direction=direction,
            dtype=dtype,
            head_dim=head_dim,
            causal=hidden,
            seqlen=seqlen,
            batch=max(tokens // seqlen, 1),
            heads=max(_WIDTH // head_dim, 1),
        )


def decodes(
    dtypes: Sequence[DType],
    head_dims: Sequence[int],
    batches: Sequence[int],
    seqlens: Sequence[int],
) -> Iterator[Point]:
    """Decoding one query a sequence, 8 query heads to each of 4 key heads."""
    for dtype, head_dim, batch, seqlen in itertools.product(dtypes, head_dims, batches, seqlens):
        yield Point(
            direction="decode",
            dtype=dtype,
            head_dim=head_dim,
            causal=False,
            seqlen=seqlen,
            batch=batch,
            heads=32,
            heads_kv=4,
        )
