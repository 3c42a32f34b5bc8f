"""Decoding and prefill with a cache, contiguous and paged; the merge of parts."""

import dataclasses
import math
import random
import shutil
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fa_verify import Mask, Problem, distribution, loader, paged, ttir
from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.case import Case
from fa_verify.verify import verify

FOLDER = Path(__file__).parents[2] / "kernels"
SPLITS = (1, 2, 7, 64, 300)
PAGE_SIZES = (1, 3, 48, 64, 256)


def packed(case, rng):
    """The case as up to four sequences with caches of their own, a few of them empty."""
    p = case.problem
    cuts = [sorted(rng.randint(0, n) for _ in range(3)) for n in (p.seqlen_q, p.seqlen_k)]
    ends = [(*cut, n) for cut, n in zip(cuts, (p.seqlen_q, p.seqlen_k), strict=True)]
    lengths = [[b - a for a, b in zip((0, *end), end, strict=False)] for end in ends]
    mask = dataclasses.replace(p.mask, documents=tuple(zip(*lengths, strict=True)))
    return dataclasses.replace(case, problem=dataclasses.replace(p, batch=1, mask=mask))


def cases(kernel, count, seed):
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    for at, case in enumerate(distribution.draw(seed, count, kernel.takes, max_elements=60_000)):
        yield packed(case, rng) if kernel.takes.documents and at % 2 else case


def verified(kernel, count, seed):
    backend = CpuBackend(seconds=120)
    for case in cases(kernel, count, seed):
        yield verify(case, kernel, Setup(), backend)


def right(kernel, count, seed):
    failed = [r for r in verified(kernel, count, seed) if r.verdict not in ("pass", "inconclusive")]
    assert not failed, failed[0]


@pytest.mark.parametrize("num_splits", SPLITS)
def test_any_number_of_splits(kernels, num_splits):
    kernel = kernels("cached_attention").contiguous_kernel("decode", num_splits=num_splits)
    right(kernel, 8, num_splits)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_any_page_size(kernels, page_size):
    module = kernels("cached_attention")
    right(module.paged_kernel("paged", page_size, num_splits=1 + page_size % 5), 8, page_size)


@pytest.mark.parametrize("page_size", [5, 32])
def test_prefill_with_a_paged_cache(kernels, page_size):
    module = kernels("cached_attention")
    right(
        module.paged_kernel("prefill", page_size, prefill=True, num_splits=page_size % 3 or None),
        8,
        page_size,
    )


def tensors(p, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).half() for s in (p.shape_q, p.shape_k, p.shape_v)]


def test_a_contiguous_cache_holds_sequences_of_different_lengths(kernels):
    module = kernels("cached_attention")
    p = Problem(batch=3, heads_q=4, heads_kv=2, seqlen_q=2, seqlen_k=150, head_dim=16, head_dim_v=8)
    q, k, v = tensors(p)
    lengths = torch.tensor([150, 1, 70], dtype=torch.int32)
    want = []
    with ttir.execute() as run:
        for i, n in enumerate(lengths.tolist()):
            alone = (q[i : i + 1], k[i : i + 1, :, :n], v[i : i + 1, :, :n])
            want.append(module.attention_with_cache(*alone, causal=True, split_keys=64))
            k[i, :, n:] = v[i, :, n:] = math.nan
        got = module.attention_with_cache(
            q, k, v, cache_lengths=lengths, causal=True, split_keys=64
        )
    assert run.incidents == []
    for x, alone in zip(got, zip(*want, strict=True), strict=True):
        assert torch.equal(x, torch.cat(alone))


MATES = ((1, 700), (16, 40), (0, 5), (3, 0))


