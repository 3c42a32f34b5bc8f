"""Sequences and heads elsewhere: in other places, alone, with other mates; results must not follow.

Where the kernel promises bits, bits are compared; else two runs may be twice the bound apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from fa_verify.checks.observed import comparisons
from fa_verify.checks.rerun import (
    agree,
    apart,
    differing,
    failures,
    generator,
    metamorphic,
    other_problem,
    outputs,
    screen,
)
from fa_verify.inputs import SPARSE, among_others, permute_batch_heads, select_sequence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.backends.base import Execution
    from fa_verify.checks.comparison import Comparison
    from fa_verify.trial import Trial
    from fa_verify.verdict import Failure

__all__ = [
    "fits_among_others",
    "other_places",
    "sequence_alone",
    "sequence_among_others",
    "several_heads",
    "several_sequences",
]


def several_heads(trial: Trial) -> bool:
    """Whether sequences or key heads can change places, and what dropout keeps does not."""
    p = trial.case.problem
    return max(p.batch, p.heads_kv) > 1 and p.seqlen_q > 0 and not p.dropout


def other_places(trial: Trial) -> Iterator[Failure]:
    """Sequences and heads in other places give the same results in those places."""
    p, rng = trial.case.problem, generator(trial)
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
    chosen = int(generator(trial).integers(trial.case.problem.batch))
    case, alone = select_sequence(trial.case, trial.pristine, chosen)
    again = other_problem(trial, alone, case.problem, backward=trial.case.backward)
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
    p, rng = trial.case.problem, generator(trial)
    chosen = int(rng.integers(p.batch))
    batch = int(rng.choice([size for size in _BATCHES if size != p.batch]))
    place = int(rng.choice([i for i in range(batch) if i != chosen]))
    case, others = among_others(trial.case, trial.pristine, chosen, batch=batch, place=place)
    again = other_problem(trial, others, case.problem, backward=trial.case.backward)
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
        found.append(metamorphic(f"{name} {title}", name, wrong, (a, b), because))
    yield from failures(found)
