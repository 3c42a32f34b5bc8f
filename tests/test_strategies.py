import collections
import dataclasses
import pathlib
import random
import statistics
import subprocess
import sys
import time

import pytest
from hypothesis import find, given, seed, settings

from fa_verify import distribution
from fa_verify.aspects import pairs
from fa_verify.capabilities import Capabilities
from fa_verify.case import Case, Values
from fa_verify.distribution import Space, sample, tables
from fa_verify.distribution.corners import CORNERS
from fa_verify.distribution.scales import SCALE_CORNERS
from fa_verify.distribution.terms import TERM_CORNERS
from fa_verify.errors import InvalidInputError
from fa_verify.layouts import BHSD
from fa_verify.strategies import cases, problems, shrink
from fa_verify.values import DO_FAMILIES, QK_FAMILIES, V_FAMILIES

LARGE = 1024 * 1024
NARROW = {
    "tutorial": Capabilities(
        dtypes=("float16",),
        head_dims=(64, 128),
        alignments=("top-left",),
        gqa=False,
        layouts=False,
        empty=False,
        accepts=lambda p: "seqlen_q != seqlen_k" if p.seqlen_q != p.seqlen_k else None,
    ),
    "no mask, no gradients": Capabilities(alignments=(), backward=False),
    "float32 only": Capabilities(dtypes=("float32",), dot_precisions=("tf32", "tf32x3")),
    "windows and caps": Capabilities(window=True, softcap=True, alignments=("bottom-right",)),
    "multiples of 8": Capabilities(head_dims=range(8, 257, 8), head_dims_v=range(8, 129, 8)),
}


def _yielded(strategy, count, start=0):
    drawn = []

    @seed(start)
    @settings(max_examples=count, database=None, deadline=None)
    @given(strategy)
    def collect(case):
        drawn.append(case)

    collect()
    return drawn


@pytest.fixture(scope="module", params=["draw", "one @given", "ten @given"])
def drawn(request):
    """Two thousand cases, however they are asked for."""
    if request.param == "draw":
        return distribution.draw(0, 2000)
    if request.param == "one @given":
        return _yielded(cases(), 2000)
    return [case for start in range(10) for case in _yielded(cases(), 200, start)]


def test_where_compiling_is_dear_cases_are_of_few_forms():
    """Reduced ones apart; without forms nearly each is of its own."""
    seeds = distribution.forms(5, 3, dtype="float16")

    def kind(case):
        p = case.problem
        orders = p.layout_q.order, p.layout_k.order, p.layout_v.order
        return p.dtype, p.head_dim, p.head_dim_v, bool(p.softcap), p.bias, p.alibi, p.sinks, orders

    of_forms, usual = (
        collections.Counter(map(kind, _yielded(cases(dtype="float16", forms=forms), 400)))
        for forms in (seeds, ())
    )
    assert sum(count for _, count in of_forms.most_common(3)) > 350
    assert len(usual) > 100


def _share(drawn, predicate):
    return sum(map(predicate, drawn)) / len(drawn)


def _area(case):
    return case.problem.seqlen_q * case.problem.seqlen_k


def test_half_of_the_cases_are_at_least_128_by_128(drawn):
    assert statistics.median(map(_area, drawn)) >= 128 * 128


def test_one_case_in_ten_is_at_least_1024_by_1024(drawn):
    assert _share(drawn, lambda c: _area(c) >= LARGE) >= 0.1


def test_the_median_head_dim_is_80(drawn):
    assert statistics.median(c.problem.head_dim for c in drawn) == 80
    for head_dim, least in ((80, 0.15), (96, 0.08), (64, 0.05), (128, 0.03)):
        assert _share(drawn, lambda c, d=head_dim: c.problem.head_dim == d) >= least
    assert len({c.problem.head_dim for c in drawn}) > 20


def test_half_of_the_cases_have_a_backward_pass(drawn):
    assert 0.5 <= _share(drawn, lambda c: c.backward) <= 0.7