@pytest.mark.parametrize("place", range(5))
def test_splits_of_a_fixed_size_leave_a_sequence_as_it_is_alone(kernels, place):
    """Whatever else is in the batch: longer caches, more queries, nothing; pages elsewhere."""
    module = kernels("cached_attention")
    own = (2, 300)
    documents = (*MATES[:place], own, *MATES[place:])
    common = {"heads_q": 8, "heads_kv": 1, "head_dim": 32, "head_dim_v": 32}
    mask = Mask(causal=True, window_left=290)
    batch = Problem(
        **common, seqlen_q=22, seqlen_k=1045, mask=dataclasses.replace(mask, documents=documents)
    )
    q, k, v = tensors(batch)
    before = [sum(lengths) for lengths in zip((0, 0), *documents[:place], strict=True)]
    rows, keys = (slice(start, start + n) for start, n in zip(before, own, strict=True))
    alone = Problem(**common, seqlen_q=2, seqlen_k=300, mask=mask)
    kernel = module.paged_kernel("paged", 7, split_keys=64)
    with ttir.execute():
        together = kernel.forward(batch, q, k, v)
        single = kernel.forward(alone, q[:, :, rows], k[:, :, keys], v[:, :, keys])
    assert torch.equal(together.o[:, :, rows], single.o)
    assert torch.equal(together.lse[:, :, rows], single.lse)


def test_where_pages_lie_changes_no_bit(kernels):
    module = kernels("cached_attention")
    p = Problem(
        batch=2, heads_q=4, heads_kv=2, seqlen_q=1, seqlen_k=200, head_dim=16, head_dim_v=16
    )
    q, k, v = tensors(p)
    found = []
    with ttir.execute():
        for seed in range(2):
            pages = paged(p, k, v, page_size=16, seed=seed)
            options = {"block_table": pages.block_table, "cache_lengths": pages.cache_lengths}
            found.append(module.attention_with_cache(q, pages.k_pages, pages.v_pages, **options))
        found.append(module.attention_with_cache(q, k, v))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def parts(splits, rows=5, head_dim=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    o = torch.randn((splits, 1, 1, rows, head_dim), generator=generator)
    return o, 4 * torch.randn((splits, 1, 1, rows), generator=generator)


def merged(o, lse):
    """The formula, in float64; parts of -inf must hold numbers here."""
    weights = torch.softmax(lse.double(), 0).nan_to_num()
    return (weights[..., None] * o.double()).sum(0), torch.logsumexp(lse.double(), 0)


@pytest.mark.parametrize("splits", [1, 2, 31, 32, 33, 300])
def test_parts_are_merged(kernels, splits):
    o, lse = parts(splits)
    lse[::3, ..., :2] = -math.inf
    lse[..., 4] = -math.inf
    want = merged(o, lse)
    o[lse == -math.inf] = math.nan  # whatever it holds
    with ttir.execute() as run:
        got = kernels("combine").combine(o, lse)
    assert run.incidents == []
    assert (got[0][..., 4, :] == 0).all()
    for one, exact in zip(got, want, strict=True):
        torch.testing.assert_close(one, exact.float())


def test_parts_that_saw_no_key_change_no_bit(kernels):
    o, lse = parts(40)
    more = torch.full((70, 1, 1, 5, 7), math.nan), torch.full((70, 1, 1, 5), -math.inf)
    with ttir.execute():
        combine = kernels("combine").combine
        few = combine(o, lse, invariant=True)
        many = combine(torch.cat([o, more[0]]), torch.cat([lse, more[1]]), invariant=True)
    assert all(map(torch.equal, few, many))


def test_nan_comes_through_a_merge(kernels):
    o, lse = parts(3)
    lse[1, ..., 0] = math.nan
    with ttir.execute():
        got = kernels("combine").combine(o, lse)
    assert torch.isnan(got[0][..., 0, :]).all()
    assert torch.isnan(got[1][..., 0]).all()
    assert torch.isfinite(got[0][..., 1:, :]).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"part_lse": torch.zeros(2, 1, 1, 4)}, "part_o.shape="),
        ({"part_o": torch.zeros(3, 1, 1, 5, 7, dtype=torch.float16)}, "must be float32"),
    ],
)
def test_parts_that_do_not_fit_are_refused(kernels, changes, message):
    o, lse = parts(3)
    with pytest.raises(ValueError, match=message):
        kernels("combine").combine(**{"part_o": o, "part_lse": lse} | changes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_splits": 2, "split_keys": 64}, "give one of them"),
        ({"num_splits": 0}, "num_splits=0: must be at least 1"),
        ({"split_keys": 100}, "split_keys=100: must be a multiple of 64"),
    ],
)
def test_splits_that_cannot_be_are_refused(kernels, options, message):
    p = Problem(seqlen_q=1, seqlen_k=8, head_dim=16, head_dim_v=16)
    with ttir.execute(), pytest.raises(ValueError, match=message):
        kernels("cached_attention").attention_with_cache(*tensors(p), **options)


