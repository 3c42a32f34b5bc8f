"""A mask that adds a finite number is told from a missing one."""

import pytest
import torch

from fa_verify import Arithmetic, Kernel, Mask, Outputs, Problem
from fa_verify.backends import make
from fa_verify.backends.base import Setup
from fa_verify.bounds import bound_forward
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


@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize(("size", "open_rows"), [(3.0, 0), (300.0, 1)])
@pytest.mark.parametrize(("seqlen_q", "alignment"), [(40, "bottom-right"), (9, "top-left")])
def test_of_rows_whose_hidden_keys_may_count_the_bound_says_nothing(
    added, size, open_rows, seqlen_q, alignment
):
    """And of the others all that it says without; of 48 keys the last 39 may be hidden to all."""
    mask = Mask(causal=True, alignment=alignment)
    problem = Problem(seqlen_q=seqlen_q, seqlen_k=48, head_dim=32, head_dim_v=8, mask=mask)
    random = torch.Generator().manual_seed(3)
    shapes = problem.shape_q, problem.shape_k, problem.shape_v
    q, k, v = (torch.randn(shape, generator=random).half() for shape in shapes)
    q *= size
    logits = q.double() @ k.double().mT * problem.scale
    hidden = ~torch.from_numpy(problem.mask.allowed(seqlen_q, 48))
    lowered = logits - 400.0 if added else torch.full_like(logits, -400.0)
    o = torch.where(hidden, lowered, logits).softmax(-1) @ v.double()
    finite, plain = (
        bound_forward(problem, arithmetic, q, k, v)[0]
        for arithmetic in (Arithmetic(masked_logit=-400.0), Arithmetic())
    )
    said = finite.det.isfinite().all(-1)
    assert bool((~said).any()) == bool(open_rows)
    assert (finite.det[said] <= plain.det[said]).all()
    off = (o - finite.reference).abs() > finite.det
    assert not off.any()
    if open_rows and added:
        assert ((o - plain.reference).abs() > plain.det).any()