def test_dtypes_come_in_their_shares(drawn):
    shares = collections.Counter(c.problem.dtype for c in drawn)
    for dtype, share in (("float16", 0.4), ("bfloat16", 0.4), ("float32", 0.2)):
        assert abs(shares[dtype] / len(drawn) - share) < 0.08
    precisions = {c.problem.dot_precision for c in drawn if c.problem.dtype == "float32"}
    assert precisions == {"ieee", "tf32", "tf32x3"}


def test_every_family_is_seen(drawn):
    for name, families in (("qk", QK_FAMILIES), ("v", V_FAMILIES), ("do", DO_FAMILIES)):
        seen = collections.Counter(getattr(c.values, name) for c in drawn)
        for family in families:
            assert seen[family] >= 0.01 * len(drawn), (name, family)


def test_coincidences_are_the_exception(drawn):
    p = [c.problem for c in drawn]
    assert _share(p, lambda x: x.seqlen_q != x.seqlen_k) > 0.75
    assert _share(p, lambda x: x.batch != x.heads_q) > 0.75
    assert _share(p, lambda x: x.layout_k != x.layout_v) > 0.8
    assert _share(p, lambda x: x.heads_kv != x.group) > 0.55
    assert 0.1 < _share(p, lambda x: x.head_dim != x.head_dim_v) < 0.4


def test_the_aligned_case_is_seen_too(drawn):
    aligned = _share(
        drawn,
        lambda c: (
            _area(c) > 0
            and c.problem.seqlen_q == c.problem.seqlen_k
            and c.problem.seqlen_q % 128 == 0
        ),
    )
    assert 0.03 < aligned < 0.2


def test_edges_are_seen(drawn):
    p = [c.problem for c in drawn]
    for length in (0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129):
        assert any(length in (x.seqlen_q, x.seqlen_k) for x in p), length
    assert _share(drawn, lambda c: _area(c) == 0) > 0.01
    assert _share(p, lambda x: x.softcap > 0) == pytest.approx(0.14, abs=0.05)
    assert _share(p, lambda x: x.softmax_scale is None) > 0.7
    assert any((x.softmax_scale or 0) < 0 for x in p)
    assert any(x.softmax_scale == 0 for x in p)
    assert _share(p, lambda x: x.group > 1) > 0.25
    assert {c.values.logits for c in drawn} >= {1.0, 2.0, 4.0, 10.0, 30.0, 100.0}


def test_masks_of_every_kind_are_seen(drawn):
    kinds = collections.Counter(
        (m.causal, m.window_left is not None, m.window_right is not None, m.alignment)
        for m in (c.problem.mask for c in drawn)
    )
    assert set(kinds) >= {kind for kind, _ in tables.MASKS}
    fully_masked = _share(
        drawn,
        lambda c: (
            c.problem.mask.causal
            and c.problem.mask.alignment == "bottom-right"
            and c.problem.seqlen_q > c.problem.seqlen_k
        ),
    )
    assert fully_masked > 0.05


def test_layouts_of_every_kind_are_seen(drawn):
    for name in ("layout_q", "layout_k", "layout_v", "layout_do"):
        layouts = [getattr(c.problem, name) for c in drawn]
        assert {"bhsd", "bshd", "bhds", "sbhd", "hbsd", "dbhs"} >= {x.order for x in layouts}
        assert {"bhsd", "bshd", "bhds", "sbhd"} <= {x.order for x in layouts}
        assert any(x.shared_heads for x in layouts)
        assert any(x.offset for x in layouts)
        for axis in range(4):
            assert any(x.pad[axis] for x in layouts), (name, axis)


def test_no_case_costs_more_than_the_limit_and_half_cost_far_less(drawn):
    costs = [distribution.work(c.problem) for c in drawn]
    assert max(costs) <= distribution.MAX_WORK
    assert statistics.median(costs) < distribution.MAX_WORK / 10


def test_cases_do_not_repeat(drawn):
    assert len(set(drawn)) > 0.99 * len(drawn)


def test_a_hundred_cases_hold_every_class_of_shape():
    for start in range(5):
        assert _share(distribution.draw(start, 100), lambda c: _area(c) >= LARGE) >= 0.1


def test_drawing_is_cheap():
    start = time.process_time()
    distribution.draw(0, 300)
    assert (time.process_time() - start) / 300 < 3e-3


