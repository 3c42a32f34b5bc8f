"""One kernel a fault of the fronts: `wrong` numbers, `hangs`, `dies`, `explodes`, `late`, ..."""

import os
import time

import torch

from fa_verify import Capabilities, Kernel, Outputs, reference

_FORWARD = Capabilities(head_dims_v=range(1, 257), window=True, softcap=True, backward=False)


def _wrong(problem, q, k, v):
    exact = reference.forward(problem, q, k, v)
    o = exact.o.to(q.dtype)
    if problem.seqlen_q > 2 and problem.seqlen_k:
        o[:, :, 2] += 1
    return Outputs(o, exact.lse.float())


def _hangs(problem, q, k, v):
    while True:
        time.sleep(0.1)


def _dies(problem, q, k, v):
    os._exit(9)


def _explodes(problem, q, k, v):
    return Outputs(torch.ones(1 << 40).sum() * q)


def _raises(problem, q, k, v):
    msg = "head_dim: not today"
    raise ValueError(msg)


def bare(problem, q, k, v):
    """A function without Capabilities that refuses everything, clearly."""
    _raises(problem, q, k, v)


def asserts(problem, q, k, v):
    """Refuses in the shortest way there is."""
    assert q.shape[-1] == 64
    return Outputs(v)


_calls = []


def _flaky(problem, q, k, v):
    _calls.append(problem)
    exact = reference.forward(problem, q, k, v)
    return Outputs((exact.o + (len(_calls) == 4)).to(q.dtype), exact.lse.float())


def _late(problem, q, k, v):
    """As on a machine where everybody wants the processor: each process is late once."""
    if not _calls:
        time.sleep(4)
    _calls.append(problem)
    exact = reference.forward(problem, q, k, v)
    return Outputs(exact.o.to(q.dtype), exact.lse.float())


late = Kernel(name="late", forward=_late, capabilities=_FORWARD)
flaky = Kernel(name="flaky", forward=_flaky, capabilities=_FORWARD)  # wrong on its fourth call
wrong = Kernel(name="wrong", forward=_wrong, capabilities=_FORWARD)
hangs = Kernel(name="hangs", forward=_hangs, capabilities=_FORWARD)
dies = Kernel(name="dies", forward=_dies, capabilities=_FORWARD)
explodes = Kernel(name="explodes", forward=_explodes, capabilities=_FORWARD)
raises = Kernel(name="raises", forward=_raises, capabilities=_FORWARD)
