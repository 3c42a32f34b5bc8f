import math

import pytest

from fa_verify.errors import InvalidInputError
from fa_verify.masks import Mask
from fa_verify.problem import Problem

FIELDS = {"seqlen_q": 3, "seqlen_k": 5, "head_dim": 8, "head_dim_v": 16}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch", 0),
        ("heads_q", 0),
        ("heads_kv", 0),
        ("seqlen_q", -1),
        ("seqlen_k", -1),
        ("head_dim", 0),
        ("head_dim", 257),
        ("head_dim_v", 0),
        ("head_dim_v", 257),
        ("dtype", "float64"),
        ("dot_precision", "bf16x3"),
        ("dot_precision", "tf32"),
        ("softmax_scale", math.inf),
        ("softmax_scale", math.nan),
        ("softcap", -1.0),
        ("softcap", math.inf),
    ],
)
def test_a_field_that_breaks_its_rule_is_named_with_its_value(field, value):
    with pytest.raises(InvalidInputError) as error:
        Problem(**{**FIELDS, field: value})
    assert str(error.value).startswith(f"{field}={value!r}")


def test_query_heads_are_whole_groups():
    with pytest.raises(InvalidInputError, match="heads_q=4"):
        Problem(**FIELDS, heads_q=4, heads_kv=3)
    assert Problem(**FIELDS, heads_q=6, heads_kv=2).group == 3


def test_documents_are_one_sequence_and_add_up_to_it():
    assert Problem(**FIELDS, mask=Mask(documents=((1, 5), (2, 0)))).mask.documents
    with pytest.raises(InvalidInputError, match="batch=2"):
        Problem(**FIELDS, batch=2, mask=Mask(documents=((1, 5), (2, 0))))
    with pytest.raises(InvalidInputError, match="seqlen_k=5"):
        Problem(**FIELDS, mask=Mask(documents=((1, 5), (2, 1))))


def test_a_resized_problem_keeps_its_documents_in_step():
    problem = Problem(**FIELDS, mask=Mask(documents=((1, 4), (2, 1)))).resized(2, 9)
    assert (problem.seqlen_q, problem.seqlen_k) == (2, 9)
    assert problem.mask.documents == ((1, 4), (1, 5))


def test_empty_sequences_are_legal():
    problem = Problem(**{**FIELDS, "seqlen_q": 0, "seqlen_k": 0})
    assert problem.shape_o == (1, 1, 0, 16)


def test_the_scale_defaults_to_one_over_the_root_of_head_dim():
    assert Problem(**FIELDS).scale == 1 / math.sqrt(8)
    assert Problem(**FIELDS, softmax_scale=0.0).scale == 0.0
    assert Problem(**FIELDS, softmax_scale=-2.5).scale == -2.5


def test_shapes_follow_from_the_fields():
    problem = Problem(**FIELDS, batch=2, heads_q=6, heads_kv=3)
    assert problem.shape_q == (2, 6, 3, 8)
    assert problem.shape_k == (2, 3, 5, 8)
    assert problem.shape_v == (2, 3, 5, 16)
    assert problem.shape_o == (2, 6, 3, 16)
    assert problem.shape_lse == (2, 6, 3)


def test_float32_alone_has_a_choice_of_dots():
    for precision in ("ieee", "tf32", "tf32x3"):
        assert Problem(**FIELDS, dtype="float32", dot_precision=precision)


def test_problems_are_values():
    assert Problem(**FIELDS) == Problem(**FIELDS)
    assert len({Problem(**FIELDS), Problem(**FIELDS), Problem(**FIELDS, batch=2)}) == 2
    with pytest.raises(AttributeError):
        Problem(**FIELDS).batch = 3
