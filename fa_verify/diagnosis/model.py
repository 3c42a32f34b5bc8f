"""A float64 model of blockwise attention with a knob for each known defect.

It predicts what a kernel with that defect would write. It is no reference: it rounds P, the
accumulators and the outputs as the defect says, and it may be wrong on purpose.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from fa_verify.diagnosis.beside import NOTHING
from fa_verify.diagnosis.knobs import RIGHT, Knobs
from fa_verify.diagnosis.logits import (
    documents,
    key_heads,
    logits,
    operand,
    rounded,
    summed,
    visible,
)
from fa_verify.diagnosis.loops import visited

if TYPE_CHECKING:
    from fa_verify.diagnosis.beside import Beside
    from fa_verify.problem import Problem

__all__ = ["backward", "forward", "key_heads", "logits", "visible"]

_FLUSH = 2.0**-150  # float32 rounds what is below half its smallest subnormal to 0
_NORMAL = 2.0**-126  # ex2.approx.ftz gives 0 for what is below its smallest normal number
_LARGEST_E4M3 = 448.0
_OVERFLOW = 2.0**128  # and what is at or above this to inf


def _float32_range(x: torch.Tensor, least: float) -> torch.Tensor:
    x = torch.where(x < least, torch.zeros_like(x), x)
    return torch.where(x >= _OVERFLOW, torch.full_like(x, torch.inf), x)


def _polynomial(x: torch.Tensor) -> torch.Tensor:
    """exp(x) by the polynomial of degree 3 for exp2 that is minimax in relative error on [0, 1)."""
    power = (x / math.log(2.0)).clamp(min=-200.0)
    whole = torch.floor(power)
    part = power - whole
    series = ((0.077119 * part + 0.227564) * part + 0.695146) * part + 1.0
    return series * torch.exp2(whole)


def _with_hidden(
    problem: Problem, found: torch.Tensor, seen: torch.Tensor, knobs: Knobs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits with -inf, or what the defect puts, at hidden keys; which of them enter l alone."""
    if knobs.hidden_logit is None and not knobs.hidden_counted:
        return found.masked_fill(~seen, -torch.inf), torch.zeros_like(seen)
    inside = torch.ones_like(seen)
    if knobs.tiles:
        inside = visited(problem, inside, "unmasked", knobs.block_m, knobs.block_n)
    extra = inside & ~seen
    if knobs.hidden_logit is not None:
        found = torch.where(extra, torch.full_like(found, knobs.hidden_logit), found)
    return found.masked_fill(~(seen | extra), -torch.inf), extra & knobs.hidden_counted


