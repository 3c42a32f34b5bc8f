"""flash-attn's rule, max|x - ref| <= 2 max|pt - ref|: reported for readers; it judges nothing.

pt is the same formula by plain PyTorch in the input dtype (flash-attn, tests/test_flash_attn.py).
It is broken by right kernels too, where pt happens to be near exact: it gates nothing here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fa_verify.checks.comparison import Comparison, empty_rows

if TYPE_CHECKING:
    from fa_verify.trial import Trial

__all__ = ["rule_2x"]

# Half-precision matmuls without a GPU are slow: 2^18 logits keep this under about 10 ms a case.
_MAX_LOGITS = 1 << 18


def rule_2x(trial: Trial, parts: dict[str, Comparison]) -> dict[str, float]:
    """Error over twice plain PyTorch's error for each compared tensor, where that is a number."""
    problem = trial.case.problem
    logits = problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k
    if not 0 < logits <= _MAX_LOGITS or problem.dot_precision != "ieee":  # pt knows no tf32
        return {}
    least = torch.finfo(trial.pristine.q.dtype).tiny  # below, the rule allows next to nothing
    result = {}
    for name, plain in _plain(trial, backward=trial.case.backward).items():
        part = parts.get(name)
        if part is None:
            continue
        theirs = (plain.to(torch.float64) - part.reference).abs()[part.judged]
        ours = part.error[part.judged]
        allowed = 2 * float(theirs.max()) if theirs.numel() else 0.0
        error = float(ours.max()) if ours.numel() else 0.0
        if least <= allowed < float("inf"):
            result[name] = error / allowed
    return result


def _plain(trial: Trial, *, backward: bool) -> dict[str, torch.Tensor]:
    """O and the gradients by PyTorch in the input dtype."""
    problem, x = trial.case.problem, trial.pristine
    q, k, v = (t.detach().clone().requires_grad_(backward) for t in (x.q, x.k, x.v))
    keys = k.repeat_interleave(problem.group, dim=1)
    values = v.repeat_interleave(problem.group, dim=1)
    scores = (q @ keys.mT) * problem.scale
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    allowed = torch.from_numpy(problem.mask.allowed(problem.seqlen_q, problem.seqlen_k))
    scores = scores.masked_fill(~allowed.to(scores.device), float("-inf"))
    empty = empty_rows(problem, scores.device)
    weights = torch.softmax(scores, dim=-1).masked_fill(empty[:, None], 0.0)
    o = weights @ values
    found = {"o": o.detach()}
    if backward and x.do is not None:
        dq, dk, dv = torch.autograd.grad(o, (q, k, v), x.do)
        found |= {"dq": dq, "dk": dk, "dv": dv}
    return found
