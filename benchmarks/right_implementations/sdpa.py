"""PyTorch's scaled_dot_product_attention as kernels: one for each of its backends.

Each calls the public function under `sdpa_kernel`, so a problem that PyTorch refuses is
`unsupported`; `expressible` only keeps the draw to what a backend may take. A bias is `attn_mask`;
where a mask hides keys beside it, it is -inf there. Under autograd the gradients of a group's query
heads may be rounded to the input dtype before they are added, and so is that of a shared bias in
each of its places: `gqa_dtype`.
"""

from __future__ import annotations

import functools

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fa_verify import Arithmetic, Capabilities, Kernel, Mask, Outputs, patterns

__all__ = [
    "sdpa_cudnn",
    "sdpa_cudnn_gradients",
    "sdpa_cudnn_masks",
    "sdpa_efficient",
    "sdpa_efficient_forward",
    "sdpa_flash",
    "sdpa_flash_cpu",
    "sdpa_flash_cpu_float32",
    "sdpa_flash_cpu_gradients",
    "sdpa_flash_gqa",
    "sdpa_flash_gqa_gradients",
    "sdpa_math",
    "sdpa_math_gqa",
    "sdpa_math_gqa_gradients",
]


def _forward(backend, problem, q, k, v, bias=None):
    """O by one backend, and its lse as it saved it for the backward pass, where it did."""
    if not q.requires_grad:
        q = q.detach().requires_grad_()
    mask = problem.mask
    # PyTorch takes the flag, of a diagonal that begins at the first key, or a tensor.
    from_the_first = mask.alignment == "top-left" or problem.seqlen_q == problem.seqlen_k
    plain = from_the_first and bias is None and mask == Mask(causal=True, alignment=mask.alignment)
    allowed = None
    if mask.hides_anything and not plain:
        allowed = mask.allowed(problem.seqlen_q, problem.seqlen_k)
        allowed = torch.from_numpy(allowed).to(q.device)
    if bias is not None:
        allowed = bias if allowed is None else bias.masked_fill(~allowed, -torch.inf)
    with sdpa_kernel(backend):
        o = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=allowed,
            is_causal=plain,
            scale=problem.scale,
            enable_gqa=problem.group > 1,
        )
    return Outputs(o, _saved_lse(o, problem))


def _saved_lse(o, problem):
    """What the backward node keeps, cut to the queries: some backends pad them."""
    node = o.grad_fn
    while node is not None:
        for name in ("_saved_logsumexp", "_saved_log_sumexp"):
            saved = getattr(node, name, None)
            if saved is not None:
                rows = saved.detach().reshape(problem.batch, problem.heads_q, -1)
                return rows[..., : problem.seqlen_q].float()
        node = node.next_functions[0][0] if node.next_functions else None
    return None


_BIAS = ("b", "h", "q", "k", "bh", "bq", "bk", "hq", "hk", "qk", "bhq", "bhk", "bqk", "hqk", "bhqk")
_GRID = 65_535  # CUDA's limit on the second and third axes of a grid


def _positive_scale(problem):
    """Fused backends take the maximum before they scale."""
    return None if problem.scale > 0 else "scale <= 0"


def _square_causal(problem):
    """FlashAttention's diagonal ends at the last key: PyTorch refuses other causal masks."""
    if problem.mask.hides_anything and problem.seqlen_q != problem.seqlen_k:
        return "causal with seqlen_q != seqlen_k"
    if problem.mask.window_left is not None or problem.mask.window_right is not None:
        return "sliding window"
    if problem.batch > _GRID:
        return f"batch > {_GRID}: CUDA error: invalid argument"
    return _positive_scale(problem)


def _no_empty_row(problem):
    """A row whose bias is -inf throughout has no softmax."""
    lo, hi = problem.mask.intervals(problem.seqlen_q, problem.seqlen_k)
    return "a fully masked row" if (hi <= lo).any() else _positive_scale(problem)


def _kernel(name, backend, arithmetic, *, gradients, **takes):
    """The backend with gradients, or forward only and then, as a rule, with grouped heads too."""
    return Kernel(
        name=name,
        forward=functools.partial(_forward, backend),
        backward="autograd" if gradients else None,
        arithmetic=arithmetic,
        expressible=Capabilities(
            **{"gqa": not gradients, **takes}, layouts=False, empty=False, backward=gradients
        ),
    )


_SHARED = {  # a bias in all axes, in some, or in some of which one are the keys
    "own": ("bhqk",),
    "any": _BIAS,
    "along keys": tuple(axes for axes in _BIAS if "k" in axes),
}


def _masks_by_tensor(*, bias):
    """What a mask tensor can say."""
    return {
        "window": True,
        "documents": True,
        "patterns": patterns.NAMES,
        "bias": _SHARED[bias],
    }


