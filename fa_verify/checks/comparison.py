"""`Comparison`: one observed tensor beside its float64 reference and bounds, element by element.

The checks and the statistics share it. Nothing here decides what a failure is.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from typing import TYPE_CHECKING

import numpy as np
import torch

from fa_verify import foreach, sight
from fa_verify.bounds.formats import floor_power_of_two
from fa_verify.bounds.probabilistic import Question

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fa_verify.bounds import Bounded
    from fa_verify.bounds.probabilistic import Refiner
    from fa_verify.problem import Problem
    from fa_verify.trial import Trial

__all__ = [
    "GRADIENTS",
    "Comparison",
    "compare",
    "comparisons",
    "empty_rows",
    "look",
    "look_closer",
    "observed",
    "sound",
    "ulp",
]

GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")
_FORMATS = {"float16": (11, -14), "bfloat16": (8, -126), "float32": (24, -126)}  # (p, emin)


def _largest(dtype: str) -> float:
    return float(torch.finfo(getattr(torch, dtype)).max)


def ulp(reference: torch.Tensor, dtype: str) -> torch.Tensor:
    """The spacing of a format at the reference, ``2^(max(floor(log2|x|), emin) - p + 1)``.

    It is the subnormals' spacing at zero.
    """
    precision, emin = _FORMATS[dtype]
    power = floor_power_of_two(reference.abs())
    return power.clamp_(min=2.0**emin).mul_(2.0 ** (1 - precision))


def empty_rows(problem: Problem, device: torch.device | str = "cpu") -> torch.Tensor:
    """Queries that see no key, bool, shape (seqlen_q,)."""
    return sight.blind(problem, torch.device(device))


@dataclasses.dataclass(frozen=True, slots=True)
class Extent:
    """What is read of a comparison before its elements are judged.

    Attributes:
        least: The least of det if nothing is infinite or NaN, nor may be; else -inf.
        most: The largest ratio, where least is above 0.
    """

    least: float
    most: float


@dataclasses.dataclass(frozen=True, slots=True)
class Due:
    """Errors where a number is due, 0 elsewhere.

    Attributes:
        difference: What was got less the reference; error: without its sign.
        ratio: Error over the deterministic bound; signed: with the error's sign. They mean
            something where that is 0 nowhere.
    """

    difference: torch.Tensor
    error: torch.Tensor
    ratio: torch.Tensor
    signed: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One tensor, observed and expected.

    Attributes:
        name: o, lse, dq, dk, dv, dbias or dsinks.
        got: What the kernel wrote, in float64.
        dtype: Format of the output (lse is always judged in float32 ulps).
        bounded: Reference and bounds.
        written: bool, False where the backend saw that nobody wrote.
        due: bool, where a finite number is due and the numerics check may judge: written, and not
            in a fully masked row (the nonfinite check owns those).
        conditional: The reference takes the observed o and lse (gradients only).
        all_due: `due` is known to be True everywhere.
    """

    name: str
    got: torch.Tensor
    dtype: str
    bounded: Bounded
    written: torch.Tensor
    due: torch.Tensor
    conditional: bool = False
    all_due: bool = False

    @property
    def reference(self) -> torch.Tensor:
        """The float64 reference."""
        return self.bounded.reference

    @functools.cached_property
    def extent(self) -> Extent:
        """How far its numbers reach."""
        look((self,))
        extent: Extent = self.__dict__["extent"]
        return extent

    @functools.cached_property
    def _due(self) -> Due:
        """Its errors where a number is due."""
        look((self,))
        none = torch.empty_like(self.got)  # `look` leaves an empty tensor alone
        due: Due = self.__dict__.get("_due", Due(none, none, none, none))
        return due

    @property
    def _ordinary(self) -> bool:
        """Nothing is infinite or NaN, nor may be: where a number is due it can be judged."""
        return self.extent.least >= 0

    @property
    def plain(self) -> bool:
        """Every element is a number and is judged."""
        return self.all_due and self._ordinary

    def _nowhere(self) -> torch.Tensor:
        return everywhere(self.got, value=False)

    @functools.cached_property
    def inconclusive(self) -> torch.Tensor:
        """Where the bound says nothing."""
        if self._ordinary:
            return self._nowhere()
        return ~torch.isfinite(self.bounded.det) & self.due

    @functools.cached_property
    def count_inconclusive(self) -> int:
        """How many elements those are."""
        return 0 if self._ordinary else int(self.inconclusive.count_nonzero())

    @functools.cached_property
    def judged(self) -> torch.Tensor:
        """Where error and bound are numbers."""
        if self._ordinary:
            return self.due
        finite = torch.isfinite(self.got) & torch.isfinite(self.reference)
        # A cast may also saturate where the reference overflows the format.
        saturated = self.infinity_allowed & (self.got.abs() == _largest(self.dtype))
        return self.due & finite & torch.isfinite(self.bounded.det) & ~saturated

    @functools.cached_property
    def judges_all(self) -> bool:
        """Whether `judged` is True everywhere."""
        return self.plain or bool(self.judged.all())

    @functools.cached_property
    def infinity_allowed(self) -> torch.Tensor:
        """Where inf is right: the reference overflows the output format on that side of 0.

        With a bound that is wider than the format it may do so on the other side too; (B17).
        """
        if self.bounded.overflow_ok is None or self._ordinary:
            return self._nowhere()
        same_sign = torch.signbit(self.got) == torch.signbit(self.reference)
        either = self.bounded.det - self.reference.abs() >= _largest(self.dtype)
        return torch.as_tensor(self.bounded.overflow_ok, device=self.got.device) & (
            same_sign | either
        )

    @functools.cached_property
    def broken(self) -> torch.Tensor:
        """NaN or inf where a number is due."""
        if self._ordinary:
            return self._nowhere()
        infinite = torch.isinf(self.got) & ~self.infinity_allowed
        return self.due & ~self.inconclusive & (torch.isnan(self.got) | infinite)

    @functools.cached_property
    def any_broken(self) -> bool:
        """Whether there is such an element."""
        return not self._ordinary and bool(self.broken.any())

    @property
    def finite(self) -> bool:
        """Whether no inf or NaN was got where a number is due."""
        return self._ordinary or bool((torch.isfinite(self.got) | ~self.due).all())

    @functools.cached_property
    def ratio(self) -> torch.Tensor:
        """Error over the deterministic bound where judged (0/0 is 0), 0 elsewhere."""
        return self._due.ratio if self.extent.least > 0 else self._over(self.bounded.det)

    @functools.cached_property
    def ratio_prob(self) -> torch.Tensor:
        """Error over the probabilistic bound, likewise."""
        return self.ratio if self.prob is self.bounded.det else self._over(self.prob)

    @functools.cached_property
    def most(self) -> float:
        """The largest ratio, 0 for an empty tensor."""
        if self.extent.least > 0:
            return self.extent.most
        return float(self.ratio.max())

    @functools.cached_property
    def most_prob(self) -> float:
        """The largest ratio_prob, likewise."""
        look_closer((self,))
        most: float = self.__dict__["most_prob"]
        return most

    @functools.cached_property
    def prob(self) -> torch.Tensor:
        """The probabilistic bound, no smaller than needed to judge what was observed."""
        look_closer((self,))
        prob: torch.Tensor = self.__dict__["prob"]
        return prob

    def question(self) -> Question | None:
        """What the probabilistic bound may decide; None: nothing."""
        refiner, elements = self.bounded.refiner, self.got.numel()
        if refiner is None or not elements or self.most <= refiner.least(elements):
            return None
        if refiner.least(elements) >= 1.0:
            return None
        within = self.plain and self.most <= 1
        return Question(refiner, self.bounded.det, self.error, within=within)

    @functools.cached_property
    def difference(self) -> torch.Tensor:
        """What was got less the reference where judged, 0 elsewhere."""
        if self._ordinary:
            return self._due.difference
        return self._due.difference.masked_fill(~self.judged, 0.0)

    @functools.cached_property
    def error(self) -> torch.Tensor:
        """|got - reference| where judged, 0 elsewhere."""
        return self._due.error if self._ordinary else self.difference.abs()

    @property
    def signed(self) -> torch.Tensor:
        """The ratio with the error's sign."""
        if self.extent.least > 0:
            return self._due.signed
        return torch.copysign(self.ratio, self.difference)

    def _over(self, bound: torch.Tensor) -> torch.Tensor:
        return (self.error / bound).masked_fill_(self.error == 0, 0.0)

    def worst(self, ratio: torch.Tensor) -> tuple[int, ...]:
        """Index of the largest ratio; () for an empty tensor."""
        if not ratio.numel():
            return ()
        return self.at(int(ratio.argmax()))

    def at(self, place: int) -> tuple[int, ...]:
        """The index of an element counted row by row."""
        # torch.unravel_index imports sympy: seconds
        return tuple(int(i) for i in np.unravel_index(place, self.got.shape))


