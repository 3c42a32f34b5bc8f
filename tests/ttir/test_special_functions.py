"""The H200's special functions: the ends of their ranges, and that their tables are whole."""

import numpy as np
import pytest

from fa_verify.ttir.numbers import special_functions
from fa_verify.ttir.numbers.special_tables import TABLES

INF, NAN, TINY = np.inf, np.nan, 2.0**-130


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize(
    ("function", "argument", "want"),
    [
        ("exp2", 0, 1), ("exp2", -0.0, 1), ("exp2", 7, 128), ("exp2", -3, 0.125),
        ("exp2", TINY, 1), ("exp2", -126, 2.0**-126), ("exp2", -126.5, 0), ("exp2", 128, INF),
        ("exp2", 1e30, INF), ("exp2", -1e30, 0), ("exp2", INF, INF), ("exp2", -INF, 0),
        ("exp2", NAN, NAN), ("exp2_gradual", -140, 2.0**-140), ("exp2_gradual", -INF, 0),
        ("exp2_gradual", 3, 8), ("exp2_gradual", NAN, NAN),
        ("reciprocal", 4, 0.25), ("reciprocal", -4, -0.25), ("reciprocal", TINY, INF),
        ("reciprocal", -0.0, -INF), ("reciprocal", INF, 0), ("reciprocal", -INF, -0.0),
        ("reciprocal", -(2.0**127), -0.0), ("reciprocal", NAN, NAN),
        ("rsqrt", 4, 0.5), ("rsqrt", 1, 1), ("rsqrt", 0, INF), ("rsqrt", -0.0, -INF),
        ("rsqrt", TINY, INF), ("rsqrt", INF, 0), ("rsqrt", -1, NAN), ("rsqrt", NAN, NAN),
        ("sqrt", 4, 2), ("sqrt", 0, 0), ("sqrt", -0.0, -0.0), ("sqrt", TINY, 0),
        ("sqrt", INF, INF), ("sqrt", -1, NAN), ("sqrt", NAN, NAN),
    ],
)  # fmt: skip
def test_the_ends_of_the_range(function, argument, want):
    got = getattr(special_functions, function)(np.float32([argument, argument]))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, np.float32([want, want]))
    assert np.isnan(want) or np.signbit(got[0]) == np.signbit(want)


@pytest.mark.parametrize(
    ("a", "b", "want"),
    [(1, 2.0**127, 2.0**-127), (3, 2.0**-140, INF), (2.0**-140, 2.0**-140, 1), (1, 0, INF),
     (0, 0, NAN), (1, INF, 0), (INF, 2, INF), (-6, 2, -3)],
)  # fmt: skip
def test_quotients_span_the_whole_range(a, b, want):
    got = special_functions.divide(np.float32([a]), np.float32([b]))
    np.testing.assert_array_equal(got, np.float32([want]))


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_complete_and_continuous(name):
    table = TABLES[name]
    constant, linear, quadratic = special_functions._rows(table)
    assert constant.size << table.low_bits == (1 << 24 if "sqrt" in name else 1 << 23)
    ends = constant / 2.0**table.resolution + linear + quadratic / 2.0  # in units of the last place
    starts = constant[1:] / 2.0**table.resolution
    jumps = np.abs(ends[:-1] - starts)
    if "sqrt" in name:
        jumps = np.delete(jumps, 63)  # from [1, 2) to [2, 4): the result starts anew
    assert jumps.max() <= 2  # the stated errors of the functions


def test_squares_lack_their_lowest_columns():
    whole, cut = special_functions.squares(8, 0), special_functions.squares(8, 9)
    assert np.array_equal(whole, np.arange(256) ** 2)
    assert (cut <= whole).all()
    assert (cut % 512 == 0).all()
    assert cut[0b11000000] == whole[0b11000000]
    assert cut[0b10000001] == 128**2  # the cross term has weight 2^8
