"""Descriptors are made as Triton makes them."""

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor


@pytest.mark.parametrize("shape", [(2, 3, 5, 80), (1, 1, 5, 64)])
def test_they_are_what_triton_s_checks_pass(kernels, shape):
    x = torch.zeros(shape, dtype=torch.float16)
    made = kernels("descriptors").columns(x, 16, 64, shape[3] - 64)
    strides = [stride if n > 1 else 8 for n, stride in zip(shape, x.stride(), strict=True)]
    for one, width in zip(made, (64, shape[3] - 64), strict=True):
        if width == 0:
            assert one is None
            continue
        checked = TensorDescriptor(x, list(shape), strides, [1, 1, 16, width])
        assert one.base is checked.base
        names = [name for name in TensorDescriptor.__dataclass_fields__ if name != "base"]
        assert [getattr(one, name) for name in names] == [getattr(checked, name) for name in names]