def look(parts: Iterable[Comparison]) -> None:
    """Find how far the numbers of some comparisons reach, in one transfer from the device."""
    some = []
    for part in parts:
        if part.got.numel():
            some.append(part)
        else:
            part.__dict__["extent"] = Extent(math.inf, 0.0)
    if not some:
        return
    dets, gots, references = ([f(x) for x in some] for f in (_det, _got, _reference))
    differences = foreach.differences(gots, references)
    for part, difference in zip(some, differences, strict=True):
        if not part.all_due:
            difference.masked_fill_(~part.due, 0.0)
    errors, signed = foreach.sizes(differences), foreach.ratios(differences, dets)
    ratios = foreach.sizes(signed)
    largest = foreach.largest([*ratios, *dets, *gots, *references])
    least = [det.amin() for det in dets]
    overflows = [ok.any() for part in some if (ok := part.bounded.overflow_ok) is not None]
    read = torch.stack([*largest, *least, *overflows]).tolist()
    n = len(some)
    ends = [[read[start + i] for start in range(0, 5 * n, n)] for i in range(n)]
    may_overflow = iter(read[5 * n :])
    every = map(Due, differences, errors, ratios, signed)
    for part, (most, *finite), due in zip(some, ends, every, strict=True):
        overflow = part.bounded.overflow_ok is not None and next(may_overflow)
        ordinary = not overflow and all(map(math.isfinite, finite))
        extent = Extent(finite[-1] if ordinary else -math.inf, most)
        part.__dict__.update(extent=extent, _due=due)