def test_a_longer_draw_begins_with_the_shorter_one():
    assert distribution.draw(3, 20)[:7] == distribution.draw(3, 7)
    assert distribution.draw(3, 7) != distribution.draw(4, 7)


def test_a_draw_does_not_change_between_versions():
    # Campaigns are compared by seed: a new table is a new distribution and is said in CHANGELOG.
    assert [str(case) for case in distribution.draw(0, 3)[1:]] == FROZEN


FROZEN = [
    (
        "pass=bwd h=2/1 s=145x40 d=16/1 dtype=float32 dot=tf32 mask=causal cap=15.0"
        " do=bshd.s2 qk.values=row-shift-far v.values=ones seed=2348642705"
    ),
    (
        "pass=bwd b=2 s=919x919 d=48 dtype=float16 mask=causal k=bhsd.b1.h3 v=bhsd.s8"
        " do=bhsd.shared v.values=ones do.values=small seed=1232279811"
    ),
]


@pytest.mark.parametrize("name", NARROW)
def test_capabilities_are_respected(name):
    c = NARROW[name]
    for case in (*distribution.draw(1, 200, c), *_yielded(cases(c), 100)):
        assert c.reason_against(case.problem) is None
        assert c.backward or not case.backward
    for problem in _yielded(problems(c), 50):
        assert c.reason_against(problem) is None


@pytest.mark.parametrize("backward", [True, False])
def test_the_caller_chooses_pass_dtype_and_size(backward):
    wishes = {"backward": backward, "dtype": "bfloat16", "max_elements": 5000}
    for case in (*distribution.draw(1, 200, **wishes), *_yielded(cases(**wishes), 100)):
        p = case.problem
        assert case.backward == backward
        assert p.dtype == "bfloat16"
        assert p.batch * p.heads_q * p.seqlen_q * p.seqlen_k <= 5000


@pytest.mark.parametrize(
    ("capabilities", "wishes", "said"),
    [
        (Capabilities(backward=False), {"backward": True}, "backward=True"),
        (Capabilities(dtypes=("float16",)), {"dtype": "float32"}, "dtype"),
        (Capabilities(head_dims=()), {}, "head_dims"),
        (Capabilities(accepts=lambda _: "never"), {}, "never"),
        (None, {"max_elements": 0}, "max_elements=0"),
    ],
)
def test_an_impossible_wish_is_misuse(capabilities, wishes, said):
    with pytest.raises(InvalidInputError, match=said):
        distribution.draw(0, 1, capabilities, **wishes)


PREDICATES = [
    (lambda p: p.seqlen_k % 64 != 0 and p.head_dim > 64, "s=1x1 d=65/1"),
    (lambda p: p.mask.causal and p.seqlen_q > p.seqlen_k > 0, "s=2x1 d=1 mask=causal"),
    (lambda p: p.seqlen_q > 300, "s=301x1 d=1"),
    (lambda p: p.seqlen_q == p.seqlen_k > 20, "s=21x21 d=1"),
    (lambda p: p.seqlen_k > 70 and p.group > 1, "h=2/1 s=1x71 d=1"),
    (lambda p: (p.mask.window_left or 0) >= 3 < p.seqlen_k, "s=1x4 d=1 mask=l3"),
]


@pytest.mark.parametrize(("predicate", "minimum"), PREDICATES)
def test_shrinking_reaches_the_minimum_in_few_executions(predicate, minimum):
    failing = [c for c in distribution.draw(2, 300) if predicate(c.problem)][:12]
    assert len(failing) > 3
    for case in failing:
        calls = []

        def fails(tried, calls=calls):
            calls.append(tried)
            return predicate(tried.problem)

        small = shrink(case, fails)
        if 0 in (case.problem.seqlen_q, case.problem.seqlen_k):
            continue  # an empty sequence stays empty
        text = str(small).replace(f" dtype={case.problem.dtype}", "")
        assert (
            text
            == f"pass=fwd {minimum.split(' mask')[0]}"
            + "".join(f" mask={part}" for part in minimum.split(" mask=")[1:])
            + " seed=0"
        )
        assert len(calls) < 100
        assert len(calls) == len(set(calls))


