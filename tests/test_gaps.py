"""Documents and patterns are drawn for kernels that declare them, and shrink; no others change."""

import pathlib

import pytest
from hypothesis import find, settings

from fa_verify import distribution
from fa_verify.aspects import aspects
from fa_verify.capabilities import Capabilities
from fa_verify.case import Case
from fa_verify.distribution.gaps import GAP_CORNERS
from fa_verify.masks import Mask
from fa_verify.patterns import NAMES
from fa_verify.strategies import cases, shrink

PLAIN = Capabilities(window=True, softcap=True)
TAKES = Capabilities(window=True, softcap=True, documents=True, patterns=NAMES)


@pytest.fixture(scope="module")
def drawn():
    return distribution.draw(3, 1500, TAKES)


def _share(drawn, predicate):
    return sum(map(predicate, drawn)) / len(drawn)


def test_documents_and_patterns_come_in_their_shares(drawn):
    assert 0.15 < _share(drawn, lambda c: bool(c.problem.mask.documents)) < 0.25
    assert 0.07 < _share(drawn, lambda c: bool(c.problem.mask.pattern)) < 0.15
    assert any(c.problem.mask.documents and c.problem.mask.pattern for c in drawn)
    assert {c.problem.mask.pattern.partition(":")[0] for c in drawn} == {"", *NAMES}


@pytest.mark.parametrize(
    "trait",
    [
        lambda d: len(d) == 1,
        lambda d: len(d) > 100,
        lambda d: len(d) > 1 and 0 in d[0],
        lambda d: len(d) > 1 and 0 in d[-1],
        lambda d: any(0 in lengths for lengths in d[1:-1]),
        lambda d: (0, 0) in d,
        lambda d: len(d) > 3 and len(set(d)) == 2,
        lambda d: sum(q == 1 < k for q, k in d) > 2,
        lambda d: any(q % 64 in (1, 63) and k % 64 in (1, 63) for q, k in d),
        lambda d: len(d) > 1 and all(q == k > 0 for q, k in d[:-1]),
    ],
)
def test_documents_of_every_kind_are_seen(drawn, trait):
    packed = [c.problem.mask.documents for c in drawn if c.problem.mask.documents]
    assert sum(map(trait, packed)) >= 2


def test_documents_fill_any_lengths():
    short = Capabilities(documents=True, accepts=lambda p: "long" if p.seqlen_q > 2 else None)
    drawn = distribution.draw(0, 400, short)
    assert any(c.problem.mask.documents and c.problem.seqlen_q == 0 for c in drawn)


def test_what_other_kernels_are_given_stays(drawn):
    plain = distribution.draw(3, 300, PLAIN)
    assert not any(c.problem.mask.documents or c.problem.mask.pattern for c in plain)
    without = Capabilities(window=True, softcap=True, documents=False, patterns=())
    assert plain == distribution.draw(3, 300, without)
    later = [(a, b) for a, b in zip(plain, drawn, strict=False) if a == b]
    assert all(not (b.problem.mask.documents or b.problem.mask.pattern) for _, b in later)


def test_only_what_is_declared_is_drawn():
    packed = distribution.draw(0, 200, Capabilities(documents=True, gqa=False))
    assert any(c.problem.mask.documents for c in packed)
    assert not any(c.problem.mask.pattern for c in packed)
    sparse = distribution.draw(0, 400, Capabilities(patterns=("prefix",)))
    assert {c.problem.mask.pattern.partition(":")[0] for c in sparse} == {"", "prefix"}
    assert not any(c.problem.mask.documents for c in sparse)


def in_corner(case, corner):
    """Whether a case is what the corner's name says."""
    documents, pattern = case.problem.mask.documents, case.problem.mask.pattern
    return {
        "documents with a diagonal each": lambda: case.problem.mask.causal and len(documents) > 1,
        "empty documents, first and last": lambda: 0 in documents[0],
        "documents of one query and many keys": lambda: documents[0][0] == 1 or 0 in documents[0],
        "one document": lambda: len(documents) == 1,
        "documents of the same lengths": lambda: len(documents) < 3 or documents[0] == documents[1],
        "blocks of a mask, some rows of them hidden": lambda: pattern.startswith("block-sparse"),
        "elements of a mask here and there": lambda: pattern[:4] in ("pred", "scat"),
    }.get(corner.name, lambda: bool(documents))()


@pytest.mark.parametrize("start", range(4))
def test_corners_come_after_those_of_all_kernels(start):
    others = 2 * (sum(1 for _ in distribution.corners.CORNERS))
    drawn = distribution.draw(start, others + 2 * len(GAP_CORNERS), TAKES)[others + 1 :: 2]
    for corner, case in zip(GAP_CORNERS, drawn, strict=True):
        assert in_corner(case, corner), (corner.name, str(case))


def test_the_document_states_these_corners():
    document = pathlib.Path(__file__).parents[1] / "docs" / "distribution.md"
    stated = "\n".join(f"| {corner.name} | {corner} |" for corner in GAP_CORNERS)
    assert stated in document.read_text(encoding="utf-8")


def test_what_a_kernel_is_compiled_for_follows_the_form():
    drawn = distribution.draw(0, 60, TAKES, forms=list(range(5)))
    kinds = [(bool(c.problem.mask.documents), bool(c.problem.mask.pattern)) for c in drawn]
    assert all(len(set(kinds[form::5])) == 1 for form in range(5))


PACKED = Case.parse(
    "pass=bwd h=2/1 s=170x300 d=64 dtype=float16 "
    "mask=causal.docs20x100-0x40-80x0-30x30*2-10x100.pattern:prefix:9 seed=7"
)


@pytest.mark.parametrize(
    ("fails", "least"),
    [
        (lambda p: bool(p.mask.documents), ((1, 1),)),
        (lambda p: (0, 40) in p.mask.documents, ((0, 40),)),
        (lambda p: len(p.mask.documents) > 2, ((0, 0),) * 3),
        (lambda p: any(q == 0 < k for q, k in p.mask.documents), ((0, 1),)),
        (lambda p: any(q > 18 and k > 90 for q, k in p.mask.documents), ((19, 91),)),
        (
            lambda p: (
                any(q and not k for q, k in p.mask.documents) and p.mask.documents[-1] == (10, 100)
            ),
            ((1, 0), (10, 100)),
        ),
    ],
)
def test_shrinks_drop_documents_and_shorten_the_rest(fails, least):
    smallest = shrink(PACKED, lambda case: fails(case.problem), capabilities=TAKES)
    assert sorted(smallest.problem.mask.documents) <= sorted(least)
    assert not smallest.problem.mask.pattern
    assert not smallest.problem.mask.causal


def test_shrinking_keeps_a_pattern_that_a_failure_needs():
    smallest = shrink(PACKED, lambda case: "prefix" in case.problem.mask.pattern)
    assert smallest.problem.mask == Mask(pattern="prefix:9")


def test_hypothesis_finds_and_shrinks_documents():
    quiet = settings(database=None, deadline=None, max_examples=500)
    found = find(cases(TAKES), lambda c: len(c.problem.mask.documents) > 1, settings=quiet)
    assert len(found.problem.mask.documents) == 2
    assert found.problem.seqlen_q * found.problem.seqlen_k <= 4


def test_aspects_name_them():
    found = dict(aspects(PACKED))
    assert found["documents"] == "some empty"
    assert found["pattern"] == "prefix"
    assert found["mask"] == "causal, bottom-right"
    assert "documents" not in dict(aspects(Case.parse("pass=fwd s=3x3 d=8 dtype=float16 seed=0")))
