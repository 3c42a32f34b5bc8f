import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_verify import reference
from fa_verify.case import Case
from fa_verify.errors import InvalidInputError
from fa_verify.inputs import (
    SLACK,
    SPARSE,
    duplicate,
    elements,
    fingerprint,
    materialise,
    modified,
    permute_batch_heads,
    permute_keys,
    perturb_hidden,
    select_sequence,
)
from fa_verify.strategies import cases

SMALL = cases(max_elements=4096)
RICH = Case.parse(
    "pass=bwd b=2 h=6/2 s=7x9 d=8/12 dtype=bfloat16 mask=causal q=bshd.s96.at3 k=bhds.s5 "
    "v=bhsd.b1.h2.s3.d1.at4 do=sbhd qk.values=mixed seed=9"
)


def _packed(case):
    """The case as three documents, the second without queries."""
    p = case.problem
    third, half = p.seqlen_k // 3, p.seqlen_q // 2
    documents = ((half, third), (0, third), (p.seqlen_q - half, p.seqlen_k - 2 * third))
    mask = dataclasses.replace(p.mask, documents=documents)
    return dataclasses.replace(case, problem=dataclasses.replace(p, batch=1, mask=mask))


def _with_gaps(case):
    mask = dataclasses.replace(case.problem.mask, pattern=f"block-sparse:3:60:{case.seed % 100}")
    return dataclasses.replace(case, problem=dataclasses.replace(case.problem, mask=mask))


def _storage(tensor):
    flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    own = torch.zeros(len(flat), dtype=torch.bool)
    own.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(True)
    return flat, own