def _dimensions(case):
    p = case.problem
    heads = (p.batch, p.heads_q, p.heads_kv)
    return (*heads, p.seqlen_q, p.seqlen_k, p.head_dim, p.head_dim_v)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_a_shrunken_case_still_fails_and_grows_nowhere(case):
    def fails(tried):
        return (tried.problem.seqlen_q * 7 + tried.problem.head_dim + tried.seed) % 3 == 0

    tried = []
    small = shrink(case, lambda c: tried.append(c) or fails(c))
    assert small == case or fails(small)
    for one in (*tried, small):
        assert all(new <= old for new, old in zip(_dimensions(one), _dimensions(case), strict=True))
        assert one.problem.dtype == case.problem.dtype
        assert one.backward <= case.backward


def test_shrinking_keeps_to_the_capabilities():
    c = NARROW["tutorial"]
    (case,) = distribution.draw(0, 1, c)
    tried = []
    small = shrink(case, lambda x: tried.append(x) or True, capabilities=c)
    assert all(c.reason_against(x.problem) is None for x in tried)
    assert (small.problem.seqlen_q, small.problem.seqlen_k, small.problem.head_dim) == (1, 1, 64)


def test_shrinking_stops_in_time():
    case = distribution.draw(0, 1)[0]
    assert shrink(case, lambda _: pytest.fail("no time is left"), max_seconds=0) == case
    calls = []
    shrink(case, lambda c: calls.append(c) or len(calls) % 2 == 0, max_executions=5)
    assert len(calls) == 5


def test_shrinking_what_never_fails_again_returns_the_case():
    case = distribution.draw(0, 1)[0]
    assert shrink(case, lambda _: False) == case


def test_hypothesis_shrinks_to_a_minimal_case():
    quiet = settings(max_examples=2000, database=None)
    smallest = find(cases(), lambda _: True, settings=quiet)
    assert smallest == Case.parse("pass=fwd s=1x1 d=1 dtype=float16 seed=0")
    found = find(
        cases(), lambda c: c.problem.mask.causal and c.problem.seqlen_q > c.problem.seqlen_k,
        settings=quiet,
    )  # fmt: skip
    assert _area(found) <= 64
    assert found.values == smallest.values
    assert found.problem.layout_q == smallest.problem.layout_q


NO_TABLES = ("T", "MAX_WORK")
TABLES = [name for name in vars(tables) if name.isupper() and name not in NO_TABLES]


def _stated(name):
    """The rows of a table of the code as docs/distribution.md states them."""
    table = getattr(tables, name)
    if not isinstance(table, tuple):
        return [f"{name}: {', '.join(sorted(table)) if isinstance(table, frozenset) else table}"]
    return [f"| {_text(value)} | {weight} |" for value, weight in table]


def _text(value):
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize("name", TABLES)
def test_the_document_states_every_weight(name):
    document = pathlib.Path(__file__).parents[1] / "docs" / "distribution.md"
    assert "\n".join(_stated(name)) in document.read_text(encoding="utf-8")


def test_the_document_states_every_corner():
    document = pathlib.Path(__file__).parents[1] / "docs" / "distribution.md"
    for corners in (CORNERS, TERM_CORNERS, SCALE_CORNERS):
        stated = "\n".join(f"| {corner.name} | {corner} |" for corner in corners)
        assert stated in document.read_text(encoding="utf-8")


