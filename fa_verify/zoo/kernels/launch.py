"""Launchers: `flash`, `atomic` (dq by atomics), `decode_forward` (split keys), `paged_forward`.

Also `varlen_forward` (packed documents) and `masked_forward` (any mask).
"""

import dataclasses

import torch
import triton

from fa_verify import Arithmetic, Capabilities, Grads, Kernel, Outputs, cu_seqlens, paged, patterns

from .decode import merge_kernel, split_kernel
from .dkdv import dkdv_kernel
from .dq import delta_kernel, dq_kernel
from .forward import forward_kernel
from .masked import masked_kernel
from .paged import paged_kernel
from .varlen import varlen_kernel

FORWARD = {"BLOCK_M": 64, "BLOCK_N": 32}
DKDV = {"BLOCK_M": 32, "BLOCK_N": 64}
DQ = {"BLOCK_M": 32, "BLOCK_N": 64}
SPLIT = {"BLOCK_M": 16, "BLOCK_N": 32}
DELTA_ROWS = MERGE_ROWS = 16
MOST_SPLITS = 4
PAGE_SIZE = 24
MOST_MASKED = 1 << 22  # elements of a mask


def block(columns):
    """Columns of a tile: a power of two, 16 at the least (tl.dot takes no less)."""
    return max(16, triton.next_power_of_2(columns))


def band(problem):
    """(lo, hi): query i sees key j when lo <= j - i <= hi; None: no limit."""
    mask = problem.mask
    shift = mask.shift(problem.seqlen_q, problem.seqlen_k)
    right = 0 if mask.causal else mask.window_right
    lo = None if mask.window_left is None else shift - mask.window_left
    hi = None if right is None else shift + right
    return lo, hi


def options(problem):
    """Arguments that the kernels share, by name."""
    lo, hi = band(problem)
    return {
        "heads_q": problem.heads_q,
        "heads_kv": problem.heads_kv,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "band_lo": lo or 0,
        "band_hi": hi or 0,
        "softmax_scale": problem.scale,
        "softcap": problem.softcap,
        "BLOCK_D": block(problem.head_dim),
        "BLOCK_DV": block(problem.head_dim_v),
        "HAS_LO": lo is not None,
        "HAS_HI": hi is not None,
        "SOFTCAP": problem.softcap > 0,
        "PRECISION": problem.dot_precision if problem.dtype == "float32" else "tf32",
    }


def forward(problem, q, k, v):
    """Return o and lse by one kernel."""
    o = torch.empty(problem.shape_o, dtype=q.dtype, device=q.device)
    lse = torch.empty(problem.shape_lse, dtype=torch.float32, device=q.device)
    if o.numel():
        blocks = triton.cdiv(problem.seqlen_q, FORWARD["BLOCK_M"])
        forward_kernel[(blocks * problem.batch * problem.heads_q,)](
            q, k, v, o, lse, *q.stride(), *k.stride(), *v.stride(), *o.stride(),
            **options(problem), **FORWARD,
        )  # fmt: skip
    return Outputs(o, lse)


def decode(problem, q, k, v):
    """Return o, laid out (batch, seqlen, heads, head_dim), and lse, by splitting the keys."""
    batch, heads, seqlen, head_dim = problem.shape_o
    o = torch.empty((batch, seqlen, heads, head_dim), dtype=q.dtype, device=q.device)
    o = o.transpose(1, 2)
    lse = torch.empty(problem.shape_lse, dtype=torch.float32, device=q.device)
    if not o.numel():
        return Outputs(o, lse)
    splits = min(MOST_SPLITS, max(1, triton.cdiv(problem.seqlen_k, SPLIT["BLOCK_N"])))
    split_keys = triton.cdiv(problem.seqlen_k, splits)
    part_o = torch.empty((splits, *problem.shape_o), dtype=torch.float32, device=q.device)
    part_lse = torch.full((splits, *problem.shape_lse), float("-inf"), device=q.device)
    blocks = triton.cdiv(problem.seqlen_q * problem.group, SPLIT["BLOCK_M"])
    split_kernel[(blocks * problem.batch * problem.heads_kv, splits)](
        q, k, v, part_o, part_lse, *q.stride(), *k.stride(), *v.stride(),
        batches=problem.batch, split_keys=split_keys, **options(problem), **SPLIT,
    )  # fmt: skip
    blocks = triton.cdiv(problem.seqlen_q, MERGE_ROWS)
    merge_kernel[(blocks * problem.batch * problem.heads_q,)](
        part_o, part_lse, o, lse, *o.stride(),
        problem.batch, problem.heads_q, problem.seqlen_q, problem.head_dim_v, splits,
        BLOCK_M=MERGE_ROWS, BLOCK_DV=block(problem.head_dim_v),
    )  # fmt: skip
    return Outputs(o, lse)


