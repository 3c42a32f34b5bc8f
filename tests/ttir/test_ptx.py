"""Inline assembly: instructions against Python integers or NumPy, then texts in kernels."""

# Triton reads the kernels in this file: their constexprs are upper-case and their names are short.
# ruff: noqa: N803

import math
import struct

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from fa_verify import ttir
from fa_verify.ttir.ptx.texts import Thread, parse


def f32(x):
    return struct.unpack("<I", struct.pack("<f", x))[0]


def f16(*numbers):
    """Bits of one or two halves, the lower first."""
    return int.from_bytes(b"".join(struct.pack("<e", x) for x in numbers), "little")


def execute(text, *inputs, width=32):
    """The bits that $0 has after a text, for inputs $1, $2 ..."""
    registers = {f"${i + 1}": np.array([x], np.uint64) for i, x in enumerate(inputs)}
    thread = Thread(registers, 1, {}, (None, None))
    thread.run(parse(text), dict.fromkeys(["$0", *registers], width))
    return int(thread.registers["$0"][0])


A, B = 0x8123_4567, 0x0000_00F9
INTEGERS = [
    ("add.u32 $0, $1, $2;", A + B), ("sub.s32 $0, $2, $1;", (B - A) & 0xFFFFFFFF),
    ("mul.lo.u32 $0, $1, $2;", A * B & 0xFFFFFFFF), ("mul.hi.u32 $0, $1, $2;", A * B >> 32),
    ("mad.lo.u32 $0, $1, 2, 0x10;", (A * 2 + 16) & 0xFFFFFFFF),
    ("min.u32 $0, $1, $2;", B), ("min.s32 $0, $1, $2;", A), ("max.s32 $0, $1, $2;", B),
    ("div.u32 $0, $1, $2;", A // B), ("rem.u32 $0, $1, $2;", A % B),
    ("div.s32 $0, $1, 7;", -((2**32 - A) // 7) & 0xFFFFFFFF), ("neg.s32 $0, $2;", 2**32 - B),
    ("abs.s32 $0, $1;", 2**32 - A), ("and.b32 $0, $1, $2;", A & B), ("or.b32 $0, $1, $2;", A | B),
    ("xor.b32 $0, $1, $2;", A ^ B), ("not.b32 $0, $1;", A ^ 0xFFFFFFFF),
    ("shl.b32 $0, $1, 4;", A << 4 & 0xFFFFFFFF), ("shr.u32 $0, $1, 4;", A >> 4),
    ("shr.s32 $0, $1, 4;", A >> 4 | 0xF0000000), ("shr.u32 $0, $1, 40;", 0),
    ("shf.l.wrap.b32 $0, $1, $2, 8;", (B << 32 | A) << 8 >> 32 & 0xFFFFFFFF),
    ("shf.r.clamp.b32 $0, $1, $2, 8;", (B << 32 | A) >> 8 & 0xFFFFFFFF),
    ("lop3.b32 $0, $1, $2, 0x00ff00ff, 0xea;", A & B | 0x00FF00FF),
    ("prmt.b32 $0, $1, $2, 0x5410;", (B & 0xFFFF) << 16 | A & 0xFFFF),
    ("prmt.b32 $0, $1, $2, 0x000b;", 0x676767FF), ("bfe.u32 $0, $1, 4, 8;", A >> 4 & 0xFF),
    ("bfe.s32 $0, $1, 28, 4;", 0xFFFFFFF8), ("bfi.b32 $0, $2, $1, 8, 4;", A & ~0xF00 | 0x900),
    ("popc.b32 $0, $1;", A.bit_count()), ("clz.b32 $0, $2;", 24), ("clz.b32 $0, 0;", 32),
    ("brev.b32 $0, $2;", int(f"{B:032b}"[::-1], 2)),
    ("{ .reg .pred p; setp.lt.s32 p, $1, $2; selp.b32 $0, 1, 2, p; }", 1),
    ("{ .reg .pred p; setp.lt.u32 p, $1, $2; @p mov.b32 $0, 1; @!p mov.b32 $0, 2; }", 2),
    ("{ .reg .b8 t<4>; mov.b32 {t0,t1,t2,t3}, $1; mov.b32 $0, {t3, t2, t1, t0}; }", 0x67452381),
    ("cvt.u32.u8 $0, $1;", 0x67), ("cvt.s32.s8 $0, $2;", 0xFFFFFFF9),
    ("cvt.sat.u8.s32 $0, $1;", 0), ("mov.b32 $0, 0b101; // a comment", 5),
]  # fmt: skip


@pytest.mark.parametrize(("text", "want"), INTEGERS, ids=[text for text, _ in INTEGERS])
def test_integer_instructions(text, want):
    assert execute(text, A, B) == want


X, Y = f32(1.5), f32(-0.3)
FLOATS = [
    ("add.f32 $0, $1, $2;", np.float32(1.5) + np.float32(-0.3)),
    ("sub.rn.f32 $0, $1, $2;", np.float32(1.5) - np.float32(-0.3)),
    ("mul.f32 $0, $1, 2.0;", 3.0), ("fma.rn.f32 $0, $1, $1, $2;", 1.5 * 1.5 - 0.30000001192092896),
    ("add.rz.f32 $0, 1.0, 0f32FFFFFF;", 1.0), ("add.rn.f32 $0, 1.0, 0f34400000;", 1 + 2.0**-22),
    ("min.f32 $0, $1, 0f7FC00000;", 1.5), ("max.NaN.f32 $0, $1, 0f7FC00000;", math.nan),
    ("max.NaN.xorsign.abs.f32 $0, $1, $2;", -1.5), ("abs.f32 $0, $2;", 0.30000001192092896),
    ("ex2.approx.ftz.f32 $0, $1;", 2**1.5), ("lg2.approx.f32 $0, $1;", math.log2(1.5)),
    ("rcp.approx.f32 $0, $1;", 1 / 1.5), ("rsqrt.approx.f32 $0, $1;", 1.5**-0.5),
    ("sqrt.rn.f32 $0, $1;", 1.5**0.5), ("tanh.approx.f32 $0, $1;", math.tanh(1.5)),
    ("div.full.f32 $0, $1, $2;", 1.5 / -0.30000001192092896), ("mov.f32 $0, 0f3F800000;", 1.0),
    ("mul.ftz.f32 $0, $1, 0f00000001;", 0.0), ("add.sat.f32 $0, $1, $1;", 1.0),
    ("cvt.rn.f32.s32 $0, -3;", -3.0), ("cvt.rni.f32.f32 $0, $1;", 2.0),
    ("cvt.rna.tf32.f32 $0, 0f3F801000;", 1 + 2.0**-10), ("cvt.f32.f16 $0, 0x3e00;", 1.5),
    ("cvt.f32.bf16 $0, 0x3fc0;", 1.5),
]  # fmt: skip


@pytest.mark.parametrize(("text", "want"), FLOATS, ids=[text for text, _ in FLOATS])
def test_float_instructions(text, want):
    got = struct.unpack("<f", struct.pack("<I", execute(text, X, Y)))[0]
    assert got == pytest.approx(want, rel=2.0**-23, nan_ok=True)


PACKED = [
    ("cvt.rn.f16x2.f32 $0, $1, $2;", f16(-0.3, 1.5)),
    ("cvt.rn.satfinite.e4m3x2.f32 $0, $1, 0f44800000;", 0x3C7E),
    ("cvt.rn.f16x2.e5m2x2 $0, 0x3e3c;", f16(1.0, 1.5)), ("cvt.rzi.s32.f32 $0, $2;", 0),
    ("cvt.rzi.u32.f32 $0, 0f5F800000;", 0xFFFFFFFF), ("cvt.rmi.s32.f32 $0, $2;", 0xFFFFFFFF),
    ("fma.rn.f16x2 $0, 0x3e003c00, 0x40004000, 0x3c003c00;", f16(3.0, 4.0)),
    ("min.f16x2 $0, 0x3e003c00, 0x3d003d00;", f16(1.0, 1.25)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "want"), PACKED, ids=[text for text, _ in PACKED])
def test_conversions_and_pairs(text, want):
    assert execute(text, X, Y) == want


@pytest.mark.parametrize(
    "text",
    ["bra LOOP;", "mov.u32 $0, %tid.x;", "mov.u32 $0, %laneid;", "shfl.sync.bfly.b32 $0, $1, 1;",
     "LOOP: add.u32 $0, $1, 1;", "add.rm.f32 $0, $1, $2;", "mov.u32 $0, undeclared;",
     "cvt.rn.satfinite.e2m1x2.f32 $0, $1, $2;", "ld.shared.b32 $0, [$1];",
     "ld.global.v2.b32 $0, [$1];",
     "cvt.rs.f16x2.f32 $0, $1, $2;"],
)  # fmt: skip
def test_what_cannot_be_run_says_so(text):
    with pytest.raises(ttir.Unsupported, match="PTX"):
        execute(text, 1, 2)


@triton.jit
def assembly(x, o, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    y = tl.inline_asm_elementwise(
        "{ .reg .b8 t<4>; mov.b32 {t0, t1, t2, t3}, $4; cvt.u32.u8 $0, t0; cvt.u32.u8 $1, t1;"
        "cvt.u32.u8 $2, t2; cvt.u32.u8 $3, t3; }",
        "=r,=r,=r,=r,r", [v], dtype=tl.int32, is_pure=True, pack=4,
    )  # fmt: skip
    a, b = tl.inline_asm_elementwise(
        "add.u32 $0, $2, 1;\nmul.lo.u32 $1, $2, 3;", "=r,=r,r", [y],
        dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    where = o + 2 * N + i
    tl.inline_asm_elementwise(
        "st.global.b32 [$1], $2; mov.u32 $0, 0;", "=r,l,r", [where, a + b], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
    tl.store(o + i, a)
    tl.store(o + N + i, b)


def test_a_kernel_packs_bytes_returns_tuples_and_stores_by_address():
    x = torch.arange(0, 256, 8, dtype=torch.uint8)
    o = torch.zeros(3, 32, dtype=torch.int32)
    with ttir.execute() as run:
        assembly[(1,)](x, o, 32)
    assert run.incidents == []
    assert torch.equal(o, torch.stack([x.int() + 1, x.int() * 3, x.int() * 4 + 1]))


@triton.jit
def stores_past(o, N: tl.constexpr):
    where = o + tl.arange(0, N)
    tl.inline_asm_elementwise(
        "st.global.b32 [$1], 7; mov.u32 $0, 0;", "=r,l", [where], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


def test_a_store_of_a_text_is_watched():
    o = torch.zeros(15, dtype=torch.int32)
    with ttir.execute() as run:
        stores_past[(1,)](o, 16)
    assert [(i.kind, i.argument, i.count) for i in run.incidents] == [
        ("out-of-bounds-write", "an address of no tensor's element", 1)
    ]
    assert o.tolist() == [7] * 15


@triton.jit
def unknown(o):
    tl.store(o, tl.inline_asm_elementwise("vote.sync.any.pred $0, $1;", "=r,r", [tl.load(o)], dtype=tl.int32, is_pure=True, pack=1))  # noqa: E501  # fmt: skip


def test_an_unknown_instruction_is_unsupported_at_its_line():
    with ttir.execute(), pytest.raises(ttir.Unsupported, match="vote") as caught:
        unknown[(1,)](torch.zeros(1, dtype=torch.int32))
    assert caught.value.op == "tt.elementwise_inline_asm"
    assert caught.value.line == unknown.fn.__code__.co_firstlineno + 2
