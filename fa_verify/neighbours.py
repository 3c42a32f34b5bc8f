"""`around`: cases like a given one, for a search that climbs towards larger errors.

No torch, no Triton. What such a search finds is judged by the deterministic bound alone.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from fa_verify.distribution import MAX_WORK, work
from fa_verify.distribution.tables import LOGITS, SCALABLE, V

if TYPE_CHECKING:
    from fa_verify.capabilities import Capabilities
    from fa_verify.case import Case

__all__ = ["around"]

_REACH = 3  # queries and keys more or less
_SEEDS = 2**32 - 1


def around(case: Case, capabilities: Capabilities | None = None) -> st.SearchStrategy[Case]:
    """Cases with other elements than this one, and a few queries and keys more or less.

    What a kernel is compiled for stays, and so does the family of q and k. Each choice is a number
    that Hypothesis can climb.
    """
    p, values = case.problem, case.values
    logits = [size for size, _ in LOGITS] if values.qk in SCALABLE else [values.logits]
    # Products of two numbers near the maximum overflow float32, so nothing could be judged.
    families = [name for name, _ in V if name != "near-max"]
    near = st.builds(
        _moved,
        st.just(case),
        queries=st.integers(-min(_REACH, p.seqlen_q), _REACH),
        keys=st.integers(-min(_REACH, p.seqlen_k), _REACH),
        v=st.sampled_from([values.v, *families]),
        logits=st.sampled_from([values.logits, *logits]),
        seed=st.integers(0, _SEEDS),
    )
    return near.filter(lambda found: _taken(found, capabilities))


def _moved(case: Case, *, queries: int, keys: int, v: str, logits: float, seed: int) -> Case:
    p = case.problem
    return dataclasses.replace(
        case,
        problem=p.resized(p.seqlen_q + queries, p.seqlen_k + keys),
        values=dataclasses.replace(case.values, v=v, logits=logits),
        seed=seed,
    )


def _taken(case: Case, capabilities: Capabilities | None) -> bool:
    refused = capabilities is not None and capabilities.reason_against(case.problem) is not None
    return not refused and work(case.problem) <= MAX_WORK
