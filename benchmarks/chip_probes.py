"""Small kernels and what they are fed: the probes of chip_numbers.py, functions of a device."""

import functools

import chip_kernels
import numpy as np
import torch
import triton.language as tl

BLOCK = 1024
FLOATS = {
    "fp32": (torch.float32, tl.float32), "fp16": (torch.float16, tl.float16),
    "bf16": (torch.bfloat16, tl.bfloat16), "e4m3": (torch.float8_e4m3fn, tl.float8e4nv),
    "e5m2": (torch.float8_e5m2, tl.float8e5), "fp64": (torch.float64, tl.float64),
    "int8": (torch.int8, tl.int8), "int16": (torch.int16, tl.int16),
    "int32": (torch.int32, tl.int32), "int64": (torch.int64, tl.int64),
    "uint8": (torch.uint8, tl.uint8), "uint32": (torch.uint32, tl.uint32),
}  # fmt: skip
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# -- inputs
def wide(rng, shape):
    """Magnitudes over 12 binades."""
    return rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 6, shape)


def spike(rng, shape):
    """Mostly tiny, a few ones: what lies just below the kept bits."""
    tiny = 2.0 ** rng.integers(-13, -9, shape) * rng.choice([1.0, 1.5, -1.0, -1.25], shape)
    return np.where(rng.random(shape) < 0.08, 1.0, tiny)


def cancelling(rng, shape):
    """Large terms that nearly cancel along both axes."""
    signs = np.where(np.arange(shape[-1]) % 2, -1.0, 1.0)
    return (16.0 + rng.standard_normal(shape)) * signs


FAMILIES = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "wide": wide,
    "spike": spike,
    "cancelling": cancelling,
}


def tensor(values, name):
    """float64 values as a tensor of a format, rounded once to what it can hold."""
    return torch.from_numpy(np.asarray(values, np.float64)).to(torch.float32).to(FLOATS[name][0])


def all_floats(rng, n):
    """float32 of every exponent and both signs, and the special values."""
    bits = rng.integers(0, 1 << 32, n - 10, dtype=np.uint64).astype(np.uint32)
    special = np.array([0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00001, 0x3F800000,
                        0x80000000, 0xFF800000], np.uint32)  # fmt: skip
    return np.concatenate([bits, special]).view(np.float32)


def boundaries(name, rng):
    """float32 at, halfway between and next to the numbers of a narrower format."""
    dtype = FLOATS[name][0]
    width = dtype.itemsize * 8
    bits = torch.arange(1 << width, dtype=torch.int32).to(BITS[dtype.itemsize])
    values = bits.view(dtype).to(torch.float64).numpy()
    values = np.unique(values[np.isfinite(values)])
    if values.size > 20000:
        values = np.sort(rng.choice(values, 20000, replace=False))
    beyond = values[-1] * np.array([1.0, 1.01, 1.04, 1.07, 1.1, 2.0])
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2, beyond, -beyond])
    with np.errstate(over="ignore"):
        points = points.astype(np.float32)
    around = [
        points,
        np.nextafter(points, np.float32(np.inf)),
        np.nextafter(points, -np.float32(np.inf)),
    ]
    return np.sort(np.concatenate([*around, all_floats(rng, 4000)]), kind="stable")


# -- probes: name -> function of device, returning a tensor
def dot_probe(family, name, out, precision, m, k, *, tiles, accumulate):
    n = 16

    def run(device):
        rng = np.random.default_rng([m, k, *family.encode(), *name.encode()])
        if name == "int8":
            a, b = [torch.from_numpy(rng.integers(-128, 128, s).astype(np.int8))
                    for s in ((tiles, m, k), (tiles, k, n))]  # fmt: skip
        else:
            a, b = (tensor(FAMILIES[family](rng, s), name) for s in ((tiles, m, k), (tiles, k, n)))
        start = FAMILIES[family](rng, (tiles, m, n)) * (8 if accumulate else 0)
        c = tensor(start, out) if out != "int32" else torch.from_numpy(start.astype(np.int32))
        result = torch.empty_like(c, device=device)
        chip_kernels.dot_kernel[(tiles,)](
            a.to(device), b.to(device), c.to(device), result, m, n, k, precision, FLOATS[out][1]
        )
        return result

    return run


