"""Which cases mutants are tried on: cheap ones that, two traits at a time, have everything."""

from __future__ import annotations

import collections
import heapq
import itertools
from typing import TYPE_CHECKING

from fa_verify import campaign
from fa_verify.mutation.pursuit import pursuing

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from fa_verify.backends.base import Setup
    from fa_verify.case import Case
    from fa_verify.kernel import Kernel
    from fa_verify.layouts import Layout

__all__ = ["Choice", "Drawn", "late", "traits"]

Drawn = tuple["Case", "Setup"]
_Pair = tuple[str, str]

_TIMES = 40  # as many cases are drawn as are wanted
_CHEAP = 0.5  # of these, the cheapest share is chosen from
_INT32 = 1 << 31  # elements that a 32-bit offset does not reach
_BLOCK = 64  # queries and keys of a tile, about: what one query costs
_USUAL = (64, 80, 96, 128, 256)  # head dims that models have
_PLAIN = 4  # of so many cases, one is of these
_VECTOR = 16  # bytes that vector accesses and copy engines move at once
_LARGEST_BLOCK = 128  # what more keys, or rows, than this are lie in several blocks
_SMALLEST_BLOCK = 16
_SIDE_BY_SIDE = 4  # heads whose blocks kernels interleave, as a rule
_NEAR = 2  # how far from a block's end an end of a mask still may be of interest


class Choice:
    """The cases of a run that mutants are tried on, asked for some at a time.

    A few large cases would take most of the time, and show little that small ones do not. One after
    the other, the case is chosen that brings most pairs of traits, each counted half as much for
    every case that has it already: whatever comes first has most that the rest has.
    """

    def __init__(self, kernel: Kernel, cases: int, seed: int) -> None:
        """Draw what is chosen from.

        Args:
            kernel: The kernel.
            cases: How many will be asked for.
            seed: Of the run that draws them.
        """
        drawn = list(campaign.drawn(kernel, campaign.Plan(cases=_TIMES * cases, seed=seed)))
        drawn.sort(key=_cost)
        cheap = drawn[: max(cases, int(_CHEAP * len(drawn)))]
        plain = [pair for pair in drawn if _is_plain(pair[0])]  # few: one or two of a hundred
        self._left = dict.fromkeys([*cheap, *plain])
        self._seen: collections.Counter[_Pair] = collections.Counter()

    def first(self, count: int) -> list[Drawn]:
        """Cases of every kind; every few turns one of those that fast paths are made for.

        These have the fewest traits.
        """
        plain = _Greedy([pair for pair in self._left if _is_plain(pair[0])])
        others = _Greedy([pair for pair in self._left if not _is_plain(pair[0])])
        found = []
        for turn in range(count):
            first, second = (plain, others) if turn % _PLAIN == 0 else (others, plain)
            found.append(first.best(self._seen) or second.best(self._seen))
        return self._taken(found)

    def alike(self, known: Sequence[Case], count: int) -> list[Drawn]:
        """Cases that have all traits that these share: they run the same code, as a rule."""
        shared = set.intersection(*(set(traits(case)) for case in known)) if known else set()
        like = [pair for pair in self._left if shared <= set(traits(pair[0]))]
        greedy = _Greedy(like)
        return self._taken([greedy.best(self._seen) for _ in range(count)])

    def unlike(
        self, known: Sequence[Case], ran: Sequence[Collection[int]], count: int
    ) -> list[Drawn]:
        """Cases for mutants that live: likely to run their code, and unlike those that did.

        Args:
            known: Cases that have run.
            ran: For each mutant, which of them ran its code.
            count: How many are asked for.
        """
        left = list(self._left)
        places = pursuing(
            [set(traits(case)) for case, _ in left], [set(traits(x)) for x in known], ran, count
        )
        return self._taken(left[place] for place in places)

    def _taken(self, found: Iterable[Drawn | None]) -> list[Drawn]:
        taken = [pair for pair in found if pair]
        for pair in taken:
            self._left.pop(pair)
        return taken