def in_corner(case, corner):
    """Whether a case is what the corner's name says, told apart from how it was drawn."""
    p = case.problem
    lo, hi = p.mask.intervals(p.seqlen_q, p.seqlen_k)
    far = [max(getattr(p, f"layout_{name}").pad) >= 1 << 20 for name in ("q", "k", "v")]
    seen = (hi - lo).clip(0)
    bands = (p.mask.window_left, p.mask.window_right) != (None, None)
    return {
        "rows that see no key": lambda: seen.min() == 0,
        "several key heads, each with a group": lambda: p.group > 1 and case.backward,
        "offsets past 2^31 by sequence": lambda: all(far),
        "offsets past 2^31 by head": lambda: all(far),
        "offsets past 2^31 by row": lambda: (
            all(far) and all(n % 16 == 1 or n == 64 for n in (p.seqlen_q, p.seqlen_k))
        ),
        "offsets past 2^31 by column": lambda: (
            all(far) and (p.head_dim < 3 or p.layout_q.order[0] == "d")
        ),
        "a window that hides a key or two": lambda: bands and seen.min() < p.seqlen_k,
        "sums in many parts, of several sequences": lambda: p.batch > 1 and hi.max() == p.seqlen_k,
        "the largest head dims": lambda: p.head_dim == 256 and case.backward and p.batch > 1,
        "keys that 16 bits cannot count": lambda: hi.max() > 1 << 15,
        "thousands of keys, all of them seen": lambda: hi.max() == p.seqlen_k,
        "a saturated softcap": lambda: 0 < p.softcap <= 5 and case.values.logits >= 30,
        "a negative scale": lambda: p.scale < 0,
        "a window's ends beside a block": lambda: bands,
        "a million logits a head": lambda: _area(case) >= LARGE,
        "no query, or no key": lambda: 0 in (p.seqlen_q, p.seqlen_k),
        "more heads than an axis of a grid counts": lambda: p.batch * p.heads_q > 65_535,
        "more than sixteen heads a group": lambda: p.group > 16 and case.backward,
        "a window of whole blocks": lambda: (
            (p.mask.window_left or 0) % 64 == 0 and (p.seqlen_k - p.seqlen_q) % 64 == 0
        ),
    }.get(corner.name, lambda: True)()


@pytest.mark.parametrize("start", range(4))
def test_every_second_of_the_first_cases_lies_in_a_corner(start):
    drawn = distribution.draw(start, 2 * len(CORNERS))
    for corner, case in zip(CORNERS, drawn[1::2], strict=True):
        assert in_corner(case, corner), (corner.name, str(case))


@pytest.mark.parametrize(
    ("name", "rests"),
    [("one key after a block's end", {1}), ("one key before a block's end", {2, 14, 15})],
)
def test_lengths_that_differ_by_nearly_a_multiple_of_a_block(name, rests):
    index = [corner.name for corner in CORNERS].index(name)
    cases = [distribution.draw(start, 2 * index + 2)[-1].problem for start in range(12)]
    assert _share(cases, lambda p: (p.seqlen_k - p.seqlen_q) % 16 in rests) > 0.7


def test_decoding_has_one_query():
    cases = [c.problem for c in distribution.draw(0, 2000)]
    one = [p for p in cases if p.seqlen_q == 1 and 64 <= p.seqlen_k <= 4096]
    assert _share(cases, one.__contains__) > 0.02
    assert any(p.mask.alignment == "top-left" and p.mask.causal for p in one)


def test_there_are_many_heads_of_each_kind():
    cases = [c.problem for c in distribution.draw(0, 400)]
    assert max(p.heads_kv for p in cases) > 8
    assert max(p.group for p in cases) > 16


def test_a_kernel_that_has_no_such_corner_is_not_asked():
    narrow = NARROW["tutorial"]
    assert all(c.problem.seqlen_q == c.problem.seqlen_k for c in distribution.draw(0, 40, narrow))
    formed = distribution.draw(0, 40, forms=[7])
    assert len({c.problem.head_dim for c in formed}) == 1
    assert any(c.problem.seqlen_k > 1 << 15 for c in distribution.draw(0, 40))


def test_the_first_cases_join_most_pairs_of_aspects():
    def joined(cases):
        return len(frozenset().union(*map(pairs, cases)))

    first = joined(distribution.draw(5, 32))
    later = joined(distribution.draw(5, 64)[32:])
    assert first > later


