"""`Group`: the cases of one kernel and precision, counted."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final, Literal

from fa_verify.report.result import Result, compared
from fa_verify.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = ["INCONCLUSIVE_LIMIT", "Group", "TensorSummary", "count_verdicts", "group"]

INCONCLUSIVE_LIMIT: Final = 0.01  # a larger share of elements without a bound is shown, and strict


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorSummary:
    """One tensor over all cases of a group.

    Attributes:
        elements: How many were compared.
        inconclusive: Of these, how many the bound says nothing about.
        ratio: Largest err/bound, deterministic bound; ratio_case is the case that had it.
        ratio_prob: Likewise under the probabilistic bound.
        typical: Median over the cases of their largest err/bound.
        ulp: Largest error in ulps of the output format.
        rule_2x: Largest error over flash-attn's allowance, None when never computed.
    """

    elements: int
    inconclusive: int
    ratio: float
    ratio_case: str
    ratio_prob: float
    ratio_prob_case: str
    typical: float
    ulp: float
    ulp_case: str
    rule_2x: float | None

    @property
    def inconclusive_share(self) -> float:
        """Share of elements that the bound says nothing about, 0 to 1."""
        return self.inconclusive / self.elements if self.elements else 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Cases of one kernel and precision, and of one pass when `direction` says so.

    Attributes:
        kernel: Its name (its target where two kernels share a name).
        precision: `Problem.precision`: "float16", "float32/tf32", "float8_e4m3fn/bfloat16".
        direction: "fwd", "bwd", or "" for both.
        counts: Cases by verdict, every verdict present.
        tensors: By name, in the order o, lse, dq, dk, dv; only those that were compared.
        seconds: Spent on these cases, all stages.
    """

    kernel: str
    precision: str
    direction: Literal["fwd", "bwd", ""]
    counts: Mapping[Verdict, int]
    tensors: Mapping[str, TensorSummary]
    seconds: float

    @property
    def cases(self) -> int:
        """How many cases."""
        return sum(self.counts.values())

    @property
    def verified(self) -> int:
        """Cases that reached pass or fail."""
        return self.counts[Verdict.PASS] + self.counts[Verdict.FAIL]

    @property
    def verdict(self) -> Verdict:
        """Fail if any case fails, then error; pass needs a case that passes."""
        for verdict in (Verdict.FAIL, Verdict.ERROR, Verdict.PASS, Verdict.INCONCLUSIVE):
            if self.counts[verdict]:
                return verdict
        return Verdict.UNSUPPORTED

    @property
    def ratio(self) -> float | None:
        """Worst err/bound of any tensor, deterministic bound."""
        return max((tensor.ratio for tensor in self.tensors.values()), default=None)

    @property
    def rule_2x(self) -> float | None:
        """Worst error over flash-attn's allowance of any tensor."""
        rules = [tensor.rule_2x for tensor in self.tensors.values() if tensor.rule_2x is not None]
        return max(rules, default=None)

    @property
    def elements(self) -> int:
        """Elements compared, all tensors."""
        return sum(tensor.elements for tensor in self.tensors.values())

    @property
    def inconclusive(self) -> int:
        """Elements that the bound says nothing about, all tensors."""
        return sum(tensor.inconclusive for tensor in self.tensors.values())

    @property
    def too_inconclusive(self) -> tuple[str, ...]:
        """Tensors of which more than `INCONCLUSIVE_LIMIT` has no bound."""
        return tuple(
            name
            for name, tensor in self.tensors.items()
            if tensor.inconclusive_share > INCONCLUSIVE_LIMIT
        )


def count_verdicts(results: Iterable[Result]) -> dict[Verdict, int]:
    """Cases by verdict, every verdict present."""
    counter = Counter(result.verdict for result in results)
    return {verdict: counter[verdict] for verdict in Verdict}


def group(
    results: Iterable[Result],
    key: Callable[[Result], tuple[str, str, Literal["fwd", "bwd", ""]]],
) -> tuple[Group, ...]:
    """Results with one key as one group each, sorted; forward before backward."""
    members: defaultdict[tuple[str, str, Literal["fwd", "bwd", ""]], list[Result]]
    members = defaultdict(list)
    for result in results:
        members[key(result)].append(result)
    return tuple(
        Group(
            kernel=kernel,
            precision=precision,
            direction=direction,
            counts=count_verdicts(members[kernel, precision, direction]),
            tensors=_tensors(members[kernel, precision, direction]),
            seconds=sum(result.seconds for result in members[kernel, precision, direction]),
        )
        for kernel, precision, direction in sorted(
            members, key=lambda name: (name[0], name[1], name[2] == "bwd")
        )
    )


def _tensors(results: Sequence[Result]) -> dict[str, TensorSummary]:
    present = {name for result in results for name in result.record.tensors}
    ordered = [name for name in compared(present) if name in present]
    ordered += sorted(present - set(ordered))
    return {name: _tensor(name, results) for name in ordered}


def _tensor(name: str, results: Sequence[Result]) -> TensorSummary:
    found = [
        (result.record.tensors[name], result.record.case)
        for result in results
        if name in result.record.tensors
    ]
    ratio, ratio_case = max((stats.ratio, case) for stats, case in found)
    ratio_prob, ratio_prob_case = max((stats.ratio_prob, case) for stats, case in found)
    ulp, ulp_case = max((stats.ulp, case) for stats, case in found)
    return TensorSummary(
        elements=sum(stats.elements for stats, _ in found),
        inconclusive=sum(stats.inconclusive for stats, _ in found),
        ratio=ratio,
        ratio_case=ratio_case,
        ratio_prob=ratio_prob,
        ratio_prob_case=ratio_prob_case,
        typical=statistics.median(stats.ratio for stats, _ in found),
        ulp=ulp,
        ulp_case=ulp_case,
        rule_2x=max((s.rule_2x for s, _ in found if s.rule_2x is not None), default=None),
    )
