"""Two runs whose results must be related, whatever the reference says.

Tolerances are sums of the two runs' deterministic bounds, never guesses; where the kernel promises
bits, bits are compared.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from fa_verify import bounds
from fa_verify.checks.observed import comparisons, empty_rows
from fa_verify.checks.rerun import (
    Difference,
    agree,
    apart,
    differing,
    failures,
    outputs,
    refused,
    screen,
)
from fa_verify.inputs import (
    SPARSE,
    among_others,
    permute_batch_heads,
    permute_keys,
    select_sequence,
)
from fa_verify.layouts import BHSD

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.backends.base import Execution
    from fa_verify.checks.comparison import Comparison
    from fa_verify.inputs import Inputs
    from fa_verify.problem import Problem
    from fa_verify.trial import Trial
    from fa_verify.verdict import Failure

__all__ = [
    "fits_among_others",
    "has_room_for_shift",
    "key_permutation",
    "other_places",
    "permutable_keys",
    "row_shift",
    "sequence_alone",
    "sequence_among_others",
    "several_heads",
    "several_sequences",
    "values_of_one",
    "weights_sum_to_one",
]

_MAX_HEAD_DIM = 256
_LOGIT_SHIFT = 64.0  # moves exp by 2^92: a lost maximum shows


def _rng(trial: Trial) -> np.random.Generator:
    return np.random.default_rng(trial.case.seed % 2**64)


def _other_problem(
    trial: Trial, inputs: Inputs, problem: Problem, *, backward: bool = False
) -> Execution | None:
    """The run of a problem that nobody drew; None where the kernel does not take it."""
    takes, declared = trial.kernel.takes, trial.kernel.capabilities is not None
    if takes is not None and takes.reason_against(problem) is not None:
        return None
    again = trial.rerun(inputs, problem=problem, backward=backward)
    return None if refused(again, declared=declared) else again


def permutable_keys(trial: Trial) -> bool:
    """Whether keys may be reordered: no mask nor what knows where a key is, and at least two."""
    p = trial.case.problem
    placed = p.mask.hides_anything or p.alibi or p.dropout > 0
    return not placed and p.seqlen_k > 1 and p.seqlen_q > 0


def key_permutation(trial: Trial) -> Iterator[Failure]:
    """Without a mask the order of the keys does not matter, but for rounding: o and lse stay."""
    order = [int(i) for i in _rng(trial).permutation(trial.case.problem.seqlen_k)]
    again = trial.rerun(permute_keys(trial.pristine, order))
    how = "keys and values permuted"
    yield from screen(again, how)
    first, second, parts = outputs(trial.execution), outputs(again), comparisons(trial)
    found = []
    for name in ("o", "lse"):
        if name in second and name in parts:
            wrong = apart(first[name], second[name], 2 * parts[name].bounded.det)
            because = f"{how}; they may differ by twice the bound"
            title = f"{name} depends on the order of the keys"
            found.append(_difference(title, name, wrong, (first[name], second[name]), because))
    yield from failures(found)


def _difference(
    title: str,
    name: str,
    wrong: torch.Tensor,
    runs: tuple[torch.Tensor, torch.Tensor],
    because: str,
) -> Difference:
    return Difference(
        check="metamorphic", title=title, name=name, wrong=wrong, runs=runs, because=because
    )


def weights_sum_to_one(trial: Trial) -> bool:
    """Whether each row of P does, as it meets V: a sink takes a part, and dropout scales."""
    p = trial.case.problem
    return p.seqlen_q > 0 and not (p.sinks or p.dropout)


def values_of_one(trial: Trial) -> Iterator[Failure]:
    """V = 1 gives o = 1 in every row that sees a key, within the bound for these inputs."""
    x = trial.pristine
    problem = dataclasses.replace(trial.case.problem, layout_v=BHSD)
    ones = dataclasses.replace(x, v=torch.ones_like(x.v, memory_format=torch.contiguous_format))
    again = _other_problem(trial, ones, problem)
    if again is None:
        return
    how = "all values set to 1"
    yield from screen(again, how)
    second = outputs(again)
    if "o" not in second:
        return
    due = (~empty_rows(problem, second["o"].device)).double()
    expected = due[:, None].expand(second["o"].shape)
    if bool((second["o"] == expected).all()):
        return
    arithmetic, terms = trial.kernel.arithmetic, trial.terms
    bounded, _ = bounds.bound_forward(problem, arithmetic, ones.q, ones.k, ones.v, terms=terms)
    wrong = apart(expected, second["o"], bounded.det)
    because = f"{how}; a row of weights sums to 1"
    runs = (expected, second["o"])
    yield from failures([_difference("V = 1 does not give 1", "o", wrong, runs, because)])


def has_room_for_shift(trial: Trial) -> bool:
    """Whether further columns of q and k fit, and carry a representable shift of the logits.

    A sink would not move along; whether dropout keeps the same elements, nobody promised.
    """
    p = trial.case.problem
    sizes = p.seqlen_q > 0 and p.seqlen_k > 0 and not (p.sinks or p.dropout)
    shifts = sizes and not p.softcap and 1e-3 <= abs(p.scale) <= 64
    return shifts and _shifted_problem(trial) is not None


def _shifted_problem(trial: Trial) -> Problem | None:
    """The same with one more column, or as many as it takes to a head_dim that the kernel takes."""
    p, takes = trial.case.problem, trial.kernel.takes
    for multiple in (1, 8, 16, 32, 64, 128):
        wider, wider_v = (-(-(d + 1) // multiple) * multiple for d in (p.head_dim, p.head_dim_v))
        problem = dataclasses.replace(
            p,
            head_dim=min(wider, _MAX_HEAD_DIM),
            head_dim_v=min(wider_v, _MAX_HEAD_DIM),
            softmax_scale=p.scale,
            layout_q=BHSD,
            layout_k=BHSD,
            layout_v=BHSD,
        )
        fits = problem.head_dim > p.head_dim and problem.head_dim_v > p.head_dim_v
        if fits and (takes is None or takes.reason_against(problem) is None):
            return problem
    return None


def row_shift(trial: Trial) -> Iterator[Failure]:
    """Adding a number to all logits of a row leaves o and moves lse by it.

    An extra column, 1 in q and a power of two in k, adds it exactly: both are representable in
    every dtype. v gets zero columns, so that head_dim = head_dim_v stays so.
    """
    p, x = trial.case.problem, trial.pristine
    problem = _shifted_problem(trial)
    assert problem is not None  # noqa: S101 - has_room_for_shift said so
    column = math.copysign(2.0 ** round(math.log2(_LOGIT_SHIFT / abs(p.scale))), _sign(trial))
    shifted = dataclasses.replace(
        x,
        q=_widened(x.q, 1.0, problem.head_dim),
        k=_widened(x.k, column, problem.head_dim),
        v=_widened(x.v, 0.0, problem.head_dim_v),
        do=None,
        dlse=None,
    )
    again = _other_problem(trial, shifted, problem)
    if again is None:
        return
    moved = column * p.scale
    how = f"all logits moved by {moved:g}"
    yield from screen(again, how)
    second, first, parts = outputs(again), outputs(trial.execution), comparisons(trial)
    arithmetic, operands = trial.kernel.arithmetic, (shifted.q, shifted.k, shifted.v)
    o, lse = bounds.bound_forward(problem, arithmetic, *operands, terms=trial.terms)
    pairs = {}
    if "o" in second and "o" in parts:
        pairs["o"] = (first["o"], second["o"][..., : p.head_dim_v], o.det[..., : p.head_dim_v])
    if "lse" in second and "lse" in parts:
        pairs["lse"] = (first["lse"], second["lse"].to(torch.float64) - moved, lse.det)
    found = []
    for name, (a, b, bound) in pairs.items():
        wrong = apart(a, b, parts[name].bounded.det + bound)
        because = f"{how} (undone in lse); they may differ by the sum of the bounds"
        title = f"{name} does not follow a shift of the logits"
        found.append(_difference(title, name, wrong, (a, b), because))
    yield from failures(found)


def _sign(trial: Trial) -> float:
    return 1.0 if trial.case.seed % 2 else -1.0


def _widened(tensor: torch.Tensor, value: float, width: int) -> torch.Tensor:
    """One column of a value behind the others, then zeros."""
    column = torch.nn.functional.pad(tensor, (0, 1), value=value)
    return torch.nn.functional.pad(column, (0, width - column.shape[-1])).contiguous()


def several_heads(trial: Trial) -> bool:
    """Whether sequences or key heads can change places, and what dropout keeps does not."""
    p = trial.case.problem
    return max(p.batch, p.heads_kv) > 1 and p.seqlen_q > 0 and not p.dropout


def other_places(trial: Trial) -> Iterator[Failure]:
    """Sequences and heads in other places give the same results in those places."""
    p, rng = trial.case.problem, _rng(trial)
    batch = [int(i) for i in np.roll(np.arange(p.batch), 1 + rng.integers(max(1, p.batch - 1)))]
    kv = [int(i) for i in rng.permutation(p.heads_kv)]
    moved, heads = permute_batch_heads(trial.pristine, batch, kv)
    again = trial.rerun(moved, backward=trial.case.backward)
    how = f"batch order {batch}, key head order {kv}"
    yield from screen(again, how)
    places = {
        name: (
            torch.tensor(batch).unsqueeze(1),
            torch.tensor(kv if name in ("dk", "dv") else heads).unsqueeze(0),
        )
        for name in _OF_SEQUENCES
    }
    first = {name: t[places[name]] for name, t in _of_sequences(trial.execution).items()}
    bound = {name: part.bounded.det[places[name]] for name, part in _parts(trial).items()}
    second = _of_sequences(again)
    yield from _same(trial, first, second, bound, how, "depends on its place in the batch")


_OF_SEQUENCES = ("o", "lse", "dq", "dk", "dv")  # gradients of bias and sinks sum over sequences


def _of_sequences(execution: Execution) -> dict[str, torch.Tensor]:
    return {name: x for name, x in outputs(execution).items() if name in _OF_SEQUENCES}


def _parts(trial: Trial) -> dict[str, Comparison]:
    return {name: part for name, part in comparisons(trial).items() if name in _OF_SEQUENCES}


def several_sequences(trial: Trial) -> bool:
    """Whether a sequence has batch mates, and what dropout keeps does not follow its place."""
    p = trial.case.problem
    return p.batch > 1 and p.seqlen_q > 0 and not p.dropout


def sequence_alone(trial: Trial) -> Iterator[Failure]:
    """A sequence without its batch mates gives the same results."""
    chosen = int(_rng(trial).integers(trial.case.problem.batch))
    case, alone = select_sequence(trial.case, trial.pristine, chosen)
    again = _other_problem(trial, alone, case.problem, backward=trial.case.backward)
    if again is None:
        return
    how = f"sequence {chosen} alone"
    yield from screen(again, how)
    only = slice(chosen, chosen + 1)
    first = {name: t[only] for name, t in _of_sequences(trial.execution).items()}
    bound = {name: part.bounded.det[only] for name, part in _parts(trial).items()}
    yield from _same(trial, first, _of_sequences(again), bound, how, "depends on its batch mates")


_BATCHES = (2, 3, 5)  # sizes of the other batch: small, since it costs as many sequences


def fits_among_others(trial: Trial) -> bool:
    """Whether it can have mates, in no more memory than there are elements.

    Documents come in one sequence, and what dropout keeps follows a sequence's place.
    """
    p = trial.case.problem
    if p.mask.documents or p.dropout:
        return False
    pairs = (
        (p.layout_q, p.shape_q),
        (p.layout_k, p.shape_k),
        (p.layout_v, p.shape_v),
        (p.layout_do, p.shape_o),
    )
    spans = [layout.span((max(_BATCHES), *shape[1:])) for layout, shape in pairs]
    return p.seqlen_q > 0 and max(spans) < SPARSE


def sequence_among_others(trial: Trial) -> Iterator[Failure]:
    """A sequence at another place, in a batch of another size, with other mates: same results.

    How a launcher divides the work (blocks, splits of the keys) may follow the size of the batch.
    """
    p, rng = trial.case.problem, _rng(trial)
    chosen = int(rng.integers(p.batch))
    batch = int(rng.choice([size for size in _BATCHES if size != p.batch]))
    place = int(rng.choice([i for i in range(batch) if i != chosen]))
    case, others = among_others(trial.case, trial.pristine, chosen, batch=batch, place=place)
    again = _other_problem(trial, others, case.problem, backward=trial.case.backward)
    if again is None:
        return
    how = f"sequence {chosen} at place {place} of a batch of {batch}, with other mates"
    yield from screen(again, how)
    was, now = slice(chosen, chosen + 1), slice(place, place + 1)
    first = {name: t[was] for name, t in _of_sequences(trial.execution).items()}
    second = {name: t[now] for name, t in _of_sequences(again).items()}
    bound = {name: part.bounded.det[was] for name, part in _parts(trial).items()}
    yield from _same(trial, first, second, bound, how, "depends on its batch")


def _same(  # noqa: PLR0917
    trial: Trial,
    first: dict[str, torch.Tensor],
    second: dict[str, torch.Tensor],
    bound: dict[str, torch.Tensor],
    how: str,
    title: str,
) -> Iterator[Failure]:
    """Bits where promised, else within twice the bound.

    batch_invariant promises the bits of o and lse; those of the gradients as well only with
    deterministic (an atomic sum has no order). Gradient bounds are conditional on o and lse, so
    gradients are compared only when those came out the same.
    """
    declared = trial.kernel.capabilities
    invariant = declared is not None and declared.batch_invariant
    exact = {"o": invariant, "lse": invariant}
    exact |= dict.fromkeys(
        ("dq", "dk", "dv"), invariant and declared is not None and declared.deterministic
    )
    same = agree(first, second)
    same_forward = all(same.get(name, True) for name in ("o", "lse"))
    found = []
    for name in _OF_SEQUENCES:
        if name not in bound or same.get(name, True):
            continue
        a, b = first[name], second[name]
        if name not in ("o", "lse") and not exact[name] and not same_forward:
            continue
        wrong = differing(a, b) if exact[name] else apart(a, b, 2 * bound[name])
        because = f"{how}; " + (
            "the kernel is declared batch_invariant"
            if exact[name]
            else "they may differ by twice the bound"
        )
        found.append(_difference(f"{name} {title}", name, wrong, (a, b), because))
    yield from failures(found)
