import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_verify.errors import InvalidInputError
from fa_verify.masks import FULL, Mask

WINDOWS = st.none() | st.integers(0, 20)
MASKS = st.booleans().flatmap(
    lambda causal: st.builds(
        Mask,
        causal=st.just(causal),
        window_left=WINDOWS,
        window_right=st.none() if causal else WINDOWS,
        alignment=st.sampled_from(["bottom-right", "top-left"]),
    )
)
LENGTHS = st.integers(0, 17)


def _sees(mask, i, j, seqlen_q, seqlen_k):
    diagonal = i + (seqlen_k - seqlen_q if mask.alignment == "bottom-right" else 0)
    if mask.causal and j > diagonal:
        return False
    if mask.window_left is not None and j < diagonal - mask.window_left:
        return False
    return mask.window_right is None or j <= diagonal + mask.window_right


@given(MASKS, LENGTHS, LENGTHS)
def test_allowed_is_the_definition(mask, seqlen_q, seqlen_k):
    naive = [
        [_sees(mask, i, j, seqlen_q, seqlen_k) for j in range(seqlen_k)] for i in range(seqlen_q)
    ]
    expected = np.array(naive, dtype=bool).reshape(seqlen_q, seqlen_k)
    assert np.array_equal(mask.allowed(seqlen_q, seqlen_k), expected)


@given(MASKS, LENGTHS, LENGTHS)
def test_intervals_lie_inside_the_keys(mask, seqlen_q, seqlen_k):
    lo, hi = mask.intervals(seqlen_q, seqlen_k)
    assert lo.shape == hi.shape == (seqlen_q,)
    assert ((lo >= 0) & (lo <= hi) & (hi <= seqlen_k)).all()


@given(MASKS, LENGTHS, LENGTHS, st.integers(0, 17), st.integers(0, 17))
def test_rows_are_rows_of_the_whole(mask, seqlen_q, seqlen_k, start, stop):
    rows = slice(start, stop)
    part = mask.allowed(seqlen_q, seqlen_k, rows)
    assert np.array_equal(part, mask.allowed(seqlen_q, seqlen_k)[rows])


@given(MASKS, LENGTHS, LENGTHS)
def test_a_mask_that_hides_nothing_allows_all(mask, seqlen_q, seqlen_k):
    if not mask.hides_anything:
        assert mask.allowed(seqlen_q, seqlen_k).all()


DOCUMENTS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=5)


@given(MASKS, DOCUMENTS)
def test_documents_are_masked_each_by_itself(mask, lengths):
    seqlen_q, seqlen_k = (sum(side) for side in zip(*lengths, strict=True))
    expected = np.zeros((seqlen_q, seqlen_k), dtype=bool)
    row = key = 0
    for queries, keys in lengths:
        expected[row : row + queries, key : key + keys] = mask.allowed(queries, keys)
        row, key = row + queries, key + keys
    packed = dataclasses.replace(mask, documents=tuple(lengths))
    assert np.array_equal(packed.allowed(seqlen_q, seqlen_k), expected)
    assert packed.hides_anything or expected.all()


@given(DOCUMENTS, LENGTHS, LENGTHS)
def test_resized_documents_fill_the_new_lengths_from_the_front(lengths, seqlen_q, seqlen_k):
    mask = Mask(documents=tuple(lengths))
    new = mask.resized(seqlen_q, seqlen_k).documents
    assert tuple(sum(side) for side in zip(*new, strict=True)) == (seqlen_q, seqlen_k)
    old = [sum(side) for side in zip(*lengths, strict=True)]
    assert mask.resized(*old) == mask
    assert all(
        after[side] <= before[side]
        for before, after in zip(lengths[:-1], new[:-1], strict=True)
        for side in (0, 1)
    )


def test_lengths_that_documents_do_not_add_up_to_are_refused():
    with pytest.raises(InvalidInputError, match="do not add up to 4 queries"):
        Mask(documents=((1, 2), (2, 2))).allowed(4, 4)


def test_alignments_agree_on_squares_and_differ_elsewhere():
    top_left = Mask(causal=True, alignment="top-left")
    assert np.array_equal(top_left.allowed(7, 7), Mask(causal=True).allowed(7, 7))
    assert not np.array_equal(top_left.allowed(7, 9), Mask(causal=True).allowed(7, 9))


def test_bottom_right_causal_with_more_queries_than_keys_masks_whole_rows():
    assert Mask(causal=True).allowed(5, 3).any(axis=1).tolist() == [False, False, True, True, True]


def test_full_hides_nothing():
    assert not FULL.hides_anything
    assert Mask() == FULL


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"window_left": -1}, "window_left=-1"),
        ({"window_right": -2}, "window_right=-2"),
        ({"causal": True, "window_right": 0}, "window_right=0"),
        ({"alignment": "centre"}, "alignment='centre'"),
        ({"documents": ((1, 2), (-1, 2))}, r"\(-1, 2\)"),
        ({"documents": ((1, 2, 3),)}, r"\(1, 2, 3\)"),
    ],
)
def test_meaningless_masks_are_refused(fields, said):
    with pytest.raises(InvalidInputError, match=said):
        Mask(**fields)
