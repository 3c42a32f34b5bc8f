"""`emulated`: an emulator of tests/emulator.py, or one derived from it, as a kernel."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fa_verify import Arithmetic, Capabilities, Grads, Kernel, Outputs, patterns
from fa_verify.terms import Terms

__all__ = ["BIAS", "WORK", "Emulator", "emulated", "flush", "keep"]

_PATH = Path(__file__).resolve().parents[2] / "tests" / "emulator.py"
_SPEC = importlib.util.spec_from_file_location("fa_verify_emulator", _PATH)
_MODULE = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = _MODULE
_SPEC.loader.exec_module(_MODULE)
Emulator, flush = _MODULE.Emulator, _MODULE._flush  # noqa: SLF001

WORK = 1e6  # multiply-adds of a product: ten milliseconds
BIAS = ("b", "h", "q", "k", "bh", "bq", "bk", "hq", "hk", "qk", "bhq", "bhk", "bqk", "hqk", "bhqk")


def keep(problem, seed, device):
    """Which elements of P are kept: an independent draw for each."""
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    shape = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
    return (torch.rand(shape, generator=generator) >= problem.dropout).to(device)


def _at_most(work):
    def accepts(p):
        own = p.batch * p.heads_q * p.seqlen_q * p.seqlen_k * (p.head_dim + p.head_dim_v)
        return f"more than {work:g} multiply-adds" if own > work else None

    return accepts


def _terms(problem, alibi_slopes=None, dropout_seed=None, **others):
    kept = None if dropout_seed is None else keep(problem, dropout_seed, "cpu")
    return Terms(slopes=alibi_slopes, keep=kept, **others)


@contextlib.contextmanager
def _unwatched():
    """Without the executor's modes: no Triton kernel runs, and each torch operation costs a third.

    What torch computes on the CPU here is float32, which a card would round in the same way.
    """
    with torch._C.DisableTorchFunction(), _disable_current_modes():  # noqa: SLF001
        yield


_ALL = {
    "dot_precisions": ("ieee", "tf32", "tf32x3"),
    "head_dims_v": range(1, 257),
    "window": True,
    "softcap": True,
    "documents": True,
    "patterns": patterns.NAMES,
    "bias": BIAS,
    "alibi": True,
    "sinks": True,
    "dropout": True,
    "lse_grad": True,
}


def emulated(name, choose, arithmetic=None, *, work=WORK, backward=True, **takes):
    """A kernel that takes whatever is drawn.

    Args:
        name: After "emulated_".
        choose: The emulator of a problem.
        arithmetic: What it declares.
        work: Most multiply-adds of a product that it takes.
        backward: Whether it has gradients.
        takes: What of `_ALL` it takes otherwise.
    """

    def forward(problem, q, k, v, **terms):
        with _unwatched():
            return Outputs(*choose(problem).forward(problem, q, k, v, _terms(problem, **terms)))

    def gradients(problem, q, k, v, outputs, do, **terms):
        saved = outputs.o, outputs.lse, do
        with _unwatched():
            found = choose(problem).backward(problem, q, k, v, *saved, _terms(problem, **terms))
        return Grads(**dict(zip(("dq", "dk", "dv", *_further(problem)), found, strict=True)))

    return Kernel(
        name=f"emulated_{name}",
        forward=forward,
        backward=gradients if backward else None,
        dropout_keep=keep,
        arithmetic=arithmetic or Arithmetic(),
        capabilities=Capabilities(
            **{**_ALL, "lse_grad": backward, **takes}, backward=backward, accepts=_at_most(work)
        ),
    )


def _further(problem):
    return [*(["dbias"] if problem.bias else []), *(["dsinks"] if problem.sinks else [])]
