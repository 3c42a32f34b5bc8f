"""Which infinities are right where the exact result is about, or beyond, what its format holds."""

import pytest
import torch

from fa_verify.bounds import Bounded
from fa_verify.checks.comparison import Comparison

INF = float("inf")


def _broken(got, reference, det):
    bounded = Bounded(
        name="dk",
        reference=torch.tensor([reference], dtype=torch.float64),
        det=torch.tensor([det], dtype=torch.float64),
        overflow_ok=torch.tensor([abs(reference) + det >= 65520.0]),
    )
    everywhere = torch.ones(1, dtype=torch.bool)
    names = {"written": everywhere, "due": everywhere, "dtype": "float16", "name": "dk"}
    got = torch.tensor([got], dtype=torch.float64)
    return bool(Comparison(got=got, bounded=bounded, **names).broken)


@pytest.mark.parametrize(
    ("got", "reference", "det", "broken"),
    [
        (INF, 70_000.0, 50.0, False),
        (-INF, 70_000.0, 50.0, True),
        (-INF, -70_000.0, 50.0, False),
        (INF, 65_000.0, 100.0, True),
        (INF, 65_000.0, 600.0, False),
        # What cancels may come out on either side.
        (-INF, 3.6e6, 5e7, False),
        (INF, 3.6e6, 5e7, False),
        (-INF, 3.6e6, 3.62e6, True),
        (float("nan"), 3.6e6, 5e7, True),
    ],
)
def test_an_infinity_has_the_sign_that_the_bound_admits(got, reference, det, broken):
    assert _broken(got, reference, det) is broken