def _same(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@settings(max_examples=60, deadline=None)
@given(SMALL)
def test_tensors_lie_as_the_layouts_say_and_all_else_is_poison(case):
    p, inputs = case.problem, materialise(case)
    assert (inputs.do is None) == (not case.backward)
    shapes = {"q": p.shape_q, "k": p.shape_k, "v": p.shape_v, "do": p.shape_o}
    for name, tensor in inputs.named():
        layout = getattr(p, f"layout_{name}")
        assert tensor.shape == shapes[name]
        assert tensor.dtype == getattr(torch, p.dtype)
        assert tensor.stride() == layout.strides(shapes[name])
        assert tensor.storage_offset() == layout.offset
        assert tensor.isfinite().all()
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        assert size == layout.offset + layout.span(shapes[name]) + SLACK
        if size >= SPARSE:
            continue
        flat, own = _storage(tensor)
        assert flat[~own].isnan().all()


@settings(max_examples=30, deadline=None)
@given(SMALL)
def test_elements_are_the_families_rounded_once(case):
    inputs, exact = materialise(case), elements(case)
    for name, tensor in inputs.named():
        expected = torch.from_numpy(exact[name]).to(tensor.dtype)
        if getattr(case.problem, f"layout_{name}").shared_heads:
            expected = expected[:, :1].expand_as(tensor)
        assert torch.equal(tensor, expected)


def test_the_same_case_gives_the_same_bits():
    first, second = materialise(RICH), materialise(RICH)
    for (_, a), (_, b) in zip(first.named(), second.named(), strict=True):
        assert _same(_storage(a)[0], _storage(b)[0])


def test_the_layout_does_not_change_the_elements():
    plain = Case.parse("pass=fwd h=2/2 s=5x7 d=8 dtype=float16 seed=1")
    strided = Case.parse(
        "pass=fwd h=2/2 s=5x7 d=8 dtype=float16 q=bshd.s3 k=bhds v=sbhd.at8 seed=1"
    )
    for (_, a), (_, b) in zip(
        materialise(plain).named(), materialise(strided).named(), strict=True
    ):
        assert torch.equal(a, b)


def test_the_logit_factor_multiplies_q_and_stays_finite():
    line = "pass=fwd s=5x7 d=8 dtype=float16 qk.values=huge logits={} seed=1"
    plain, scaled = (materialise(Case.parse(line.format(x))) for x in ("1.0", "100.0"))
    assert torch.equal(plain.k, scaled.k)
    assert scaled.q.abs().max() > 50 * plain.q.abs().max()
    far = materialise(Case.parse(line.format("1e30")))
    assert far.q.abs().max() == 65504


def test_shared_heads_are_all_head_zero():
    case = Case.parse("pass=fwd h=6/3 s=5x7 d=8 dtype=float16 k=bhsd.shared seed=1")
    k = materialise(case).k
    assert k.stride(1) == 0
    assert torch.equal(k[:, 0], k[:, 2])


@settings(max_examples=20, deadline=None)
@given(SMALL)
def test_a_duplicate_is_equal_apart(case):
    inputs = materialise(case)
    copy, before = duplicate(inputs), fingerprint(inputs)
    assert modified(copy, before) == ()
    for (_, a), (_, b) in zip(inputs.named(), copy.named(), strict=True):
        assert a.stride() == b.stride()
        assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()


def test_modified_names_the_tensor_and_the_first_element():
    inputs = materialise(RICH)
    before = fingerprint(inputs)
    inputs.k[1, 0, 3, 2] += 1
    inputs.k[1, 1, 3, 2] += 1
    assert modified(inputs, before) == ("k: 2 elements changed, first at (1, 0, 3, 2)",)


def test_modified_sees_slack_even_when_it_stays_nan():
    inputs = materialise(RICH)
    before = fingerprint(inputs)
    flat, own = _storage(inputs.v)
    place = int(torch.nonzero(~own)[10])
    flat.view(torch.int16)[place] ^= 1  # another NaN
    (said,) = modified(inputs, before)
    assert said == f"v: 1 elements of slack written, first at storage offset {place}"


def _changed(before, after):
    """Keys of which anything is different."""
    return (before.v != after.v).any(dim=3).any(dim=1).any(dim=0) | (before.k != after.k).any(
        dim=3
    ).any(dim=1).any(dim=0)


@settings(max_examples=60, deadline=None)
@given(SMALL | SMALL.map(_packed) | SMALL.map(_with_gaps), st.integers(0, 9))
def test_perturbing_hidden_keys_leaves_the_named_rows_alone(case, seed):
    p, inputs = case.problem, materialise(case)
    before = fingerprint(inputs)
    changed, keeps = perturb_hidden(case, inputs, np.random.default_rng(seed))
    assert modified(inputs, before) == ()
    assert keeps.shape == (p.seqlen_q,)
    allowed = torch.from_numpy(p.mask.allowed(p.seqlen_q, p.seqlen_k))
    assert keeps.any() == (not allowed.all())
    assert torch.equal(keeps, ~(allowed & _changed(inputs, changed)).any(1)) or not keeps.any()
    differs = torch.zeros(p.seqlen_k, dtype=torch.bool)
    for name in ("k", "v"):
        old, new = getattr(inputs, name), getattr(changed, name)
        assert new.isfinite().all()
        assert new.stride() == old.stride()
        differs |= (old != new).any(dim=3).any(dim=1).any(dim=0)
    assert not (allowed & differs)[keeps].any()
    if keeps.any():  # and the row that was chosen sees nothing of what was changed
        assert differs.any()
        a, b = (reference.forward(p, x.q, x.k, x.v) for x in (inputs, changed))
        assert torch.equal(a.o[:, :, keeps], b.o[:, :, keeps])
        assert torch.equal(a.lse[:, :, keeps], b.lse[:, :, keeps])


def test_a_tensor_may_lie_past_what_32_bits_count():
    case = Case.parse("pass=fwd b=1 h=3 s=4x5 d=8 dtype=float16 k=hbsd.h1073741824 seed=1")
    plain = materialise(Case.parse("pass=fwd b=1 h=3 s=4x5 d=8 dtype=float16 seed=1"))
    inputs = materialise(case)
    assert inputs.k.stride(1) * 2 > 2**31
    assert torch.equal(inputs.k, plain.k)
    before, copy = fingerprint(inputs), duplicate(inputs)
    assert modified(inputs, before) == ()
    copy.k[0, 2, 4, 7] += 1
    assert torch.equal(inputs.k, plain.k)
    assert modified(copy, before) == ("k: 1 elements changed, first at (0, 2, 4, 7)",)


def test_the_perturbed_row_can_be_chosen():
    case = Case.parse("pass=fwd s=8x8 d=8 dtype=float16 mask=causal seed=1")
    inputs = materialise(case)
    changed, keeps = perturb_hidden(case, inputs, np.random.default_rng(0), row=3)
    assert keeps.tolist() == [True] * 4 + [False] * 4
    assert torch.equal(changed.k[:, :, :4], inputs.k[:, :, :4])
    assert (changed.k[:, :, 4:] != inputs.k[:, :, 4:]).all()
    assert changed.k.abs().max() > 30000
    _, keeps = perturb_hidden(case, inputs, np.random.default_rng(0), row=7)
    assert not keeps.any()


def test_nothing_hidden_means_nothing_to_check():
    case = Case.parse("pass=fwd s=8x8 d=8 dtype=float16 seed=1")
    _, keeps = perturb_hidden(case, materialise(case), np.random.default_rng(0))
    assert not keeps.any()


def test_permuted_keys_give_the_same_attention():
    case = Case.parse("pass=fwd h=4/2 s=5x7 d=8 dtype=float32 k=bhds v=bshd.s9 seed=1")
    inputs = materialise(case)
    permuted = permute_keys(inputs, [3, 1, 0, 6, 5, 4, 2])
    assert torch.equal(permuted.k[:, :, 0], inputs.k[:, :, 3])
    assert torch.equal(permuted.v[:, :, 6], inputs.v[:, :, 2])
    a, b = (reference.forward(case.problem, x.q, x.k, x.v) for x in (inputs, permuted))
    assert torch.allclose(a.o, b.o, rtol=1e-12, atol=1e-14)
    with pytest.raises(InvalidInputError, match="order="):
        permute_keys(inputs, [0, 0, 1, 2, 3, 4, 5])


@pytest.mark.parametrize("layout", ["bhsd", "bhsd.shared", "bshd.s5.at2"])
def test_permuted_batches_and_heads_permute_the_output(layout):
    case = dataclasses.replace(
        Case.parse(
            f"pass=bwd b=3 h=6/3 s=5x7 d=8 dtype=float32 q={layout} k={layout} do={layout} seed=1"
        )
    )
    inputs = materialise(case)
    permuted, heads = permute_batch_heads(inputs, [2, 0, 1], [1, 2, 0])
    assert heads == (2, 3, 4, 5, 0, 1)
    a, b = (reference.forward(case.problem, x.q, x.k, x.v) for x in (inputs, permuted))
    assert torch.allclose(b.o, a.o[[2, 0, 1]][:, heads], rtol=1e-12, atol=1e-14)
    assert torch.equal(permuted.do, inputs.do[[2, 0, 1]][:, heads])
    with pytest.raises(InvalidInputError, match="batch_order="):
        permute_batch_heads(inputs, [0, 1], [0, 1, 2])


@settings(max_examples=30, deadline=None)
@given(SMALL)
def test_one_sequence_alone_has_the_same_elements_and_its_own_poison(case):
    inputs = materialise(case)
    index = case.problem.batch - 1
    alone, chosen = select_sequence(case, inputs, index)
    assert alone.problem.batch == 1
    for (name, whole), (_, one) in zip(inputs.named(), chosen.named(), strict=True):
        assert torch.equal(one[0], whole[index])
        layout = getattr(alone.problem, f"layout_{name}")
        assert one.stride() == layout.strides(tuple(one.shape))
        if one.untyped_storage().nbytes() < SPARSE * one.element_size():
            flat, own = _storage(one)
            assert flat[~own].isnan().all()


def test_there_is_no_sequence_beyond_the_batch():
    with pytest.raises(InvalidInputError, match="batch_index=2"):
        select_sequence(RICH, materialise(RICH), 2)


def test_hidden_logits_stay_below_a_declared_finite_mask():
    case = Case.parse("pass=fwd s=16x16 d=16 dtype=bfloat16 mask=causal seed=1")
    inputs = materialise(case)
    changed, _ = perturb_hidden(case, inputs, np.random.default_rng(0), row=3, masked_logit=-1000.0)
    logits = case.problem.scale * (changed.q.double() @ changed.k.double().mT)
    assert 1.0 < float(logits[..., 4:].abs().max()) < 250.0
