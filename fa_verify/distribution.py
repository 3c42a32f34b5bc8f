"""The default distribution of cases: weight tables, frozen here and stated in docs/distribution.md.

`sample` draws one case from the tables, `draw` those of a campaign's shard. No torch, no Triton.
Each number that a shard or a Hypothesis example needs comes from one `random.Random`, whose
``random()`` is the same on every platform and Python version.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import TYPE_CHECKING, Any, TypeVar

from fa_verify.case import Case, Values
from fa_verify.errors import InvalidInputError
from fa_verify.layouts import Layout
from fa_verify.masks import Mask
from fa_verify.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fa_verify.capabilities import Capabilities

__all__ = ["MAX_WORK", "Space", "draw", "sample", "work"]

T = TypeVar("T")
Table = tuple[tuple[T, float], ...]

MAX_WORK = 6e8
"""Most that a case may cost: batch * heads_q * seqlen_q * seqlen_k * (head_dim + head_dim_v)."""

LARGE = 1024 * 1024  # seqlen_q * seqlen_k of the class "large", at the least
FIRST = 24  # cases of a seed that are chosen to bring new things together
CANDIDATES = 6  # among which each of them is chosen
INT32 = 1 << 31  # elements that 32 bits count; a "huge" layout's last element lies past them
MOST_APART = 1024  # of its elements' rows: each takes a page of memory

# Class: queries from..to, keys from..to, most batch * heads_q. "large" is cut from an area.
SHAPES: Table[tuple[str, int, int, int, int, int]] = (
    (("medium", 33, 300, 33, 300, 6), 22.5),
    (("edge", 0, 33, 0, 33, 24), 9),
    (("small", 1, 64, 1, 64, 24), 10),
    (("decode", 1, 16, 64, 4096, 12), 7),
    (("long", 200, 1000, 200, 1000, 3), 23),
    (("tall", 500, 3000, 1, 150, 4), 6),
    (("wide", 1, 150, 500, 3000, 4), 7),
    (("large", 256, 4096, 256, 4096, 3), 14),
    # Past 16 bits: keys that short integers cannot count, heads that a grid's axis cannot.
    (("giant", 1, 4, 32_800, 36_000, 1), 1),
    (("crowd", 1, 2, 1, 2, 65_600), 0.5),
)
EDGE_LENGTHS: Table[int] = (
    *((1, 20), (0, 16), (2, 15), (3, 8), (5, 5), (7, 5)),
    *((15, 6), (16, 6), (17, 8), (31, 6), (32, 6), (33, 8)),
)
LENGTH_KINDS: Table[str] = (("anything", 40), ("beside a block", 35), ("blocks", 10), ("prime", 15))
BLOCKS: Table[int] = ((16, 1), (32, 1), (64, 2), (128, 2), (256, 1))
# Coincidence hides bugs, and so does its absence: masks that are dropped when lengths are even.
RELATIONS: Table[str] = (("unequal", 60), ("congruent", 20), ("aligned", 12), ("equal", 8))
# "congruent": seqlen_k - seqlen_q is this much more than a multiple of a block.
NEARNESS: Table[int] = ((0, 1), (1, 1), (-1, 1), (2, 1), (-2, 1))

HEADS: Table[tuple[int, int, int]] = (
    *(((1, 1, 1), 8), ((1, 2, 2), 7), ((2, 1, 1), 7), ((2, 3, 3), 7), ((3, 2, 2), 6)),
    *(((1, 3, 3), 5), ((1, 5, 5), 3), ((3, 4, 4), 3), ((1, 2, 1), 7), ((1, 3, 1), 6)),
    *(((1, 6, 2), 8), ((1, 6, 3), 7), ((2, 4, 1), 4), ((2, 6, 2), 6), ((3, 8, 2), 6)),
    *(((1, 8, 2), 5), ((1, 4, 2), 3), ((5, 4, 2), 3), ((1, 14, 2), 2)),
)
CROWD: Table[tuple[int, int, int]] = (((8200, 8, 2), 1), ((65_600, 1, 1), 1))
HEAD_DIMS: Table[int] = (
    *((80, 24), (96, 16), (64, 12), (128, 8), (32, 6), (16, 5), (256, 2)),
    *((1, 1), (2, 1), (8, 1), (40, 1), (48, 1), (72, 1), (112, 1), (192, 1), (255, 1)),
    (0, 18),  # any of 1 to 256
)
HEAD_DIM_V: Table[str] = (("same", 75), ("other", 25))

DTYPES: Table[Any] = (("float16", 40), ("bfloat16", 40), ("float32", 20))
DOT_PRECISIONS: Table[Any] = (("ieee", 40), ("tf32", 40), ("tf32x3", 20))
BACKWARD = 0.6

# causal, a left window, a right window, alignment
MASKS: Table[tuple[bool, bool, bool, Any]] = (
    ((False, False, False, "bottom-right"), 30),
    ((True, False, False, "bottom-right"), 26),
    ((True, False, False, "top-left"), 10),
    ((False, True, True, "bottom-right"), 8),
    ((True, True, False, "bottom-right"), 9),
    ((False, True, False, "bottom-right"), 4),
    ((False, False, True, "bottom-right"), 3),
    ((False, True, True, "top-left"), 4),
    ((True, True, False, "top-left"), 4),
    ((False, True, False, "top-left"), 2),
)
SMALL_WINDOWS: Table[int] = ((0, 3), (1, 3), (2, 1), (7, 1), (15, 1), (16, 1), (17, 1), (64, 1))
WINDOWS: Table[str] = (("small", 36), ("hides little", 14), ("anything", 50))
HIDDEN: Table[int] = (
    (2, 3),
    (1, 1),
    (3, 1),
)  # a window this much below a length hides a key or two
SOFTCAPS: Table[float] = ((0.0, 86), (50.0, 3), (30.0, 3), (15.0, 3), (5.0, 2), (1.0, 3))
SCALES: Table[float | None] = (
    *((None, 82), (0.125, 3), (0.5, 3), (1.0, 2), (-0.1, 3), (-1.0, 1), (0.0, 2)),
    *((0.01, 2), (1e-4, 0.5), (10.0, 1), (1e4, 0.5)),
)

LAYOUTS: Table[str] = (
    *(("bhsd", 28), ("bshd", 18), ("packed", 14), ("padded rows", 10), ("transposed", 8)),
    *(("shared heads", 6), ("offset", 6), ("padded heads", 4), ("spread", 3), ("sbhd", 3)),
    ("huge", 2),
)
DENSE_LAYOUTS: Table[str] = (("bhsd", 55), ("bshd", 45))
DIFFERENT_LAYOUTS = 0.7  # how often v's kind is drawn again when it is k's

QK: Table[str] = (
    *(("normal", 36), ("uniform-positive", 3), ("constant", 3), ("equal-keys", 3), ("one-hot", 4)),
    *(("dominant-key", 4), ("alternating-signs", 3), ("heavy-tails", 3), ("row-shift", 4)),
    *(("row-shift-far", 2.5), ("near-ties", 2.5), ("subnormal-p", 4), ("near-max", 2.5)),
    *(("zeros", 2.5), ("mixed", 3), ("two-level", 3), ("duplicates", 2.5), ("increasing", 4)),
    *(("drifting-periodic", 2.5), ("decreasing", 3), ("tiny", 2.5), ("huge", 2.5)),
)
V: Table[str] = (
    *(("normal", 42), ("ones", 8), ("zero-mean", 10), ("indicator", 10), ("offset", 8)),
    *(("near-max", 4), ("heavy-tails", 6), ("zeros", 3), ("mixed", 9)),
)
DO: Table[str] = (
    *(("normal", 52), ("ones", 10), ("one-hot-row", 10), ("zeros", 4)),
    *(("mixed", 10), ("small", 8), ("near-max", 6)),
)
LOGITS: Table[float] = ((1.0, 62), (2.0, 8), (4.0, 8), (10.0, 10), (30.0, 6), (100.0, 6))
# Families whose logits are not set to a size of their own.
SCALABLE = frozenset(
    {
        *("normal", "uniform-positive", "constant", "equal-keys", "alternating-signs"),
        *("heavy-tails", "near-ties", "zeros", "mixed", "two-level", "duplicates"),
    }
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The tables that remain once a kernel's capabilities and the caller's wishes are known.

    Attributes:
        capabilities: What the kernel takes; None: everything.
        dtypes: Those drawn from; likewise dot_precisions, masks, heads.
        head_dims: All allowed, ascending.
        head_dims_v: All allowed, ascending; empty: always head_dim.
        backward: Share of cases with a backward pass.
        max_elements: Most batch * heads_q * seqlen_q * seqlen_k, or None.
    """

    capabilities: Capabilities | None
    dtypes: Table[Any]
    dot_precisions: Table[Any]
    masks: Table[tuple[bool, bool, bool, Any]]
    heads: Table[tuple[int, int, int]]
    head_dims: tuple[int, ...]
    head_dims_v: tuple[int, ...]
    backward: float
    max_elements: int | None

    @classmethod
    def of(
        cls,
        capabilities: Capabilities | None = None,
        *,
        dtype: str | None = None,
        backward: bool | None = None,
        max_elements: int | None = None,
    ) -> Space:
        """Cut the tables down.

        Raises:
            InvalidInputError: Nothing is left of one of them.
        """
        c = capabilities
        every = tuple(range(1, 257))
        gradients = c is None or c.backward
        if backward and not gradients:
            msg = "backward=True: the capabilities declare no backward; use backward=None or False"
            raise InvalidInputError(msg)
        if max_elements is not None and max_elements < 1:
            msg = f"max_elements={max_elements}: must be at least 1, or None"
            raise InvalidInputError(msg)
        dots = DOT_PRECISIONS if c is None else _only(DOT_PRECISIONS, c.dot_precisions)
        usable = tuple(name for name, _ in DTYPES if name != "float32" or dots)
        return cls(
            capabilities=c,
            dtypes=_only(
                _only(DTYPES, usable if c is None else set(usable) & set(c.dtypes)),
                (dtype,) if dtype is not None else usable,
                name="dtype",
            ),
            dot_precisions=dots,
            masks=tuple(entry for entry in MASKS if c is None or _takes_mask(c, entry[0])),
            heads=tuple(e for e in HEADS if c is None or c.gqa or e[0][1] == e[0][2]),
            head_dims=_not_empty("head_dims", (d for d in every if c is None or d in c.head_dims)),
            head_dims_v=every
            if c is None
            else tuple(d for d in every if d in (c.head_dims_v or ())),
            backward=BACKWARD if backward is None and gradients else float(bool(backward)),
            max_elements=max_elements,
        )

    def fit_head_dim(self, wanted: int, *, of_v: bool = False) -> int:
        """The largest allowed head_dim up to the one wanted, or else the smallest."""
        allowed = self.head_dims_v if of_v else self.head_dims
        return max((d for d in allowed if d <= wanted), default=allowed[0])


