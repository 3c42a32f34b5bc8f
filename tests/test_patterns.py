"""Each pattern against its definition, one pair of places at a time."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_verify.case import Case
from fa_verify.diagnosis.knobs import RIGHT
from fa_verify.diagnosis.model import visible
from fa_verify.errors import InvalidInputError
from fa_verify.masks import Mask
from fa_verify.patterns import NAMES, Pattern
from fa_verify.problem import Problem

LENGTHS = st.integers(0, 40)
TEXTS = (
    *("block-sparse:7:40:3", "prefix:5", "dilated:3", "global-local:2:3", "scattered:4:1"),
    "predicate:6",
)


def test_every_rule_is_tried():
    assert {text.partition(":")[0] for text in TEXTS} == set(NAMES)


@given(st.sampled_from(TEXTS), LENGTHS, LENGTHS, st.sampled_from(["bottom-right", "top-left"]))
def test_rules_are_their_definitions(text, seqlen_q, seqlen_k, alignment):
    mask = Mask(pattern=text, alignment=alignment)
    allowed = mask.allowed(seqlen_q, seqlen_k)
    shift = seqlen_k - seqlen_q if alignment == "bottom-right" else 0
    name, *numbers = text.split(":")
    numbers = [int(number) for number in numbers]
    definitions = {
        "prefix": lambda i, j, far: j < numbers[0] or far >= 0,
        "dilated": lambda i, j, far: far % numbers[0] == 0,
        "global-local": lambda i, j, far: abs(far) <= numbers[0] or min(i, j) < numbers[1],
        "predicate": lambda i, j, far: (i * i + 3 * j + numbers[0]) % 7 < 3,
    }
    for i, j in itertools.product(range(seqlen_q), range(seqlen_k)):
        if name in definitions:  # the others are told by what they are made of, below
            assert allowed[i, j] == definitions[name](i, j, i + shift - j)


def test_a_block_sparse_mask_is_made_of_blocks_and_has_blind_rows():
    allowed = Mask(pattern="block-sparse:8:40:3").allowed(64 * 8, 32 * 8)
    blocks = allowed.reshape(64, 8, 32, 8)
    assert (blocks == blocks[:, :1, :, :1]).all()
    seen = blocks[:, 0, :, 0]
    blind = ~seen.any(1)
    assert 0 < blind.sum() < 24
    assert 0.3 < seen[~blind].mean() < 0.5
    other = Mask(pattern="block-sparse:8:40:4").allowed(64 * 8, 32 * 8)
    assert (other != allowed).any()


def test_scattered_documents_share_tokens_by_their_diagonal():
    allowed = Mask(pattern="scattered:4:1").allowed(50, 50)
    assert allowed.diagonal().all()
    assert (allowed == allowed.T).all()
    assert len(np.unique(allowed, axis=0)) == 4


@pytest.mark.parametrize("text", TEXTS)
def test_a_pattern_narrows_a_band_and_documents(text):
    documents = ((9, 14), (0, 3), (11, 6))
    band = Mask(window_left=4, documents=documents)
    both = Mask(window_left=4, documents=documents, pattern=text)
    alone = Mask(documents=documents, pattern=text)
    expected = band.allowed(20, 23) & alone.allowed(20, 23)
    assert np.array_equal(both.allowed(20, 23), expected)
    assert both.hides_anything
    assert np.array_equal(both.allowed(20, 23, np.array([3, 19])), expected[[3, 19]])
    problem = Problem(seqlen_q=20, seqlen_k=23, head_dim=8, head_dim_v=8, mask=both)
    assert np.array_equal(visible(problem, RIGHT, 23).numpy(), expected)
    case = Case(problem=problem)
    assert Case.parse(str(case)) == case


@pytest.mark.parametrize("text", TEXTS)
def test_a_pattern_reads_back(text):
    assert str(Pattern.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("chequered:3", "must begin with one of block-sparse, prefix"),
        ("prefix", "must be prefix:LENGTH"),
        ("prefix:3:4", "must be prefix:LENGTH"),
        ("prefix:-3", "must be prefix:LENGTH"),
        ("prefix:three", "must be prefix:LENGTH"),
        ("dilated:0", "step=0"),
        ("scattered:4:9999999999", "seed=9999999999"),
    ],
)
def test_other_texts_are_refused(text, said):
    with pytest.raises(InvalidInputError, match=said):
        Mask(pattern=text)