class _Greedy:
    """Cases, of which the one is asked for again and again that brings most."""

    def __init__(self, cases: list[Drawn]) -> None:
        self._cases = cases
        self._pairs = [
            list(itertools.combinations(sorted(set(traits(case))), 2)) for case, _ in cases
        ]
        self._heap = [(-float(len(pairs)), i) for i, pairs in enumerate(self._pairs)]
        heapq.heapify(self._heap)

    def best(self, seen: collections.Counter[_Pair]) -> Drawn | None:
        """Take the best case and count its pairs; None: all are taken.

        What a case brings only falls: one that is still above all that the others once brought
        needs no comparison with what they bring now.
        """
        while self._heap:
            _, i = heapq.heappop(self._heap)
            gain = sum(0.5 ** seen[pair] for pair in self._pairs[i])
            if not self._heap or (-gain, i) <= self._heap[0]:
                seen.update(self._pairs[i])
                return self._cases[i]
            heapq.heappush(self._heap, (-gain, i))
        return None


def late(pair: Drawn) -> tuple[bool, int]:
    """A key: what is cheap is tried before what is not.

    Last come cases where a stride, taken for a length, makes loops that a time limit must end.
    """
    return any(trait.startswith("far") for trait in traits(pair[0])), _cost(pair)


def traits(case: Case) -> Iterator[str]:
    """What a kernel may branch on, and what a defect may need to show."""
    p, mask = case.problem, case.problem.mask
    yield f"pass {case.backward}"
    yield f"dtype {p.precision} {p.fp8}"
    yield f"softcap {p.softcap > 0}"
    yield f"scale {(p.scale > 0) - (p.scale < 0)}"
    yield f"right {mask.causal or mask.window_right is not None}"
    yield f"left {mask.window_left is not None}"
    yield f"group {p.group > 1} {p.heads_kv > 1} batch {p.batch > 1}"
    many = f"heads {p.batch * p.heads_q > _SIDE_BY_SIDE}"
    yield f"{many} blocks {p.seqlen_q > _LARGEST_BLOCK} {p.seqlen_k > _LARGEST_BLOCK}"
    yield from _paths(case)
    if mask.documents:
        empty = sorted({lengths.index(0) for lengths in mask.documents if 0 in lengths})
        yield f"documents {len(mask.documents) > 1} {mask.alignment if mask.banded else ''}"
        yield f"documents empty {empty}"
    if mask.pattern:
        yield f"pattern {mask.pattern.partition(':')[0]} {p.seqlen_q > _LARGEST_BLOCK}"
    shift = mask.shift(p.seqlen_q, p.seqlen_k)
    right = 0 if mask.causal else mask.window_right
    if right is not None:
        yield f"right end beside a block {_beside(shift + right)}"
    if mask.window_left is not None:
        yield f"left end beside a block {_beside(shift - mask.window_left)}"
    else:
        seen = p.seqlen_k if right is None else shift + right
        yield f"blocks without a mask {min(seen, p.seqlen_k) > _LARGEST_BLOCK}"
    yield f"longer {(p.seqlen_q > p.seqlen_k) - (p.seqlen_q < p.seqlen_k)}"
    yield f"terms {p.terms != ()} banded {mask.banded} {bool(mask.documents or mask.pattern)}"
    yield f"bias {p.bias} {_along(p.layout_bias, p.shape_bias)}"
    if p.bias:
        yield f"values of bias {case.values.bias}"
    yield f"alibi {p.alibi} {case.values.slopes if p.alibi else ''}"
    yield f"sinks {p.sinks} {case.values.sinks if p.sinks else ''}"
    yield f"dropout {p.dropout > 0}"
    if case.backward:
        yield f"gradient of lse {p.lse_grad}"
    yield f"values {case.values.qk}"
    yield f"values of v {case.values.v}"
    for name, shape in (
        ("q", p.shape_q),
        ("k", p.shape_k),
        ("v", p.shape_v),
        ("do", p.shape_o),
        ("bias", p.shape_bias),
    ):
        layout: Layout = getattr(p, f"layout_{name}")
        for axis, stride in zip("bhsd", layout.strides(shape), strict=True):
            extent = shape["bhsd".index(axis)]
            if stride * (extent - 1) >= _INT32 and (name != "do" or case.backward):
                yield f"far {name} {axis} {_extent(extent)} {bool(mask.documents)}"


