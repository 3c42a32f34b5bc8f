"""flash-attn's rule, max|x - ref| <= 2 max|pt - ref|: reported for readers; it judges nothing.

pt is the same formula by plain PyTorch in the input dtype (flash-attn, tests/test_flash_attn.py).
It is broken by right kernels too, where pt happens to be near exact: it gates nothing here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from fa_verify import foreach, sight
from fa_verify.reference import by_kv_head

if TYPE_CHECKING:
    from fa_verify.checks.comparison import Comparison
    from fa_verify.trial import Trial

__all__ = ["rule_2x"]

# Up to 2^18 logits this costs a CPU under about 10 ms a case.
_MAX_LOGITS = 1 << 18


def rule_2x(trial: Trial, parts: dict[str, Comparison]) -> dict[str, float]:
    """Error over twice plain PyTorch's error for each compared tensor, where that is a number."""
    problem = trial.case.problem
    logits = problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k
    known = problem.dot_precision == "ieee" and not (problem.terms or problem.fp8)  # to pt
    if not (known and 0 < logits <= _MAX_LOGITS):
        return {}
    least = torch.finfo(trial.pristine.q.dtype).tiny  # below, the rule allows next to nothing
    errors = {}
    for name, plain in _plain(trial, backward=trial.case.backward).items():
        part = parts.get(name)
        if part is None or not part.got.numel():
            continue
        theirs = plain - part.reference
        if not part.judges_all:
            theirs = torch.where(part.judged, theirs, 0.0)
        errors[name] = (part.error, theirs)
    if not errors:
        return {}
    pairs = foreach.largest([x for pair in errors.values() for x in pair])
    read = torch.stack([*pairs]).view(-1, 2).tolist()  # one transfer from the device
    return {
        name: ours / (2 * theirs)
        for name, (ours, theirs) in zip(errors, read, strict=True)
        if least <= 2 * theirs < math.inf
    }


def _plain(trial: Trial, *, backward: bool) -> dict[str, torch.Tensor]:
    """O and the gradients as plain PyTorch in the input dtype has them, in float32.

    It rounds the result of every operation to the input dtype and computes inside one in float32;
    done so by hand, half precision costs a CPU a quarter of the time.
    """
    problem, x = trial.case.problem, trial.pristine
    native = x.q.dtype

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(native).float()

    q, k, v = (by_kv_head(problem, t, torch.float32).flatten(1, 2) for t in (x.q, x.k, x.v))
    scores, slope = rounded(rounded(q @ k.mT) * problem.scale), None
    if problem.softcap:
        tanh = rounded(torch.tanh(rounded(scores / problem.softcap)))
        scores, slope = rounded(tanh * problem.softcap), rounded(1 - tanh * tanh)
    if problem.mask.hides_anything:
        hidden = sight.hidden(problem, slice(None), slice(None), q.device)
        scores.masked_fill_(hidden.repeat(problem.group, 1), float("-inf"))
    weights = rounded(torch.softmax(scores, dim=-1))
    if sight.any_blind(problem):
        empty = sight.blind(problem, q.device)
        weights.masked_fill_(empty.repeat(problem.group)[:, None], 0.0)
    found = {"o": rounded(weights @ v).reshape(problem.shape_o)}
    if backward and x.do is not None:
        do = by_kv_head(problem, x.do, torch.float32).flatten(1, 2)
        slopes = rounded(do @ v.mT)
        slopes = rounded(weights * (slopes - (weights * slopes).sum(-1, keepdim=True)))
        if slope is not None:
            slopes = rounded(slopes * slope)
        slopes = rounded(slopes * problem.scale)
        found["dq"] = rounded(slopes @ k).reshape(problem.shape_q)
        found["dk"] = rounded(slopes.mT @ q).reshape(problem.shape_k)
        found["dv"] = rounded(weights.mT @ do).reshape(problem.shape_v)
    return found
