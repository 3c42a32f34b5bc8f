"""Every function that triton.language.extra.cuda.libdevice declares, against mpmath or integers."""

import inspect
import math
import re
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from triton.language.extra.cuda import libdevice as declared

from fa_verify.ttir.ops.libdevice import find

TYPES = {"fp32": np.float32, "fp64": np.float64, "int32": np.int32, "uint32": np.uint32,
         "int64": np.int64, "uint64": np.uint64}  # fmt: skip
OVERLOAD = re.compile(
    r'\(((?:core\.dtype\("\w+"\),?\s*)+)\):\s*\("(\w+)",\s*core\.dtype\("(\w+)"\)\)'
)
SYMBOLS = {
    symbol: (tuple(re.findall(r'"(\w+)"', arguments)), result)
    for arguments, symbol, result in OVERLOAD.findall(inspect.getsource(declared))
}
COUNT = 48

mp = mpmath.mp.clone()
mp.dps = 40


def tail(x):
    return mp.erfc(x) * mp.exp(x * x)


REAL = {
    "erfcx": tail, "rsqrt": lambda x: 1 / mp.sqrt(x), "exp2": lambda x: mp.mpf(2) ** x,
    "exp10": lambda x: mp.mpf(10) ** x, "log2": lambda x: mp.log(x, 2), "log10": mp.log10,
    "logb": lambda x: mp.floor(mp.log(abs(x), 2)), "ilogb": lambda x: mp.floor(mp.log(abs(x), 2)),
    "tgamma": mp.gamma, "lgamma": lambda x: mp.log(abs(mp.gamma(x))),
    "normcdf": mp.ncdf, "normcdfinv": lambda p: mp.sqrt(2) * mp.erfinv(2 * p - 1),
    "erfcinv": lambda x: mp.erfinv(1 - mp.mpf(x)), "fabs": abs, "abs": abs, "llabs": abs,
    "j0": lambda x: mp.besselj(0, x), "j1": lambda x: mp.besselj(1, x), "jn": mp.besselj,
    "y0": lambda x: mp.bessely(0, x), "y1": lambda x: mp.bessely(1, x), "yn": mp.bessely,
    "cyl_bessel_i0": lambda x: mp.besseli(0, x), "cyl_bessel_i1": lambda x: mp.besseli(1, x),
    "rcbrt": lambda x: mp.sign(x) / mp.cbrt(abs(x)), "cbrt": lambda x: mp.sign(x) * mp.cbrt(abs(x)),
    "rhypot": lambda a, b: 1 / mp.hypot(a, b), "norm3d": lambda *x: mp.norm(x),
    "norm4d": lambda *x: mp.norm(x), "rnorm3d": lambda *x: 1 / mp.norm(x),
    "rnorm4d": lambda *x: 1 / mp.norm(x), "trunc": math.trunc,
    "round": lambda x: mp.sign(x) * mp.floor(abs(x) + 0.5), "rint": mp.nint, "nearbyint": mp.nint,
    "llrint": mp.nint, "llround": lambda x: mp.sign(x) * mp.floor(abs(x) + 0.5),
    "copysign": math.copysign, "fmod": math.fmod, "remainder": math.remainder, "pow": mp.power,
    "powi": lambda x, n: mp.mpf(x) ** int(n), "fdim": lambda a, b: max(a - b, 0),
    "ldexp": lambda x, n: mp.ldexp(x, int(n)), "scalbn": lambda x, n: mp.ldexp(x, int(n)),
    "fmax": max, "fmin": min, "fma": lambda a, b, c: mp.mpf(a) * b + c,
    "saturate": lambda x: min(max(x, 0), 1), "frsqrt": lambda x: 1 / mp.sqrt(x),
    "fdividef": lambda a, b: mp.mpf(a) / b, "isnanf": math.isnan, "isnand": math.isnan,
    "isinff": math.isinf, "isinfd": math.isinf, "finitef": math.isfinite,
    "isfinited": math.isfinite, "signbitf": lambda x: x < 0, "signbitd": lambda x: x < 0,
}  # fmt: skip


def signed24(x):
    return (x & 0xFFFFFF) - (1 << 24 if x & 0x800000 else 0)


