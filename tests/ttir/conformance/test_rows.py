"""The language's functions and operators, one test a row and element type.

A row is an expression of tiles a, b, c and what it is equal to: a function of tensors (of NumPy
arrays for integers), to the bit; or of float64 tensors, within units in the last place.
"""

import operator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import triton.language as tl

HALVES, SINGLES = ("float16", "bfloat16"), ("float32", "float64")
SIGNED = ("int8", "int16", "int32", "int64")
UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
FLOATS, INTEGERS, WORDS = (*HALVES, *SINGLES), (*SIGNED, *UNSIGNED), ("int32", "int64")
ALL = (*FLOATS, *INTEGERS)
FEW = ("float32", "bfloat16", "int8", "int64")
LINE, TILE = ((64,),), ((4, 16),)


@dataclass(frozen=True)
class Row:
    """`name` is the public name that the expression tests, "" for an operator."""

    name: str
    expression: str
    reference: object
    types: tuple = ALL
    shapes: tuple = LINE
    draw: str = "any"
    ulps: float = 0


def elements(kind, dtype, shape, seed):
    """Integers over their range (or of a few small values), floats of a few units."""
    rng = np.random.default_rng(seed)
    if "int" in dtype:
        bounds = np.iinfo(dtype)
        low, high = {
            "few": (-5 if bounds.min else 0, 5), "positive": (1, 9), "index": (0, 15),
        }.get(kind, (bounds.min, bounds.max))  # fmt: skip
        return torch.from_numpy(rng.integers(low, high, shape, dtype, endpoint=True))
    x = rng.normal(size=shape) * 4
    x = {"few": np.round(x), "positive": np.abs(x) + 0.125, "unit": rng.random(shape)}.get(kind, x)
    return torch.from_numpy(x).to(getattr(torch, dtype))


def c_quotient(a, b):
    quotient = a // b
    return quotient + ((a - quotient * b != 0) & ((a < 0) != (b < 0))).astype(a.dtype)


def high_half(a, b):
    width = 8 * a.itemsize
    return np.array([int(x) * int(y) >> width for x, y in zip(a, b, strict=True)], a.dtype)


def collatz(x):
    steps = 0
    while x > 1:
        x = x // 2 if x % 2 == 0 else 3 * x + 1
        steps += 1
    return steps


def first(x, extreme):
    """Index of the first extreme of each row."""
    x = np.asarray(x)
    return (x == extreme(x, 1, keepdims=True)).argmax(1).astype("i4")


def widened(x):
    """What `tl.sum` adds integers in: at least 32 bits."""
    return x.sum(1, dtype=f"{x.dtype.kind}{max(x.dtype.itemsize, 4)}")


def on_floats_and_integers(floats, integers):
    return lambda *xs: (integers if isinstance(xs[0], np.ndarray) else floats)(*xs)


tensor = torch.as_tensor
PAIR, THREE, TWO_TILES = LINE * 2, LINE * 3, TILE * 2
COMPARISONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
               "==": operator.eq, "!=": operator.ne}  # fmt: skip
fmod = on_floats_and_integers(torch.fmod, np.fmod)
maximum = on_floats_and_integers(torch.maximum, np.maximum)
minimum = on_floats_and_integers(torch.minimum, np.minimum)
row_sum = on_floats_and_integers(lambda x: x.sum(1), widened)
where = on_floats_and_integers(torch.where, np.where)
argmax, argmin = (lambda x, f=f: first(x, f) for f in (np.max, np.min))

