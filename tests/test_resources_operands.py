"""A fault of Triton in PTX: a loop writes what a product of the iteration before may read.

The listings are of forward passes that Triton 3.6 compiled for sm_90, cut to the registers in
question.
"""

import pytest

from fa_verify.resources.operands import rewritten

SCORES = """
	wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%r54,%r55}, %rd21, %rd22, 0, 1, 1, 0, 0;
	wgmma.commit_group.sync.aligned;
	wgmma.wait_group.sync.aligned 0;
"""
WEIGHTS = """
	cvt.rn.f16x2.f32 	%r181, %r384, %r383;
	mov.b64 	{%r182, %r183}, %rd4;
"""
PRODUCT = """
	wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%r127,%r128}, {%r181,%r182}, %rd7, 1, 1, 1;
	wgmma.commit_group.sync.aligned;
"""


def loop(*parts):
    return "$L__BB0_4:      // in a loop\n" + "".join(parts) + "\t@%p31 bra \t$L__BB0_4;\n"


def test_an_operand_computed_before_the_wait_is_counted():
    """On an H200 o was NaN."""
    assert rewritten(loop(WEIGHTS, SCORES, PRODUCT)) == 2


def test_an_operand_computed_after_it_is_not():
    assert rewritten(loop(SCORES, WEIGHTS, PRODUCT)) == 0
    assert rewritten(WEIGHTS + SCORES + PRODUCT) == 0  # no loop
    assert rewritten("") == 0


@pytest.mark.parametrize(("pending", "count"), [(0, 0), (1, 2)])
def test_a_wait_that_leaves_the_product_running_is_none(pending, count):
    wait = f"\twgmma.wait_group.sync.aligned {pending};\n"
    assert rewritten(loop(wait, WEIGHTS, PRODUCT)) == count


def test_a_wait_for_all_but_later_groups_is_one():
    """The product's group is the older of two."""
    wait = "\twgmma.wait_group.sync.aligned 1;\n"
    other = "\twgmma.commit_group.sync.aligned;\n"
    assert rewritten(loop(wait, WEIGHTS, PRODUCT, other)) == 0
