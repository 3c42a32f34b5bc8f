"""Cumulative lengths of packed documents, and what diagnosis thinks that they see."""

import itertools

import pytest
import torch

from fa_verify import Mask, Problem, cu_seqlens
from fa_verify.diagnosis.gaps import causes
from fa_verify.diagnosis.knobs import RIGHT, Knobs
from fa_verify.diagnosis.model import visible

DOCUMENTS = ((0, 2), (3, 1), (2, 0), (0, 0), (4, 6), (4, 6))


def _problem(**fields):
    return Problem(seqlen_q=13, seqlen_k=15, head_dim=8, head_dim_v=8, mask=Mask(**fields))


def test_cumulative_lengths_cut_the_sequence_into_its_documents():
    starts_q, starts_k, longest_q, longest_k = cu_seqlens(_problem(documents=DOCUMENTS), "cpu")
    assert starts_q.dtype == starts_k.dtype == torch.int32
    assert [b - a for a, b in itertools.pairwise(starts_q.tolist())] == [q for q, _ in DOCUMENTS]
    assert [b - a for a, b in itertools.pairwise(starts_k.tolist())] == [k for _, k in DOCUMENTS]
    assert (longest_q, longest_k) == (4, 6)
    assert starts_q.is_contiguous()
    assert starts_k.is_contiguous()


def test_a_sequence_without_documents_is_one():
    starts_q, starts_k, *longest = cu_seqlens(_problem(), "cpu")
    assert starts_q.tolist() == [0, 13]
    assert starts_k.tolist() == [0, 15]
    assert longest == [13, 15]


@pytest.mark.parametrize("alignment", ["bottom-right", "top-left"])
@pytest.mark.parametrize(
    "band", [{}, {"causal": True}, {"window_left": 1}, {"window_left": 2, "window_right": 0}]
)
def test_the_model_of_a_right_kernel_sees_what_the_mask_allows(band, alignment):
    problem = _problem(documents=DOCUMENTS, alignment=alignment, **band)
    allowed = torch.from_numpy(problem.mask.allowed(13, 15))
    assert torch.equal(visible(problem, RIGHT, 15), allowed)


def _boxes(lengths_q, lengths_k, shape):
    """All pairs of queries and keys of documents with these lengths, as far as they exist."""
    seen = torch.zeros(shape, dtype=torch.bool)
    row = key = 0
    for queries, keys in zip(lengths_q, lengths_k, strict=True):
        seen[row : row + queries, key : max(key + keys, 0)] = True
        row, key = row + queries, key + keys
    return seen


def _moved(begin, end):
    """The documents' keys, from `begin` more to `end` more than they have (keys, queries)."""
    seen = torch.zeros(13, 15, dtype=torch.bool)
    row = key = 0
    for queries, keys in DOCUMENTS:
        seen[
            row : row + queries,
            max(0, key + begin(keys)) : max(0, key + keys + end(keys, queries)),
        ] = True
        row, key = row + queries, key + keys
    return seen


QUERIES, KEYS = zip(*DOCUMENTS, strict=True)
KINDS = {
    "ignored": torch.ones(13, 15, dtype=torch.bool),
    "one": torch.ones(13, 15, dtype=torch.bool),
    "late": _moved(lambda _: 0, lambda *_: 1),
    "begin early": _moved(lambda _: -1, lambda *_: 0),
    "empty": _moved(lambda _: 0, lambda keys, _: int(not keys)),
    "as many": _moved(lambda _: 0, lambda keys, queries: queries - keys),
    "by queries": _boxes(QUERIES, QUERIES, (13, 15)),
    "by keys": _boxes(KEYS, KEYS, (13, 15)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_of_a_defect_sees_what_its_documents_would(kind):
    problem = _problem(documents=DOCUMENTS)
    assert torch.equal(visible(problem, Knobs(documents=kind), 15), KINDS[kind])
    assert not torch.equal(KINDS[kind], visible(problem, RIGHT, 15))


@pytest.mark.parametrize("kind", ["one", "packed diagonal"])
def test_the_model_of_another_diagonal_has_that_of_the_packed_sequence(kind):
    problem = _problem(documents=DOCUMENTS, causal=True)
    seen = torch.from_numpy(Mask(causal=True).allowed(13, 15))
    if kind != "one":
        seen &= _boxes(QUERIES, KEYS, (13, 15))
    assert torch.equal(visible(problem, Knobs(documents=kind), 15), seen)


def test_the_model_of_lost_gaps_sees_the_band_or_whole_blocks():
    mask = Mask(causal=True, pattern="predicate:2")
    problem = Problem(seqlen_q=13, seqlen_k=15, head_dim=8, head_dim_v=8, mask=mask)
    ignored = visible(problem, Knobs(gaps="ignored"), 15)
    assert torch.equal(ignored, torch.from_numpy(Mask(causal=True).allowed(13, 15)))
    grown = visible(problem, Knobs(gaps="whole blocks", block_m=4, block_n=4), 15)
    allowed = torch.from_numpy(mask.allowed(13, 15))
    for row, key in itertools.product(range(13), range(15)):
        block = allowed[row // 4 * 4 : row // 4 * 4 + 4, key // 4 * 4 : key // 4 * 4 + 4]
        assert grown[row, key] == block.any()


def test_causes_of_documents_and_gaps_are_tried_where_there_are_such():
    def tried(**fields):
        return {cause.knobs.documents or cause.knobs.gaps for cause in causes(_problem(**fields))}

    assert tried() == set()
    assert tried(documents=((13, 15),)) == set()
    assert tried(documents=DOCUMENTS) == {*KINDS, "packed diagonal", "diagonal of ends"}
    assert tried(pattern="prefix:3") == {"ignored", "whole blocks"}