BITS = {
    "popc": lambda x, _: x.bit_count(), "clz": lambda x, w: w - x.bit_length(),
    "ffs": lambda x, _: (x & -x).bit_length(), "brev": lambda x, w: int(f"{x:0{w}b}"[::-1], 2),
    "umulhi": lambda a, b, w: a * b >> w, "umul64hi": lambda a, b, w: a * b >> w,
    "umul24": lambda a, b, _: (a & 0xFFFFFF) * (b & 0xFFFFFF), "uhadd": lambda a, b, _: a + b >> 1,
    "mul24": lambda a, b, _: signed24(a) * signed24(b), "urhadd": lambda a, b, _: a + b + 1 >> 1,
    "usad": lambda a, b, c, _: abs(a - b) + c,
    "byte_perm": lambda a, b, s, _: int.from_bytes(
        bytes((b << 32 | a) >> 8 * (s >> 4 * i & 7) & 255 for i in range(4)), "little"),
}  # fmt: skip
SIGNED = {
    "mulhi": lambda a, b, w: a * b >> w, "mul64hi": lambda a, b, w: a * b >> w,
    "hadd": lambda a, b, _: a + b >> 1, "rhadd": lambda a, b, _: a + b + 1 >> 1,
    "sad": lambda a, b, c, _: abs(a - b) + c, "abs": lambda a, _: abs(a),
    "llabs": lambda a, _: abs(a),
}  # fmt: skip
VIEWS = {"float_as_int", "float_as_uint", "int_as_float", "uint_as_float", "double_as_longlong",
         "longlong_as_double"}  # fmt: skip
# Where a function is defined or interesting; otherwise around zero.
DRAWS = {
    **dict.fromkeys(["asin", "acos", "atanh", "erfinv"], (-1, 1)), "acosh": (1, 9),
    "normcdfinv": (0, 1), "erfcinv": (0, 2),
    **dict.fromkeys(["log", "log2", "log10", "sqrt", "rsqrt", "frsqrt", "pow", "y0", "y1", "yn",
                     "tgamma", "lgamma", "log1p"], (0.1, 9)),
}  # fmt: skip
# Units in the last place of the larger of the result and 2**-4 (functions cross zero).
# erfcx: torch's is the Faddeeva package, accurate to 1e-13.
LOOSE = {
    "lgamma": 8,
    "erfcinv": 16,
    "normcdfinv": 16,
    "tgamma": 4,
    "erfcx": 450,
    "cyl_bessel_i1": 8,
}
# Bessel functions: absolute, in units of the larger of 1 and the result.
BESSEL = ("j0", "j1", "jn", "y0", "y1", "yn")


def inputs(name, types):
    rng = np.random.default_rng(3)
    for kind in types:
        dtype = np.dtype(TYPES[kind])
        if dtype.kind == "f":
            low, high = DRAWS.get(name, (-9, 9))
            yield rng.uniform(low, high, COUNT).astype(dtype)
        elif name in ("jn", "yn", "powi", "ldexp", "scalbn"):
            yield rng.integers(0, 7, COUNT).astype(dtype)
        else:
            bounds = np.iinfo(dtype)
            yield rng.integers(bounds.min, bounds.max, COUNT, dtype, endpoint=True)


def base(symbol):
    name = symbol.removeprefix("__nv_").removeprefix("fast_").removesuffix("_rn")
    if hasattr(mp, name):
        return name
    for known in (REAL, BITS, SIGNED):
        for candidate in (name, name.removesuffix("f"), name.removesuffix("ll")):
            if candidate in known:
                return candidate
    return name.removesuffix("f")


def run(symbol, arrays):
    function = find(symbol)
    carried = [x.view(f"i{x.itemsize}") if x.dtype.kind == "u" else x for x in arrays]
    with np.errstate(all="ignore"):
        return function(*[x[None] for x in carried])[0]


def rounded(exact, mode, dtype):
    """A rational number in a direction, by trying neighbours."""
    near = dtype(float(exact)) if dtype == np.float64 else np.float32(float(exact))
    candidates = sorted(
        {np.nextafter(near, dtype(-np.inf)), near, np.nextafter(near, dtype(np.inf))}
    )
    below = [c for c in candidates if Fraction(float(c)) <= exact]
    above = [c for c in candidates if Fraction(float(c)) >= exact]
    if mode == "rd" or (mode == "rz" and exact > 0):
        return below[-1]
    if mode in ("ru", "rz"):
        return above[0]
    return min(
        candidates,
        key=lambda c: (abs(Fraction(float(c)) - exact), int(c.view(f"i{c.itemsize}")) & 1),
    )


ARITHMETIC = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b, "rcp": lambda a: 1 / a, "fma": lambda a, b, c: a * b + c,
}  # fmt: skip
NAMED = re.compile(r"^__nv_[fd]?(add|sub|mul|div|rcp|sqrt|fma)f?_(rn|rz|rd|ru)$")
CONVERSION = re.compile(r"^__nv_(\w+)2(float|double|int|uint|ll|ull)_(rn|rz|rd|ru)$")
NAMES = {symbol for symbol in SYMBOLS if NAMED.match(symbol) or CONVERSION.match(symbol)}
WORDS = {"__nv_double2hiint", "__nv_double2loint", "__nv_hiloint2double", "__nv_rcp64h",
         "__nv_nextafter", "__nv_nextafterf"}  # fmt: skip