def _takes_mask(c: Capabilities, entry: tuple[bool, bool, bool, Any]) -> bool:
    causal, left, right, alignment = entry
    if not (causal or left or right):
        return True
    return alignment in c.alignments and (c.window or not (left or right))


def _only(table: Table[T], allowed: Iterable[Any], name: str = "") -> Table[T]:
    kept = set(allowed)
    left = tuple(entry for entry in table if entry[0] in kept)
    return _not_empty(name, left) if name else left


def _not_empty(name: str, values: Iterable[T]) -> tuple[T, ...]:
    left = tuple(values)
    if not left:
        msg = f"{name}: none is left that both the capabilities and the caller allow"
        raise InvalidInputError(msg)
    return left


def work(problem: Problem) -> float:
    """What `MAX_WORK` limits."""
    p = problem
    return p.batch * p.heads_q * p.seqlen_q * p.seqlen_k * (p.head_dim + p.head_dim_v)


def draw(
    seed: int,
    count: int,
    capabilities: Capabilities | None = None,
    *,
    dtype: str | None = None,
    backward: bool | None = None,
    max_elements: int | None = None,
    forms: Sequence[int] = (),
) -> list[Case]:
    """The first `count` cases of the sequence that belongs to a seed.

    The classes of shape and the q, k families are spread evenly over the sequence, so that a
    hundred cases already hold every class in its share. Each of the first `FIRST` cases is the one
    of `CANDIDATES` that joins most features not yet seen together, so that a few cases already
    hold most pairs of a dtype, a mask, layouts, heads, softcap, scale and pass.

    Args:
        seed: Which sequence.
        count: How many cases.
        capabilities: What the kernel takes; None: everything.
        dtype: Only this one.
        backward: Only cases with a backward pass, or only without.
        max_elements: Most batch * heads_q * seqlen_q * seqlen_k.
        forms: Where compiling is dear. What a kernel is compiled for (head dims, dtype, kind of
            mask, softcap, layouts) is then drawn from these seeds, case i from ``forms[i % n]``;
            lengths, heads, batch, windows, scale and values stay free.

    Raises:
        InvalidInputError: The capabilities leave nothing to draw.

    >>> draw(0, 3) == draw(0, 5)[:3]
    True
    >>> len({case.problem.head_dim for case in draw(0, 50, forms=[7])})
    1
    """
    space = Space.of(capabilities, dtype=dtype, backward=backward, max_elements=max_elements)
    start = random.Random(f"start {seed}")  # noqa: S311
    first, second = start.random(), start.random()
    cases: list[Case] = []
    seen: set[tuple[str, str]] = set()
    for index in range(count):
        # The R2 sequence: Martin Roberts, "The unreasonable effectiveness of quasirandom
        # sequences" (2018); steps 1/g and 1/g^2, g^3 = g + 1.
        spread = (
            (first + index * 0.7548776662466927) % 1.0,
            (second + index * 0.5698402909980532) % 1.0,
        )
        form = f"form {forms[index % len(forms)]}" if forms else None
        tries = 1 if forms or index >= FIRST else CANDIDATES
        drawn = [
            sample(
                random.Random(f"case {seed} {index} {candidate}"),  # noqa: S311
                space,
                spread=spread,
                form=form,
            )
            for candidate in range(tries)
        ]
        case = max(drawn, key=lambda one: len(_pairs(one) - seen)) if tries > 1 else drawn[0]
        seen |= _pairs(case) if tries > 1 else set()
        cases.append(case)
    return cases


