"""A float64 model of blockwise attention with a knob for each known defect.

It predicts what a kernel with that defect would write. It is no reference: it rounds P, the
accumulators and the outputs as the defect says, and it may be wrong on purpose.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

import torch

from fa_verify.diagnosis.loops import visited

if TYPE_CHECKING:
    from fa_verify.problem import Problem

__all__ = ["RIGHT", "Knobs", "backward", "forward"]

_FLUSH = 2.0**-150  # float32 rounds what is below half its smallest subnormal to 0
_OVERFLOW = 2.0**128  # and what is at or above this to inf


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """One deviation from flash attention; the defaults are right.

    Attributes:
        head_dim: Columns of q and k that enter the logits; likewise head_dim_v of v and o.
        scale: Replaces the softmax scale.
        softcap: Whether a softcap is applied.
        shift: Keys by which the diagonal is moved; likewise left and right, the window's ends.
        masked: Whether the mask is applied at all.
        kv_head: Which key head query head h reads: h // group, h % heads_kv, h // heads_kv, h
            itself, or 0.
        right_end: A right end of the band, from the diagonal on, where the mask has none.
        loop: How the loop over blocks goes wrong, see `fa_verify.diagnosis.loops`; block_m: rows a
            block of it (and block_n keys).
        prescaled: Whether q is multiplied by the scale and rounded; scores_dtype: format of S.
        block_n: Keys a block; it matters only to the knobs below.
        padding: Keys up to a whole block count as zeros with weight exp(0 - m).
        keys_end: Keys from here on are skipped; keys_begin: those before it.
        rescale_l: Whether l is rescaled when the maximum moves; likewise rescale_acc.
        start: The maximum's initial value.
        empty_by_l: A row with l = 0 is taken for a fully masked one, whatever its m.
        p_dtype: Format that P is rounded to ("" none); likewise acc_dtype and l_dtype, each block.
        product_dtype: Format that P V of a block is rounded to before it is added.
        exponent: Factor of s - m in exp alone.
        lse_m, lse_l: lse = lse_m m + lse_l log(l).
        normalise: Whether acc is divided by l.
        dq_scale, dk_scale: Power of the scale in dq and dk (1 is right).
        delta: Whether delta is subtracted; delta_dtype: format of its products.
        dp_dtype: Format of dP; dp_columns: columns of v and do that enter it.
        capped_p: Whether P of the backward pass is at most 1.
        softcap_slope: Whether the softcap's derivative is applied; linear_slope: as 1 - |tanh|.
        group_heads: Which query heads of a group reach dk and dv.
        dq_keys_end, dkdv_rows_end: Keys that reach dq, rows that reach dk and dv.
        ds_dtype: Format that dS is rounded to.
        tf32: How the operands of dots lose all but ten mantissa bits: "" not at all, "truncate"
            (Hopper) or "nearest".
    """

    head_dim: int | None = None
    head_dim_v: int | None = None
    scale: float | None = None
    softcap: bool = True
    shift: int = 0
    left: int = 0
    right: int = 0
    masked: bool = True
    kv_head: Literal["divide", "modulo", "floor", "same", "zero"] = "divide"
    right_end: int | None = None
    loop: str = ""
    block_m: int = 64
    prescaled: bool = False
    scores_dtype: str = ""
    block_n: int = 64
    padding: bool = False
    keys_begin: int = 0
    keys_end: int | None = None
    rescale_l: bool = True
    rescale_acc: bool = True
    start: float = -torch.inf
    empty_by_l: bool = False
    p_dtype: str = ""
    acc_dtype: str = ""
    product_dtype: str = ""
    l_dtype: str = ""
    exponent: float = 1.0
    lse_m: float = 1.0
    lse_l: float = 1.0
    normalise: bool = True
    dq_scale: int = 1
    dk_scale: int = 1
    delta: bool = True
    delta_dtype: str = ""
    dp_dtype: str = ""
    dp_columns: int | None = None
    capped_p: bool = False
    softcap_slope: bool = True
    linear_slope: bool = False
    group_heads: Literal["all", "first", "last"] = "all"
    dq_keys_end: int | None = None
    dkdv_rows_end: int | None = None
    ds_dtype: str = ""
    tf32: Literal["", "truncate", "nearest"] = ""


RIGHT = Knobs()


def _rounded(x: torch.Tensor, dtype: str) -> torch.Tensor:
    return x.to(getattr(torch, dtype)).to(torch.float64) if dtype else x


def _operand(x: torch.Tensor, knobs: Knobs) -> torch.Tensor:
    """An operand of a dot: 13 of float32's mantissa bits dropped under tf32."""
    if not knobs.tf32:
        return x
    bits = x.to(torch.float32).view(torch.int32)
    if knobs.tf32 == "nearest":
        bits = bits + (1 << 12)
    return (bits & ~((1 << 13) - 1)).view(torch.float32).to(torch.float64)