def with_pages(problem, q, k, v):
    """Return o and lse, k and v being read from pages; pages that a window left behind are gone."""
    pages = paged(problem, k, v, page_size=PAGE_SIZE, evict=True)
    o = torch.empty(problem.shape_o, dtype=q.dtype, device=q.device)
    lse = torch.empty(problem.shape_lse, dtype=torch.float32, device=q.device)
    if not o.numel():
        return Outputs(o, lse)
    longest_k = PAGE_SIZE * pages.block_table.shape[1]
    count = min(triton.cdiv(longest_k, SPLIT["BLOCK_N"]), MOST_SPLITS)
    parts = torch.empty((count, *problem.shape_o), dtype=torch.float32, device=q.device)
    part_lse = torch.full((count, *problem.shape_lse), float("-inf"), device=q.device)
    sequences = len(pages.cache_lengths) * problem.heads_q
    given = options(problem)
    for name in ("seqlen_q", "seqlen_k", "band_lo", "band_hi", "softcap", "SOFTCAP"):
        del given[name]
    mask = problem.mask
    right = mask.window_right if not mask.causal else 0
    given |= {"HAS_LO": mask.window_left is not None, "HAS_HI": right is not None}
    paged_kernel[(triton.cdiv(pages.max_seqlen_q, SPLIT["BLOCK_M"]) * sequences, count)](
        q, *pages[:4], pages.cu_seqlens_q, parts, part_lse,
        *q.stride(), *pages.k_pages.stride(), *pages.v_pages.stride(),
        stride_table=pages.block_table.stride(0), batches=problem.batch, tokens=problem.seqlen_q,
        longest_q=pages.max_seqlen_q,
        window_left=mask.window_left or 0, window_right=right or 0,
        split_keys=triton.cdiv(longest_k, count), page_size=PAGE_SIZE,
        BOTTOM_RIGHT=mask.alignment == "bottom-right", PACKED=bool(mask.documents),
        **given, **SPLIT,
    )  # fmt: skip
    blocks = triton.cdiv(problem.seqlen_q, MERGE_ROWS)
    merge_kernel[(blocks * problem.batch * problem.heads_q,)](
        parts, part_lse, o, lse, *o.stride(),
        problem.batch, problem.heads_q, problem.seqlen_q, problem.head_dim_v, count,
        BLOCK_M=MERGE_ROWS, BLOCK_DV=block(problem.head_dim_v),
    )  # fmt: skip
    return Outputs(o, lse)


def start_backward(problem, q, k, v, o, do):
    """Delta, and empty dk and dv."""
    delta = torch.empty(problem.shape_lse, dtype=torch.float32, device=q.device)
    dk = torch.empty(problem.shape_k, dtype=k.dtype, device=k.device)
    dv = torch.empty(problem.shape_v, dtype=v.dtype, device=v.device)
    if delta.numel():
        blocks = triton.cdiv(problem.seqlen_q, DELTA_ROWS)
        delta_kernel[(blocks * problem.batch * problem.heads_q,)](
            o, do, delta, *o.stride(), *do.stride(),
            problem.heads_q, problem.seqlen_q, problem.head_dim_v,
            BLOCK_M=DELTA_ROWS, BLOCK_DV=block(problem.head_dim_v),
        )  # fmt: skip
    return delta, dk, dv


def backward(problem, q, k, v, outputs, do):
    """Gradients, dq by a kernel of its own: the same bits on every run."""
    delta, dk, dv = start_backward(problem, q, k, v, outputs.o, do)
    dq = torch.empty(problem.shape_q, dtype=q.dtype, device=q.device)
    strides = (*q.stride(), *k.stride(), *v.stride(), *do.stride())
    if dk.numel():
        blocks = triton.cdiv(problem.seqlen_k, DKDV["BLOCK_N"])
        dkdv_kernel[(blocks * problem.batch * problem.heads_kv,)](
            q, k, v, do, outputs.lse, delta, dk, dv, None, *strides, *dk.stride(),
            ATOMIC_DQ=False, **options(problem), **DKDV,
        )  # fmt: skip
    if dq.numel():
        blocks = triton.cdiv(problem.seqlen_q, DQ["BLOCK_M"])
        dq_kernel[(blocks * problem.batch * problem.heads_q,)](
            q, k, v, do, outputs.lse, delta, dq, *strides, **options(problem), **DQ
        )
    return Grads(dq, dk, dv)