def test_the_card_is_filled(kernels):
    filling = kernels("cached_attention").filling
    assert filling(tiles=4, most=512, slots=264) == 63
    assert filling(tiles=4, most=4, slots=264) == 4
    assert filling(tiles=256, most=512, slots=264) == 1
    assert filling(tiles=10_000, most=512, slots=264) == 1


# file, what is right, what is wrong
DEFECTS = {
    "an empty part is not written and read all the same": (
        "decode.py", "acc / l[:, None], 0, head_dim_v, exists,",
        "acc / l[:, None], 0, head_dim_v, exists & ~empty,",
    ),
    "-inf less -inf": (
        "combine.py", 'shift = tl.where(m_new == float("-inf"), 0.0, m_new)', "shift = m_new",
    ),
    "lse of the largest part": ("combine.py", "m + tl.log(total))", "m)"),
    "lse taken for base 2": ("combine.py", "(part - shift) * LOG2E", "part - shift"),
    "the last block of parts is lost": (
        "combine.py", "total = tl.full((), 0.0, dtype=tl.float32)",
        "total = tl.full((), 0.0, dtype=tl.float32)\n    splits = splits // BLOCK_S * BLOCK_S",
    ),
    "l is not in what a split hands on": (
        "decode.py", "m * score_scale + tl.log(l))", "m * score_scale)",
    ),
    "a split ends a key early": (
        "decode.py", "tl.minimum(begin + split_keys, key_end)",
        "tl.minimum(begin + split_keys - 1, key_end)",
    ),
    "a split ends a key late": (
        "decode.py", "tl.minimum(begin + split_keys, key_end)",
        "tl.minimum(begin + split_keys + 1, key_end)",
    ),
    "the last page is read whole": (
        "decode.py", "inside = (keys >= key_begin) & (keys < end)",
        "inside = (keys >= key_begin) & (keys < tl.cdiv(end, 16) * 16)",
    ),
    "pages before the window are read": (
        "decode.py", "inside = (keys >= key_begin) & (keys < end)", "inside = keys < end",
    ),
    "the table is read one on": (
        "cache.py", "table + keys // PAGE_SIZE)", "table + keys // PAGE_SIZE + 1)",
    ),
    "the slot is that of the block": (
        "cache.py", "slot = (keys % PAGE_SIZE).to(tl.int64)",
        "slot = (keys % BLOCK_N).to(tl.int64)",
    ),
    "v has the page stride of k": (
        "decode.py", "v_head, page, slot, stride_vb", "v_head, page, slot, stride_kb",
    ),
    "everybody's pages are those of the first sequence": (
        "decode.py", "tl.cast(batch, tl.int64) * stride_table", "tl.cast(0, tl.int64) * batch",
    ),
    "a page that was kept from the block before": (
        "cache.py", "tl.load(table + keys // PAGE_SIZE)",
        "tl.load(table + tl.maximum(first_key - 1, 0) // PAGE_SIZE + keys % 1)",
    ),
    "the longest cache's length for all": (
        "decode.py", "seqlen_k = tl.load(cache_lengths + batch)", "seqlen_k = seqlen_k",
    ),
    "queries of the sequence before": (
        "decode.py", "first_token = tl.load(cu_seqlens_q + batch)",
        "first_token = tl.load(cu_seqlens_q + tl.maximum(batch - 1, 0))",
    ),
    "a row's query is found by a shift": (
        "decode.py", "queries = packed // group", "queries = packed // (group - group % 2 + 1)",
    ),
    "every split has a sink": (
        "decode.py", "mask=exists & (split == 0), other", "mask=exists, other",
    ),
    "parts are rounded": (
        "decode.py", "store_outputs(o_rows, acc / l[:, None], 0",
        "store_outputs(o_rows, (acc / l[:, None]).to(tl.bfloat16), 0",
    ),
}  # fmt: skip