def look_closer(parts: Iterable[Comparison]) -> None:
    """Find the probabilistic bounds of some comparisons, in few transfers from the device."""
    every = [part for part in parts if "prob" not in part.__dict__]
    asked = [(part, question) for part in every if (question := part.question()) is not None]
    asked = _where([question.any_asked for _, question in asked], asked)
    small = [(part, question) for part, question in asked if _refiner(part).small]
    bounds = [question.together() for _, question in small]
    over = _where([any_over for _, any_over in bounds], small)
    for (part, _), (prob, _) in zip(small, bounds, strict=True):
        part.__dict__["prob"] = prob
    for part, question in asked:
        if not _refiner(part).small or any(part is other for other, _ in over):
            part.__dict__["prob"] = question.apart()
    for part in every:
        part.__dict__.setdefault("prob", part.bounded.det)
    closer = [part for part, _ in asked]
    if closer:
        largest = torch.stack([*foreach.largest([part.ratio_prob for part in closer])]).tolist()
        for part, most in zip(closer, largest, strict=True):
            part.__dict__["most_prob"] = most
    for part in every:
        part.__dict__.setdefault("most_prob", part.most)


def _where(
    said: list[torch.Tensor], items: list[tuple[Comparison, Question]]
) -> list[tuple[Comparison, Question]]:
    """Those items of which it was said that it is so; one transfer from the device."""
    read = torch.stack(said).tolist() if said else []
    return [item for item, so in zip(items, read, strict=True) if so]


def _refiner(part: Comparison) -> Refiner:
    refiner = part.bounded.refiner
    assert refiner is not None  # noqa: S101 -- else there is no question
    return refiner


def _det(part: Comparison) -> torch.Tensor:
    return part.bounded.det


def _got(part: Comparison) -> torch.Tensor:
    return part.got


def _reference(part: Comparison) -> torch.Tensor:
    return part.reference


def everywhere(like: torch.Tensor, *, value: bool) -> torch.Tensor:
    """A truth value in the shape of a tensor, which takes no memory."""
    return _constant(value, like.device).expand(like.shape)