def test_strategies_load_neither_torch_nor_triton():
    code = (
        "import sys, fa_verify.strategies, fa_verify.distribution;"
        "sys.exit(any(name.split('.')[0] in ('torch', 'triton') for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == 0


def test_shrink_keeps_the_difference_of_the_lengths_that_a_failure_needs():
    case = Case.parse("pass=fwd s=284x268 d=80 dtype=float16 mask=causal seed=1")

    def fails(case):
        return case.problem.mask.causal and case.problem.seqlen_q - case.problem.seqlen_k >= 16

    small = shrink(case, fails).problem
    assert (small.seqlen_q, small.seqlen_k, small.head_dim) == (17, 1, 1)


AXES = ("bhqk", "hqk", "qk", "k", "h")
ALL_TERMS = Capabilities(bias=AXES, alibi=True, sinks=True, dropout=True, lse_grad=True)


def _bare(case):
    """The case without its terms."""
    bare = {"bias": "", "alibi": False, "sinks": False, "dropout": 0.0, "lse_grad": False}
    problem = dataclasses.replace(case.problem, **bare, layout_bias=BHSD)
    kept = {name: getattr(case.values, name) for name in ("qk", "v", "do", "logits")}
    return dataclasses.replace(case, problem=problem, values=Values(**kept))


def test_terms_are_drawn_where_they_are_declared_and_change_nothing_else():
    without = distribution.draw(3, 400, Capabilities())
    assert not any(case.problem.terms for case in without)
    # Corners of terms come in between, so that only what is drawn by itself can be compared.
    pair = (Capabilities(), ALL_TERMS)
    for start in range(200):
        same = (random.Random(start) for _ in range(2))  # noqa: S311
        plain, termed = (sample(rng, Space.of(c)) for rng, c in zip(same, pair, strict=True))
        assert _bare(termed) == plain


def test_a_third_of_the_cases_has_each_term():
    cases = distribution.draw(4, 1500, ALL_TERMS)[60:]
    for name in ("bias", "alibi", "sinks", "dropout"):
        assert 0.28 < _share(cases, lambda c, name=name: name in c.problem.terms) < 0.39, name
    backward = [case for case in cases if case.backward]
    assert 0.28 < _share(backward, lambda c: c.problem.lse_grad) < 0.39
    assert not any(case.problem.lse_grad for case in cases if not case.backward)
    assert {case.problem.bias for case in cases} == {"", *AXES}
    one = distribution.draw(4, 600, Capabilities(sinks=True))[60:]
    assert 0.28 < _share(one, lambda c: c.problem.sinks) < 0.39
    assert all(ALL_TERMS.reason_against(case.problem) is None for case in cases)


def _last(case, axis):
    """How far the last element of a bias along an axis is from the first."""
    p = case.problem
    return (p.shape_bias[axis] - 1) * p.layout_bias.strides(p.shape_bias)[axis]


def test_every_corner_of_terms_is_visited():
    count = 2 * (len(CORNERS) + len(TERM_CORNERS))
    every = dataclasses.replace(ALL_TERMS, window=True, softcap=True)
    drawn = distribution.draw(9, count, every)[1::2][len(CORNERS) :]
    has = {
        "a bias that hides keys": lambda c: c.values.bias == "hides",
        "a bias that many rows share": lambda c: c.problem.bias in ("k", "h", "qk") and c.backward,
        "slopes of either sign, along a shifted diagonal": lambda c: (
            c.values.slopes == "signed" and c.problem.seqlen_q != c.problem.seqlen_k
        ),
        "rows that see no key but have a sink": lambda c: (
            c.problem.sinks and c.problem.seqlen_q > c.problem.seqlen_k
        ),
        "sinks of some heads only": lambda c: c.values.sinks == "off" and c.problem.heads_q > 1,
        "a bias past 2^31 by query": lambda c: _last(c, 2) >= 1 << 31 and _last(c, 3) < 1 << 31,
        "a bias past 2^31 by key": lambda c: _last(c, 3) >= 1 << 31,
        "dropout of nearly all": lambda c: c.problem.dropout == 0.9,
        "all terms at once": lambda c: len(c.problem.terms) == 5,
    }
    for corner, case in zip(TERM_CORNERS, drawn, strict=True):
        assert has[corner.name](case), (corner.name, str(case))


def test_shrinking_drops_terms_first():
    case = next(c for c in distribution.draw(2, 300, ALL_TERMS) if len(c.problem.terms) > 3)
    tried = []

    def fails(case):
        tried.append(case)
        return case.problem.alibi

    small = shrink(case, fails, capabilities=ALL_TERMS)
    assert small.problem.terms == ("alibi",)
    assert small.values == Values()
    seen = []
    shrink(case, lambda c: seen.append(c) or True, capabilities=ALL_TERMS)
    assert any(not c.problem.terms for c in seen)
