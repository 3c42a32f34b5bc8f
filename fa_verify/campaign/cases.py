"""Which cases a campaign gives a kernel, and how each is run."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from typing import TYPE_CHECKING

from fa_verify import distribution
from fa_verify.backends.base import Setup
from fa_verify.backends.fences.fence import in_turn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.campaign.plan import Plan
    from fa_verify.case import Case
    from fa_verify.kernel import Kernel
    from fa_verify.record import CaseRecord

__all__ = ["CUDA_FORMS", "SHARD", "compiles", "drawn", "further", "numbered", "setup_of"]

# Cases drawn from one seed; the next shard's seed follows from the run's. Whole turns of
# `CUDA_FORMS`.
SHARD = 80
_CONFIGS = 840  # a multiple of every number of configurations up to 8
# Forms for which a CUDA run compiles each kernel before it takes others, and the shards that it
# draws of them: a form of `flash` is some ten kernels, with the variants that windows, heads
# and reruns make of it, each a second or more to compile, a case that needs no compiling some
# hundredths (docs/cuda.md). So many meet every variant in every precision (`distribution.forms`).
# Another seed of the run draws other forms.
CUDA_FORMS = 20
_SHARDS_OF_FORMS = 300
# One case in so many is stressed, with `_RUNS` further runs. It has the divisor 4 in common with
# `CUDA_FORMS`, so that the forms that are compiled for every configuration are a quarter of all;
# another seed takes others.
_STRESSED = 16
_RUNS = 12
_OPTIONS = ((4, 1), (8, 3), (2, 2), (8, 1), (4, 4))  # (num_warps, num_stages)


def drawn(kernel: Kernel, plan: Plan) -> Iterator[tuple[Case, Setup]]:
    """The cases that a run gives a kernel, each with its setup."""
    for index, case in numbered(kernel, plan):
        yield case, setup_of(plan, index)


def numbered(kernel: Kernel, plan: Plan) -> Iterator[tuple[int, Case]]:
    """The cases that a run gives a kernel, each with the number that `setup_of` goes by."""
    if plan.long:  # all with the first configuration, which is as a rule the one for long sequences
        cases = distribution.long(kernel.takes, plan.seed, dtype=plan.dtype)
        yield from ((0, case) for case in itertools.islice(cases, plan.cases))
        return
    index = 0
    for shard in range(1 << 30):
        drawn = distribution.draw(
            plan.seed * 1_000_003 + shard,
            SHARD,
            kernel.takes,
            dtype=plan.dtype,
            forms=_forms(kernel, plan, shard // _SHARDS_OF_FORMS),
        )
        for case in drawn:
            if plan.cases is not None and index >= plan.cases:
                return
            yield index, case
            index += 1


def _forms(kernel: Kernel, plan: Plan, block: int) -> tuple[str, ...]:
    """What the cases of some shards are compiled for; none where compiling costs nothing."""
    if plan.backend != "cuda":
        return ()
    seed = plan.seed * 1_000_003 + block
    return distribution.forms(seed, CUDA_FORMS, kernel.takes, dtype=plan.dtype)


def compiles(plan: Plan, index: int) -> bool:
    """Whether a case is one of the first of its forms on a card: its kernels are to be compiled."""
    return plan.backend == "cuda" and index % (SHARD * _SHARDS_OF_FORMS) < SHARD


def setup_of(plan: Plan, index: int) -> Setup:
    """A configuration for each case, modulo how many the kernel turns out to have.

    On the CPU it is scattered: the classes of shape follow the index too, and a configuration must
    meet them all. On CUDA a form meets one configuration only, whose kernels are compiled once.
    """
    chosen = plan.long or (index + plan.seed) % _STRESSED == 0
    stress = _RUNS if plan.stress and chosen else 0
    if plan.backend == "cuda":
        turn, form = divmod(index, CUDA_FORMS)
        block = index // (SHARD * _SHARDS_OF_FORMS)
        return Setup(
            backend="cuda",
            config=form + block,
            float_model="hardware",
            fence=in_turn(plan.fence, form, turn),
            stress=stress,
        )
    scattered = zlib.crc32(f"{plan.seed} {index}".encode())
    return Setup(backend=plan.backend, config=scattered % _CONFIGS, stress=stress)


def further(setup: Setup, record: CaseRecord) -> list[Setup]:
    """The setups that a stressed case runs under as well: a case each, with all its checks.

    Every other configuration, and on a card two of `_OPTIONS` on two configurations.
    """
    own = Setup.parse(record.setup).config
    plain = dataclasses.replace(setup, stress=0)
    found = [dataclasses.replace(plain, config=i) for i in range(record.configs) if i != own]
    if setup.backend == "cuda":
        turn = zlib.crc32(record.case.encode())
        for step in range(2):
            warps, stages = _OPTIONS[(turn + step) % len(_OPTIONS)]
            config = (own + step) % record.configs
            found.append(dataclasses.replace(plain, config=config, warps=warps, stages=stages))
    return found
