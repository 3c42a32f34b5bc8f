"""Defects of packed documents and of block masks, each planted in the kernels: all show."""

import pathlib
import shutil

import pytest

from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.case import Case
from fa_verify.loader import load
from fa_verify.verify import verify

KERNELS = pathlib.Path(__file__).parents[2] / "kernels"
FORM = "pass=bwd h=2/1 d=16 dtype=float32 seed=3"
DOCUMENTS = [
    f"{FORM} s=70x130 mask=causal.docs0x9-20x60-0x0-17x1-33x60",
    f"{FORM} s=70x130 mask=l5.r3.docs30x40-1x0-0x50-39x40",
]
BLOCKS = [
    f"{FORM} s=170x200 mask=pattern:prefix:90",
    f"{FORM} s=170x200 mask=causal.pattern:block-sparse:64:60:1",
]

DEFECTS = {
    "a document has one row more": (
        DOCUMENTS,
        [("documents.py", "document + 1) - start", "document + 1) - start + 1")],
    ),
    "a document begins one row early": (
        DOCUMENTS,
        [("documents.py", "    return start, tl.load", "    return start - 1, tl.load")],
    ),
    "an empty document reads the next one's first row": (
        DOCUMENTS,
        [
            (
                "documents.py",
                "tl.load(starts + document + 1) - start",
                "tl.maximum(tl.load(starts + document + 1) - start, 1)",
            )
        ],
    ),
    "the diagonal is that of the packed sequence": (
        DOCUMENTS,
        [
            ("arguments.py", "    if packed:\n        furthest", "    if False:\n        furthest"),
            ("documents.py", "        band += length_k - length_q\n", "        band += 0\n"),
        ],
    ),
    "documents are aligned by their first query": (
        DOCUMENTS,
        [("documents.py", "        band += length_k - length_q\n", "        band += 0\n")],
    ),
    "keys are cut where the queries' documents end": (
        DOCUMENTS,
        [("forward.py", "document_rows(starts_k, document)", "document_rows(starts_q, document)")],
    ),
    "a block too few for each document": (
        DOCUMENTS,
        [("arguments.py", "else rows // block + documents", "else triton.cdiv(rows, block)")],
    ),
    "lse of all documents lies at the first": (
        DOCUMENTS,
        [("forward.py", "        lse_head += start_q\n", "        lse_head += 0\n")],
    ),
    "dv of all documents lies at the first": (
        DOCUMENTS,
        [("backward_dkdv.py", "skip_rows(dv_head, start_k,", "skip_rows(dv_head, 0,")],
    ),
    "lists lack their last partial block": (
        BLOCKS,
        [
            (
                "block_mask.py",
                "tl.load(first + 1) * SPARSE",
                "(tl.load(first + 1) - PARTIAL) * SPARSE",
            )
        ],
    ),
    "lists lack their first whole block": (
        BLOCKS,
        [
            (
                "block_mask.py",
                "return tl.load(first) * SPARSE",
                "return (tl.load(first) + 1 - PARTIAL) * SPARSE",
            )
        ],
    ),
    "partial blocks are seen as a whole": (
        BLOCKS,
        [("block_mask.py", "seen | (kind == -2)", "seen | (kind != -1)")],
    ),
    "partial blocks are read transposed in dk and dv": (
        BLOCKS,
        [
            (
                "block_mask.py",
                "places = queries[None, :] * SPARSE + keys[:, None]",
                "places = keys[:, None] * SPARSE + queries[None, :]",
            )
        ],
    ),
    "lists of queries serve blocks of keys": (
        BLOCKS,
        [("block_mask.py", "_lists(kinds.T, device)", "_lists(kinds, device)")],
    ),
    "a block's tile is the next one's": (
        BLOCKS,
        [("block_mask.py", "tl.maximum(kind, 0).to", "(tl.maximum(kind, 0) + 1).to")],
    ),
}


def _verdicts(target, cases):
    (kernel,) = load(target)
    backend = CpuBackend(seconds=60)
    return [
        verify(Case.parse(case), kernel, Setup(config=config), backend).verdict
        for config, case in enumerate(cases)
    ]


@pytest.mark.parametrize("name", ["flash", "flash_atomic"])
@pytest.mark.parametrize("cases", [DOCUMENTS, BLOCKS], ids=["documents", "blocks"])
def test_the_kernels_pass(name, cases):
    assert _verdicts(f"{KERNELS / 'flash_attention.py'}:{name}", cases) == ["pass"] * len(cases)


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_fails(defect, tmp_path):
    cases, patches = DEFECTS[defect]
    folder = tmp_path / "kernels"
    shutil.copytree(KERNELS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, old, new in patches:
        file = folder / name
        text = file.read_text(encoding="utf-8")
        assert old in text
        file.write_text(text.replace(old, new), encoding="utf-8")
    assert "fail" in _verdicts(f"{folder / 'flash_attention.py'}:flash", cases)
