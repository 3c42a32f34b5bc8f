"""A mask that adds a finite number is told from a missing one."""

import pytest
import torch

from fa_verify import Kernel, Outputs
from fa_verify.backends import make
from fa_verify.backends.base import Setup
from fa_verify.case import Case
from fa_verify.checks import masking
from fa_verify.diagnosis import diagnose
from fa_verify.trial import Trial

CASE = Case.parse(
    "pass=fwd s=24x24 d=16 dtype=float32 mask=causal scale=100.0 qk.values=row-shift seed=3"
)


def attend(mask):
    def forward(problem, q, k, v):
        logits = q.double() @ k.double().mT * problem.scale
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        logits = mask(logits, hidden)
        o = (torch.softmax(logits, -1) @ v.double()).to(q.dtype)
        return Outputs(o, torch.logsumexp(logits, -1).float())

    return Kernel(name="masked", forward=forward)


def cause(mask):
    trial = Trial(attend(mask), CASE, Setup(), make("cpu"))
    found = list(masking.finite(trial))
    return {failure.diagnosis for failure in diagnose(trial, found, seconds=0)}


@pytest.mark.parametrize(("number", "harmless"), [(1e6, "250,000"), (1e4, "15,000")])
def test_a_finite_mask_is_named_with_what_it_holds_back(number, harmless):
    (said,) = cause(lambda x, hidden: x - number * hidden)
    assert said.startswith("hidden logits have a finite number added")
    assert f"(those below {harmless} do not here)" in said


def test_a_missing_mask_is_not_called_finite():
    (said,) = cause(lambda x, hidden: x)
    assert said.startswith("a key that the mask hides enters the result")


def test_a_right_mask_fails_nothing():
    assert cause(lambda x, hidden: x.masked_fill(hidden, -torch.inf)) == set()
