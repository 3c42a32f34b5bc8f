"""What is given to the front in the wrong kind is refused by name; NumPy's numbers are taken."""

import numpy as np
import pytest
import torch

from fa_verify import ttir


@pytest.fixture(scope="module")
def front(kernels):
    return {
        "attention": kernels("attention").attention,
        "varlen": kernels("attention").attention_varlen,
        "fp8": kernels("attention_fp8").attention_fp8,
        "decode": kernels("decode_attention").decode_attention,
    }


def arguments(name):
    """Of a call that is right."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 8, 16, generator=generator) for _ in range(3))
    if name == "varlen":
        starts = torch.tensor([0, 3, 8], dtype=torch.int32)
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return {"q": q, "k": k, "v": v, "cu_seqlens_q": starts, "cu_seqlens_k": starts}
    if name == "fp8":
        scales = {f"{x}_descale": torch.ones(1, 1, 1) for x in "qkv"}
        q, k, v = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
        return {"q": q, "k": k, "v": v, **scales}
    return {"q": q, "k_cache" if name == "decode" else "k": k,
            "v_cache" if name == "decode" else "v": v}  # fmt: skip


FRONTS = ("attention", "varlen", "fp8", "decode")
TENSORS = [(name, one) for name in FRONTS for one in arguments(name)]
TENSORS += [("attention", "bias"), ("attention", "alibi_slopes"), ("attention", "sinks")]
TENSORS += [("decode", "block_table"), ("decode", "cache_seqlens"), ("decode", "sinks")]


@pytest.mark.parametrize(("name", "one"), TENSORS)
@pytest.mark.parametrize("wrong", [np.zeros((1, 2, 8, 16)), [[1.0]], 3.0, "q"], ids=type)
def test_what_is_no_tensor(front, name, one, wrong):
    with pytest.raises(ValueError, match=rf"^{one}: {type(wrong).__name__}: must be a tensor"):
        front[name](**arguments(name) | {one: wrong})


@pytest.mark.parametrize("name", FRONTS)
def test_what_is_no_dense_tensor(front, name):
    given = arguments(name)
    last = list(given)[2]
    with pytest.raises(ValueError, match=rf"^{last}: a sparse_coo tensor: .* x\.to_dense"):
        front[name](**given | {last: torch.zeros(1, 2, 8, 16).to_sparse()})
    nested = torch.nested.nested_tensor([torch.zeros(2, 3)], layout=torch.jagged)
    with pytest.raises(ValueError, match=r"^q: a nested tensor: .* attention_varlen"):
        front[name](**given | {"q": nested})


@pytest.mark.parametrize("name", FRONTS)
def test_none_in_the_place_of_a_tensor_that_must_be(front, name):
    for one in arguments(name):
        with pytest.raises(ValueError, match=f"^{one}: NoneType: must be a tensor"):
            front[name](**arguments(name) | {one: None})


OPTIONS = [
    ("softmax_scale", "a", "must be a number"),
    ("softmax_scale", torch.tensor(0.5), "must be a number; a tensor would get no gradient"),
    ("softcap", None, "must be a number"),
    ("causal", "yes", "must be True or False"),
    ("window_size", 5, r"must be \(left, right\)"),
    ("window_size", (5.0, 0), "must be an integer"),
    ("window_size", (None, 0), "must be an integer"),
    ("window_size", (-2, 0), r"must be \(left, right\)"),
    ("window_size", (1, 2, 3), r"must be \(left, right\)"),
]
ONE_FRONT = [
    ("attention", "dropout_p", "a", "must be a number"),
    ("attention", "dropout_p", None, "must be a number"),
    ("attention", "dropout_p", 1.0, "must be at least 0 and below 1"),
    ("attention", "deterministic", "no", "must be True or False"),
    ("decode", "num_splits", 2.5, "must be an integer"),
    ("decode", "max_seqlen_q", "8", "must be an integer"),
    ("fp8", "out_dtype", torch.float32, "must be bfloat16 or float16"),
]


@pytest.mark.parametrize(
    ("name", "option", "value", "rule"),
    [(name, *option) for name in FRONTS for option in OPTIONS] + ONE_FRONT,
)
def test_options_of_the_wrong_kind(front, name, option, value, rule):
    with pytest.raises(ValueError, match=rf"^{option}=.*: {rule}"):
        front[name](**arguments(name), **{option: value})


def test_a_seed_that_is_none(front):
    with pytest.raises(ValueError, match=r"^dropout_seed='a': must be an integer"):
        front["attention"](**arguments("attention"), dropout_p=0.5, dropout_seed="a")


@pytest.mark.parametrize("name", FRONTS)
def test_numbers_of_other_kinds_are_taken(front, name):
    given = arguments(name)
    with ttir.execute() as run:
        found = front[name](
            **given, softmax_scale=np.float32(0.5), causal=np.bool_(True), softcap=np.int64(3),
            window_size=(np.int64(5), np.int32(0)),
        )  # fmt: skip
        expected = front[name](
            **given, softmax_scale=0.5, causal=True, softcap=3.0, window_size=[5, 0]
        )
    assert torch.equal(found, expected)
    assert run.incidents == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's driver may then be CUDA's")
@pytest.mark.parametrize("name", FRONTS)
def test_on_the_cpu_the_executor_is_named(front, name):
    with pytest.raises(
        ValueError, match=r"^q\.device=cpu: .*GPU.* python -m fa_verify.ttir .*exec"
    ):
        front[name](**arguments(name))


@pytest.mark.parametrize("name", FRONTS)
def test_a_meta_tensor_among_others_is_refused_and_alone_gives_shapes(front, name):
    given = arguments(name)
    meta = {one: x.to("meta") for one, x in given.items()}
    with ttir.execute():
        for one in given:
            with pytest.raises(ValueError, match="meta"):
                front[name](**given | {one: meta[one]})
        assert front[name](**meta).device.type == "meta"


def test_a_meta_tensor_of_what_is_believed_on_a_gpu_is_not_believed_there(front):
    with ttir.redirected(), ttir.execute():
        given = {one: x.cuda() for one, x in arguments("attention").items()}
        meta = given["k"].to("meta")
        assert (meta.device.type, meta.is_cuda, (meta + 1).device.type) == ("meta", False, "meta")
        with pytest.raises(ValueError, match=r"^k=torch\.float32 on meta: must be as q"):
            front["attention"](**given | {"k": meta})
