"""`decode_attention` against float64, compiled, and what it refuses."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fa_verify import ttir

LENGTHS = (5, 0, 40)


def tensors():
    """Queries of three sequences, and a cache for 48 keys each."""
    generator = torch.Generator().manual_seed(0)
    shapes = (3, 4, 2, 16), (3, 2, 48, 16), (3, 2, 48, 8)
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v, torch.tensor(LENGTHS, dtype=torch.int32)


def paged(cache, page_size):
    """The cache's keys in pages, in an order of their own; and the table."""
    batch, heads, seqlen, head_dim = cache.shape
    pages = cache.transpose(1, 2).reshape(-1, page_size, heads, head_dim)
    order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(1))
    pool = torch.empty_like(pages)
    pool[order] = pages
    return pool, order.to(torch.int32).reshape(batch, seqlen // page_size)


def exactly(q, k, v, *, causal):
    """o of each sequence by itself, in float64."""
    results = []
    for row, length in enumerate(LENGTHS):
        keys, values = (x[row, :, :length].double().repeat_interleave(2, 0) for x in (k, v))
        logits = q[row].double() @ keys.mT * 16**-0.5
        if causal:
            hidden = torch.ones(2, length, dtype=torch.bool).triu(length - 1)
            logits = logits.masked_fill(hidden, float("-inf"))
        results.append(logits.softmax(-1) @ values)
    return torch.stack(results)


@pytest.mark.parametrize("num_splits", [None, 1, 3])
@pytest.mark.parametrize("page_size", [None, 1, 16])
@pytest.mark.parametrize("causal", [True, False])
def test_each_sequence_sees_its_keys(kernels, causal, page_size, num_splits):
    q, k, v, lengths = tensors()
    options = {"cache_seqlens": lengths, "causal": causal, "num_splits": num_splits}
    caches = [k, v]
    if page_size:
        (pool_k, options["block_table"]), (pool_v, _) = (paged(x, page_size) for x in (k, v))
        caches = [pool_k, pool_v]
    with ttir.execute() as run:
        o = kernels("decode_attention").decode_attention(q, *caches, **options)
    assert run.incidents == []
    torch.testing.assert_close(o, exactly(q, k, v, causal=causal).float())


@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_sink_takes_its_share(kernels, num_splits):
    q, k, v, lengths = tensors()
    sinks = torch.tensor([-1.0, 0.0, 2.0, 5.0])
    decode = kernels("decode_attention").decode_attention
    options = {"cache_seqlens": lengths, "num_splits": num_splits, "return_lse": True}
    with ttir.execute() as run:
        plain, plain_lse = decode(q, k, v, **options)
        o, lse = decode(q, k, v, sinks=sinks, **options)
    assert run.incidents == []
    torch.testing.assert_close(lse, torch.logaddexp(plain_lse, sinks[:, None].expand(3, 4, 2)))
    torch.testing.assert_close(o, plain * torch.exp(plain_lse - lse)[..., None])
    with ttir.execute(), pytest.raises(ValueError, match=r"sinks: torch\.float64"):
        decode(q, k, v, sinks=sinks.double(), **options)


def test_packed_queries_give_what_a_batch_gives(kernels):
    q, k, v, lengths = tensors()
    decode = kernels("decode_attention").decode_attention
    starts = torch.tensor([0, 2, 4, 6], dtype=torch.int32)
    with ttir.execute():
        o, lse = decode(q, k, v, cache_seqlens=lengths, causal=True, return_lse=True)
        packed, packed_lse = decode(
            q.transpose(1, 2).flatten(0, 1), k, v, cache_seqlens=lengths, causal=True,
            cu_seqlens_q=starts, max_seqlen_q=2, return_lse=True,
        )  # fmt: skip
    assert packed.shape == (6, 4, 8)
    torch.testing.assert_close(packed.unflatten(0, (3, 2)).transpose(1, 2), o)
    torch.testing.assert_close(packed_lse.unflatten(1, (3, 2)).transpose(0, 1), lse)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_it_compiles_whole(kernels, on_the_cpu):
    q, k, v, lengths = tensors()
    decode = kernels("decode_attention").decode_attention

    def function(q, k, v, lengths):
        return decode(2 * q, k, v, cache_seqlens=lengths, num_splits=2) + 1

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v, lengths), function(q, k, v, lengths))
    assert "decode_kernel" in on_the_cpu