def elementwise(kernel, inputs, out, *constants):
    def run(device):
        xs = [x.to(device) for x in inputs()]
        n = xs[0].numel()
        result = torch.zeros(n, dtype=FLOATS[out][0], device=device)
        kernel[(-(-n // BLOCK),)](*xs, result, n, *constants, BLOCK)
        return result

    return run


def dots():
    kinds = [
        ("fp16", "fp32", None), ("bf16", "fp32", None), ("fp32", "fp32", "tf32"),
        ("fp32", "fp32", "ieee"), ("fp32", "fp32", "tf32x3"), ("e4m3", "fp32", None),
        ("e5m2", "fp32", None), ("fp16", "fp16", None), ("int8", "int32", None),
    ]  # fmt: skip
    for name, out, precision in kinds:
        for m, tiles in ((16, 4), (64, 1), (128, 1)):
            for k in (32, 128) if name in ("e4m3", "e5m2", "int8") else (16, 64):
                for family in FAMILIES if name != "int8" else ("normal",):
                    accumulate = k > 32
                    label = f"dot/{name}{precision or ''}->{out} {family} m={m} k={k}"
                    yield (
                        label,
                        dot_probe(
                            family, name, out, precision, m, k, tiles=tiles, accumulate=accumulate
                        ),
                    )


def functions():
    domains = {
        "exp": (-110, 95), "exp2": (-155, 130), "sigmoid": (-100, 100), "sin": (-30, 30),
        "cos": (-30, 30), "erf": (-5, 5),
    }  # fmt: skip

    def inputs(op):
        rng = np.random.default_rng(list(op.encode()))
        parts = [all_floats(rng, 12000)]
        if op == "exp2":  # fractions finer than 2^-23
            parts.append(
                (rng.uniform(-1, 1, 8000) * 2.0 ** -rng.integers(0, 26, 8000)).astype(np.float32)
            )
        if op in domains:
            parts.append(rng.uniform(*domains[op], 12000).astype(np.float32))
        if op in ("log", "log2", "sqrt", "rsqrt", "sqrt_rn"):
            parts = [np.abs(parts[0]), rng.uniform(0.5, 2, 8000).astype(np.float32)]
        return [torch.from_numpy(np.concatenate(parts))]

    whole = torch.arange(-608, 520) / 4  # quarters from -152 to 130
    yield (
        "function/exp2 quarters",
        elementwise(chip_kernels.unary_kernel, lambda: [whole], "fp32", "exp2"),
    )
    for op in ("exp", "exp2", "log", "log2", "sqrt", "sqrt_rn", "rsqrt", "sin", "cos", "erf",
               "sigmoid", "floor", "ceil", "abs", "reciprocal"):  # fmt: skip
        yield (
            f"function/{op}",
            elementwise(chip_kernels.unary_kernel, lambda op=op: inputs(op), "fp32", op),
        )


def arithmetic():
    def inputs(name, low, high):
        rng = np.random.default_rng([*name.encode(), low + 300])
        shape = (3, 6000)
        values = rng.choice([-1, 1], shape) * rng.uniform(1, 2, shape)
        return [tensor(v, name) for v in values * 2.0 ** rng.integers(low, high, shape)]

    ranges = {
        "fp32": {"plain": (-8, 8), "tiny": (-149, -120), "mixed": (-80, 20)},
        "fp16": {"plain": (-8, 8), "tiny": (-24, -8)},
        "bf16": {"plain": (-8, 8), "tiny": (-133, -110)},
    }
    ops = ("add", "sub", "mul", "div", "fma", "contracted", "contracted_sub", "contracted_from",
           "two_products", "used_twice", "max", "div_rn", "rem")  # fmt: skip
    for name, spans in ranges.items():
        for label, span in spans.items():
            for op in ops:
                if op in ("div_rn", "rem") and name != "fp32":
                    continue
                yield (
                    f"arithmetic/{op} {name} {label}",
                    elementwise(
                        chip_kernels.ternary_kernel, lambda a=(name, *span): inputs(*a), name, op
                    ),
                )


def patterns(name):
    dtype = FLOATS[name][0]
    bits = torch.arange(1 << dtype.itemsize * 8, dtype=torch.int32)
    return [bits.to(BITS[dtype.itemsize]).view(dtype)]


def numbers():
    """float32 of every exponent, and many about the ends of int8 and int16."""
    rng = np.random.default_rng(9)
    parts = [all_floats(rng, 8000)]
    parts += [rng.uniform(-end, end, 4000).astype(np.float32) for end in (400, 70000)]
    return [torch.from_numpy(np.concatenate(parts))]


def whole_numbers(name):
    info = torch.iinfo(FLOATS[name][0])
    rng = np.random.default_rng(info.bits)
    if info.bits <= 16:
        return [torch.arange(info.min, info.max + 1).to(FLOATS[name][0])]
    drawn = rng.integers(info.min, info.max, 20000, endpoint=True) >> rng.integers(
        0, info.bits - 1, 20000
    )
    return [torch.from_numpy(drawn).to(FLOATS[name][0])]


def float64s(name):
    rng = np.random.default_rng(64)
    with np.errstate(invalid="ignore"):
        points = boundaries(name, rng).astype(np.float64)
    points = points[::7]
    return [
        torch.from_numpy(np.concatenate([points, points * (1 + 2.0**-50), points * (1 - 2.0**-50)]))
    ]


def conversions():
    narrow = ("fp16", "bf16", "e4m3", "e5m2")
    for to in narrow:
        for rounding in ("rtne", "rtz"):
            if (to, rounding) == ("e4m3", "rtz"):
                continue  # Triton's compiler aborts
            yield f"cast/fp32->{to} {rounding}", elementwise(
                chip_kernels.cast_kernel,
                lambda to=to: [torch.from_numpy(boundaries(to, np.random.default_rng(7)))],
                to, FLOATS[to][1], rounding,
            )  # fmt: skip
    for source in narrow:
        for to in (*narrow, "fp32"):
            if to != source and {source, to} != {"e4m3", "e5m2"}:  # Triton has no such conversion
                yield f"cast/{source}->{to}", elementwise(
                    chip_kernels.cast_kernel, lambda source=source: patterns(source),
                    to, FLOATS[to][1], None,
                )  # fmt: skip
        yield f"copy/{source}", elementwise(
            chip_kernels.cast_kernel, lambda source=source: patterns(source),
            source, FLOATS[source][1], None,
        )  # fmt: skip
    for to in ("fp32", "fp16", "bf16"):
        near = "bf16" if to == "fp32" else to
        yield (
            f"cast/fp64->{to}",
            elementwise(
                chip_kernels.cast_kernel, lambda near=near: float64s(near), to, FLOATS[to][1], None
            ),
        )
    for to in ("int8", "uint8", "int16", "int32", "uint32", "int64"):
        for source in ("fp32", "fp16", "bf16"):
            inputs = numbers if source == "fp32" else functools.partial(patterns, source)
            yield (
                f"cast/{source}->{to}",
                elementwise(chip_kernels.cast_kernel, inputs, to, FLOATS[to][1], None),
            )
    for source in ("int8", "uint8", "int16", "int32", "int64"):
        for to in ("fp32", "fp16", "bf16"):
            yield f"cast/{source}->{to}", elementwise(
                chip_kernels.cast_kernel, lambda source=source: whole_numbers(source),
                to, FLOATS[to][1], None,
            )  # fmt: skip


def probes(only):
    for family in (dots, functions, arithmetic, conversions):
        for label, run in family():
            if only in label:
                yield label, run