def _pairs(case: Case) -> set[tuple[str, str]]:
    """What comes together in a case, two by two."""
    p, mask = case.problem, case.problem.mask
    lengths = (p.seqlen_q > p.seqlen_k) - (p.seqlen_q < p.seqlen_k)
    power = p.head_dim & (p.head_dim - 1) == 0
    features = (
        f"dtype {p.dtype} {p.dot_precision}",
        f"mask {mask.causal} {mask.window_left is None} {mask.window_right is None}",
        f"aligned {mask.hides_anything and mask.alignment}",
        f"lengths {lengths}",
        f"heads {p.group > 1} {p.heads_kv > 1} {p.batch > 1}",
        f"head_dim {power} {p.head_dim > 64} {p.head_dim_v == p.head_dim}",
        f"q {_kind(p.layout_q)}",
        f"k {_kind(p.layout_k)}",
        f"v {_kind(p.layout_v)}",
        f"do {case.backward and _kind(p.layout_do)}",
        f"softcap {p.softcap > 0}",
        f"scale {p.softmax_scale and p.softmax_scale > 0}",
        f"v values {case.values.v}",
    )
    return set(itertools.combinations(features, 2))


def _kind(layout: Layout) -> str:
    huge = max(layout.pad) >= INT32 // MOST_APART
    return f"{layout.order} {layout.pad != (0, 0, 0, 0)} {huge} {layout.shared_heads}"


