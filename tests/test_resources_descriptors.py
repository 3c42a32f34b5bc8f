"""A fault of ptxas 12.8 in machine code: descriptors of products from registers that hold others.

The listings are of kernels that Triton 3.6 compiled for sm_90, cut to the registers in question.
"""

import pytest

from fa_verify.resources.descriptors import disassembled, lost

# 64 + 16 columns at fixed addresses: the copy's column and barrier are in UR10 and UR17. On an H200
# it ended in an illegal access.
WRONG = """
        /*09b0*/              @UP1 UMOV UR10, 0x40 ;                          /* 0x0000004000...  */
        /*0a10*/              @UP1 UIADD3 UR17, UR16, 0x4000, URZ ;
        /*0a20*/              @UP2 UTMALDG.4D [UR16], [UR36] ;
        /*0b50*/                   UIADD3 UR10, UP1, UR10, 0x20, URZ ;
        /*0b90*/                   USHF.R.U32.HI UR38, URZ, 0x4, UR16 ;
        /*0bb0*/                   UIADD3.X UR17, UR17, -0x3ffffff0, URZ, UP1, !UPT ;
        /*0bd0*/                   UIADD3 UR58, UP3, UR10, 0x20, URZ ;
        /*0c30*/                   USGXT.U32 UR38, UR38, 0xe ;
        /*0c50*/                   UIADD3.X UR59, UR17, URZ, URZ, UP3, !UPT ;
"""
# The same program's keys, of 64 columns: the upper half is added to zero.
RIGHT = """
        /*0b70*/                   USHF.R.U32.HI UR5, URZ, 0x4, UR24 ;
        /*0bf0*/                   USGXT.U32 UR5, UR5, 0xe ;
        /*0c70*/                   UIADD3 UR14, UP3, UR5, 0x2, URZ ;
        /*0ce0*/                   UMOV UR7, URZ ;
        /*0e70*/                   UIADD3.X UR13, UR7, 0x40000040, URZ, UP3, !UPT ;
        /*0ff0*/                   UIADD3.X UR7, UR23, URZ, URZ, UP2, !UPT ;
"""
# The sums in vector registers: v's last 16 columns beside keys in one tile of 128. R10 holds a
# barrier's address. On an H200 its output was NaN.
WRONG_IN_VECTORS = """
        /*0a40*/                   LEA R10, R128, UR8, 0xd ;
        /*0b40*/                   SHF.R.U32.HI R11, RZ, 0x4, R10 ;
        /*0bb0*/                   SGXT.U32 R11, R11, 0xe ;
        /*0bc0*/                   IADD3 R12, P5, R11, 0x20, RZ ;
        /*0bd0*/                   IADD3.X R10, R10, -0x3ffffff0, RZ, P5, !PT ;
        /*0be0*/                   R2UR UR11, R10 ;
"""
RIGHT_IN_VECTORS = """
        /*0e50*/                   CS2R R6, SRZ ;
        /*0e60*/                   IADD3 R4, P2, R4, 0x2, RZ ;
        /*0e70*/                   IADD3.X R7, R7, 0x40000040, RZ, P2, !PT ;
        /*0f00*/                   IMAD.MOV.U32 R6, RZ, RZ, RZ ;
        /*0f10*/                   IADD3.X R10, R6.reuse, 0x40000040, RZ, P3, !PT ;
"""


def test_a_descriptor_from_a_register_that_holds_something_else_is_counted():
    assert lost(WRONG) == 1
    assert lost(WRONG + RIGHT) == 1
    assert lost(WRONG_IN_VECTORS) == 1
    assert lost(WRONG_IN_VECTORS + RIGHT_IN_VECTORS) == 1


def test_descriptors_of_right_programs_are_not():
    assert lost(RIGHT) == 0
    assert lost(RIGHT_IN_VECTORS) == 0
    assert lost("") == 0


@pytest.mark.parametrize("constant", ["0x100", "-0x1", "0x40004040", "0x3fff"])
def test_other_sums_of_64_bits_are_no_descriptors(constant):
    assert lost(WRONG.replace("-0x3ffffff0", constant)) == 0


def test_a_register_written_as_the_upper_half_of_a_pair_is_seen():
    moved = RIGHT.replace("UMOV UR7, URZ", "ULDC.64 UR6, c[0x0][0x6b0]")
    assert lost(moved) == 1


def test_what_is_no_machine_code_has_no_descriptors():
    assert disassembled(b"") == ""
