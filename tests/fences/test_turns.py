"""Which fence a case of a campaign gets."""

import collections

import pytest

from fa_verify import campaign, loader
from fa_verify.backends.base import Setup
from fa_verify.backends.fences.fence import Fence
from fa_verify.campaign.cases import CUDA_FORMS


def fences(mode, cases):
    (kernel,) = loader.load("tests/targets/plain.py:right")
    plan = campaign.Plan(backend="cuda", cases=cases, fence=mode)
    return [setup.fence for _, setup in campaign.drawn(kernel, plan)]


def test_every_form_meets_a_page_at_both_ends_and_one_alignment():
    met = collections.defaultdict(set)
    for index, fence in enumerate(fences("page", 2 * CUDA_FORMS)):
        met[index % CUDA_FORMS].add((fence.start, fence.flush))
    assert all({start for start, _ in seen} == {False, True} for seen in met.values())
    assert all(len({flush for _, flush in seen}) == 1 for seen in met.values())
    flush = [index for index, seen in met.items() if all(flush for _, flush in seen)]
    assert flush == [index for index in range(CUDA_FORMS) if index % 8 == 5]
    assert 0 < len(flush) <= CUDA_FORMS / 6  # each is compiled apart


@pytest.mark.parametrize("mode", ["off", "poison"])
def test_other_modes_have_one_fence(mode):
    assert set(fences(mode, 20)) == {Fence(mode=mode)}


@pytest.mark.parametrize("text", ["off", "page", "page.start.flush", "page.only-q.gap64"])
def test_a_setup_carries_its_fence(text):
    setup = Setup(backend="cuda", fence=Fence.parse(text))
    assert f"fence={text}" in str(setup)
    assert Setup.parse(str(setup)) == setup


def test_a_setup_that_names_no_fence_has_poison():
    assert Setup.parse("backend=cuda").fence == Fence(mode="poison")
    assert "fence" not in str(Setup(backend="cuda"))
