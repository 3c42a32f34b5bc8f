"""`Knobs`: the ways in which the model of blockwise attention can go wrong."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

__all__ = ["RIGHT", "Knobs"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """One deviation from flash attention; the defaults are right.

    Attributes:
        head_dim: Columns of q and k that enter the logits; likewise head_dim_v of v and o.
        scale: Replaces the softmax scale.
        softcap: Whether a softcap is applied; cap_divides: whether its argument is divided by it;
            scale_after_cap: the scale follows it; tanh_overflows: its tanh is NaN at large logits.
        bias_before_cap: Whether a bias is added before the softcap; sink_rescales_acc: whether acc
            is rescaled for a sink; sink_in_maximum: whether a sink enters m; guarded_sink: whether
            an m of -inf is then taken for 0; sink_in_sum: whether it enters l; l_of_kept: l sums
            what dropout keeps.
        shift: Keys by which the diagonal is moved; likewise left and right, the window's ends.
        masked: Whether the mask is applied at all.
        hidden_logit: Logit of the keys that the mask hides, where it is not -inf.
        hidden_counted: Keys that the mask hides enter l, though not acc.
        tiles: Only keys of the blocks that are visited enter by the two knobs above.
        kv_head: Which key head query head h reads: h // group, h % heads_kv, h // heads_kv, h
            itself, 0, or the one before its own.
        right_end: A right end of the band, from the diagonal on, where the mask has none.
        documents: What goes wrong with packed documents, gaps: with a mask's gaps, see
            `fa_verify.diagnosis.gaps`.
        loop: How the loop over blocks goes wrong, see `fa_verify.diagnosis.loops`; block_m: rows a
            block of it (and block_n keys).
        prescaled: Whether q is multiplied by the scale and rounded; scores_dtype: format of S;
            products_dtype: of S before it is scaled.
        q_dtype, k_dtype, v_dtype: Formats that operands are rounded to before a dot.
        block_n: Keys a block; it matters only to the knobs below.
        padding: Keys up to a whole block count as zeros with weight exp(0 - m).
        keys_end: Keys from here on are skipped; keys_begin: those before it; without: a range of
            keys that are; lost: the "last" or the "first", the partial block at the end ("tail"),
            the "last block" or the "first block", of a sequence or document.
        v_late: A block takes the v of the block before.
        rescale_l: Whether l is rescaled when the maximum moves; likewise rescale_acc; fades: how
            often acc is.
        start: The maximum's initial value; block_maximum: it forgets the blocks before;
            no_maximum: it is not subtracted; lost_maximum: it is never stored.
        flushes: exp gives 0 for what is below float32's smallest normal number.
        empty_by_l: A row with l = 0 is taken for a fully masked one, whatever its m.
        p_dtype: Format that P is rounded to ("" none); likewise acc_dtype and l_dtype, each block;
            part_dtype: of a block's part of l; sum_dtype: that it is summed in. p_lift: what P is
            multiplied by for its cast; None: as the kernel declares it.
        product_dtype: Format that P V of a block is rounded to before it is added.
        exponent: Factor of s - m (in the backward pass: of s - lse) in exp alone; polynomial:
            exp2 is one of degree 3.
        lse_m, lse_l: lse = lse_m m + lse_l log(l).
        lse_read: Factor of the lse that the backward pass reads.
        normalise: Whether acc is divided by l.
        dq_scale, dk_scale: Power of the scale in dq and dk (1 is right).
        delta: Factor of delta; delta_dtype: format of its products.
        dp_dtype: Format of dP; dp_columns: columns of v and do that enter it.
        capped_p: Whether P of the backward pass is at most 1.
        softcap_slope: Whether the softcap's derivative is applied; linear_slope: as 1 - |tanh|;
            signed_slope: as 1 - tanh.
        group_heads: Which query heads of a group reach dk and dv; group_dq: dq of the others is 0.
        dq_keys_end, dkdv_rows_end: Keys that reach dq, rows that reach dk and dv.
        dq_dtype: Format that blocks' parts of dq are added up in.
        ds_dtype: Format that dS is rounded to.
        tf32: How the operands of dots lose all but ten mantissa bits: "" not at all, "truncate"
            (Hopper) or "nearest".
    """

    head_dim: int | None = None
    head_dim_v: int | None = None
    scale: float | None = None
    softcap: bool = True
    cap_divides: bool = True
    scale_after_cap: bool = False
    tanh_overflows: bool = False
    bias_before_cap: bool = False
    sink_rescales_acc: bool = True
    sink_in_maximum: bool = True
    sink_in_sum: bool = True
    guarded_sink: bool = True
    l_of_kept: bool = False
    shift: int = 0
    left: int = 0
    right: int = 0
    masked: bool = True
    hidden_logit: float | None = None
    hidden_counted: bool = False
    tiles: bool = False
    kv_head: Literal["divide", "modulo", "floor", "same", "zero", "before"] = "divide"
    right_end: int | None = None
    documents: str = ""
    gaps: str = ""
    loop: str = ""
    block_m: int = 64
    prescaled: bool = False
    scores_dtype: str = ""
    products_dtype: str = ""
    q_dtype: str = ""
    k_dtype: str = ""
    v_dtype: str = ""
    block_n: int = 64
    padding: bool = False
    keys_begin: int = 0
    keys_end: int | None = None
    without: tuple[int, int] = (0, 0)
    lost: str = ""
    v_late: bool = False
    rescale_l: bool = True
    rescale_acc: bool = True
    fades: int = 1
    start: float = -math.inf
    block_maximum: bool = False
    no_maximum: bool = False
    lost_maximum: bool = False
    empty_by_l: bool = False
    flushes: bool = False
    p_dtype: str = ""
    p_lift: float | None = None
    acc_dtype: str = ""
    product_dtype: str = ""
    l_dtype: str = ""
    part_dtype: str = ""
    sum_dtype: str = ""
    exponent: float = 1.0
    polynomial: bool = False
    lse_m: float = 1.0
    lse_l: float = 1.0
    lse_read: float = 1.0
    normalise: bool = True
    dq_scale: int = 1
    dk_scale: int = 1
    delta: float = 1.0
    delta_dtype: str = ""
    dp_dtype: str = ""
    dp_columns: int | None = None
    capped_p: bool = False
    softcap_slope: bool = True
    linear_slope: bool = False
    signed_slope: bool = False
    group_heads: Literal["all", "first", "last"] = "all"
    group_dq: bool = False
    dq_keys_end: int | None = None
    dkdv_rows_end: int | None = None
    dq_dtype: str = ""
    ds_dtype: str = ""
    tf32: Literal["", "truncate", "nearest"] = ""

    @property
    def rounds(self) -> bool:
        """Whether the defect is a format."""
        formats = (self.p_dtype, self.ds_dtype, self.acc_dtype, self.product_dtype, self.l_dtype)
        more = (self.dp_dtype, self.delta_dtype, self.part_dtype, self.sum_dtype, self.dq_dtype)
        scores = (self.scores_dtype, self.products_dtype)
        operands = (self.q_dtype, self.k_dtype, self.v_dtype)
        return any((*formats, *more, *scores, *operands, self.prescaled))

    @property
    def local(self) -> bool:
        """Whether blocks, or ends, matter, which each document has of its own."""
        rescales = not (self.rescale_l and self.rescale_acc) or self.fades != 1
        maxima = self.block_maximum or self.lost_maximum or self.tiles or self.v_late
        sums = (self.l_dtype, self.part_dtype, self.sum_dtype, self.dq_dtype)
        formats = (self.acc_dtype, self.product_dtype, *sums)
        return bool(self.lost or self.padding or rescales or maxima or any(formats))

    @property
    def strays(self) -> bool:
        """Whether what the defect reads, or where it writes, may lie outside a tensor."""
        beyond = ("late", "begin early", "empty", "by queries", "by keys")
        return self.kv_head != "divide" or self.documents in beyond

    @property
    def exceeds(self) -> bool:
        """Whether P, given a right lse, may exceed 1: other keys are visible, or other logits."""
        moved = (self.shift, self.left, self.right, not self.masked, self.scale is not None)
        other = (self.exponent != 1, self.lse_read != 1, not self.softcap, self.head_dim)
        more = (self.scale_after_cap, self.kv_head != "divide", "unmasked" in self.loop)
        return any((*moved, *other, *more))


RIGHT = Knobs()