def _paths(case: Case) -> Iterator[str]:
    """How tensors can be read, which chooses between paths of a kernel."""
    p = case.problem
    wide = _wide(case)
    rows = f"in vectors of {wide}" if _vectors(case, wide) else "of single elements"
    columns = f"columns {_columns(p.head_dim, wide)} {rows}"
    yield columns
    yield f"{columns} of v {_columns(p.head_dim_v, wide)} {p.head_dim == p.head_dim_v}"
    yield f"plain {_is_plain(case)}"
    yield f"{rows} plain {_is_plain(case)} batch {p.batch > 1} bias {p.bias}"
    if _is_plain(case):
        yield f"plain {p.head_dim}"
        yield f"plain {case.backward} group {p.group > 1} {p.heads_kv > 1} batch {p.batch > 1}"


def _is_plain(case: Case) -> bool:
    """Whether it is what fast paths are made for, which take windows and sinks as a rule."""
    p, mask = case.problem, case.problem.mask
    further = set(p.terms) - {"sinks"} or p.softcap or mask.documents or mask.pattern
    return (
        not further
        and p.scale > 0
        and p.dtype != "float32"
        and not p.fp8.startswith("block")
        and p.head_dim == p.head_dim_v
        and p.head_dim in _USUAL
        and _vectors(case, _wide(case))
    )


def _wide(case: Case) -> int:
    """Elements of q, k and v in a vector."""
    p = case.problem
    return _VECTOR // (1 if p.fp8 else 4 if p.dtype == "float32" else 2)


def _columns(head_dim: int, wide: int) -> str:
    """A power of two, two of them, another number of whole vectors, or neither."""
    if head_dim.bit_count() == 1:
        return "2^n"
    if head_dim.bit_count() == 2 and head_dim % _SMALLEST_BLOCK == 0:
        return "2^n + 2^m"
    return "vectors" if head_dim % wide == 0 else "odd"


def _extent(extent: int) -> str:
    """Whether the last element is in the first block, whatever a block is, or surely in another."""
    if extent <= _SMALLEST_BLOCK:
        return "in a block"
    return "in blocks" if extent > _LARGEST_BLOCK else "in some block"


def _along(layout: Layout, shape: tuple[int, int, int, int]) -> str:
    """How a bias that lies along keys can be read."""
    if shape[3] == 1:
        return ""
    return "in a row" if layout.strides(shape)[3] == 1 else "scattered"


def _vectors(case: Case, wide: int) -> bool:
    """Whether all tensors can be read 16 bytes at a time."""
    p = case.problem
    shapes = {"q": p.shape_q, "k": p.shape_k, "v": p.shape_v} | (
        {"do": p.shape_o} if case.backward else {}
    )
    for name, shape in shapes.items():
        layout: Layout = getattr(p, f"layout_{name}")
        *outer, inner = layout.strides(shape)
        if inner != 1 or any(n % wide for n in (*outer, layout.offset, shape[3])):
            return False
    return True


def _beside(end: int) -> str:
    """How far an end of a mask is from a multiple of a block, where it is near one."""
    rest = (end + _BLOCK // 2) % _BLOCK - _BLOCK // 2
    return f"{rest:+d}" if abs(rest) <= _NEAR else "no"


def _cost(pair: Drawn) -> int:
    """Multiply-adds, each tile counted whole."""
    p = pair[0].problem
    tiles = (p.seqlen_q // _BLOCK + 1) * (p.seqlen_k // _BLOCK + 1)
    return p.batch * p.heads_q * tiles * _BLOCK * _BLOCK * (p.head_dim + p.head_dim_v)