def backward_atomic(problem, q, k, v, outputs, do):
    """Gradients, dq by atomics into a float32 buffer padded to whole blocks of rows."""
    delta, dk, dv = start_backward(problem, q, k, v, outputs.o, do)
    rows = triton.cdiv(problem.seqlen_q, DKDV["BLOCK_M"]) * DKDV["BLOCK_M"]
    shape = (problem.batch, problem.heads_q, rows, problem.head_dim)
    dq_sum = torch.zeros(shape, dtype=torch.float32, device=q.device)
    if dk.numel():
        blocks = triton.cdiv(problem.seqlen_k, DKDV["BLOCK_N"])
        dkdv_kernel[(blocks * problem.batch * problem.heads_kv,)](
            q, k, v, do, outputs.lse, delta, dk, dv, dq_sum,
            *q.stride(), *k.stride(), *v.stride(), *do.stride(), *dk.stride(),
            ATOMIC_DQ=True, **options(problem), **DKDV,
        )  # fmt: skip
    dq = dq_sum[:, :, : problem.seqlen_q].to(q.dtype)
    return Grads(dq, dk, dv)


def varlen(problem, q, k, v):
    """O and lse of packed documents; a sequence that is not packed is one document."""
    o = torch.empty(problem.shape_o, dtype=q.dtype, device=q.device)
    lse = torch.empty(problem.shape_lse, dtype=torch.float32, device=q.device)
    starts_q, starts_k, _, _ = cu_seqlens(problem, q.device)
    documents, mask, further = len(starts_q) - 1, problem.mask, options(problem)
    right = mask.window_right if not mask.causal else 0
    names = ("heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")
    names = (*names, "softmax_scale", "softcap", "BLOCK_D", "BLOCK_DV", "SOFTCAP", "PRECISION")
    if o.numel():
        # Each document has a part of a tile at most beside the whole ones.
        most = problem.seqlen_q // FORWARD["BLOCK_M"] + documents
        varlen_kernel[(most, problem.heads_q)](
            q, k, v, o, lse, starts_q, starts_k,
            *q.stride()[1:], *k.stride()[1:], *v.stride()[1:], *o.stride()[1:],
            documents=documents, window_left=mask.window_left or 0, window_right=right or 0,
            HAS_LO=mask.window_left is not None, HAS_HI=right is not None,
            BOTTOM_RIGHT=mask.alignment == "bottom-right",
            **{name: further[name] for name in names}, **FORWARD,
        )  # fmt: skip
    return Outputs(o, lse)


def masked(problem, q, k, v):
    """O and lse under the problem's mask, whatever it is."""
    o = torch.empty(problem.shape_o, dtype=q.dtype, device=q.device)
    lse = torch.empty(problem.shape_lse, dtype=torch.float32, device=q.device)
    allowed = torch.from_numpy(problem.mask.allowed(problem.seqlen_q, problem.seqlen_k))
    further = options(problem)
    left_out = ("band_lo", "band_hi", "HAS_LO", "HAS_HI")
    if o.numel():
        blocks = triton.cdiv(problem.seqlen_q, FORWARD["BLOCK_M"])
        masked_kernel[(blocks * problem.batch * problem.heads_q,)](
            q, k, v, o, lse, allowed.to(q.device, torch.int8),
            *q.stride(), *k.stride(), *v.stride(), *o.stride(),
            **{name: value for name, value in further.items() if name not in left_out}, **FORWARD,
        )  # fmt: skip
    return Outputs(o, lse)


_CAPABILITIES = Capabilities(
    dot_precisions=("ieee", "tf32", "tf32x3"),
    head_dims_v=range(1, 257),
    window=True,
    softcap=True,
    deterministic=True,
    batch_invariant=True,
)

flash = Kernel(
    name="flash",
    forward=forward,
    backward=backward,
    capabilities=_CAPABILITIES,
    arithmetic=Arithmetic(ds_scale="after"),
)
atomic = Kernel(
    name="atomic",
    forward=forward,
    backward=backward_atomic,
    capabilities=dataclasses.replace(_CAPABILITIES, deterministic=False, batch_invariant=False),
    arithmetic=Arithmetic(ds_scale="after", dq_atomics=True),
)
decode_forward = Kernel(
    name="decode",
    forward=decode,
    capabilities=dataclasses.replace(_CAPABILITIES, backward=False),
)
paged_forward = Kernel(
    name="paged",
    forward=with_pages,
    capabilities=dataclasses.replace(
        _CAPABILITIES, backward=False, softcap=False, documents=True, batch_invariant=False
    ),
)
varlen_forward = Kernel(
    name="varlen",
    forward=varlen,
    capabilities=dataclasses.replace(
        _CAPABILITIES,
        backward=False,
        documents=True,
        accepts=lambda problem: "a batch" if problem.batch > 1 else None,
    ),
)
masked_forward = Kernel(
    name="masked",
    forward=masked,
    capabilities=dataclasses.replace(
        _CAPABILITIES,
        backward=False,
        documents=True,
        patterns=patterns.NAMES,
        accepts=lambda problem: (
            "a large mask" if problem.seqlen_q * problem.seqlen_k > MOST_MASKED else None
        ),
    ),
)
