"""`sample`: one case from the tables.

Each number comes from one `random.Random`, whose ``random()`` is the same on every platform and
Python version.
"""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, Any

from fa_verify.case import Case, Values
from fa_verify.distribution import tables
from fa_verify.distribution.corners import PLAIN
from fa_verify.distribution.gaps import with_gaps
from fa_verify.distribution.placement import placed
from fa_verify.distribution.scales import with_scales
from fa_verify.distribution.tables import DIFFERENT_LAYOUTS, LARGE, MAX_WORK
from fa_verify.distribution.terms import with_terms
from fa_verify.errors import InvalidInputError
from fa_verify.masks import Mask
from fa_verify.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fa_verify.distribution.corners import Corner
    from fa_verify.distribution.space import Space
    from fa_verify.distribution.tables import T, Table

__all__ = ["sample", "work"]

_TRIES = 1000
_PATIENCE = 50  # tries until a corner is taken to be outside what `accepts` takes
_SAME_FORM = 250  # tries with one form: `decode` of kernels/ takes one case in nine
Shape = tuple[str, int, int, int, int, int]


def work(problem: Problem) -> float:
    """What `MAX_WORK` limits."""
    p = problem
    return p.batch * p.heads_q * p.seqlen_q * p.seqlen_k * (p.head_dim + p.head_dim_v)


def sample(
    rng: random.Random,
    space: Space,
    *,
    spread: tuple[float, float] | None = None,
    form: str | None = None,
    corner: Corner = PLAIN,
    tries: int = _TRIES,
) -> Case:
    """One case that the space's capabilities accept.

    Args:
        rng: Where all choices come from.
        space: The tables.
        spread: Numbers in [0, 1) that choose the class of shape and the q, k family instead.
        form: Seed of the choices that a kernel is compiled for, instead of rng.
        corner: What is left of the tables, unless `accepts` refuses all of that.
        tries: Cases that may be refused in a row.

    Raises:
        InvalidInputError: `accepts` refused as many.
    """
    reason = None
    for tried in range(tries):
        former = rng if form is None else random.Random(form)  # noqa: S311
        corner = corner if tried < _PATIENCE else PLAIN
        drawing = _Drawing(rng, former, space, corner)
        case = drawing.case(spread or (rng.random(), rng.random()))
        c = space.capabilities
        case = with_scales(case, c, corner, form)
        reason = None if c is None else c.reason_against(case.problem)
        if reason is None:
            gaps = with_gaps(case, c, corner, form)
            whole = None if gaps is None else with_terms(gaps, c, corner, form)
            if whole is not None:
                return whole
            reason = "too large for what its form has"
        spread = None
        # Mostly lengths are refused: another form for each would have a kernel compiled for many.
        if form is not None and tried % _SAME_FORM == _SAME_FORM - 1:
            form += "'"
    msg = (
        f"capabilities: refused {tries} cases of the default distribution, the last for {reason!r}"
    )
    raise InvalidInputError(msg)


