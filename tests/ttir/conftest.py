"""Memory for the tensor descriptors that kernels make, which Triton asks the program for."""

import pytest
import torch
import triton


@pytest.fixture(autouse=True)
def _allocator():
    triton.set_allocator(lambda size, *_: torch.empty(size, dtype=torch.int8))
