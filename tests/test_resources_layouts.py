"""A fault of Triton 3.6 and 3.7: operands of products laid out for more columns than they have."""

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fa_verify.resources.layouts import repeated

PRODUCT = """
#mma = #ttg.nvidia_mma<{versionMajor = %d, versionMinor = 0, warpsPerCTA = [1, 4], instrShape = [16, 8]}>
    %%acc = tt.dot %%p, %%v, %%c, inputPrecision = tf32 : tensor<16x%dxbf16, #ttg.dot_op<{opIdx = 0, parent = #mma, kWidth = %d}>> * tensor<%dx64xbf16, #ttg.dot_op<{opIdx = 1, parent = #mma, kWidth = %d}>> -> tensor<16x64xf32, #mma> loc(#loc)
"""  # noqa: E501 - a line of Triton's


def product(version, columns, width):
    return PRODUCT % (version, columns, width, columns, width)


@triton.jit
def masked_product(p, mask, v, out, COLUMNS: tl.constexpr, JOINED: tl.constexpr):  # noqa: N803
    """P, where a byte allows it and half of its columns are kept, times V."""
    rows, columns, outputs = tl.arange(0, 16), tl.arange(0, COLUMNS), tl.arange(0, 16)
    places = rows[:, None] * COLUMNS + columns[None, :]
    allowed = tl.load(mask + places) != 0
    if JOINED:
        halves = rows[:, None] * 0 + tl.arange(0, COLUMNS // 2)[None, :]
        kept = tl.reshape(tl.join(halves % 3 == 0, halves % 2 == 0), (16, COLUMNS))
        allowed = allowed & kept
    tile = tl.where(allowed, tl.load(p + places), 0.0)
    values = tl.load(v + columns[:, None] * 16 + outputs[None, :])
    tl.store(out + rows[:, None] * 16 + outputs[None, :], tl.dot(tile, values))


def compiled(columns, *, joined, mask="*i8"):
    signature = {"p": "*bf16", "mask": mask, "v": "*bf16", "out": "*fp32"}
    signature |= {"COLUMNS": "constexpr", "JOINED": "constexpr"}
    source = ASTSource(masked_product, signature, {(4,): columns, (5,): joined})
    options = {"enable_fp_fusion": True}  # the default, of which Triton 3.9 warns
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ttgir"]


@pytest.mark.parametrize(("columns", "width"), [(16, 8), (8, 4), (32, 16)])
def test_fewer_columns_than_four_threads_hold_are_counted(columns, width):
    assert repeated(product(2, columns, width)) == 1
    assert repeated(product(2, columns, width) * 2) == 2


@pytest.mark.parametrize(("columns", "width"), [(16, 4), (16, 2), (32, 8), (64, 8)])
def test_others_are_not(columns, width):
    assert repeated(product(2, columns, width)) == 0


def test_products_of_wgmma_are_not():
    assert repeated(product(3, 16, 8)) == 0


def test_triton_makes_such_products_of_bytes_and_joins():
    faulty = triton.__version__.startswith(("3.6.", "3.7."))
    assert repeated(compiled(16, joined=True)) == (1 if faulty else 0)


@pytest.mark.parametrize(
    ("columns", "joined", "mask"), [(16, False, "*i8"), (32, True, "*i8"), (16, True, "*i16")]
)
def test_triton_makes_none_of_wider_tiles_or_types(columns, joined, mask):
    found = compiled(columns, joined=joined, mask=mask)
    assert "tt.dot " in found
    assert repeated(found) == 0
