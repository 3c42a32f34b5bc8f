"""Operations on several tensors say what the same operations on each say."""

from __future__ import annotations

import math

import pytest
import torch

from fa_verify import foreach

CARD = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
)


@pytest.mark.parametrize("device", ["cpu", CARD])
def test_largest_sees_nan_and_infinity_wherever_they_are(device):
    many = torch.full((70_000,), -2.0, dtype=torch.float64, device=device)
    late, infinite = many.clone(), many.clone().view(7, -1).T
    late[-1] = math.nan
    infinite[3, 2] = -math.inf
    found = foreach.largest([many, late, infinite, many[:1] * 0])
    assert torch.stack([*found]).tolist() == pytest.approx(
        [2.0, math.nan, math.inf, 0.0], nan_ok=True
    )


@pytest.mark.parametrize("device", ["cpu", CARD])
def test_differences_ratios_and_signs_are_those_of_each(device):
    left = [torch.tensor(x, dtype=torch.float64, device=device) for x in ([1.0, -3.0], [[0.0]])]
    right = [torch.tensor(x, dtype=torch.float64, device=device) for x in ([4.0, 2.0], [[5.0]])]
    assert [x.tolist() for x in foreach.differences(left, right)] == [[-3.0, -5.0], [[-5.0]]]
    assert [x.tolist() for x in foreach.ratios(left, right)] == [[0.25, -1.5], [[0.0]]]
    assert [x.tolist() for x in foreach.products(left, right)] == [[4.0, -6.0], [[0.0]]]
    assert [x.tolist() for x in foreach.signs(left)] == [[1.0, -1.0], [[0.0]]]
    assert [x.tolist() for x in foreach.sizes(left)] == [[1.0, 3.0], [[0.0]]]