def sample(
    rng: random.Random,
    space: Space,
    *,
    spread: tuple[float, float] | None = None,
    form: str | None = None,
) -> Case:
    """One case that the space's capabilities accept.

    Args:
        rng: Where all choices come from.
        space: The tables.
        spread: Numbers in [0, 1) that choose the class of shape and the q, k family instead.
        form: Seed of the choices that a kernel is compiled for, instead of rng.

    Raises:
        InvalidInputError: `accepts` refused a thousand cases in a row.
    """
    reason = None
    for _ in range(1000):
        former = rng if form is None else random.Random(form)  # noqa: S311
        case = _Draw(rng, former, space).case(spread or (rng.random(), rng.random()))
        c = space.capabilities
        reason = None if c is None else c.reason_against(case.problem)
        if reason is None:
            return case
        spread = None
        form = form and f"{form}'"
    msg = f"capabilities: refused 1000 cases of the default distribution, the last for {reason!r}"
    raise InvalidInputError(msg)


class _Draw:
    """One case being drawn."""

    def __init__(self, rng: random.Random, form: random.Random, space: Space) -> None:
        self._rng = rng
        self._form = form  # of the choices that a kernel is compiled for; often the same as rng
        self._space = space

    def case(self, spread: tuple[float, float]) -> Case:
        space, c = self._space, self._space.capabilities
        shape = _at(SHAPES, spread[0])
        head_dim, head_dim_v = self._head_dims()
        seqlen_q, seqlen_k = self._lengths(shape, head_dim + head_dim_v)
        batch, heads_q, heads_kv = self._heads(
            seqlen_q * seqlen_k, head_dim + head_dim_v, most=shape[5], crowd=shape[0] == "crowd"
        )
        dtype = _at(space.dtypes, self._form.random())
        backward = self._chance(space.backward)
        softcap = _at(SOFTCAPS, self._form.random())
        problem = Problem(
            batch=batch,
            heads_q=heads_q,
            heads_kv=heads_kv,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=dtype,
            dot_precision=_at(space.dot_precisions, self._form.random())
            if dtype == "float32"
            else "ieee",
            mask=self._mask(seqlen_q, seqlen_k),
            softmax_scale=self._pick(SCALES),
            softcap=softcap if c is None or c.softcap else 0.0,
        )
        problem = dataclasses.replace(problem, **self._layouts(problem, backward=backward))
        values = self._values(_at(QK, spread[1]), backward=backward)
        return Case(
            problem=problem, values=values, seed=self._between(0, 2**32 - 1), backward=backward
        )

    def _values(self, qk: str, *, backward: bool) -> Values:
        v, do, logits = self._pick(V), self._pick(DO), self._pick(LOGITS)
        # Products of two numbers near the maximum overflow float32, so nothing could be judged.
        if qk == "near-max":
            v, do = (name if name != "near-max" else "normal" for name in (v, do))
        if v == "near-max":
            do = "small"
        return Values(
            qk=qk,
            v=v,
            do=do if backward else "normal",
            logits=logits if qk in SCALABLE else 1.0,
        )

    def _pick(self, table: Table[T]) -> T:
        return _at(table, self._rng.random())

    def _chance(self, probability: float) -> bool:
        return self._rng.random() < probability

    def _between(self, least: int, most: int) -> int:
        return least + int(self._rng.random() * (most - least + 1))

    def _head_dims(self) -> tuple[int, int]:
        space = self._space
        head_dim = self._head_dim(space.head_dims)
        if not space.head_dims_v:
            return head_dim, head_dim
        same = _at(HEAD_DIM_V, self._form.random()) == "same" and head_dim in space.head_dims_v
        return head_dim, head_dim if same else self._head_dim(space.head_dims_v)

    def _head_dim(self, allowed: Sequence[int]) -> int:
        any_of = allowed[int(self._form.random() * len(allowed))]
        fits = tuple(entry for entry in HEAD_DIMS if entry[0] in allowed or entry[0] == 0)
        return _at(fits, self._form.random()) or any_of

    def _length(self, least: int, most: int) -> int:
        """A length of one of the kinds in [least, most], as near as the kind allows."""
        kind, n = self._pick(LENGTH_KINDS), self._between(least, most)
        if kind == "prime":
            while n > least and not _is_prime(n):
                n -= 1
        elif kind != "anything":
            block = self._pick(BLOCKS)
            n = max(1, round(n / block)) * block
            if kind == "beside a block":
                n += 1 if self._chance(0.5) else -1
        return min(max(n, least), most)

    def _lengths(self, shape: tuple[str, int, int, int, int, int], depth: int) -> tuple[int, int]:
        name, q_least, q_most, k_least, k_most, _ = shape
        relation = self._pick(RELATIONS)
        if name == "edge":
            # One length at an edge; the other too, or anything.
            q, k = self._pick(EDGE_LENGTHS), self._pick(EDGE_LENGTHS)
            if self._chance(0.4):
                q, k = (q, self._length(1, 200)) if self._chance(0.5) else (self._length(1, 200), k)
        elif name == "large":
            most = int(min(1.5, MAX_WORK / (LARGE * depth)) * LARGE)
            # Log-uniform, so that both 4096 x 256 and 256 x 4096 occur as often as squares.
            base = q_least * (q_most / q_least) ** self._rng.random()
            q = self._length(int(0.9 * base), int(1.1 * base))
            k = self._length(-(-LARGE // q), most // q)
            if relation != "unequal":
                q = k = self._length(1024, int(most**0.5))
        else:
            q, k = self._length(q_least, q_most), self._length(k_least, k_most)
        if relation == "aligned" and q > 64 and k > 64:
            q = k = min(q, k) // 128 * 128 + (128 if name != "large" or min(q, k) < 1024 else 0)
        elif relation == "equal" and name in ("edge", "small", "medium", "long"):
            k = q
        elif relation == "congruent" and q > 1 and name not in ("large", "giant", "crowd"):
            block, rest = self._pick(BLOCKS), self._pick(NEARNESS)
            near = q + round((k - q) / block) * block + rest
            k = near if k_least <= near <= k_most else k
        elif relation == "unequal" and q == k and name != "crowd":
            k += 1 if name != "large" else 2
        return self._shorten(q, k)

    def _shorten(self, q: int, k: int) -> tuple[int, int]:
        most = self._space.max_elements
        while most is not None and q * k > most:
            q, k = (q // 2, k) if q > k else (q, k // 2)
        return q, k

    def _heads(self, area: int, depth: int, *, most: int, crowd: bool) -> tuple[int, int, int]:
        elements = self._space.max_elements or MAX_WORK
        table = self._space.heads
        if crowd:
            table = tuple(e for e in CROWD if any(h[1] > h[2] for h, _ in table) or e[0][1] == 1)
        fits = tuple(
            (heads, weight)
            for heads, weight in table
            if heads[0] * heads[1] <= most
            and heads[0] * heads[1] * area * depth <= MAX_WORK
            and heads[0] * heads[1] * area <= elements
        )
        return self._pick(fits) if fits else (1, 1, 1)

    def _mask(self, seqlen_q: int, seqlen_k: int) -> Mask:
        causal, left, right, alignment = _at(self._space.masks, self._form.random())
        sides = [self._window(seqlen_q, seqlen_k) if side else None for side in (left, right)]
        return Mask(causal=causal, window_left=sides[0], window_right=sides[1], alignment=alignment)

    def _window(self, seqlen_q: int, seqlen_k: int) -> int:
        kind, small, hidden = self._pick(WINDOWS), self._pick(SMALL_WINDOWS), self._pick(HIDDEN)
        if kind == "small":
            return small
        if kind == "hides little":
            return max(0, (seqlen_q if self._chance(0.5) else seqlen_k) - hidden)
        return self._length(0, max(seqlen_q, seqlen_k))

    def _layouts(self, problem: Problem, *, backward: bool) -> dict[str, Any]:
        c = self._space.capabilities
        table = LAYOUTS if c is None or c.layouts else DENSE_LAYOUTS
        kinds = {name: _at(table, self._form.random()) for name in ("q", "k", "v", "do")}
        if kinds["k"] == kinds["v"] and self._form.random() < DIFFERENT_LAYOUTS:
            kinds["v"] = _at(table, self._form.random())
        if not backward:
            kinds["do"] = "bhsd"
        return {f"layout_{name}": self._layout(kind, name, problem) for name, kind in kinds.items()}

    def _layout(self, kind: str, name: str, p: Problem) -> Layout:
        some = (1, 3, 8, 16)[int(self._form.random() * 4)]
        if kind == "packed":
            # A slice of one (batch, seqlen, heads of q + k + v, head_dim) buffer.
            head_dim = p.head_dim if name in ("q", "k") else p.head_dim_v
            own = p.heads_q if name in ("q", "do") else p.heads_kv
            heads = p.heads_q + 2 * p.heads_kv
            before = {"k": p.heads_q, "v": p.heads_q + p.heads_kv}.get(name, 0)
            pad = (0, 0, (heads - own) * head_dim, 0)
            return Layout(order="bshd", pad=pad, offset=before * head_dim)
        if kind == "huge":
            return self._huge(name, p)
        order = {"bshd": "bshd", "transposed": "bhds", "sbhd": "sbhd"}.get(kind, "bhsd")
        pads = {
            "padded rows": (0, 0, some, 0),
            "padded heads": (some, 3 * some, 0, 0),
            "spread": (0, 0, 0, 1),
        }
        return Layout(
            order=order,
            pad=pads.get(kind, (0, 0, 0, 0)),
            shared_heads=kind == "shared heads",
            offset=some if kind == "offset" else 0,
        )

    def _huge(self, name: str, p: Problem) -> Layout:
        """A view whose last sequence, head or row lies past 2^31 elements, at a stride below that.

        The axis needs three of them; 4-byte elements would take 8 GB of addresses. None where forms
        are given: on a card such a tensor takes memory.
        """
        extents = getattr(p, {"do": "shape_o"}.get(name, f"shape_{name}"))
        axes = [axis for axis in range(3) if 3 <= extents[axis] <= MOST_APART]
        if not axes or p.dtype == "float32" or self._form is not self._rng:
            return Layout()
        axis = axes[int(self._form.random() * len(axes))]
        pad = [0, 0, 0, 0]
        pad[axis] = -(-INT32 // (extents[axis] - 1))
        order = ("bhsd", "hbsd", "sbhd")[axis]  # outermost, or all together span far more
        return Layout(order=order, pad=(pad[0], pad[1], pad[2], pad[3]))


def _at(table: Table[T], position: float) -> T:
    """The entry under a position in [0, 1) when the weights are laid end to end."""
    rest = position * sum(weight for _, weight in table)
    for value, weight in table:
        rest -= weight
        if rest < 0:
            return value
    return table[-1][0]


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % factor for factor in range(2, int(n**0.5) + 1))
