"""`checks.dropout`: what a kernel says it keeps is a draw, and what is none is told."""

import pytest
import torch

from fa_verify import Capabilities, Kernel
from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.case import Case
from fa_verify.checks import dropout
from fa_verify.trial import Trial

CASE = "pass=fwd b=2 h=4/2 s=130x150 d=8 dtype=float16 dropout=0.3 seed=3"


def drawn(problem, seed, device):
    """A draw for each element."""
    generator = torch.Generator().manual_seed(seed)
    shape = (*problem.shape_lse, problem.seqlen_k)
    return (torch.rand(shape, generator=generator) >= problem.dropout).to(device)


def _never(problem, q, k, v, **terms):
    raise NotImplementedError


def titles(keep, case=CASE, *, independent=True):
    kernel = Kernel(
        name="plain", forward=_never, dropout_keep=keep, capabilities=Capabilities(dropout=True)
    )
    trial = Trial(kernel, Case.parse(case), Setup(), CpuBackend(), independent=independent)
    return [failure.title for failure in dropout.check(trial)]


@pytest.mark.parametrize("probability", [1e-9, 0.01, 0.3, 0.5, 0.9, 0.999])
def test_a_draw_passes(probability):
    for seed in range(20):
        case = CASE.replace("0.3", str(probability)).replace("seed=3", f"seed={seed}")
        assert titles(drawn, case) == []
        assert titles(drawn, case.replace("130x150", "3x2")) == []
        assert titles(drawn, case.replace("dropout", "mask=causal dropout")) == []


def test_a_threshold_of_a_byte_passes():
    def coarse(problem, seed, device):
        generator = torch.Generator().manual_seed(seed)
        shape = (*problem.shape_lse, problem.seqlen_k)
        byte = torch.randint(256, shape, generator=generator)
        return (byte >= int(256 * problem.dropout)).to(device)

    assert titles(coarse, CASE.replace("130x150", "900x1100")) == []


def test_what_a_mask_hides_may_be_said_at_will():
    def hidden(problem, seed, device):
        return drawn(problem, seed, device).tril_(problem.seqlen_k - problem.seqlen_q)

    assert titles(hidden, CASE.replace("dropout", "mask=causal dropout")) == []


def tiled(problem, seed, device):
    """The same in every tile of 32 queries and 32 keys."""
    keep = drawn(problem, seed, device)[:, :, :32, :32].repeat(1, 1, 5, 5)
    return keep[:, :, : problem.seqlen_q, : problem.seqlen_k]


WRONG = {
    "the share that is dropped": (
        lambda *given: ~drawn(*given), {"dropout keeps another share"},
    ),
    "two in a hundred too many": (
        lambda *given: drawn(*given) | (torch.rand(2, 4, 130, 150) < 0.07),
        {"dropout keeps another share"},
    ),
    "heads alike": (
        lambda *given: drawn(*given)[:, :1].expand(-1, 4, -1, -1),
        {f"dropout keeps the same in different {name}" for name in ("heads", "rows", "keys")},
    ),
    "sequences alike": (
        lambda *given: drawn(*given)[:1].expand(2, -1, -1, -1),
        {f"dropout keeps the same in different {name}" for name in ("heads", "rows", "keys")},
    ),
    "tiles alike": (
        tiled, {f"dropout keeps the same in different {name}" for name in ("rows", "keys")},
    ),
    "one seed for all": (
        lambda problem, _, device: drawn(problem, 5, device), {"dropout ignores its seed"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("keep", "due"), WRONG.values(), ids=WRONG)
def test_what_is_no_draw_is_told(keep, due):
    assert set(titles(keep)) == due
    assert titles(keep, independent=False) == []
