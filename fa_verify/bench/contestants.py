"""Contestants: kernels and peers, each as a function that makes the launches of one point.

A *peer* is an attention of PyTorch's: one behind scaled_dot_product_attention, or flex_attention,
compiled. Its backward pass is autograd's, on a graph built beforehand. Where it takes no grouped
heads, k and v were expanded beforehand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from fa_verify.errors import UnsupportedProblemError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fa_verify.bench.points import Point
    from fa_verify.kernel import Kernel

__all__ = ["Contestant", "Inputs", "inputs", "kernel", "peer"]

_BACKENDS = {
    "fa2": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_GROUPED = frozenset({"fa2", "cudnn"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """One set of tensors of a point."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """Something that is timed.

    Attributes:
        name: Shown in the table.
        peer: Whether others are compared with it.
        prepare: From a point and inputs to what is timed: all that need not be timed is done.
    """

    name: str
    peer: bool
    prepare: Callable[[Point, Inputs], Callable[[], tuple[Tensor, ...]]]


def inputs(point: Point, device: str, seed: int) -> Inputs:
    """Standard normal q, k, v and do."""
    generator = torch.Generator(device).manual_seed(seed)
    p, dtype = point.problem, getattr(torch, point.dtype)
    q, k, v, do = (
        torch.randn(shape, generator=generator, device=device, dtype=dtype)
        for shape in (p.shape_q, p.shape_k, p.shape_v, p.shape_o)
    )
    return Inputs(q=q, k=k, v=v, do=do)


def kernel(tested: Kernel) -> Contestant:
    """A kernel, called as `fa-verify check` calls it."""
    return Contestant(name=tested.name, peer=False, prepare=functools.partial(_kernel, tested))


def peer(name: str) -> Contestant:
    """One of `points.PEERS`."""
    return Contestant(name=name, peer=True, prepare=functools.partial(_peer, name))


def _kernel(tested: Kernel, point: Point, given: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    problem, bshd = point.problem, tested.layout == "bshd"
    reason = tested.capabilities and tested.capabilities.reason_against(problem)
    if reason:
        raise UnsupportedProblemError(reason)
    q, k, v, do = (x.transpose(1, 2) if bshd else x for x in (given.q, given.k, given.v, given.do))
    backward = tested.backward
    if point.direction != "backward":

        def forward() -> tuple[Tensor, ...]:
            o = tested.forward(problem, q, k, v).o
            return (o.transpose(1, 2) if bshd else o,)

        return forward
    if not callable(backward):
        leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
        o = tested.forward(problem, *leaves).o
        return functools.partial(_gradients, o, leaves, do)
    outputs = tested.forward(problem, q, k, v)

    def gradients() -> tuple[Tensor, ...]:
        grads = backward(problem, q, k, v, outputs, do)
        return grads.dq, grads.dk, grads.dv

    return gradients


def _peer(name: str, point: Point, given: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    attention = _flex(point) if name == "flex" else _sdpa(name, point)
    if point.direction != "backward":
        k, v = (_expanded(name, point, x) for x in (given.k, given.v))

        def forward() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return (attention(given.q, k, v),)

        return forward
    leaves = tuple(x.detach().requires_grad_() for x in (given.q, given.k, given.v))
    return functools.partial(_gradients, attention(*leaves), leaves, given.do)


def _gradients(o: Tensor, leaves: tuple[Tensor, ...], do: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(o, leaves, do, retain_graph=True)


def _expanded(name: str, point: Point, x: Tensor) -> Tensor:
    """Keys or values with as many heads as queries, for a peer that takes no fewer."""
    group = point.problem.group
    return x if group == 1 or name in _GROUPED else x.repeat_interleave(group, dim=1)


def _sdpa(name: str, point: Point) -> Callable[..., Tensor]:
    grouped = point.problem.group > 1 and name in _GROUPED

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(_BACKENDS[name]):
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=point.causal, enable_gqa=grouped
            )

    return attention


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)


def _flex(point: Point) -> Callable[..., Tensor]:
    mask = None
    if point.causal:
        # Positions of the band are compared in the kernel; blocks above it are left out.
        mask = create_block_mask(
            lambda _b, _h, i, j: i >= j, None, None, point.seqlen, point.seqlen, device="cuda"
        )
    with contextlib.suppress(AttributeError):  # a compilation for each point, not a few in all
        torch._dynamo.config.cache_size_limit = 1 << 20  # noqa: SLF001 - the public name of it
        torch._dynamo.config.accumulated_cache_size_limit = 1 << 20  # noqa: SLF001 - likewise
        torch._inductor.config.compile_threads = 1  # noqa: SLF001 - many processes do that at once
    return functools.partial(_compiled(), block_mask=mask)
