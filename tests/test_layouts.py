import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_verify.errors import InvalidInputError
from fa_verify.layouts import BHSD, BSHD, Layout

PADS = st.tuples(*[st.integers(0, 9)] * 4)
LAYOUTS = st.builds(
    Layout,
    order=st.permutations("bhsd").map("".join),
    pad=PADS,
    shared_heads=st.booleans(),
    offset=st.integers(0, 9),
)
SHAPES = st.tuples(*[st.integers(0, 4)] * 4)


def _places(layout, shape):
    strides = layout.strides(shape)
    grid = np.indices(shape).reshape(4, -1)
    return (np.array(strides) @ grid).tolist()


@given(LAYOUTS)
def test_a_text_reads_back_as_the_layout(layout):
    assert Layout.parse(str(layout)) == layout


@given(LAYOUTS, SHAPES)
def test_no_two_elements_share_a_place_unless_heads_do(layout, shape):
    places = _places(layout, shape)
    heads = shape[1] if layout.shared_heads else 1
    assert len(set(places)) * heads == len(places)


@given(LAYOUTS, SHAPES)
def test_the_span_reaches_the_last_element_and_no_further(layout, shape):
    assert layout.span(shape) == max(_places(layout, shape), default=-1) + 1


@given(LAYOUTS, SHAPES)
def test_shared_heads_have_stride_zero_and_no_other_axis_does(layout, shape):
    b, h, s, d = layout.strides(shape)
    assert (h == 0) == layout.shared_heads
    assert min(b, s, d) > 0


def test_plain_layouts_are_contiguous():
    shape = (2, 3, 5, 16)
    assert BHSD.strides(shape) == (240, 80, 16, 1)
    assert BSHD.strides(shape) == (240, 16, 48, 1)
    assert BHSD.span(shape) == BSHD.span(shape) == 480


def test_every_order_is_legal():
    for order in itertools.permutations("bhsd"):
        layout = Layout(order="".join(order))
        assert layout.strides((2, 3, 5, 7))["bhsd".index(order[3])] == 1


def test_a_packed_buffer_interleaves_q_k_and_v():
    heads, head_dim = 3, 16
    parts = [
        Layout(order="bshd", pad=(0, 0, 2 * heads * head_dim, 0), offset=i * heads * head_dim)
        for i in range(3)
    ]
    shape = (2, heads, 5, head_dim)
    places = [place + p.offset for p in parts for place in _places(p, shape)]
    assert sorted(places) == list(range(3 * 2 * heads * 5 * head_dim))


@pytest.mark.parametrize(
    "text", ["", "bhs", "bhsdd", "bhsd.", "bhsd.x3", "bhsd.s", "bhsd.s-1", "bhsd.at", "bhsd.at1.s2"]
)
def test_malformed_texts_are_misuse(text):
    with pytest.raises(InvalidInputError, match="layout="):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"order": "bhss"}, "order='bhss'"),
        ({"pad": (0, 0, -1, 0)}, "pad="),
        ({"pad": (0, 0, 0)}, "pad="),
        ({"offset": -1}, "offset=-1"),
    ],
)
def test_layouts_of_no_tensor_are_refused(fields, said):
    with pytest.raises(InvalidInputError, match=said):
        Layout(**fields)


@pytest.mark.parametrize("text", ["bbhs", "bhsd.s3.s4"])
def test_repeated_parts_are_misuse(text):
    with pytest.raises(InvalidInputError):
        Layout.parse(text)