@functools.cache
def _constant(value: bool, device: torch.device) -> torch.Tensor:  # noqa: FBT001 - a cache's key
    return torch.tensor(value, device=device)


def observed(trial: Trial) -> dict[str, torch.Tensor]:
    """The outputs that exist, have the right shape and can be compared, by name.

    The contract check reports those that do not.
    """
    problem, execution = trial.case.problem, trial.execution
    shapes = {
        "o": problem.shape_o,
        "lse": problem.shape_lse,
        "dq": problem.shape_q,
        "dk": problem.shape_k,
        "dv": problem.shape_v,
        **({"dbias": problem.shape_bias} if problem.bias else {}),
        **({"dsinks": (problem.heads_q,)} if problem.sinks else {}),
    }
    found: dict[str, torch.Tensor | None] = {}
    if execution.outputs is not None:
        found |= {"o": execution.outputs.o, "lse": execution.outputs.lse}
    if execution.grads is not None:
        found |= execution.grads.named()
    return {
        name: tensor
        for name, tensor in found.items()
        if isinstance(tensor, torch.Tensor) and tuple(tensor.shape) == shapes.get(name)
    }


def compare(
    trial: Trial, name: str, got: torch.Tensor, bounded: Bounded, *, conditional: bool = False
) -> Comparison:
    """Set an observed tensor beside its bound."""
    problem = trial.case.problem
    reference = bounded.reference
    # Contiguous as the reference is: several tensors then take one operation.
    got = got.detach().to(
        device=reference.device, dtype=torch.float64, memory_format=torch.contiguous_format
    )
    unwritten = trial.execution.unwritten.get(name)
    written = everywhere(got, value=True)
    if unwritten is not None:
        written = ~unwritten.to(got.device)
    due = written
    some_empty = name in ("o", "lse", "dq") and sight.any_blind(problem)
    if some_empty:
        empty = empty_rows(problem, got.device).view(-1, *[1] * (got.dim() - 3))
        # Of such a row lse is the sink, if there is one.
        due = written & ~(empty & reference.isneginf() if name == "lse" else empty)
    return Comparison(
        name=name,
        got=got,
        dtype="float32" if name in ("lse", "dsinks") else problem.dtype,
        bounded=bounded,
        written=written,
        due=due,
        conditional=conditional,
        all_due=unwritten is None and not some_empty,
    )


_CACHE: weakref.WeakKeyDictionary[Trial, dict[str, Comparison]] = weakref.WeakKeyDictionary()


def comparisons(trial: Trial) -> dict[str, Comparison]:
    """Every observed tensor beside its bound, o and lse first; computed once a trial.

    Gradients are judged given the observed o and lse, which is sharper (docs/bounds.md B22), unless
    the forward pass is already wrong: a conditional reference would then follow the kernel into its
    error, so they are judged against the end-to-end reference.
    """
    if trial not in _CACHE:
        _CACHE[trial] = _compute(trial)
    return _CACHE[trial]


def _compute(trial: Trial) -> dict[str, Comparison]:
    tensors = observed(trial)
    result: dict[str, Comparison] = {}
    if "o" in tensors or "lse" in tensors:
        for bounded in trial.forward_bounds:
            if bounded.name in tensors:
                result[bounded.name] = compare(trial, bounded.name, tensors[bounded.name], bounded)
    look(result.values())
    if not set(GRADIENTS) & set(tensors):
        return result
    # An inf in o (right where the reference overflows) would make the conditional delta NaN.
    conditional = {"o", "lse"} <= set(result) and all(
        sound(part) and part.finite for part in result.values()
    )
    gradients = trial.backward_bounds if conditional else trial.unconditional_bounds
    for bounded in gradients:
        if bounded.name in tensors:
            result[bounded.name] = compare(
                trial, bounded.name, tensors[bounded.name], bounded, conditional=conditional
            )
    look(result[name] for name in GRADIENTS if name in result)
    return result


def sound(part: Comparison) -> bool:
    """Whether everything written is within its bound, and finite where it must be."""
    return part.most <= 1 and not part.any_broken and (part.all_due or bool(part.written.all()))