ROWS = [
    # operators
    Row("", "a + b", operator.add, ALL, PAIR),
    Row("", "a - b", operator.sub, ALL, PAIR),
    Row("", "a * b", operator.mul, ALL, PAIR),
    Row("", "-a", operator.neg, (*FLOATS, *SIGNED)),
    Row("", "a / b", operator.truediv, SINGLES, PAIR, "positive"),
    Row("", "a / b", lambda a, b: a.float() / b.float(), HALVES, PAIR, "positive"),
    Row("", "a // b", c_quotient, INTEGERS, PAIR, "positive"),
    Row("", "a % b", fmod, ALL, PAIR, "positive"),
    Row("", "a & b", operator.and_, INTEGERS, PAIR),
    Row("", "a | b", operator.or_, INTEGERS, PAIR),
    Row("", "a ^ b", operator.xor, INTEGERS, PAIR),
    Row("", "~a", operator.invert, INTEGERS),
    Row("", "a << (b & 7)", lambda a, b: a << (b & 7), INTEGERS, PAIR),
    Row("", "a >> (b & 7)", lambda a, b: a >> (b & 7), INTEGERS, PAIR),
    *[Row("", f"a {text} b", test, ALL, PAIR, "few") for text, test in COMPARISONS.items()],
    # element by element
    Row("add", "tl.add(a, b)", operator.add, FEW, PAIR),
    Row("sub", "tl.sub(a, b)", operator.sub, FEW, PAIR),
    Row("mul", "tl.mul(a, b)", operator.mul, FEW, PAIR),
    Row("maximum", "tl.maximum(a, b)", maximum, ALL, PAIR, "few"),
    Row("minimum", "tl.minimum(a, b)", minimum, ALL, PAIR, "few"),
    Row("clamp", "tl.clamp(a, -1.0, 2.0)", lambda a: a.clamp(-1, 2), ("float32",)),
    Row("abs", "tl.abs(a)", abs, (*FLOATS, *SIGNED)),
    Row("where", "tl.where(a > b, a, b)", lambda a, b: where(a > b, a, b), ALL, PAIR),
    Row("exp", "tl.exp(a)", torch.exp, ("float64",), ulps=2),
    # exp2 of the rounded product: its error is |x| log2(e) ln(2) / 2 ulp more, and |x| < 20 here.
    Row("exp", "tl.exp(a)", torch.exp, ("float32",), ulps=12),
    Row("exp2", "tl.exp2(a)", torch.exp2, SINGLES, ulps=2),
    Row("log", "tl.log(a)", torch.log, SINGLES, LINE, "positive", 2),
    Row("log2", "tl.log2(a)", torch.log2, SINGLES, LINE, "positive", 2),
    Row("sin", "tl.sin(a)", torch.sin, SINGLES, ulps=4),
    Row("cos", "tl.cos(a)", torch.cos, SINGLES, ulps=4),
    Row("sqrt", "tl.sqrt(a)", torch.sqrt, SINGLES, LINE, "positive", 1),
    Row("sqrt_rn", "tl.sqrt_rn(a)", lambda a: a.double().sqrt().float(), ("float32",), LINE,
        "positive"),
    Row("rsqrt", "tl.rsqrt(a)", torch.rsqrt, SINGLES, LINE, "positive", 2),
    Row("erf", "tl.erf(a)", torch.erf, SINGLES, ulps=4),
    Row("floor", "tl.floor(a)", torch.floor, SINGLES),
    Row("ceil", "tl.ceil(a)", torch.ceil, SINGLES),
    Row("fma", "tl.fma(a, b, c)", lambda a, b, c: a * b + c, ("float32",), THREE, ulps=0.51),
    Row("fdiv", "tl.fdiv(a, b)", torch.div, SINGLES, PAIR, "positive", 2),
    Row("div_rn", "tl.div_rn(a, b)", torch.div, ("float32",), PAIR, "positive"),
    Row("cdiv", "tl.cdiv(a, b)", lambda a, b: -(-a // b), WORDS, PAIR, "positive"),
    Row("umulhi", "tl.umulhi(a, b)", high_half, ("uint32", "uint64"), PAIR),
    Row("sigmoid", "tl.sigmoid(a)", torch.sigmoid, SINGLES, ulps=4),
    Row("uint_to_uniform_float", "tl.uint_to_uniform_float(a)",
        lambda a: np.where(a < 0, -a - 1, a).astype("f4") * np.float32(4.6566127342e-10),
        ("int32",)),
    Row("pair_uniform_to_normal", "tl.pair_uniform_to_normal(a, b)[0]",
        lambda a, b: (-2 * a.clamp_min(1e-7).log()).sqrt() * torch.cos(6.283185307179586 * b),
        ("float32",), PAIR, "unit", 2**10),  # cos near its zeros loses relative precision
    Row("map_elementwise", "tl.map_elementwise(collatz, a)",
        lambda a: np.array([collatz(int(x)) for x in a], "i4"), ("int32",), LINE, "positive"),
    Row("inline_asm_elementwise",
        "tl.inline_asm_elementwise('add.s32 $0, $1, $1;', '=r,r', [a], tl.int32, True, 1)",
        lambda a: a + a, ("int32",)),
    # conversions
    *[Row("cast", f"tl.cast(a, tl.{to})", lambda a, to=to: tensor(a).to(getattr(torch, to)),
          ("float32", "float16", "bfloat16", "int8", "uint8", "int32"), LINE, "few")
      for to in (*FLOATS, "int8", "int32", "int64")],
    Row("cast", "tl.cast(a, tl.uint8)", lambda a: tensor(a).to(torch.uint8),
        ("float32", "bfloat16", "int32"), LINE, "positive"),
    Row("cast", "tl.cast(a, tl.float8e4nv).to(tl.float32)",
        lambda a: a.to(torch.float8_e4m3fn).float(), ("float32", "float16")),
    Row("cast", "tl.cast(a, tl.float8e5).to(tl.float32)",
        lambda a: a.to(torch.float8_e5m2).float(), ("float32", "float16")),
    Row("cast", "tl.cast(a, tl.float16, fp_downcast_rounding='rtz')",
        lambda a: torch.from_numpy(np.where(np.abs(a.numpy().astype("f2")) > np.abs(a.numpy()),
                                            np.nextafter(a.numpy().astype("f2"), np.float16(0)),
                                            a.numpy().astype("f2"))), ("float32",)),
    Row("cast", "tl.cast(a, tl.int32, bitcast=True)", lambda a: a.view(torch.int32), ("float32",)),
    Row("cast", "tl.cast(a, tl.float16, bitcast=True)",
        lambda a: tensor(a).view(torch.float16), ("bfloat16", "int16")),
    # reductions and scans
    Row("sum", "tl.sum(a, 1)", row_sum, ALL, TILE, "few"),
    Row("sum", "tl.sum(a)", lambda x: x.sum(), ("float32", *WORDS), TILE, "few"),
    Row("max", "tl.max(a, 0)", lambda x: tensor(x).amax(0), (*SINGLES, *WORDS), TILE),
    Row("max", "tl.max(a, 1)", lambda x: x.max(1), ("uint32", "uint64"), TILE),
    Row("min", "tl.min(a, 0)", lambda x: tensor(x).amin(0), (*SINGLES, *WORDS), TILE),
    Row("min", "tl.min(a, 1)", lambda x: x.min(1), ("uint32", "uint64"), TILE),
    Row("max", "tl.max(a, 1, return_indices=True)[1]", argmax, ("float32", "int32"), TILE, "few"),
    Row("argmax", "tl.argmax(a, 1)", argmax, ("float32", "float16", *SIGNED), TILE, "few"),
    Row("argmin", "tl.argmin(a, 1)", argmin, ("float32", "float16", *SIGNED), TILE, "few"),
    Row("xor_sum", "tl.xor_sum(a, 1)", lambda x: np.bitwise_xor.reduce(x, 1), INTEGERS, TILE),
    Row("reduce_or", "tl.reduce_or(a, 1)", lambda x: np.bitwise_or.reduce(x, 1), INTEGERS, TILE),
    Row("reduce", "tl.reduce(a, 1, later)", lambda x: x[:, -1], ALL, TILE),
    Row("reduce", "tl.reduce((a, b), 1, larger)[1]",
        lambda x, y: y.gather(1, x.argmax(1, keepdim=True))[:, 0], ("float32",), TWO_TILES),
    Row("cumsum", "tl.cumsum(a, 1)", lambda x: x.cumsum(1), (*SINGLES, *WORDS), TILE, "few"),
    Row("cumsum", "tl.cumsum(a, 0, reverse=True)", lambda x: x[::-1].cumsum(0, dtype=x.dtype)[::-1],
        ("int32", "uint32", "int64", "uint64"), TILE),
    Row("cumprod", "tl.cumprod(a, 1)", lambda x: x.cumprod(1), ("float64", "int64", "uint64"),
        ((16, 4),), "few"),
    Row("associative_scan", "tl.associative_scan(a, 1, total)", lambda x: x.cumsum(1),
        ("float32", "int64"), TILE, "few"),
    Row("associative_scan", "tl.associative_scan((a, b), 1, larger)[0]",
        lambda x, _: x.cummax(1).values, ("float32",), TWO_TILES),
    Row("associative_scan", "tl.associative_scan(a, 1, earlier)",
        lambda x: tensor(x)[:, :1].expand(4, 16), FEW, TILE),
    Row("associative_scan", "tl.associative_scan(a, 1, earlier, reverse=True)",
        lambda x: tensor(x)[:, -1:].expand(4, 16), FEW, TILE),
    Row("softmax", "tl.softmax(a)", lambda x: torch.softmax(x, 0), ("float32",), ulps=16),
    Row("histogram", "tl.histogram(a, 16)", lambda x: np.bincount(x, minlength=16).astype("i4"),
        ("int32",), LINE, "index"),
    Row("histogram", "tl.histogram(a, 16, mask=a < 4)",
        lambda x: np.bincount(x[x < 4], minlength=16).astype("i4"), ("int32",), LINE, "index"),
    Row("sort", "tl.sort(a)", lambda x: tensor(x).sort(1).values, (*FLOATS, *SIGNED),
        TILE),
    Row("sort", "tl.sort(a, descending=True)", lambda x: tensor(x).sort(1, True).values,
        FEW, TILE),
    Row("topk", "tl.topk(a, 4)", lambda x: tensor(x).topk(4).values, FEW, TILE),
    # rearrangements
    Row("reshape", "tl.reshape(a, (8, 8))", lambda x: x.reshape(8, 8)),
    Row("view", "tl.view(a, (8, 8))", lambda x: x.reshape(8, 8), FEW),
    Row("ravel", "tl.ravel(a)", lambda x: x.reshape(64), FEW, TILE),
    Row("trans", "tl.trans(a)", lambda x: x.T, ALL, TILE),
    Row("permute", "tl.permute(a, (2, 0, 1))", lambda x: tensor(x).permute(2, 0, 1), FEW,
        ((2, 4, 8),)),
    Row("expand_dims", "tl.expand_dims(a, 1)", lambda x: x[:, None], FEW),
    Row("squeeze", "tl.squeeze(tl.expand_dims(a, 0), 0)", lambda x: x, FEW),
    Row("unsqueeze", "tl.unsqueeze(a, 0)", lambda x: x[None], FEW),
    Row("broadcast_to", "tl.broadcast_to(tl.expand_dims(a, 0), (4, 64))",
        lambda x: tensor(x).expand(4, 64), FEW),
    Row("broadcast", "tl.broadcast(a, b)[0] + b", lambda a, b: a + b, FEW, ((1, 16), (4, 16))),
    Row("cat", "tl.cat(a, b, can_reorder=True)",
        lambda a, b: torch.cat([tensor(a), tensor(b)]), FEW, PAIR),
    Row("join", "tl.join(a, b)", lambda *xs: torch.stack([*map(tensor, xs)], -1), ALL,
        PAIR),
    Row("split", "tl.split(a)[1]", lambda x: x[:, 1], ALL, ((32, 2),)),
    Row("interleave", "tl.interleave(a, b)",
        lambda *xs: torch.stack([*map(tensor, xs)], -1).view(-1), FEW, PAIR),
    Row("flip", "tl.flip(a, 1)", lambda x: tensor(x).flip(1), FEW, TILE),
    Row("gather", "tl.gather(a, tl.flip(tl.sort(b), 1) & 15, 1)",
        lambda a, b: tensor(a).gather(1, tensor(b).sort(1, True).values & 15),
        ("int64",), TWO_TILES, "index"),
    # tiles from nothing, and the place in the grid
    Row("arange", "tl.arange(16, 32)", lambda: np.arange(16, 32, dtype="i4"), ("",), ()),
    *[Row("full", f"tl.full((4, 4), 3, tl.{t})",
          lambda t=t: torch.full((4, 4), 3, dtype=getattr(torch, t)), ("",), ()) for t in ALL],
    Row("zeros", "tl.zeros((4, 4), tl.int64)", lambda: torch.zeros(4, 4).long(), ("",), ()),
    Row("expect_zero", "tl.expect_zero(a, a > 3)", lambda a: a, FEW),
    Row("zeros_like", "tl.zeros_like(a)", lambda a: a * 0, FEW, LINE, "positive"),
    Row("to_tensor", "tl.to_tensor(3)", lambda: np.int32(3), ("",), ()),
    Row("program_id", "tl.program_id(1)", lambda: np.int32(0), ("",), ()),
    Row("num_programs", "tl.num_programs(2) + 4", lambda: np.int32(5), ("",), ()),
    Row("swizzle2d", "tl.swizzle2d(1, 2, 4, 4, 2)[0]", lambda: np.int32(0), ("",), ()),
]  # fmt: skip

CASES = [
    pytest.param(row, dtype, id=f"{row.expression}-{dtype}")
    for row in ROWS
    if not row.name or row.name in tl.__all__
    for dtype in row.types
]


@pytest.mark.filterwarnings("ignore:.*can_reorder")
@pytest.mark.parametrize(("row", "dtype"), CASES)
def test_row(row, dtype, evaluate, agree):
    tensors = [elements(row.draw, dtype, shape, seed) for seed, shape in enumerate(row.shapes)]
    if row.ulps:
        exact = row.reference(*[x.double() for x in tensors])
        agree(evaluate(row.expression, tensors, exact.to(tensors[0].dtype)), exact, row.ulps)
        return
    given = [x if x.dtype.is_floating_point else x.numpy() for x in tensors]
    with np.errstate(over="ignore"):
        want = row.reference(*given)
    want = want if torch.is_tensor(want) else torch.from_numpy(np.array(want))
    agree(evaluate(row.expression, tensors, want), want, 0)
