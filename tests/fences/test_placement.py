import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_verify.backends.fences.fence import Fence
from fa_verify.backends.fences.placement import ALIGNED, SLACK, place, room
from fa_verify.errors import InvalidInputError

FENCES = [
    Fence(mode=mode, start=start, flush=flush, gap=gap)
    for mode, start, flush, gap in itertools.product(
        ("poison", "page"), (False, True), (False, True), (0, 6)
    )
]
GRANULE = 2 << 20


def region_for(nbytes, fence, *, fenced=True):
    return -(-room(nbytes, fence, fenced=fenced) // GRANULE) * GRANULE


@given(
    fence=st.sampled_from(FENCES),
    nbytes=st.integers(1, 3 * GRANULE),
    phase=st.integers(0, ALIGNED - 1),
    fenced=st.booleans(),
)
def test_a_tensor_lies_inside_its_region_between_poison(fence, nbytes, phase, fenced):
    region = region_for(nbytes, fence, fenced=fenced)
    at = place(region, nbytes, fence, phase=phase, fenced=fenced)
    assert 0 <= at.low <= at.first < at.last <= at.high <= region
    assert at.last - at.first == nbytes
    assert at.low % 8 == at.high % 8 == 0
    if not (fence.mode == "page" and fenced):
        assert at.first % ALIGNED == phase
        assert min(at.first - at.low, at.high - at.last) > SLACK - ALIGNED
        return
    near = at.first - fence.gap if fence.start else region - fence.gap - at.last
    assert near == 0 if fence.flush else 0 <= near < ALIGNED
    assert fence.flush or at.first % ALIGNED == phase


@given(nbytes=st.integers(1, 4096))
def test_aligned_tensors_of_whole_words_touch_the_page(nbytes):
    fence, nbytes = Fence(mode="page"), nbytes * ALIGNED
    region = region_for(nbytes, fence)
    assert place(region, nbytes, fence, phase=0, fenced=True).last == region


@pytest.mark.parametrize("fence", [*FENCES, Fence(mode="page", only="7", finite=True)])
def test_a_fence_is_read_as_it_was_written(fence):
    assert Fence.parse(str(fence)) == fence


@pytest.mark.parametrize("text", ["", "pages", "page.flush.start", "page.gap", "poison.only-"])
def test_other_texts_are_refused(text):
    with pytest.raises(InvalidInputError, match="must be off, poison or page"):
        Fence.parse(text)