def test_the_declarations_were_read():
    assert len(SYMBOLS) > 300
    assert all(find(symbol) for symbol in SYMBOLS)
    assert find("__nv_of_the_future") is None


@pytest.mark.parametrize("symbol", sorted(set(SYMBOLS) - NAMES - WORDS))
def test_function(symbol):
    types, result = SYMBOLS[symbol]
    name = base(symbol)
    arrays = list(inputs(name, types))
    got = run(symbol, arrays)
    width, dtype = 8 * arrays[0].itemsize, TYPES[result]
    if symbol.removeprefix("__nv_") in VIEWS:
        assert got.tobytes() == arrays[0].tobytes()
        return
    if np.dtype(TYPES[types[0]]).kind in "iu" and name in {**BITS, **SIGNED}:
        table, kind = (SIGNED, "i") if name in SIGNED else (BITS, "u")
        rows = zip(*[x.view(f"{kind}{x.itemsize}").tolist() for x in arrays], strict=True)
        mask = (1 << 8 * np.dtype(dtype).itemsize) - 1
        want = [table[name](*row, width) & mask for row in rows]
        assert [int(x) & mask for x in got] == want
        return
    function = REAL.get(name) or getattr(mp, name)
    rows = zip(*[x.tolist() for x in arrays], strict=True)
    want = [function(*row) for row in rows]
    unit = next(np.finfo(x.dtype).eps for x in arrays if x.dtype.kind == "f")
    for value, exact in zip(got.tolist(), want, strict=True):
        allowed = LOOSE.get(name, 2) * unit * max(abs(exact), 2.0**-4)
        if name in BESSEL:
            allowed = unit * abs(exact) + 2e-14 * max(abs(exact), 1)
        assert abs(mp.mpf(value) - exact) <= allowed, (value, exact)


@pytest.mark.parametrize("symbol", sorted(s for s in SYMBOLS if NAMED.match(s)))
def test_arithmetic_with_a_named_rounding(symbol):
    operation, mode = NAMED.match(symbol).groups()
    types, result = SYMBOLS[symbol]
    arrays = list(inputs("sqrt" if operation == "sqrt" else "", types))
    got = run(symbol, arrays)
    for i, row in enumerate(zip(*[x.tolist() for x in arrays], strict=True)):
        if operation == "sqrt":
            x, r = Fraction(row[0]), Fraction(float(got[i]))
            up, down = (Fraction(float(np.nextafter(got[i], got.dtype.type(d)))) for d in (9, 0))
            assert down**2 < x < up**2
            assert mode == "rn" or (r * r >= x if mode == "ru" else r * r <= x)
            continue
        exact = ARITHMETIC[operation](*map(Fraction, row))
        assert got[i] == rounded(exact, mode, TYPES[result]), row


@pytest.mark.parametrize("symbol", sorted(s for s in SYMBOLS if CONVERSION.match(s) and s in NAMES))
def test_conversion_with_a_named_rounding(symbol):
    _, target, mode = CONVERSION.match(symbol).groups()
    types, result = SYMBOLS[symbol]
    (x,) = inputs("", types)
    if x.dtype.kind == "f":
        x[:4] = [0.5, 1.5, -0.5, 2.5] if target != "float" else x[:4]
    got = run(symbol, [x])
    if np.dtype(TYPES[result]).kind == "f":
        want = [rounded(Fraction(v), mode, TYPES[result]) for v in x.tolist()]
    else:
        direction = {"rn": np.rint, "rz": np.trunc, "rd": np.floor, "ru": np.ceil}[mode]
        got = got.view(f"{'u' if target.startswith('u') else 'i'}{got.itemsize}")
        bounds, whole = np.iinfo(got.dtype), direction(x.astype(float))
        want = [min(max(int(v), bounds.min), bounds.max) for v in whole]
    assert got.tolist() == [type(got.tolist()[0])(v) for v in want]


def test_words_of_a_double():
    x = np.array([1.5, -3.25, 1e300])
    high, low = (run(f"__nv_double2{w}int", [x]) for w in ("hi", "lo"))
    bits = [int(v) for v in x.view(np.uint64)]
    assert [int(v) & 0xFFFFFFFF for v in high] == [v >> 32 for v in bits]
    assert [int(v) & 0xFFFFFFFF for v in low] == [v & 0xFFFFFFFF for v in bits]
    assert run("__nv_hiloint2double", [high, low]).tolist() == x.tolist()
    assert np.allclose(run("__nv_rcp64h", [x]) * x, 1, rtol=2.0**-19)
    assert run("__nv_nextafterf", [np.float32([1, 1]), np.float32([2, 0])]).tolist() == [
        1 + 2.0**-23, 1 - 2.0**-24,
    ]  # fmt: skip