def test_torch_finds_nothing_wrong(kernels, on_the_cpu):
    q, k, v, lengths = tensors()
    options = (None, None, None, False, -1, -1, 0.0, "bottom-right", "ieee", 2, None)
    operator = kernels("decode_attention")._decode_op
    torch.library.opcheck(operator, (q, k, v, None, lengths, None, *options))
    assert on_the_cpu


def test_it_has_no_gradient(kernels, on_the_cpu):
    q, k, v, lengths = tensors()
    o = kernels("decode_attention").decode_attention(
        q.requires_grad_(), k, v, cache_seqlens=lengths
    )
    assert on_the_cpu
    with pytest.raises(NotImplementedError, match="decode_attention: it has no gradient"):
        o.sum().backward()


def test_fake_tensors_run_no_kernel(kernels, on_the_cpu):
    with FakeTensorMode():
        q, k, v, lengths = tensors()
        o, lse = kernels("decode_attention").decode_attention(
            q, k, v, cache_seqlens=lengths, return_lse=True
        )
    assert (o.shape, lse.shape) == ((3, 4, 2, 8), (3, 4, 2))
    assert on_the_cpu == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.ones(3, 4, 2, 15)}, "must agree with v_cache.shape"),
        ({"q": torch.ones(3, 5, 2, 16)}, "its heads must be a multiple of the cache's 2"),
        ({"q": torch.ones(3, 4, 16)}, r"q.shape=\(3, 4, 16\): must have four axes"),
        ({"q": torch.ones(2, 4, 2, 16)}, "batch must be 2"),
        ({"q": torch.ones(3, 4, 2, 16).half()}, "k_cache=torch.float32 on cpu: must be as q"),
        ({"cache_seqlens": torch.ones(3)}, r"cache_seqlens: torch.float32 \(3,\) on cpu"),
        ({"cache_seqlens": torch.ones(2).int()}, r"cache_seqlens: torch.int32 \(2,\) on cpu"),
        ({"cu_seqlens_q": torch.ones(4).int()}, "max_seqlen_q=None: must be given"),
        ({"softcap": -1.0}, "softcap=-1.0: must be finite"),
        ({"alignment": "right"}, "alignment='right': must be"),
        ({"num_splits": 0}, "num_splits=0: must be at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(kernels, change, message):
    q, k, v, lengths = tensors()
    given = {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": lengths, **change}
    with ttir.execute(), pytest.raises(ValueError, match=message):
        kernels("decode_attention").decode_attention(**given)


@pytest.mark.parametrize("page_size", [None, 16])
def test_without_the_operator_calls_are_replayed(kernels, monkeypatch, page_size):
    replay, decoding = kernels("replay"), kernels("decode_attention")
    passes = replay.Replayed(decoding._decode_pass._function)
    monkeypatch.setattr(decoding, "_decode_pass", passes)
    monkeypatch.setattr(decoding, "eager", lambda *_: True)
    monkeypatch.setattr(replay, "pinned", lambda: False)

    def call(seed):
        q, k, v, lengths = (x.clone() for x in tensors())
        q += seed
        lengths -= torch.tensor([seed, 0, 3 * seed], dtype=torch.int32)
        options = {"cache_seqlens": lengths, "num_splits": 3}
        if page_size:
            (k, options["block_table"]), (v, _) = (paged(x, page_size) for x in (k, v))
        return decoding.decode_attention(q, k, v, **options)

    with ttir.execute() as run:
        found = [call(seed) for seed in range(4)]
        assert all(isinstance(one, replay.Noted) for one in passes._known.values())
        monkeypatch.setattr(replay, "pinned", lambda: True)
        assert all(map(torch.equal, found, [call(seed) for seed in range(4)]))
    assert run.incidents == []


def test_gradients_are_refused_without_the_operator_too(kernels, on_the_cpu):
    q, k, v, _ = tensors()
    decode = kernels("decode_attention").decode_attention
    o = decode(q.requires_grad_(), k, v)
    with pytest.raises(NotImplementedError, match="it has no gradient"):
        o.sum().backward()
    with torch.no_grad():
        assert not decode(q, k, v).requires_grad
