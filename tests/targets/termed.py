"""Attention in plain PyTorch with bias, ALiBi, sinks, dropout and lse's gradient: right, and wrong.

Exact results are rounded once, so that only what is planted can be wrong.
"""

import dataclasses

import torch

from fa_verify import Arithmetic, Capabilities, Grads, Kernel, Outputs, reference
from fa_verify.terms import Terms


def keep(problem, seed, device):
    """Which elements of P are kept."""
    generator = torch.Generator().manual_seed(seed)
    shape = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
    return (torch.rand(shape, generator=generator) >= problem.dropout).to(device)


def _terms(problem, bias, alibi_slopes, sinks, dropout_seed, dlse=None):
    kept = None if dropout_seed is None else keep(problem, dropout_seed, "cpu")
    return Terms(bias=bias, slopes=alibi_slopes, sinks=sinks, dlse=dlse, keep=kept)


def kernel(name, altered=lambda terms: terms, grads=lambda grads: grads, *, saves=True):
    """The right kernel, but for the terms that it sees and what becomes of its gradients.

    Args:
        name: Of the kernel.
        altered: Of the terms.
        grads: Of the gradients.
        saves: The backward sees the altered terms too.
    """

    def forward(problem, q, k, v, *, bias=None, alibi_slopes=None, sinks=None, dropout_seed=None):
        terms = altered(_terms(problem, bias, alibi_slopes, sinks, dropout_seed))
        exact = reference.forward(problem, q, k, v, terms)
        return Outputs(exact.o.to(q.dtype), exact.lse.float())

    def backward(
        problem, q, k, v, outputs, do,
        *, bias=None, alibi_slopes=None, sinks=None, dropout_seed=None, dlse=None,
    ):  # fmt: skip
        del outputs
        terms = _terms(problem, bias, alibi_slopes, sinks, dropout_seed, dlse)
        exact = reference.backward(problem, q, k, v, do, altered(terms) if saves else terms)
        found = Grads(
            *(x.to(q.dtype) for x in (exact.dq, exact.dk, exact.dv)),
            None if exact.dbias is None else exact.dbias.to(q.dtype),
            None if exact.dsinks is None else exact.dsinks.float(),
        )
        return grads(found)

    return Kernel(
        name=name,
        forward=forward,
        backward=backward,
        dropout_keep=keep,
        capabilities=Capabilities(
            dot_precisions=("ieee", "tf32", "tf32x3"),
            head_dims_v=range(1, 257),
            window=True,
            softcap=True,
            bias=("bhqk", "hqk", "qk", "bqk", "bk", "k", "q", "h", "b"),
            alibi=True,
            sinks=True,
            dropout=True,
            lse_grad=True,
            deterministic=True,
            batch_invariant=True,
        ),
        arithmetic=Arithmetic(delta_from_stored_o=False),
    )


def _without(name):
    return lambda terms: dataclasses.replace(terms, **{name: None})


def _negated_slopes(terms):
    return terms if terms.slopes is None else dataclasses.replace(terms, slopes=-terms.slopes)


def _other_keep(terms):
    return terms if terms.keep is None else dataclasses.replace(terms, keep=terms.keep.roll(1, 3))


def _first_row(grads):
    wide = grads.dbias is not None and grads.dbias.shape[2] == 1
    return dataclasses.replace(grads, dbias=grads.dbias / 2) if wide else grads


def _dsinks_times(factor):
    def grads(found):
        none = found.dsinks is None
        return found if none else dataclasses.replace(found, dsinks=factor * found.dsinks)

    return grads


right = kernel("right")
bias_ignored = kernel("bias_ignored", _without("bias"))
slope_sign = kernel("slope_sign", _negated_slopes)
no_sink = kernel("no_sink", _without("sinks"))
other_keep = kernel("other_keep", _other_keep)
dlse_ignored = kernel("dlse_ignored", _without("dlse"))
half_dbias = kernel("half_dbias", grads=_first_row)
no_dsinks = kernel("no_dsinks", grads=lambda grads: dataclasses.replace(grads, dsinks=None))
negated_dsinks = kernel("negated_dsinks", grads=_dsinks_times(-1))
zero_dsinks = kernel("zero_dsinks", grads=_dsinks_times(0))