def _laid_out(
    problem: Problem,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    knobs: Knobs,
    beside: Beside,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Logits, those that enter l alone, v by query head, and dropout's factors, of all keys."""
    q, k, v = tensors
    heads = key_heads(problem, knobs)
    k, v = k[:, heads], v[:, heads]
    block = knobs.block_n
    keys = problem.seqlen_k
    if knobs.padding:
        extra = -keys % block
        k = torch.nn.functional.pad(k, (0, 0, 0, extra))
        v = torch.nn.functional.pad(v, (0, 0, 0, extra))
        keys += extra
    scores, _ = logits(problem, q, k, knobs, beside)
    weights = beside.weights
    if weights is not None:
        weights = torch.nn.functional.pad(weights, (0, keys - weights.shape[-1]))
    v = operand(v, knobs, knobs.v_dtype)
    if knobs.v_late:
        v = torch.cat([v[..., :block, :], v[..., :-block, :]], dim=-2)[..., :keys, :]
    scores, only_l = _with_hidden(problem, scores, visible(problem, knobs, keys), knobs)
    return scores, only_l, v, weights


def forward(  # noqa: PLR0917 -- the operands of attention, in their usual order
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    knobs: Knobs = RIGHT,
    beside: Beside = NOTHING,
) -> dict[str, torch.Tensor]:
    """O (in the input dtype's values) and lse that a kernel with this defect would write.

    Args:
        problem: What is computed.
        q: (batch, heads_q, seqlen_q, head_dim) float64; k and v likewise.
        k: Keys.
        v: Values.
        knobs: The defect.
        beside: What the problem has beside them.

    Returns:
        "o" (batch, heads_q, seqlen_q, head_dim_v) and "lse" (batch, heads_q, seqlen_q), float64.
    """
    if knobs.local and problem.mask.documents and not problem.mask.pattern:
        parts = [
            forward(of_one, q[..., rows, :], k[..., keys, :], v[..., keys, :], knobs, its)
            for of_one, rows, keys, its in documents(problem, beside)
        ]
        return {name: torch.cat([part[name] for part in parts], dim=2) for name in ("o", "lse")}
    scores, only_l, v, weights = _laid_out(problem, (q, k, v), knobs, beside)
    keys, block = scores.shape[-1], knobs.block_n
    tiles = visited(problem, torch.ones_like(scores[0, 0]).bool(), "unmasked", knobs.block_m, block)
    shape, least = scores.shape[:3], _NORMAL if knobs.flushes else _FLUSH
    m = torch.full(shape, knobs.start, dtype=torch.float64)
    l = torch.zeros(shape, dtype=torch.float64)  # noqa: E741 - its name in every paper
    acc = torch.zeros((*shape, v.shape[-1]), dtype=torch.float64)
    for first in range(0, keys, block):
        columns = slice(first, first + block)
        part = scores[..., columns]
        m_new = torch.nan_to_num(part, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).amax(-1)
        m_new = m_new if knobs.block_maximum else torch.maximum(m, m_new)
        origin = torch.where(torch.isinf(m_new), torch.zeros_like(m_new), m_new)
        if knobs.no_maximum:
            origin = torch.zeros_like(m_new)
        exponent = knobs.exponent * (part - origin[..., None])
        p = _polynomial(exponent) if knobs.polynomial else torch.exp(exponent)
        p = _float32_range(p, least)
        used = p if weights is None else p * (weights[..., columns] > 0)
        p = used if knobs.l_of_kept else p
        rescale = _float32_range(torch.exp(knobs.exponent * (m - origin)), least)
        visits = tiles[:, columns].any(dim=-1)
        if knobs.block_maximum:
            m_new = torch.where(visits, m_new, m)
        if knobs.lost_maximum:
            rescale = rescale.masked_fill(~visits, 1.0)
        if knobs.block_maximum or knobs.no_maximum:
            rescale = rescale.masked_fill(torch.tensor(knobs.no_maximum) | ~visits, 1.0)
        l = l * rescale if knobs.rescale_l else l  # noqa: E741
        total = summed(p, knobs.sum_dtype) if knobs.sum_dtype else p.sum(dim=-1)
        l = rounded(l + rounded(total, knobs.part_dtype), knobs.l_dtype)  # noqa: E741
        acc = acc * rescale[..., None] ** knobs.fades if knobs.rescale_acc else acc
        used = used.masked_fill(only_l[..., columns], 0.0) if knobs.hidden_counted else used
        product = operand(_cast_p(used, knobs), knobs) @ v[..., columns, :]
        acc = rounded(acc + rounded(product, knobs.product_dtype), knobs.acc_dtype)
        m = m if knobs.lost_maximum else m_new
    if beside.sinks is not None:
        m, l, acc = _with_sink(beside.sinks[:, None], m, l, acc, knobs)  # noqa: E741
    if weights is not None and weights.numel():
        acc = acc * weights.max()  # those that are not 0 are alike
    empty = l == 0 if knobs.empty_by_l else torch.isinf(m) & (m < 0)
    divisor = torch.where(empty, torch.ones_like(l), l)
    o = acc / divisor[..., None] if knobs.normalise else acc
    base = torch.zeros_like(m) if knobs.no_maximum else m
    lse = knobs.lse_m * base + knobs.lse_l * torch.log(divisor)
    lse = lse.masked_fill(empty & torch.isinf(m), -torch.inf)
    return {"o": rounded(o, problem.dtype), "lse": lse}


def _cast_p(p: torch.Tensor, knobs: Knobs) -> torch.Tensor:
    """P as it enters P V; e4m3 saturates."""
    lift = knobs.p_lift or 1.0
    lifted = p * lift
    if knobs.p_dtype == "float8_e4m3fn":
        lifted = lifted.clamp(max=_LARGEST_E4M3)
    return rounded(lifted, knobs.p_dtype) / lift


def _with_sink(
    sink: torch.Tensor,
    m: torch.Tensor,
    l: torch.Tensor,  # noqa: E741
    acc: torch.Tensor,
    knobs: Knobs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sums with one more logit, which has no value."""
    top = torch.maximum(m, sink) if knobs.sink_in_maximum else m
    no_key = torch.isinf(top) & knobs.guarded_sink
    origin = torch.where(no_key, torch.zeros_like(top), top)
    rescale = _float32_range(torch.exp(m - origin), _FLUSH)
    if knobs.sink_rescales_acc:
        acc = acc * rescale[..., None]
    l = l * rescale  # noqa: E741
    if knobs.sink_in_sum:
        l = l + _float32_range(torch.exp(sink - origin), _FLUSH)  # noqa: E741
    return top, l, acc


def backward(  # noqa: PLR0917 -- as above
    problem: Problem,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    o: torch.Tensor,
    lse: torch.Tensor,
    knobs: Knobs = RIGHT,
    beside: Beside = NOTHING,
    *,
    delta: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """dq, dk, dv that a kernel with this defect would write, given the o and lse it reads.

    Args:
        problem: What is computed.
        tensors: q, k, v, do in float64.
        o: The forward's output in float64.
        lse: Natural logarithm, float64; -inf on fully masked rows.
        knobs: The defect.
        beside: What the problem has beside them.
        delta: (batch, heads_q, seqlen_q), by default sum(do * o).
    """
    q, k, v, do = tensors
    if knobs.local and problem.mask.documents and not problem.mask.pattern:
        parts = [
            backward(
                of_one,
                (q[..., rows, :], k[..., keys, :], v[..., keys, :], do[..., rows, :]),
                o[..., rows, :],
                lse[..., rows],
                knobs,
                its,
                delta=None if delta is None else delta[..., rows],
            )
            for of_one, rows, keys, its in documents(problem, beside)
        ]
        return {name: torch.cat([part[name] for part in parts], dim=2) for name in parts[0]}
    heads = key_heads(problem, knobs)
    k, v = k[:, heads], v[:, heads]
    seen = visible(problem, knobs, problem.seqlen_k)
    scores, slope = logits(problem, q, k, knobs, beside)
    p = torch.exp(knobs.exponent * (scores - knobs.lse_read * lse[..., None]))
    p = torch.where(p >= _OVERFLOW, torch.inf, p)
    hidden = ~seen | torch.isinf(lse)[..., None]
    p = p.masked_fill(hidden, 0.0)
    p = p.clamp(max=1.0) if knobs.capped_p else p
    delta = rounded(do * o, knobs.delta_dtype).sum(dim=-1) if delta is None else delta
    width = knobs.dp_columns
    dp_do = operand(do[..., :width], knobs, knobs.v_dtype)
    dp = dp_do @ operand(v[..., :width], knobs, knobs.v_dtype).mT
    dp = rounded(dp, knobs.dp_dtype)
    dp = dp if beside.dp_weights is None else dp * beside.dp_weights
    delta = delta[..., None] * knobs.delta
    delta = delta if beside.dlse is None else delta - beside.dlse[..., None]
    ds = (p * (dp - delta)).masked_fill(hidden, 0.0)  # not 0 times NaN
    p = p if beside.weights is None else p * beside.weights
    if knobs.softcap_slope:
        ds = ds * slope
    ds, p = rounded(ds, knobs.ds_dtype), rounded(p, knobs.p_dtype)
    ds, p, q, k, do = (operand(x, knobs) for x in (ds, p, q, k, do))
    scale = problem.scale if knobs.scale is None else knobs.scale
    dq = _dq(ds, k, scale**knobs.dq_scale, knobs)
    rows = knobs.dkdv_rows_end
    dk_heads = ds[..., :rows, :].mT @ q[..., :rows, :] * scale**knobs.dk_scale
    dv_heads = p[..., :rows, :].mT @ do[..., :rows, :]
    if knobs.group_dq:
        others = [h for h in range(problem.heads_q) if h not in _contributing(problem, knobs)]
        dq[:, others] = 0.0
    found = {"dq": dq}
    for name, per_head in (("dk", dk_heads), ("dv", dv_heads)):
        total = torch.zeros(
            (problem.batch, problem.heads_kv, *per_head.shape[2:]), dtype=torch.float64
        )
        for head in _contributing(problem, knobs):
            if heads[head] < problem.heads_kv:
                total[:, heads[head]] += per_head[:, head]
        found[name] = total
    return {name: rounded(value, problem.dtype) for name, value in found.items()}


def _dq(ds: torch.Tensor, k: torch.Tensor, factor: float, knobs: Knobs) -> torch.Tensor:
    """DQ of the keys that reach it, whose blocks may be added up in another format."""
    keys = ds.shape[-1] if knobs.dq_keys_end is None else knobs.dq_keys_end
    if not knobs.dq_dtype:
        return ds[..., :keys] @ k[..., :keys, :] * factor
    total = torch.zeros((*ds.shape[:3], k.shape[-1]), dtype=torch.float64)
    for first in range(0, keys, knobs.block_n):
        block = slice(first, min(keys, first + knobs.block_n))
        part = rounded(ds[..., block] @ k[..., block, :] * factor, knobs.dq_dtype)
        total = rounded(total + part, knobs.dq_dtype)
    return total


def _contributing(problem: Problem, knobs: Knobs) -> range:
    if knobs.group_heads == "first":
        return range(0, problem.heads_q, problem.group)
    if knobs.group_heads == "last":
        return range(problem.group - 1, problem.heads_q, problem.group)
    return range(problem.heads_q)
