"""What an attention is asked for, as operators take it, and the `Problem` that it poses."""

import functools
import typing

import torch

from fa_verify import Mask, Problem

from .block_mask import BlockMask

__all__ = ["DTYPES", "PRECISIONS", "Inputs", "Options", "problem_of"]

DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
PRECISIONS = "ieee", "tf32", "tf32x3"
_AXES = "bhqk"


class Inputs(typing.NamedTuple):
    """The tensors.

    The seed of dropout is one, on the CPU, so that a compiled graph draws it. A block mask is the
    list of its tensors, as `BlockMask.flat` gives it.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    dropout_seed: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    block_mask: list[torch.Tensor] | None = None

    def terms(self):
        """What the kernels take beside q, k and v, by name."""
        terms = {name: getattr(self, name) for name in ("bias", "alibi_slopes", "sinks")}
        if self.dropout_seed is not None:
            terms["dropout_seed"] = int(self.dropout_seed)
        if self.cu_seqlens_q is not None:
            terms["starts"] = self.cu_seqlens_q, self.cu_seqlens_k
        if self.block_mask is not None:
            terms["block_mask"] = BlockMask.of(self.block_mask)
        return {name: term for name, term in terms.items() if term is not None}


class Options(typing.NamedTuple):
    """What else `attention` is asked for."""

    softmax_scale: float | None = None
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    dropout_p: float = 0.0
    alignment: str = "bottom-right"
    dot_precision: str = "ieee"
    deterministic: bool = True


def problem_of(inputs, options, *, symbolic=False):
    """The problem that these pose.

    Args:
        inputs: The tensors.
        options: The rest.
        symbolic: Sizes may be symbols, which have no hash.

    Raises:
        ValueError: One breaks its rule, or they do not fit together.
    """
    _check_shapes(inputs)
    _check_terms(inputs)
    _check_block_mask(inputs, options)
    q, k, v = inputs[:3]
    terms = _bias_axes(inputs), inputs.alibi_slopes is not None, inputs.sinks is not None
    pose = _problem.__wrapped__ if symbolic else _problem
    return pose(q.shape, k.shape, v.shape[3], DTYPES[q.dtype], options, terms)


@functools.lru_cache(maxsize=256)
def _problem(shape_q, shape_k, head_dim_v, dtype, options, terms):
    batch, heads_q, seqlen_q, head_dim = shape_q
    bias, alibi, sinks = terms
    left, right = (
        None if size < 0 else size for size in (options.window_left, options.window_right)
    )
    return Problem(
        batch=batch,
        heads_q=heads_q,
        heads_kv=shape_k[1],
        seqlen_q=seqlen_q,
        seqlen_k=shape_k[2],
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        dot_precision=options.dot_precision,
        mask=Mask(
            causal=options.causal,
            window_left=left,
            window_right=right,
            alignment=options.alignment,
        ),
        softmax_scale=options.softmax_scale,
        softcap=options.softcap,
        bias=bias,
        alibi=alibi,
        sinks=sinks,
        dropout=options.dropout_p,
    )


def _bias_axes(inputs):
    """The axes in which a bias has the full size."""
    if inputs.bias is None:
        return ""
    full = (*inputs.q.shape[:3], inputs.k.shape[2])
    sizes = zip(_AXES, inputs.bias.shape, full, strict=True)
    return "".join(axis for axis, size, whole in sizes if size == whole)


def _check_shapes(inputs):
    """Say what of q, k and v does not fit, before a kernel reads past a tensor."""
    q, k, v = inputs[:3]
    shapes = {name: tuple(x.shape) for name, x in (("q", q), ("k", k), ("v", v))}
    for name, shape in shapes.items():
        if len(shape) != len(_AXES):
            msg = f"{name}.shape={shape}: must be (batch, heads, seqlen, head_dim)"
            raise ValueError(msg)
    if q.dtype not in DTYPES:
        msg = f"q.dtype={q.dtype}: must be float16, bfloat16 or float32; convert q, k and v"
        raise ValueError(msg)
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype or x.device != q.device:
            msg = f"{name}={x.dtype} on {x.device}: must be as q, {q.dtype} on {q.device}"
            raise ValueError(msg)
    if k.shape[:3] != v.shape[:3]:
        msg = f"v.shape={shapes['v']}: must agree with k.shape={shapes['k']} up to head_dim"
        raise ValueError(msg)
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        msg = f"k.shape={shapes['k']}: batch and head_dim must be those of q.shape={shapes['q']}"
        raise ValueError(msg)


def _check_terms(inputs):
    """Likewise for what comes beside q, k and v."""
    q, k = inputs.q, inputs.k
    full = (*q.shape[:3], k.shape[2])
    rows = q.shape[0] if inputs.cu_seqlens_q is None else len(inputs.cu_seqlens_q) - 1
    bias, slopes, sinks, seed, starts_q, starts_k, _ = inputs[3:]
    for name, tensor in zip(Inputs._fields[3:9], inputs[3:9], strict=True):
        place = "cpu" if name == "dropout_seed" else q.device
        if tensor is not None and tensor.device != torch.device(place):
            msg = f"{name} on {tensor.device}: must be on {place}"
            raise ValueError(msg)
    if bias is not None and (
        bias.dim() != len(_AXES)
        or not bias.is_floating_point()
        or any(size not in (1, whole) for size, whole in zip(bias.shape, full, strict=True))
    ):
        hint = "; a mask goes in as 0 and -inf" if bias.dtype == torch.bool else ""
        msg = (
            f"bias: {bias.dtype} {tuple(bias.shape)}: must be floating, and broadcast to "
            f"{full}{hint}"
        )
        raise ValueError(msg)
    for name, tensor, shapes in (
        ("alibi_slopes", slopes, ((q.shape[1],), (rows, q.shape[1]))),
        ("sinks", sinks, ((q.shape[1],),)),
    ):
        if tensor is not None and (
            tensor.dtype != torch.float32 or tuple(tensor.shape) not in shapes
        ):
            wanted = " or ".join(map(str, shapes))
            msg = f"{name}: {tensor.dtype} {tuple(tensor.shape)}: must be float32 {wanted}"
            raise ValueError(msg)
    if seed is not None and (seed.dtype != torch.int64 or seed.dim()):
        msg = f"dropout_seed: {seed.dtype} {tuple(seed.shape)}: must be one int64"
        raise ValueError(msg)
    if starts_q is not None:
        for name, starts in (("cu_seqlens_q", starts_q), ("cu_seqlens_k", starts_k)):
            if (
                starts.dtype != torch.int32
                or starts.dim() != 1
                or starts.shape != starts_q.shape
                or len(starts) == 0
            ):
                msg = (
                    f"{name}: {starts.dtype} {tuple(starts.shape)}: both must be int32 and as "
                    "long, (sequences + 1,): [0] of no sequence"
                )
                raise ValueError(msg)


def _check_block_mask(inputs, options):
    """Likewise for a block mask, which stands alone."""
    if inputs.block_mask is None:
        return
    mask = BlockMask.of(inputs.block_mask)
    blocks = tuple(-(-x.shape[2] // mask.size) for x in (inputs.q, inputs.k))
    if tuple(mask.kinds.shape) != blocks or mask.kinds.device != inputs.q.device:
        msg = (
            f"block_mask: {tuple(mask.kinds.shape)} blocks of {mask.size} on {mask.kinds.device}: "
            f"must be {blocks} on {inputs.q.device}; make it for seqlen_q={inputs.q.shape[2]}, "
            f"seqlen_k={inputs.k.shape[2]}"
        )
        raise ValueError(msg)
    others = options.causal, options.window_left >= 0, options.window_right >= 0
    if any(others) or inputs.cu_seqlens_q is not None:
        msg = "block_mask: says all that is hidden; leave out causal, window_size and cu_seqlens"
        raise ValueError(msg)