class _Drawing:
    """One case being drawn."""

    def __init__(
        self, rng: random.Random, form: random.Random, space: Space, corner: Corner
    ) -> None:
        self._rng = rng
        self._form = form  # of the choices that a kernel is compiled for; often the same as rng
        self._space = space
        self._corner = corner

    def case(self, spread: tuple[float, float]) -> Case:
        space, c = self._space, self._space.capabilities
        shape = _at(self._left("SHAPES"), spread[0])
        head_dim, head_dim_v = self._head_dims()
        seqlen_q, seqlen_k = self._lengths(shape, head_dim + head_dim_v)
        batch, heads_q, heads_kv = self._heads(
            seqlen_q * seqlen_k, head_dim + head_dim_v, most=shape[5], crowd=shape[0] == "crowd"
        )
        dtype = _at(self._narrowed("DTYPES", space.dtypes), self._form.random())
        backward = self._chance(space.backward)
        if self._corner.backward is not None and 0 < space.backward < 1:
            backward = self._corner.backward
        softcap = _at(self._left("SOFTCAPS"), self._form.random())
        problem = Problem(
            batch=batch,
            heads_q=heads_q,
            heads_kv=heads_kv,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=dtype,
            dot_precision=_at(
                self._narrowed("DOT_PRECISIONS", space.dot_precisions), self._form.random()
            )
            if dtype == "float32"
            else "ieee",
            mask=self._mask(seqlen_q, seqlen_k),
            softmax_scale=self._pick("SCALES"),
            softcap=softcap if c is None or c.softcap else 0.0,
        )
        problem = dataclasses.replace(problem, **self._layouts(problem, backward=backward))
        values = self._values(_at(self._left("QK"), spread[1]), backward=backward)
        return Case(
            problem=problem, values=values, seed=self._between(0, 2**32 - 1), backward=backward
        )

    def _left(self, name: str) -> Table[Any]:
        """What the corner leaves of a table."""
        table: Table[Any] = getattr(tables, name)
        return self._narrowed(name, table)

    def _narrowed(self, name: str, table: Table[T]) -> Table[T]:
        kept = self._corner.kept(name)
        if not kept:
            return table
        left = tuple(
            entry
            for entry in table
            if entry[0] in kept or (name == "SHAPES" and entry[0][0] in kept)  # type: ignore[index]
        )
        return left or table

    def _pick(self, name: str) -> Any:
        return _at(self._left(name), self._rng.random())

    def _chance(self, probability: float) -> bool:
        return self._rng.random() < probability

    def _between(self, least: int, most: int) -> int:
        return least + int(self._rng.random() * (most - least + 1))

    def _values(self, qk: str, *, backward: bool) -> Values:
        v, do, logits = self._pick("V"), self._pick("DO"), self._pick("LOGITS")
        # Products of two numbers near the maximum overflow float32, so nothing could be judged.
        if qk == "near-max":
            v, do = (name if name != "near-max" else "normal" for name in (v, do))
        if v == "near-max":
            do = "small"
        return Values(
            qk=qk,
            v=v,
            do=do if backward else "normal",
            logits=logits if qk in tables.SCALABLE else 1.0,
        )

    def _head_dims(self) -> tuple[int, int]:
        space = self._space
        head_dim = self._head_dim(space.head_dims)
        if not space.head_dims_v:
            return head_dim, head_dim
        same = _at(self._left("HEAD_DIM_V"), self._form.random()) == "same"
        if same and head_dim in space.head_dims_v:
            return head_dim, head_dim
        return head_dim, self._head_dim(space.head_dims_v)

    def _head_dim(self, allowed: Sequence[int]) -> int:
        if self._corner.deepest:
            return allowed[-1]
        any_of = allowed[int(self._form.random() * len(allowed))]
        fits = tuple(e for e in self._left("HEAD_DIMS") if e[0] in allowed or e[0] == 0)
        return int(_at(fits, self._form.random()) if fits else any_of) or any_of

    def _length(self, least: int, most: int) -> int:
        """A length of one of the kinds in [least, most], as near as the kind allows."""
        kind, n = self._pick("LENGTH_KINDS"), self._between(least, most)
        if kind == "prime":
            while n > least and not _is_prime(n):
                n -= 1
        elif kind != "anything":
            block = self._pick("BLOCKS")
            n = max(1, round(n / block)) * block
            if kind == "beside a block":
                n += self._pick("SIDES")
        return min(max(n, least), most)

    def _lengths(self, shape: Shape, depth: int) -> tuple[int, int]:
        name, q_least, q_most, k_least, k_most, _ = shape
        relation = self._pick("RELATIONS")
        if name == "edge":
            # One length at an edge; the other too, or anything.
            q, k = self._pick("EDGE_LENGTHS"), self._pick("EDGE_LENGTHS")
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
            q = 1 if name == "decode" and self._chance(tables.ONE_QUERY) else q
        if relation == "aligned" and q > 64 and k > 64:
            q = k = min(q, k) // 128 * 128 + (128 if name != "large" or min(q, k) < 1024 else 0)
        elif relation == "equal" and name in ("edge", "small", "medium", "long"):
            k = q
        elif relation == "congruent" and q > 1 and name not in ("large", "giant", "crowd"):
            block, rest = self._pick("BLOCKS"), self._pick("NEARNESS")
            near = q + round((k - q) / block) * block + rest
            k = near if k_least <= near <= k_most else k
        elif relation == "unequal" and q == k and name != "crowd":
            k += 1 if name != "large" else 2
        return self._ordered(*self._shortened(q, k))

    def _shortened(self, q: int, k: int) -> tuple[int, int]:
        most = self._space.max_elements
        while most is not None and q * k > most:
            q, k = (q // 2, k) if q > k else (q, k // 2)
        return q, k

    def _ordered(self, q: int, k: int) -> tuple[int, int]:
        wanted = self._corner.order
        wrong = (wanted == "more queries" and q < k) or (wanted == "more keys" and q > k)
        return (k, q) if wrong else (q, k)

    def _heads(self, area: int, depth: int, *, most: int, crowd: bool) -> tuple[int, int, int]:
        elements = self._space.max_elements or MAX_WORK
        table = self._narrowed("HEADS", self._space.heads)
        if crowd:
            grouped = any(heads[1] > heads[2] for heads, _ in table)
            table = tuple(e for e in tables.CROWD if grouped or e[0][1] == e[0][2])
        fits = tuple(
            (heads, weight)
            for heads, weight in table
            if heads[0] * heads[1] <= most
            and heads[0] * heads[1] * area * depth <= MAX_WORK
            and heads[0] * heads[1] * area <= elements
        )
        return _at(fits, self._rng.random()) if fits else (1, 1, 1)

    def _mask(self, seqlen_q: int, seqlen_k: int) -> Mask:
        left_of = self._narrowed("MASKS", self._space.masks)
        causal, left, right, alignment = _at(left_of, self._form.random())
        bottom = alignment == "bottom-right"
        return Mask(
            causal=causal,
            # A left end hides keys from the last row first, a right end from the first one.
            window_left=self._window(seqlen_k if bottom else seqlen_q, seqlen_q, seqlen_k)
            if left
            else None,
            window_right=self._window(seqlen_q if bottom else seqlen_k, seqlen_q, seqlen_k)
            if right
            else None,
            alignment=alignment,
        )

    def _window(self, reach: int, seqlen_q: int, seqlen_k: int) -> int:
        """A window's size; one of `reach` - 1 hides nothing, one less a key of one row."""
        kind, small, hidden = (
            self._pick("WINDOWS"),
            self._pick("SMALL_WINDOWS"),
            self._pick("HIDDEN"),
        )
        if kind == "small":
            return int(small)
        if kind == "hides little":
            return max(0, reach - 1 - int(hidden))
        return self._length(0, max(seqlen_q, seqlen_k))

    def _layouts(self, problem: Problem, *, backward: bool) -> dict[str, Any]:
        c = self._space.capabilities
        table = self._left("LAYOUTS") if c is None or c.layouts else tables.DENSE_LAYOUTS
        kinds = {name: _at(table, self._form.random()) for name in ("q", "k", "v", "do")}
        if kinds["k"] == kinds["v"] and self._form.random() < DIFFERENT_LAYOUTS:
            kinds["v"] = _at(table, self._form.random())
        if not backward:
            kinds["do"] = "bhsd"
        if self._form is not self._rng:  # on a card, where a huge tensor takes memory
            kinds = {name: kind.replace("huge", "bhsd") for name, kind in kinds.items()}
        return {
            f"layout_{name}": placed(kind, name, problem, self._form.random, self._corner.axis)
            for name, kind in kinds.items()
        }


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