def planted(folder, file, right_text, wrong_text):
    """Kernels with a cache whose source has other text."""
    shutil.copytree(FOLDER, folder / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    source = folder / "kernels" / file
    text = source.read_text()
    assert text.count(right_text) == 1
    source.write_text(text.replace(right_text, wrong_text))
    extra = folder / "kernels" / "planted.py"
    extra.write_text(
        "from .cached_attention import paged_kernel\n"
        "planted = paged_kernel('planted', 16, num_splits=3)\n"
        "prefill = paged_kernel('prefill', 8, prefill=True, split_keys=64)\n"
        "many = paged_kernel('many', 128, num_splits=40)\n"
        "far = paged_kernel('far', 16, far=True)\n"
    )
    return [k for k in loader.load(str(extra)) if k.name in {"planted", "prefill", "many", "far"}]


@pytest.mark.parametrize("name", DEFECTS)
def test_defects_are_caught(name, tmp_path):
    for kernel in planted(tmp_path, *DEFECTS[name])[:3]:
        for record in verified(kernel, 20, 1):
            if record.verdict == "fail":
                assert {f.check for f in record.failures} != {"contract"}, record
                return
    pytest.fail("not caught")


FAR = "pass=fwd b=2 h=4/2 s=2x100 d=64 dtype=float16 mask=causal seed=1"


def test_pools_past_32_bits(kernels, tmp_path):
    right_kernel = kernels("cached_attention").paged_kernel("far", 16, far=True)
    *_, wrong_kernel = planted(
        tmp_path,
        "cache.py",
        "rows = page * stride_page + slot",
        "rows = page.to(tl.int32) * stride_page + slot",
    )
    records = [
        verify(Case.parse(FAR), kernel, Setup(), CpuBackend())
        for kernel in (right_kernel, wrong_kernel)
    ]
    assert [record.verdict for record in records] == ["pass", "fail"]
    assert {f.check for f in records[1].failures} >= {"memory"}


@pytest.mark.parametrize("page_size", [0, 16, 64])
def test_keys_are_copied_wide_and_ahead_of_their_use(kernels, page_size):
    """A lost hint makes loads narrow, which no number shows, and a card twice as slow."""
    kernel = kernels("decode").decode_kernel
    constants = {
        "cu_seqlens_q": None, "sinks": None, "BLOCK_D": 128, "TAIL_D": 0, "PADDED_D": False,
        "BLOCK_DV": 128, "TAIL_DV": 0, "PADDED_DV": False, "HAS_LO": False, "HAS_HI": False,
        "BOTTOM_RIGHT": True, "SOFTCAP": False, "DOT_PRECISION": "tf32", "VECTOR": 8,
        "PAGE_SIZE": page_size, "DEPENDENTS": True, "BLOCK_M": 16, "BLOCK_N": 64,
    }  # fmt: skip
    if not page_size:
        constants |= {"cache_lengths": None, "block_table": None}
    types = {"q": "*fp16", "k": "*fp16", "v": "*fp16", "o": "*fp32", "lse": "*fp32"}
    types |= {"cache_lengths": "*i32", "block_table": "*i32"}
    types |= {"softmax_scale": "fp32", "softcap": "fp32"}
    source = ASTSource(
        fn=kernel,
        signature={
            name: "constexpr" if name in constants else types.get(name, "i32")
            for name in kernel.arg_names
        },
        constexprs={(kernel.arg_names.index(name),): x for name, x in constants.items()},
    )
    built = triton.compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True},
    )
    copies = [line for line in built.asm["ttgir"].splitlines() if "async_copy_global" in line]
    wide = [line for line in copies if "contiguity = 8" in line]
    assert len(wide) >= 8, copies
