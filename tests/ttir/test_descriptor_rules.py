"""Alignment and contiguity of tensor descriptors made on the host and in the kernel."""

# Triton reads the kernels in this file: their constexprs are upper-case and their names are short.
# ruff: noqa: N803

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from fa_verify import ttir


@triton.jit
def made_in_kernel(x_ptr, y_ptr, start, stride, BLOCK: tl.constexpr):
    at = x_ptr + start * tl.program_id(0)
    rows = tl.make_tensor_descriptor(at, [16, 16], [stride, 1], [BLOCK, BLOCK])  # made
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i[:, None] * BLOCK + i[None, :], rows.load([0, 0]))


@triton.jit
def made_on_host(rows, y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i[:, None] * BLOCK + i[None, :], rows.load([0, 0]))


def line_of(text):
    with open(__file__, encoding="utf-8") as source:  # noqa: PTH123
        return next(i for i, line in enumerate(source, 1) if line.rstrip().endswith(text))


@pytest.mark.parametrize(
    ("start", "stride", "words"),
    [
        (0, 32, None),
        (4, 32, None),
        (2, 32, "the base lies 8 bytes past a multiple of 16"),
        (0, 30, "stride 0 is 120 bytes, no multiple of 16"),
    ],
)
def test_a_descriptor_made_in_a_kernel(start, stride, words):
    x, y = torch.zeros(1024)[64:], torch.zeros(16, 16)
    with ttir.execute() as run:
        made_in_kernel[(2,)](x, y, start, stride, 16)
    if words is None:
        assert run.incidents == []
        return
    assert [(i.kind, i.line) for i in run.incidents] == [("descriptor-rule", line_of("# made"))]
    assert run.incidents[0].detail == words
    assert run.incidents[0].argument == "x_ptr"
    assert run.incidents[0].program_id == ((1, 0, 0) if start else (0, 0, 0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"base": torch.zeros(1024)[66:]}, "the base lies 8 bytes past a multiple of 16"),
        ({"strides": [30, 1]}, "stride 0 is 120 bytes, no multiple of 16"),
        ({"strides": [32, 2]}, "the last dimension has stride 2, not 1"),
    ],
)
def test_a_descriptor_made_on_the_host(change, words):
    rows = TensorDescriptor(torch.zeros(1024)[64:], [16, 16], [32, 1], [16, 16])
    for name, value in change.items():  # the constructor would refuse
        setattr(rows, name, value)
    with ttir.execute() as run:
        made_on_host[(1,)](rows, torch.zeros(16, 16), 16)
    if words is None:
        assert run.incidents == []
        return
    assert [i.kind for i in run.incidents] == ["descriptor-rule"]
    assert run.incidents[0].detail == words
    assert run.incidents[0].argument == "rows"
