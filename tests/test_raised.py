"""What a kernel raises is told at its author's line, whatever it goes through."""

import json
import linecache
import sys

import pytest
import torch
import triton
import triton.language as tl

from fa_verify import Grads, Kernel, Outputs
from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.case import Case
from fa_verify.checks import contract
from fa_verify.trial import Trial
from fa_verify.verify import verify

Q = torch.zeros(1, 1, 4, 16)
CASE = Case.parse("pass=fwd s=4x4 d=16 dtype=float32 seed=0")


@triton.jit
def inner(x):
    return x + undefined  # noqa: F821 - the name is missing on purpose


@triton.jit
def outer(o):
    at = tl.arange(0, 16)
    tl.store(o + at, inner(at))


@triton.jit
def uneven(o):
    at = tl.arange(0, 16)
    tl.store(o + at, tl.zeros([8], tl.float32))


def nested(_, q, k, v):
    outer[(1,)](q)


def shapes(_, q, k, v):
    uneven[(1,)](q)


def launcher(_, q, k, v):
    return Outputs(json.loads("{")["o"])


def leaves(_, q, k, v):
    sys.exit()


def torchs(_, q, k, v):
    return Outputs(q @ torch.zeros(3, 3))


def right(_, q, k, v):
    return Outputs(torch.softmax(q @ k.mT / 4, dim=-1) @ v)


def failures(forward):
    kernel = Kernel(name="k", forward=forward)
    return list(contract.check(Trial(kernel, CASE, Setup(), CpuBackend())))


@pytest.mark.parametrize(
    ("forward", "title", "source"),
    [
        (nested, "CompilationError", "return x + undefined"),
        (shapes, "CompilationError", "tl.store(o + at, tl.zeros([8], tl.float32))"),
        (launcher, "JSONDecodeError", 'return Outputs(json.loads("{")["o"])'),
        (leaves, "SystemExit", "sys.exit()"),
        (torchs, "RuntimeError", "return Outputs(q @ torch.zeros(3, 3))"),
    ],
)
def test_what_is_raised_is_told_at_its_authors_line(forward, title, source):
    (found,) = failures(forward)
    assert found.title == f"forward raised {title}"
    file, _, line = found.location.rpartition(":")
    assert file == __file__
    assert linecache.getline(file, int(line)).strip().startswith(source)
    assert found.source.startswith(source)
    assert found.message.split(title, 1)[1].strip(": ")


def test_the_reason_of_an_inner_function_is_said():
    (found,) = failures(nested)
    assert "undefined" in found.message


def test_a_right_kernel_raises_nothing():
    assert not failures(right)


@pytest.mark.parametrize(
    ("o", "said"),
    [
        (lambda o: Outputs(o.to_sparse()), "o: layout=torch.sparse_coo"),
        (lambda o: Outputs(o.to("meta")), "o: device='meta'"),
        (lambda o: Outputs(o, o[..., 0].to("meta")), "lse: device='meta'"),
        (lambda o: (o, None), "forward returned tuple"),
    ],
)
def test_outputs_that_nobody_can_look_at_are_the_kernels_fault(o, said):
    (found,) = failures(lambda *args: o(right(*args).o))
    assert found.title == "forward raised ResultError"
    assert said in found.message


def test_a_forgotten_return_is_a_fault_of_a_kernel_that_declares_nothing():
    """Its other errors may say that it does not take the problem."""
    judged = verify(CASE, Kernel(name="k", forward=lambda *_: None), Setup(), CpuBackend())
    assert judged.verdict == "fail"
    assert "forward returned NoneType: it must return Outputs" in judged.failures[0].message


@pytest.mark.parametrize(
    ("grads", "said"),
    [
        (None, "backward returned NoneType"),
        (Grads(Q, Q, None), "backward returned dv of type NoneType"),
        (Grads(Q, Q.to("meta"), Q), "dk: device='meta'"),
    ],
)
def test_gradients_that_are_none_are_the_kernels_fault(grads, said):
    kernel = Kernel(name="k", forward=right, backward=lambda *_: grads)
    case = Case.parse(str(CASE).replace("pass=fwd", "pass=bwd"))
    (found,) = contract.check(Trial(kernel, case, Setup(), CpuBackend()))
    assert found.title == "backward raised ResultError"
    assert said in found.message