def _float32_range(x: torch.Tensor) -> torch.Tensor:
    x = torch.where(x < _FLUSH, torch.zeros_like(x), x)
    return torch.where(x >= _OVERFLOW, torch.full_like(x, torch.inf), x)


def _key_heads(problem: Problem, knobs: Knobs) -> torch.Tensor:
    heads = torch.arange(problem.heads_q)
    if knobs.kv_head == "modulo":
        return heads % problem.heads_kv
    if knobs.kv_head == "floor":
        return (heads // problem.heads_kv).clamp(max=problem.heads_kv - 1)
    if knobs.kv_head == "same":
        return heads.clamp(max=problem.heads_kv - 1)
    if knobs.kv_head == "zero":
        return torch.zeros_like(heads)
    return heads // problem.group


def _visible(problem: Problem, knobs: Knobs, keys: int) -> torch.Tensor:
    """Who sees whom, over keys that may reach past seqlen_k, shape (seqlen_q, keys)."""
    mask = problem.mask
    rows = torch.arange(problem.seqlen_q)[:, None]
    columns = torch.arange(keys)[None, :]
    distance = columns - rows - mask.shift(problem.seqlen_q, problem.seqlen_k) - knobs.shift
    visible = torch.ones_like(distance, dtype=torch.bool)
    if knobs.masked:
        if mask.window_left is not None:
            visible &= distance >= -mask.window_left - knobs.left
        right = 0 if mask.causal else mask.window_right
        if right is not None:
            visible &= distance <= right + knobs.right
    if knobs.right_end is not None:
        visible &= distance <= knobs.right_end
    if knobs.loop:
        visible = visited(problem, visible, knobs.loop, knobs.block_m, knobs.block_n)
    if not knobs.padding:
        visible &= columns < problem.seqlen_k
    visible &= columns >= knobs.keys_begin
    if knobs.keys_end is not None:
        visible &= columns < knobs.keys_end
    return visible


def _scores(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, knobs: Knobs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and the softcap's slope."""
    width = knobs.head_dim
    scale = problem.scale if knobs.scale is None else knobs.scale
    if knobs.prescaled:
        q, scale = _rounded(q * scale, problem.dtype), 1.0
    q, k = _operand(q[..., :width], knobs), _operand(k[..., :width], knobs)
    logits = _rounded((q @ k.mT) * scale, knobs.scores_dtype)
    slope = torch.ones_like(logits)
    if problem.softcap and knobs.softcap:
        tanh = torch.tanh(logits / problem.softcap)
        logits = problem.softcap * tanh
        slope = 1 - (tanh.abs() if knobs.linear_slope else tanh * tanh)
    return logits, slope


def forward(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, knobs: Knobs = RIGHT
) -> dict[str, torch.Tensor]:
    """O (in the input dtype's values) and lse that a kernel with this defect would write.

    Args:
        problem: What is computed.
        q: (batch, heads_q, seqlen_q, head_dim) float64; k and v likewise.
        k: Keys.
        v: Values.
        knobs: The defect.

    Returns:
        "o" (batch, heads_q, seqlen_q, head_dim_v) and "lse" (batch, heads_q, seqlen_q), float64.
    """
    heads = _key_heads(problem, knobs)
    k, v = k[:, heads], v[:, heads]
    block = knobs.block_n
    keys = problem.seqlen_k
    if knobs.padding:
        extra = -keys % block
        k = torch.nn.functional.pad(k, (0, 0, 0, extra))
        v = torch.nn.functional.pad(v, (0, 0, 0, extra))
        keys += extra
    logits, _ = _scores(problem, q, k, knobs)
    v = _operand(v, knobs)
    logits = logits.masked_fill(~_visible(problem, knobs, keys), -torch.inf)
    shape = logits.shape[:3]
    m = torch.full(shape, knobs.start, dtype=torch.float64)
    l = torch.zeros(shape, dtype=torch.float64)  # noqa: E741 - its name in every paper
    acc = torch.zeros((*shape, v.shape[-1]), dtype=torch.float64)
    for first in range(0, keys, block):
        part = logits[..., first : first + block]
        m_new = torch.maximum(m, part.max(dim=-1).values)
        origin = torch.where(torch.isinf(m_new), torch.zeros_like(m_new), m_new)
        p = _float32_range(torch.exp(knobs.exponent * (part - origin[..., None])))
        rescale = torch.exp(knobs.exponent * (m - origin))
        l = l * rescale if knobs.rescale_l else l  # noqa: E741
        l = _rounded(l + p.sum(dim=-1), knobs.l_dtype)  # noqa: E741
        acc = acc * rescale[..., None] if knobs.rescale_acc else acc
        product = _operand(_rounded(p, knobs.p_dtype), knobs) @ v[..., first : first + block, :]
        acc = _rounded(acc + _rounded(product, knobs.product_dtype), knobs.acc_dtype)
        m = m_new
    empty = l == 0 if knobs.empty_by_l else torch.isinf(m) & (m < 0)
    divisor = torch.where(empty, torch.ones_like(l), l)
    o = acc / divisor[..., None] if knobs.normalise else acc
    lse = knobs.lse_m * m + knobs.lse_l * torch.log(divisor)
    lse = lse.masked_fill(empty, -torch.inf)
    return {"o": _rounded(o, problem.dtype), "lse": lse}


def backward(
    problem: Problem,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    o: torch.Tensor,
    lse: torch.Tensor,
    knobs: Knobs = RIGHT,
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
        delta: (batch, heads_q, seqlen_q), by default sum(do * o).
    """
    q, k, v, do = tensors
    heads = _key_heads(problem, knobs)
    k, v = k[:, heads], v[:, heads]
    visible = _visible(problem, knobs, problem.seqlen_k)
    logits, slope = _scores(problem, q, k, knobs)
    p = torch.exp(logits - lse[..., None])
    p = p.masked_fill(~visible | torch.isinf(lse)[..., None], 0.0)
    p = p.clamp(max=1.0) if knobs.capped_p else p
    delta = _rounded(do * o, knobs.delta_dtype).sum(dim=-1) if delta is None else delta
    width = knobs.dp_columns
    dp = _operand(do[..., :width], knobs) @ _operand(v[..., :width], knobs).mT
    dp = _rounded(dp, knobs.dp_dtype)
    ds = p * (dp - delta[..., None] * knobs.delta)
    if knobs.softcap_slope:
        ds = ds * slope
    ds, p = _rounded(ds, knobs.ds_dtype), _rounded(p, knobs.p_dtype)
    ds, p, q, k, do = (_operand(x, knobs) for x in (ds, p, q, k, do))
    scale = problem.scale if knobs.scale is None else knobs.scale
    dq = ds[..., : knobs.dq_keys_end] @ k[..., : knobs.dq_keys_end, :] * scale**knobs.dq_scale
    rows = knobs.dkdv_rows_end
    dk_heads = ds[..., :rows, :].mT @ q[..., :rows, :] * scale**knobs.dk_scale
    dv_heads = p[..., :rows, :].mT @ do[..., :rows, :]
    found = {"dq": dq}
    for name, per_head in (("dk", dk_heads), ("dv", dv_heads)):
        total = torch.zeros(
            (problem.batch, problem.heads_kv, *per_head.shape[2:]), dtype=torch.float64
        )
        for head in _contributing(problem, knobs):
            total[:, heads[head]] += per_head[:, head]
        found[name] = total
    return {name: _rounded(value, problem.dtype) for name, value in found.items()}


def _contributing(problem: Problem, knobs: Knobs) -> range:
    if knobs.group_heads == "first":
        return range(0, problem.heads_q, problem.group)
    if knobs.group_heads == "last":
        return range(problem.group - 1, problem.heads_q, problem.group)
    return range(problem.heads_q)
