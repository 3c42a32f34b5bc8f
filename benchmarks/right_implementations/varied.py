"""Right kernels whose choices are drawn from the problem, as an autotuner's depend on it.

Blocks of any lengths in any order, three forms of the exponent, sums one product after the other,
in halves or exact, terms added in either order, a stale maximum, keys split and merged.
"""

from __future__ import annotations

import dataclasses
import math
import random
import zlib

import torch

from fa_verify import Arithmetic

from .emulation import Emulator, emulated

_SUMS = ("fma", "fma", "one by one", "halves", "exact")
_PRODUCTS = 1 << 20  # of one dot whose sums are made one by one or in halves


@dataclasses.dataclass(frozen=True)
class _Varied(Emulator):
    """Beside the emulator's own choices, some that it has not."""

    sums: str = "fma"
    ragged: bool = False
    alibi_first: bool = False
    reciprocal: bool = False

    def _blocks(self, length):
        if not self.ragged:
            return super()._blocks(length)
        rng = random.Random(f"{self.seed} {length}")  # noqa: S311 - reproducible, not secret
        cuts = sorted(rng.sample(range(1, length), min(length - 1, length // 24))) if length else []
        blocks = [slice(*ends) for ends in zip([0, *cuts], [*cuts, length], strict=True)]
        rng.shuffle(blocks)
        return blocks if length else []

    def _mm(self, problem, a, b, acc=None):
        many = a.shape[0] * a.shape[1] * a.shape[2] * b.shape[2] > _PRODUCTS
        if (
            problem.dot_precision == "tf32x3"
            or self.sums == "fma"
            or (many and self.sums != "exact")
        ):
            return super()._mm(problem, a, b, acc)
        a, b = self._operand(problem, a), self._operand(problem, b)
        if self.sums == "exact":
            product = torch.bmm(a.double(), b.double()).float()
            return product if acc is None else product + acc
        products = a.unsqueeze(-1) * b.unsqueeze(1)
        if self.sums == "halves":
            total = _in_halves(products)
            return total if acc is None else total + acc
        total = torch.zeros_like(products[:, :, 0]) if acc is None else acc
        for at in range(products.shape[2]):
            total = total + products[:, :, at]
        return total

    def _with_terms(self, problem, s, factor, bias, alibi):
        if self.alibi_first and bias is not None and alibi is not None:
            bias, alibi = bias - alibi, None
        return super()._with_terms(problem, s, factor, bias, alibi)

    def _normalised(self, acc, total):
        return acc * (1.0 / total) if self.reciprocal else acc / total

    def _summed(self, x, axis):
        order = torch.randperm(x.shape[axis], generator=torch.Generator().manual_seed(self.seed))
        x = x.index_select(axis, order)
        return x.cumsum(axis).narrow(axis, -1, 1) if x.shape[axis] else x.sum(axis, keepdim=True)


def _in_halves(products):
    """The sum along the third axis, each half by itself."""
    size = products.shape[2]
    if size < 2:
        return products.sum(2)
    return _in_halves(products[:, :, : size // 2]) + _in_halves(products[:, :, size // 2 :])


@dataclasses.dataclass(frozen=True)
class _Merged(_Varied):
    """Keys in parts, whose float32 outputs are merged with the weights exp(lse of part - lse)."""

    parts: int = 2

    def forward(self, problem, q, k, v, terms):
        length = max(1, -(-problem.seqlen_k // self.parts))
        first = _Part(**_fields(self), keys=(0, length))
        found = [first.forward(problem, q, k, v, terms)]
        terms = dataclasses.replace(terms, sinks=None)
        for start in range(length, problem.seqlen_k, length):
            part = dataclasses.replace(first, keys=(start, start + length))
            plain = dataclasses.replace(problem, sinks=False)
            found.append(part.forward(plain, q, k, v, terms))
        o, lse = (torch.stack(x) for x in zip(*found, strict=True))
        top = _finite(lse.amax(0))
        lse_of_all = top + (lse - top).exp().sum(0).log()
        weights = (lse - _finite(lse_of_all)).exp()
        return (weights.unsqueeze(-1) * o).sum(0).to(q.dtype), lse_of_all


@dataclasses.dataclass(frozen=True)
class _Part(_Varied):
    """Some of the keys, and o as it was accumulated."""

    keys: tuple[int, int] = (0, 0)

    def _mask(self, problem):
        allowed = super()._mask(problem)
        index = torch.arange(problem.seqlen_k)
        return allowed & (index >= self.keys[0]) & (index < self.keys[1])

    def _blocks(self, length):
        first, end = self.keys
        return [x for x in super()._blocks(length) if x.start < end and x.stop > first]

    def _stored(self, _native, o):
        return o


def _fields(emulator):
    return {x.name: getattr(emulator, x.name) for x in dataclasses.fields(_Varied)}


def _finite(x):
    return torch.where(x == -math.inf, 0.0, x)


def _choices(problem):
    """Drawn from the problem, so that a second run makes the same."""
    seed = zlib.crc32(repr(problem).encode())
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    return rng, {
        # A block costs a millisecond: of very many keys they are larger.
        "block_n": max(rng.choice((16, 32, 48, 64, 80, 128, 256)), problem.seqlen_k // 256),
        "reverse": rng.random() < 0.5,
        "exponent": rng.choice(("exp2", "exp", "fma")),
        "tf32": rng.choice(("truncate", "even", "exact")),
        "noise": rng.choice((0.0, 2.0, 4.0)),
        "ds_scale": rng.choice(("before", "after")),
        "threshold": rng.choice((0.0, 0.0, 8.0)),
        "sink": rng.choice(("first", "last")),
        "keep": rng.choice(("before", "after")),
        "sums": rng.choice(_SUMS),
        "ragged": rng.random() < 0.5,
        "alibi_first": rng.random() < 0.5,
        "reciprocal": rng.random() < 0.5,
        "seed": seed,
    }


def _varied(problem):
    return _Varied(**_choices(problem)[1])


def _merged(problem):
    rng, choices = _choices(problem)
    return _Merged(**choices, parts=rng.choice((2, 3, 5, 17)))


varied = emulated("varied", _varied)
merged = emulated("merged", _merged, Arithmetic(merged_by_lse=True))
