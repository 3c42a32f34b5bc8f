"""Which of the checks that run the kernel again a case gets."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from fa_verify.checks import determinism, masking, metamorphic, places, poison
from fa_verify.checks.observed import comparisons, sound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fa_verify.trial import Trial
    from fa_verify.verdict import Failure

__all__ = ["RERUNS", "check", "chosen"]


def _always(trial: Trial) -> bool:
    return trial.case.problem.seqlen_q > 0


def _order_is_fixed(trial: Trial) -> bool:
    """Where the order can be chosen, a run in another order is a second launch as well."""
    return _always(trial) and not determinism.schedulable(trial)


RERUNS: tuple[tuple[str, Callable[[Trial], bool], Callable[[Trial], Iterator[Failure]]], ...] = (
    ("hidden keys", masking.hides, masking.finite),
    ("hidden NaN", masking.promises_isolation, masking.isolates_nan),
    ("same launch again", _order_is_fixed, determinism.repeated),
    ("other poison", poison.between_fences, poison.other_poison),
    ("reverse order", determinism.schedulable, determinism.reversed_order),
    ("shuffled order", determinism.schedulable, determinism.shuffled_order),
    ("key permutation", metamorphic.permutable_keys, metamorphic.key_permutation),
    ("V = 1", metamorphic.weights_sum_to_one, metamorphic.values_of_one),
    ("row shift", metamorphic.has_room_for_shift, metamorphic.row_shift),
    ("batch and head permutation", places.several_heads, places.other_places),
    ("one sequence alone", places.several_sequences, places.sequence_alone),
    ("in another batch", places.fits_among_others, places.sequence_among_others),
)
"""Name, whether it says anything about a trial, and the check."""

# Half a million logits of 128 + 128 columns: a run then takes seconds on one core, as much as ten
# median cases, so only one such case in four is run a second time (reruns then take a fifth of a
# campaign's time, measured over 60 cases).
_LARGE = 1 << 27
_ONE_IN = 4
# The one rerun with kernels of its own, which a card has to compile: in one form of `_ONE_IN`.
_WIDER = "row shift"
# Compiling and bounding a case of this work takes ten times as long as a run of it (0.3 to 0.6 s
# and 0.03 s, measured over 30 cases), so that it is run a few times more.
_SMALL = 1 << 24
_CROWD = 4096  # sequences and heads: a program each makes a run take seconds, however small
# What a kernel may promise to the bit, and the rerun that holds it to that.
_PROMISES = {"deterministic": "shuffled order", "batch_invariant": "one sequence alone"}


def chosen(trial: Trial) -> tuple[str, ...]:
    """The reruns that a case gets: one of those that apply, by the case's id.

    A rerun costs as much as the case itself. All of them on every case would cut the number of
    distinct cases in a budget by five, and distinct cases find more; over a campaign each rerun
    still meets hundreds of cases. Small cases also get those of what the kernel promises to the
    bit, which few cases can show (several sequences, sums in several orders). Large cases (above
    `_LARGE` multiply-adds) get one in four times. A case that a search found (shrunken, replayed)
    gets all of them: it must show again what the case it came from showed, under whichever rerun
    that was. Thousands of heads get none. On a card one form in `_ONE_IN` gets wider heads.
    """
    names = tuple(name for name, applies, _ in RERUNS if applies(trial))
    if trial.independent and not _may_be_wider(trial):
        names = tuple(name for name in names if name != _WIDER)
    if not trial.independent or not names:
        return names
    turn = int(trial.case.id, 16)
    p = trial.case.problem
    work = p.batch * p.heads_q * p.seqlen_q * p.seqlen_k * (p.head_dim + p.head_dim_v)
    if p.batch * p.heads_q > _CROWD:
        return ()
    if work > _LARGE and turn % _ONE_IN:
        return ()
    own = names[turn // _ONE_IN % len(names)]
    if work > _SMALL:
        return (own,)
    promised = {
        name for promise, name in _PROMISES.items() if getattr(trial.kernel.takes, promise, False)
    }
    return tuple(name for name in names if name == own or name in promised)


def _may_be_wider(trial: Trial) -> bool:
    """Whether a wider head may be compiled for the case: its own form decides, on a card."""
    p = trial.case.problem
    form = (p.precision, p.head_dim, p.head_dim_v, p.mask.causal, p.mask.alignment, p.terms)
    return trial.setup.backend == "cpu" or zlib.crc32(repr(form).encode()) % _ONE_IN == 0


def check(trial: Trial) -> Iterator[Failure]:
    """Run the chosen ones, unless the case fails already: they compare with its first run."""
    execution = trial.execution
    if execution.error or execution.incidents or execution.unwritten:
        return
    if not all(sound(part) for part in comparisons(trial).values()):
        return
    names = chosen(trial)
    for name, _, run in RERUNS:
        if name in names:
            yield from run(trial)
