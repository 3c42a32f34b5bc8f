"""Nine defects that the usual rules do not see, each caught on a case that anyone draws.

Each is an edit of a small right kernel (`fa_verify.zoo`), which passes the same case: the one of
that number, from 0, of seed 0 of the default distribution for a kernel of that dtype.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from fa_verify import distribution, loader
from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.verify import verify
from fa_verify.zoo.defects import KERNELS, Defect, planted, rows

torch.set_num_threads(1)  # as the workers of a campaign do

ONE_KEY = Defect(
    name="one-key-in-4096",
    defect="One key in 4096 is not seen.",
    tag="ttir",
    patch=(("forward.py", "(keys < seqlen_k)", "((keys < seqlen_k) & (keys % 4096 != 2048))"),),
)
DEFECTS = {row.name.partition(" (")[0]: row for row in (*rows(), ONE_KEY)}

CAUGHT = [
    # l accumulated in fp16
    ("l-in-fp16", "float16", 2, "lse outside its bound"),
    ("l-in-fp16", "bfloat16", 2, "lse outside its bound"),
    # P in bf16 in an fp16 kernel
    ("p-in-bf16", "float16", 2, "o outside its bound"),
    # acc rounded each block
    ("acc-rounded-each-block", "float16", 2, "o outside its bound"),
    ("acc-rounded-each-block", "bfloat16", 2, "o outside its bound"),
    # q pre-scaled in the storage dtype
    ("q-prescale-round", "float16", 2, "lse outside its bound"),
    ("q-prescale-round", "bfloat16", 2, "lse outside its bound"),
    # the output off by 0.1%
    ("output-off-by-a-thousandth", "float16", 0, "o outside its bound"),
    ("output-off-by-a-thousandth", "bfloat16", 7, "o leans one way"),
    # one missing key in 4096
    ("one-key-in-4096", "float16", 83, "lse outside its bound"),
    ("one-key-in-4096", "bfloat16", 83, "lse outside its bound"),
    # delta from low-precision products
    ("delta-low-precision", "float16", 4, "dq outside its bound"),
    ("delta-low-precision", "bfloat16", 3, "dq outside its bound"),
    # tf32 where ieee was declared
    ("tf32-default", "float32", 3, "lse outside its bound"),
    # exp2 by a polynomial of degree 3, undeclared
    ("exp2-polynomial", "float16", 10, "lse outside its bound"),
    ("exp2-polynomial", "bfloat16", 10, "lse outside its bound"),
]


def right():
    (kernel,) = loader.load(f"{KERNELS / 'launch.py'}:flash")
    return kernel


@functools.cache
def cases(dtype):
    takes = dataclasses.replace(right().takes, dtypes=(dtype,))
    return distribution.draw(0, 1 + max(number for _, _, number, _ in CAUGHT), takes)


@pytest.mark.parametrize(("name", "dtype", "number", "title"), CAUGHT)
def test_a_subtle_defect_is_caught_where_the_right_kernel_passes(
    name, dtype, number, title, tmp_path
):
    case, backend = cases(dtype)[number], CpuBackend()
    defect = dataclasses.replace(DEFECTS[name], dtype=dtype)
    (kernel,) = loader.load(planted([defect], tmp_path)[defect])
    record = verify(case, kernel, Setup(), backend)
    assert ("numerics", title) in [(failure.check, failure.title) for failure in record.failures]
    assert verify(case, right(), Setup(), backend).verdict == "pass"


def test_all_nine_are_there():
    assert len({name for name, *_ in CAUGHT}) == 9
