import numpy as np
import pytest

from fa_verify.case import Case
from fa_verify.inputs import elements
from fa_verify.values import DO_FAMILIES, QK_FAMILIES, V_FAMILIES, Facts, stream

SHAPES = [  # of q, k, v
    ((2, 6, 19, 16), (2, 2, 33, 16), (2, 2, 33, 24)),
    ((1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1)),
    ((1, 2, 0, 8), (1, 1, 5, 8), (1, 1, 5, 3)),
    ((3, 2, 5, 80), (3, 2, 0, 80), (3, 2, 0, 96)),
]
DTYPES = ["float16", "bfloat16", "float32"]


def _logits(family, *, seed=0, shape_q=(1, 2, 40, 80), shape_k=(1, 1, 200, 80), scale=80**-0.5):
    q, k = QK_FAMILIES[family](stream(seed, "qk"), shape_q, shape_k, Facts.of("float16", scale))
    return scale * q @ np.repeat(k, shape_q[1] // shape_k[1], axis=1).swapaxes(2, 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.1, -0.3, 0.0, 1e4])
@pytest.mark.parametrize("family", QK_FAMILIES)
def test_qk_families_are_finite_and_shaped(family, scale, dtype):
    for shape_q, shape_k, _ in SHAPES:
        q, k = QK_FAMILIES[family](stream(5, "qk"), shape_q, shape_k, Facts.of(dtype, scale))
        assert (q.shape, k.shape) == (shape_q, shape_k)
        assert q.dtype == k.dtype == np.float64
        assert np.isfinite(q).all()
        assert np.isfinite(k).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tensor", ["v", "do"])
def test_other_families_are_finite_and_in_range(tensor, dtype):
    facts = Facts.of(dtype, 0.1)
    for name, family in (V_FAMILIES if tensor == "v" else DO_FAMILIES).items():
        for _, _, shape in SHAPES:
            array = family(stream(5, tensor), shape, facts)
            assert array.shape == shape, name
            assert array.dtype == np.float64, name
            assert (np.abs(array) <= facts.largest).all(), name


@pytest.mark.parametrize("family", QK_FAMILIES)
def test_a_seed_gives_the_same_values_again_and_another_seed_others(family):
    shapes = SHAPES[0][:2]
    facts = Facts.of("float16", 0.25)
    q, k = QK_FAMILIES[family](stream(3, "qk"), *shapes, facts)
    again = QK_FAMILIES[family](stream(3, "qk"), *shapes, facts)
    assert np.array_equal(q, again[0])
    assert np.array_equal(k, again[1])
    if family not in ("constant", "zeros"):  # these have few values to choose from
        other = QK_FAMILIES[family](stream(4, "qk"), *shapes, facts)
        assert not (np.array_equal(q, other[0]) and np.array_equal(k, other[1]))


def test_values_do_not_change_between_versions():
    # A replay line must mean the same numbers in every release and on every machine.
    case = Case.parse("pass=bwd s=2x2 d=2 dtype=float16 qk.values=dominant-key seed=1")
    got = {name: array.round(6).ravel().tolist() for name, array in elements(case).items()}
    assert got == FROZEN


FROZEN = {
    "q": [-0.847735, 1.0, 0.467523, 1.0],
    "k": [0.068056, 28.284271, 0.513486, 0.0],
    "v": [2.48568, 1.105944, -1.255745, 0.469524],
    "do": [1.442386, -0.890114, 0.787195, 0.958538],
}


def test_shrinking_one_tensor_leaves_the_others_alone():
    wide = elements(Case.parse("pass=bwd s=5x7 d=8/16 dtype=float32 seed=2"))
    narrow = elements(Case.parse("pass=bwd s=5x7 d=8/4 dtype=float32 seed=2"))
    short = elements(Case.parse("pass=bwd s=3x7 d=8/16 dtype=float32 seed=2"))
    assert np.array_equal(wide["q"], narrow["q"])
    assert np.array_equal(wide["k"], narrow["k"])
    assert np.array_equal(wide["k"], short["k"])
    assert np.array_equal(wide["v"], short["v"])
    assert np.array_equal(wide["q"][:, :, :3], short["q"])


def test_extreme_seeds_have_streams():
    for seed in (0, 2**64 - 1, -1, 10**30):
        assert 0 <= stream(seed, "v").random() < 1


@pytest.mark.parametrize(("family", "shift"), [("row-shift", 120), ("row-shift-far", 1000)])
def test_row_shift_moves_whole_rows(family, shift):
    middle = np.median(_logits(family), axis=-1)
    assert np.allclose(np.abs(middle), shift, atol=2.0)
    assert (middle > 0).any()
    assert (middle < 0).any()


def test_equal_keys_give_equal_logits():
    for family in ("equal-keys", "constant"):
        assert np.ptp(_logits(family), axis=-1).max() < 1e-12


def test_near_ties_are_ties_but_for_the_last_place():
    logits = _logits("near-ties")
    assert 0 < np.ptp(logits, axis=-1).max() < 0.05


def test_one_hot_and_dominant_key_have_a_winner():
    for family, lead in (("one-hot", 10.0), ("dominant-key", 10.0)):
        logits = np.sort(_logits(family), axis=-1)
        assert (logits[..., -1] - logits[..., -2] > lead).mean() > 0.9, family


def test_negative_scales_keep_the_winner():
    logits = np.sort(_logits("dominant-key", scale=-0.2), axis=-1)
    assert (logits[..., -1] - logits[..., -2] > 5.0).all()


def test_subnormal_p_is_subnormal_in_float16():
    logits = _logits("subnormal-p")
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    assert ((p > 2.0**-26) & (p < 2.0**-14)).mean() > 0.7


def test_increasing_moves_the_maximum_and_decreasing_does_not():
    shape_k = (1, 1, 2048, 80)
    for family, sign in (("increasing", 1), ("decreasing", -1)):
        logits = sign * _logits(family, shape_k=shape_k)
        blocks = logits.reshape(*logits.shape[:3], -1, 64).max(axis=-1)
        assert (np.diff(blocks, axis=-1) > 0).mean() > 0.6, family
        assert (blocks[..., -1] - blocks[..., 0] > 20).all(), family


def test_duplicates_and_two_levels_repeat():
    for family, distinct in (("two-level", 2), ("duplicates", 8)):
        _, k = QK_FAMILIES[family](
            stream(1, "qk"), (1, 1, 3, 16), (1, 1, 300, 16), Facts.of("float16", 0.25)
        )
        assert len(np.unique(k[0, 0], axis=0)) == distinct


def test_near_max_does_not_overflow_the_dot_in_float32():
    for dtype in DTYPES:
        facts = Facts.of(dtype, 0.1)
        for seed in range(4):
            q, k = QK_FAMILIES["near-max"](
                stream(seed, "qk"), (1, 1, 64, 256), (1, 1, 64, 256), facts
            )
            assert max(np.abs(q).max(), np.abs(k).max()) == facts.top
            assert (np.abs(q) @ np.abs(k).swapaxes(2, 3)).max() < 2.0**127


def test_zero_mean_v_cancels_and_indicator_v_shows_each_key_once():
    facts = Facts.of("float16", 0.1)
    v = V_FAMILIES["zero-mean"](stream(0, "v"), (1, 2, 64, 5), facts)
    assert np.array_equal(v.sum(axis=2), np.zeros((1, 2, 5)))
    for seed in range(8):
        v = V_FAMILIES["indicator"](stream(seed, "v"), (1, 2, 64, 5), facts)
        assert np.array_equal(v.sum(axis=3), np.ones((1, 2, 64)))


def test_one_hot_row_do_has_one_row_a_head():
    do = DO_FAMILIES["one-hot-row"](stream(0, "do"), (2, 3, 17, 8), Facts.of("float16", 0.1))
    assert (np.any(do != 0, axis=3).sum(axis=2) == 1).all()


def test_every_family_says_what_it_sees():
    for families in (QK_FAMILIES, V_FAMILIES, DO_FAMILIES):
        for name, family in families.items():
            assert ":" in (family.__doc__ or ""), name
