"""Hypothesis strategies for problems and cases, and `shrink`. No torch, no Triton.

A case is drawn as one fixed number of bytes: how far each field is reduced, and the seed of a draw
from the default distribution. Elements are never drawn. Random bytes reduce next to nothing, so
``@given`` sees the frozen distribution; zero bytes reduce a field to its simplest value, so
Hypothesis shrinks towards a minimal case.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import time
from typing import TYPE_CHECKING

from hypothesis import reject
from hypothesis import strategies as st

from fa_verify.case import Case, Values
from fa_verify.distribution import Space, sample
from fa_verify.layouts import BHSD
from fa_verify.masks import FULL, Mask
from fa_verify.problem import TERMS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fa_verify.capabilities import Capabilities
    from fa_verify.problem import Problem

__all__ = ["cases", "problems", "shrink"]

_SEED_BYTES = 8
_LENGTHS = ("both", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "window", "documents")
_HEADS = ("batch", "group", "heads_kv")
_FLAGS = (
    *("backward", "mask", "causal", "window_left", "window_right", "alignment", "dtype"),
    *("dot_precision", "softcap", "softmax_scale", "layout_q", "layout_k", "layout_v"),
    *("layout_do", "qk", "v", "do", "logits", "seed"),
    *TERMS,
    *("documents", "pattern", "fp8", "scales"),
)
# What of a problem has values of a family, where it has another name.
_FIELDS = {"slopes": "alibi", "dlse": "lse_grad"}
# Overlapping digits: a length's cap is the sum of its three bytes times these. Bytes that shrink
# one after the other still reach every number, and a random cap lies above any length we draw.
_DIGITS = (256, 16, 1)
_SIZE = len(_LENGTHS) * len(_DIGITS) + len(_HEADS) + len(_FLAGS) + _SEED_BYTES


def cases(
    capabilities: Capabilities | None = None,
    *,
    backward: bool | None = None,
    dtype: str | None = None,
    max_elements: int | None = None,
    forms: Sequence[str] = (),
) -> st.SearchStrategy[Case]:
    """Cases of the default distribution that a kernel takes; they shrink to a minimal shape.

    Args:
        capabilities: What the kernel takes; None: everything.
        backward: Always or never a backward pass; None: as the distribution has it.
        dtype: Only this dtype.
        max_elements: Most batch * heads_q * seqlen_q * seqlen_k.
        forms: Where compiling is dear: seeds of what a kernel is compiled for, as
            `distribution.forms` chooses them; but for what is reduced, cases are of one of them.

    Raises:
        InvalidInputError: Nothing is left to draw.
    """
    space = Space.of(capabilities, dtype=dtype, backward=backward, max_elements=max_elements)
    decode = functools.partial(_decode, space, tuple(forms), keep_backward=backward is True)
    # One choice of fixed size: Hypothesis then neither mixes parts of two examples nor prefers
    # small numbers, either of which would bend the distribution.
    return st.binary(min_size=_SIZE, max_size=_SIZE).map(decode)


def problems(
    capabilities: Capabilities | None = None,
    *,
    dtype: str | None = None,
    max_elements: int | None = None,
) -> st.SearchStrategy[Problem]:
    """The problems of `cases`, values and seed left out."""
    drawn = cases(capabilities, dtype=dtype, max_elements=max_elements)
    return drawn.map(lambda case: case.problem)


def _decode(space: Space, forms: tuple[str, ...], data: bytes, *, keep_backward: bool) -> Case:
    """The case that the bytes stand for."""
    source = iter(data)
    caps = {name: sum(next(source) * digit for digit in _DIGITS) for name in _LENGTHS}
    caps |= {name: next(source) for name in _HEADS}
    simple = {name for name in _FLAGS if next(source) == 0}
    if keep_backward:
        simple.discard("backward")
    seed = int.from_bytes(bytes(source), "big")
    form = f"form {forms[seed % len(forms)]}" if forms else None
    full = sample(random.Random(seed), space, form=form)  # noqa: S311 - reproducible, not secret
    case = _capped(_simplified(full, simple, space), caps, space)
    if not _accepted(case, space):
        reject()
    return case


def _accepted(case: Case, space: Space) -> bool:
    c = space.capabilities
    return c is None or c.reason_against(case.problem) is None


def _simplified(case: Case, simple: set[str], space: Space) -> Case:
    """The case with the named fields at their defaults."""
    p, values = case.problem, case.values
    changes: dict[str, object] = {}
    if "fp8" in simple:
        changes["fp8"] = space.simplest_fp8
    changes["mask"] = FULL if "mask" in simple else _simplified_mask(p.mask, simple, space)
    if "dtype" in simple:
        changes["dtype"] = space.dtypes[0][0]
    if changes.get("dtype", p.dtype) != "float32":
        changes["dot_precision"] = "ieee"
    elif "dot_precision" in simple and space.dot_precisions:
        changes["dot_precision"] = space.dot_precisions[0][0]
    defaults: dict[str, object] = {"softcap": 0.0, "softmax_scale": None}
    defaults |= {f"layout_{name}": BHSD for name in ("q", "k", "v", "do")}
    defaults |= {"bias": "", "alibi": False, "sinks": False, "dropout": 0.0, "lse_grad": False}
    changes |= {name: value for name, value in defaults.items() if name in simple}
    if "bias" in simple:
        changes["layout_bias"] = BHSD
    default = Values()
    kept = {
        field.name: getattr(
            default if _FIELDS.get(field.name, field.name) in simple else values, field.name
        )
        for field in dataclasses.fields(Values)
    }
    return Case(
        problem=dataclasses.replace(p, **changes),  # type: ignore[arg-type]
        values=Values(**kept),
        seed=0 if "seed" in simple else case.seed,
        backward=case.backward and "backward" not in simple,
    )


def _simplified_mask(mask: Mask, simple: set[str], space: Space) -> Mask:
    alignments = ("bottom-right",) if space.capabilities is None else space.capabilities.alignments
    aligned = "alignment" in simple and "bottom-right" in alignments
    new = dataclasses.replace(
        mask,
        causal=mask.causal and "causal" not in simple,
        window_left=None if "window_left" in simple else mask.window_left,
        window_right=None if "window_right" in simple else mask.window_right,
        alignment="bottom-right" if aligned else mask.alignment,
        documents=() if "documents" in simple else mask.documents,
        pattern="" if "pattern" in simple else mask.pattern,
    )
    return new if new.hides_anything or new.documents else FULL


def _capped(case: Case, caps: dict[str, int], space: Space) -> Case:
    """The case with no dimension above its cap. Only sequences that were empty are empty."""
    p = case.problem
    head_dim = space.fit_head_dim(min(p.head_dim, caps["head_dim"]))
    head_dim_v = head_dim
    if space.head_dims_v:
        head_dim_v = space.fit_head_dim(min(p.head_dim_v, caps["head_dim_v"]), of_v=True)
    heads_kv = min(p.heads_kv, max(1, caps["heads_kv"]))
    p = _without(p, slice(max(1, caps["documents"]), None))
    shorter = p.resized(
        min(p.seqlen_q, max(1, min(caps["both"], caps["seqlen_q"]))),
        min(p.seqlen_k, max(1, min(caps["both"], caps["seqlen_k"]))),
    )
    problem = dataclasses.replace(
        shorter,
        batch=min(p.batch, max(1, caps["batch"])),
        heads_q=heads_kv * min(p.group, max(1, caps["group"])),
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        mask=_narrowed(shorter.mask, caps["window"]),
    )
    return dataclasses.replace(case, problem=problem)


def _without(p: Problem, some: slice) -> Problem:
    """The problem without some of its documents; at least one stays."""
    left = list(p.mask.documents)
    del left[some]
    if not left or len(left) == len(p.mask.documents):
        return p
    seqlen_q, seqlen_k = (sum(side) for side in zip(*left, strict=True))
    mask = dataclasses.replace(p.mask, documents=tuple(left))
    return dataclasses.replace(p, seqlen_q=seqlen_q, seqlen_k=seqlen_k, mask=mask)


def _with_length(case: Case, place: int, side: int, length: int) -> Case:
    """The case with another number of queries (side 0) or keys (1) in one document."""
    p = case.problem
    documents = [list(lengths) for lengths in p.mask.documents]
    documents[place][side] = length
    seqlen_q, seqlen_k = (sum(lengths) for lengths in zip(*documents, strict=True))
    mask = dataclasses.replace(p.mask, documents=tuple((q, k) for q, k in documents))
    problem = dataclasses.replace(p, seqlen_q=seqlen_q, seqlen_k=seqlen_k, mask=mask)
    return dataclasses.replace(case, problem=problem)


def _narrowed(mask: Mask, cap: int) -> Mask:
    sides = (mask.window_left, mask.window_right)
    left, right = (side if side is None else min(side, cap) for side in sides)
    return dataclasses.replace(mask, window_left=left, window_right=right)


def shrink(
    case: Case,
    fails: Callable[[Case], bool],
    *,
    capabilities: Capabilities | None = None,
    max_seconds: float = 60.0,
    max_executions: int = 100,
) -> Case:
    """A smaller and simpler case that still fails.

    Greedy, and cheap because it climbs: each dimension is tried from its smallest value upwards, so
    that most executions are of tiny cases. No dimension grows; the dtype stays.

    Args:
        case: A case that fails.
        fails: Runs a case; True when it fails in the way that is wanted.
        capabilities: Cases outside are not tried.
        max_seconds: No execution starts later than this.
        max_executions: Most calls of `fails`.

    Returns:
        The smallest case found on which `fails` was true, or `case` itself.
    """
    space = Space.of(capabilities)
    search = _Search(fails, space, time.monotonic() + max_seconds, max_executions)
    search.run(case)
    return search.best


class _Search:
    """The state of one `shrink`."""

    def __init__(
        self, fails: Callable[[Case], bool], space: Space, end: float, executions: int
    ) -> None:
        self._fails = fails
        self._space = space
        self._end = end
        self._left = executions
        self._seen: dict[Case, bool] = {}
        self.best: Case

    def run(self, case: Case) -> None:
        self.best = case
        self._seen[case] = True
        before = None
        while before != self.best and self._may_go_on():
            before = self.best
            self._reduce()  # first, so that the rest runs on small cases
            self._simplify()

    def _may_go_on(self) -> bool:
        return self._left > 0 and time.monotonic() < self._end

    def _try(self, case: Case) -> bool:
        """Whether the case fails too; it is then the best."""
        known = self._seen.get(case)
        if known is None:
            if not (self._may_go_on() and _accepted(case, self._space)):
                return False
            self._left -= 1
            known = self._seen[case] = self._fails(case)
        if known:
            self.best = case
        return known

    def _simplify(self) -> None:
        """Set fields to their defaults: all of them, else halves of what is left, down to each."""
        others = [name for name in _FLAGS if name not in ("dtype", *TERMS)]
        queue = [list(TERMS), others]
        while queue:
            names = [
                name for name in queue.pop(0)
                if _simplified(self.best, {name}, self._space) != self.best
            ]  # fmt: skip
            if names and not self._try(_simplified(self.best, set(names), self._space)):
                half = len(names) // 2
                queue += [names[:half], names[half:]] if half else []

    def _reduce(self) -> None:
        """Lower the dimensions, those first that save most time."""
        self._lower("batch", "group", "heads_kv")
        self._drop()
        self._lower("both")
        self._slide()
        self._shorten()
        self._lower("head_dim", "head_dim_v")
        for name in (*_HEADS, *_LENGTHS):
            self._lower(name)

    def _drop(self) -> None:
        """Leave documents out: halves of them, down to each."""
        size = len(self.best.problem.mask.documents) // 2
        while size:
            start = 0
            while start < len(self.best.problem.mask.documents):
                problem = _without(self.best.problem, slice(start, start + size))
                case = dataclasses.replace(self.best, problem=problem)
                if case == self.best or not self._try(case):
                    start += size
            size //= 2

    def _shorten(self) -> None:
        """Shorten each document's queries, and its keys: the others stay."""
        for place, side in itertools.product(range(len(self.best.problem.mask.documents)), (0, 1)):
            for length in (0, *_ladder(self.best.problem.mask.documents[place][side])):
                if self._try(_with_length(self.best, place, side, length)):
                    break

    def _slide(self) -> None:
        """Shorten both lengths by the same amount: what fails may lie in their difference."""
        p = self.best.problem
        shorter = min(p.seqlen_q, p.seqlen_k)
        for length in _ladder(shorter):
            cut = shorter - length
            q, k = p.seqlen_q - cut, p.seqlen_k - cut
            if self._try(dataclasses.replace(self.best, problem=p.resized(q, k))):
                return

    def _lower(self, *names: str) -> None:
        """The lowest common cap of some dimensions under which the case still fails."""
        top = max(_dimension(self.best, name) for name in names)
        passed, start = 0, self.best
        for cap in (*_ladder(top), top):
            if self._try(_capped(start, _caps(names, cap), self._space)):
                break
            passed = cap
        else:
            return
        failed = cap
        while failed - passed > 1 and self._may_go_on():
            middle = (passed + failed) // 2
            if self._try(_capped(start, _caps(names, middle), self._space)):
                failed = middle
            else:
                passed = middle


def _caps(names: tuple[str, ...], cap: int) -> dict[str, int]:
    return dict.fromkeys((*_LENGTHS, *_HEADS), 1 << 62) | dict.fromkeys(names, cap)


def _dimension(case: Case, name: str) -> int:
    p = case.problem
    if name == "window":
        return max(p.mask.window_left or 0, p.mask.window_right or 0)
    if name == "documents":
        return len(p.mask.documents)
    if name == "both":
        return max(p.seqlen_q, p.seqlen_k)
    value = getattr(p, name)
    assert isinstance(value, int)  # noqa: S101 - for mypy
    return value


def _ladder(top: int) -> Iterator[int]:
    """Caps to try, upwards: 1, 2, and just above each power of two, where a new block begins."""
    yield from (cap for cap in (1, 2) if cap < top)
    block = 16
    while block + 1 < top:
        yield block + 1
        block *= 2
