"""Cumulative lengths of packed documents, and what diagnosis thinks that they see."""

import itertools

import pytest
import torch

from fa_verify import Mask, Problem, cu_seqlens
from fa_verify.diagnosis.knobs import RIGHT
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
