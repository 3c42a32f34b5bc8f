"""Finds the tables of fa_verify/ttir/numbers/special_tables.py from what a card returned.

    python benchmarks/chip_numbers.py record DIR --device cuda --tables
    python benchmarks/fit_special_functions.py DIR

The functions are quadratic in the low bits of the significand, with coefficients for each value of
the high bits (Oberman and Siu 2005). Regressing all 2^23 results on bits and products of two bits
showed the coefficients to be integers, and which columns of the square the hardware drops: those of
weight below 2^`column`. Here the integers are found, such that every recorded result is reproduced.
"""

import argparse
import textwrap
from pathlib import Path

import numpy as np

from fa_verify.ttir.numbers.special_functions import squares

# name: low bits, lowest column of the square, segments of 1/2^resolution in the constant term
SHAPES = {"exp2": (17, 19, 2), "reciprocal": (16, 17, 3), "rsqrt": (17, 19, 4), "sqrt": (17, 19, 5)}


def significands(recorded):
    """24-bit results of every function by position: what the distances in the recording mean."""
    one = (np.arange(1 << 23, dtype=np.uint32) | 0x3F800000).view(np.float32).astype(np.float64)
    both = np.concatenate([one, 2 * one])
    exact = {"exp2": (np.exp2(one - 1), 127), "reciprocal": (1 / one, 126),
             "rsqrt": (1 / np.sqrt(both), 126), "sqrt": (np.sqrt(both), 127)}  # fmt: skip
    for name, (value, exponent) in exact.items():
        bits = value.astype(np.float32).view(np.int32).astype(np.int64) + recorded[name]
        yield name, bits - (exponent << 23) + (1 << 23)


def coefficients(want, low_bits, square):
    """(linear, quadratic, least constant, greatest constant) of one segment."""
    low = np.arange(want.size, dtype=np.int64)
    t = low / want.size
    guess = np.linalg.lstsq(np.stack([np.ones_like(t), t, t * t], 1), want + 0.5, rcond=None)[0]
    near = sorted(np.ndindex(13, 13), key=lambda at: abs(at[0] - 6) + abs(at[1] - 6))
    for i, j in near:
        linear, quadratic = round(guess[1]) + i - 6, round(2 * guess[2]) + j - 6
        varying = (linear * low << (low_bits + 1)) + quadratic * square
        least = ((want << (2 * low_bits + 1)) - varying).max()
        most = ((want + 1 << (2 * low_bits + 1)) - varying).min() - 1
        if least <= most:
            return linear, quadratic, least, most
    raise ValueError(guess)


def fit(name, want):
    low_bits, column, resolution = SHAPES[name]
    square = squares(low_bits, column)
    if name == "rsqrt":  # 1 / sqrt(1) is 1, whatever the table says
        want[0] = want[1] + 1
    rows = [coefficients(part, low_bits, square) for part in want.reshape(-1, 1 << low_bits)]
    least, most = (np.array([row[i] for row in rows]) for i in (2, 3))
    unit = 1 << (2 * low_bits + 1 - resolution)
    for bias in range(0, unit, unit >> 12):
        constant = -(-(least - bias) // unit)
        if (constant * unit + bias <= most).all():
            break
    else:
        raise ValueError(name)
    table = [(int(c), row[0], row[1]) for c, row in zip(constant, rows, strict=True)]
    print(f'"{name}": Table(low_bits={low_bits}, column={column}, resolution={resolution}, '
          f"bias={bias}, text=")  # fmt: skip
    print(textwrap.fill(" ".join(str(x) for row in table for x in row), 96))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    with np.load(parser.parse_args().folder / "chip_tables.npz") as recorded:
        for name, want in significands(recorded):
            fit(name, want)


if __name__ == "__main__":
    main()