def _math(name, *, gradients, gqa=False):
    """Everything in float32, for half inputs as well; delta is summed from P dP.

    But dS is rounded before it is summed to the gradient of a shared bias.
    """
    arithmetic = Arithmetic(
        p_dtype="float32",
        ds_dtype="float32",
        delta_from_p_dp=True,
        gqa_dtype="input" if gqa else "float32",
    )
    head_dims = range(1, 257)
    return _kernel(
        name,
        SDPBackend.MATH,
        arithmetic,
        gradients=gradients,
        gqa=gqa,
        head_dims_v=head_dims,
        **_masks_by_tensor(bias="any" if gqa else "own"),
    )


def _flash(name, *, gradients, gqa=False):
    """FlashAttention 2, which splits the keys where queries are few."""
    return _kernel(
        name,
        SDPBackend.FLASH_ATTENTION,
        Arithmetic(dq_atomics=True, merged_by_lse=True, gqa_dtype="input" if gqa else "float32"),
        gradients=gradients,
        gqa=gqa,
        dtypes=("float16", "bfloat16"),
        accepts=_square_causal,
    )


def _efficient(name, *, gradients):
    """CUTLASS's, with the keys walked in order and dQ added in float32."""
    return _kernel(
        name,
        SDPBackend.EFFICIENT_ATTENTION,
        Arithmetic(dq_atomics=True, ds_from_rounded_p=True),
        gradients=gradients,
        dot_precisions=("tf32x3",),  # CUTLASS's OpMultiplyAddFastF32
        head_dims=range(8, 257, 8),
        gqa=False,
        accepts=_no_empty_row,
        **_masks_by_tensor(bias="own" if gradients else "along keys"),
    )


def _causal_flag_only(problem):
    """No mask but the one that needs no tensor."""
    mask, square = problem.mask, problem.seqlen_q == problem.seqlen_k
    if mask.window_left is not None or mask.window_right is not None:
        return "sliding window"
    if mask.causal and not (square or mask.alignment == "top-left"):
        return "a causal mask that ends at the last key"
    return _no_empty_row(problem)


def _without_nan(problem):
    """Where dq has NaN, seqlen_k is a multiple of 64 and seqlen_q another number."""
    if problem.seqlen_k % 64 == 0 and problem.seqlen_q != problem.seqlen_k:
        return "seqlen_k a multiple of 64, seqlen_q not the same"
    return _causal_flag_only(problem)


def _cudnn(name, arithmetic=None, *, gradients=False, **takes):
    """NVIDIA's closed one (H200, torch 2.11; docs/false_alarms.md)."""
    return _kernel(
        name,
        SDPBackend.CUDNN_ATTENTION,
        arithmetic or Arithmetic(),
        gradients=gradients,
        dtypes=("float16", "bfloat16"),
        head_dims=range(8, 129, 8),
        **takes,
    )


def _cpu(name, dtypes, arithmetic, *, gradients):
    """ATen's own for CPUs."""
    return _kernel(
        name,
        SDPBackend.FLASH_ATTENTION,
        arithmetic,
        gradients=gradients,
        dtypes=dtypes,
        accepts=_no_empty_row,
        **{**_masks_by_tensor(bias="any"), **({"bias": ()} if gradients else {})},
    )


sdpa_math = _math("sdpa_math", gradients=True)
sdpa_math_gqa = _math("sdpa_math_gqa", gradients=False, gqa=True)
sdpa_math_gqa_gradients = _math("sdpa_math_gqa_gradients", gradients=True, gqa=True)
sdpa_flash = _flash("sdpa_flash", gradients=True)
sdpa_flash_gqa = _flash("sdpa_flash_gqa", gradients=False, gqa=True)
sdpa_flash_gqa_gradients = _flash("sdpa_flash_gqa_gradients", gradients=True, gqa=True)
sdpa_cudnn = _cudnn("sdpa_cudnn", accepts=_causal_flag_only)
# Hidden logits are moved down by a finite number: up to 6e3 they stay hidden, at 1e5 they do not;
# an lse of bfloat16 was 65536 below a hidden logit of 4e6.
# A bias that is the same for all keys faults: "misaligned address".
sdpa_cudnn_masks = _cudnn(
    "sdpa_cudnn_masks",
    Arithmetic(masked_logit=-2.4e4),
    accepts=_no_empty_row,
    **_masks_by_tensor(bias="along keys"),
)
sdpa_cudnn_gradients = _cudnn("sdpa_cudnn_gradients", gradients=True, accepts=_without_nan)
sdpa_efficient = _efficient("sdpa_efficient", gradients=True)
sdpa_efficient_forward = _efficient("sdpa_efficient_forward", gradients=False)
sdpa_flash_cpu_float32 = _cpu("sdpa_flash_cpu_float32", ("float32",), Arithmetic(), gradients=True)
# Of half inputs its exp is off by up to 1687 units of 2^-24 (torch 2.13, measured over [-12, 0]).
sdpa_flash_cpu = _cpu(
    "sdpa_flash_cpu", ("float16", "bfloat16"), Arithmetic(exp2_ulps=2048), gradients=False
)
# dk and dv are rounded to the inputs' dtype after every block of queries.
sdpa_flash_cpu_gradients = _cpu(
    "sdpa_flash_cpu_gradients",
    ("float16", "bfloat16"),
    Arithmetic(exp2_ulps=2048, gradient_dtype="input"),
    gradients=True,
)
