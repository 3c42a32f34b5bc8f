"""`paged`: k and v in pages, poison everywhere else."""

import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

from fa_verify import Mask, Problem, UnsupportedProblemError, paged, pages, ttir
from fa_verify.errors import InvalidInputError
from fa_verify.layouts import Layout
from fa_verify.pages import NOWHERE


def problem(**fields):
    fields = {"batch": 2, "heads_q": 4, "heads_kv": 2, "seqlen_q": 3, "seqlen_k": 37} | fields
    return Problem(head_dim=5, head_dim_v=3, dtype="float32", **fields)


def tensors(p):
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=generator) for shape in (p.shape_k, p.shape_v))


def gathered(pool, pages, sequence):
    """The rows of a sequence, (heads, keys, columns), as the table says."""
    length = int(pages.cache_lengths[sequence])
    used = -(-length // pool.shape[1])
    rows = pool[pages.block_table[sequence, :used].long()].flatten(0, 1)
    return rows[:length].transpose(0, 1)


@pytest.mark.parametrize("page_size", [1, 3, 16, 37, 256])
def test_the_table_leads_to_every_key(page_size):
    p = problem()
    k, v = tensors(p)
    pages = paged(p, k, v, page_size=page_size, seed=1)
    assert pages.k_pages.shape[1:] == (page_size, 2, 5)
    assert pages.cu_seqlens_q.tolist() == [0, 3, 6]
    for sequence in range(2):
        assert torch.equal(gathered(pages.k_pages, pages, sequence), k[sequence])
        assert torch.equal(gathered(pages.v_pages, pages, sequence), v[sequence])


def test_sequences_of_different_lengths():
    p = problem(batch=1, seqlen_k=20, mask=Mask(documents=((1, 0), (2, 13), (0, 7))))
    k, v = tensors(p)
    pages = paged(p, k, v, page_size=4)
    assert pages.cache_lengths.tolist() == [0, 13, 7]
    assert pages.cu_seqlens_q.tolist() == [0, 1, 3, 3]
    assert pages.max_seqlen_q == 2
    assert pages.block_table.shape == (3, 5)
    assert torch.equal(gathered(pages.k_pages, pages, 1), k[0, :, :13])
    assert torch.equal(gathered(pages.v_pages, pages, 2), v[0, :, 13:])


def test_whatever_is_no_key_is_poison():
    p = problem()
    pages = paged(p, *tensors(p), page_size=8)
    live = int(torch.isfinite(pages.k_pages[..., 0, 0]).sum())
    assert live == 2 * 37
    table = pages.block_table
    assert (table[:, :5] < len(pages.k_pages)).all()
    assert table[:, :5].unique().numel() == 10
    assert (table[:, 5:] == NOWHERE).all()


def test_the_seed_orders_the_pages():
    p = problem()
    k, v = tensors(p)
    tables = [paged(p, k, v, page_size=4, seed=seed).block_table for seed in (0, 0, 1)]
    assert torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[0], tables[2])


def test_evicted_pages_lead_to_one_of_nan():
    # Queries 34 to 36 see keys from 28 on: pages of 8 are gone up to key 24.
    p = problem(mask=Mask(causal=True, window_left=6))
    k, v = tensors(p)
    pages = paged(p, k, v, page_size=8, evict=True)
    for row in pages.block_table:
        (gone,) = row[:3].unique().tolist()
        assert torch.isnan(pages.k_pages[gone]).all()
        assert torch.isfinite(pages.v_pages[row[3].long()]).all()
    assert torch.equal(
        pages.k_pages[pages.block_table[1, 3].long()], k[1, :, 24:32].transpose(0, 1)
    )


def test_a_page_holds_a_key():
    p = problem()
    with pytest.raises(InvalidInputError, match="page_size=0"):
        paged(p, *tensors(p), page_size=0)


@triton.jit
def copy_slot(pool, table, o, page, slot, stride_page, stride_slot):
    """One number of the slot of a page of sequence 0's table."""
    number = tl.load(table + page).to(tl.int64)
    tl.store(o, tl.load(pool + number * stride_page + slot * stride_slot))


@pytest.mark.parametrize(
    ("page", "slot", "kinds"),
    [
        (4, 4, []),
        (4, 5, ["uninitialised-read"]),  # key 37, past the end, in the last page
        (5, 0, ["out-of-bounds-read"]),  # the table's end
    ],
)
def test_the_executor_sees_who_reads_a_hole(page, slot, kinds):
    p = problem()
    k, v = tensors(p)
    with ttir.execute() as run:
        pages = paged(p, k, v, page_size=8)
        pool = pages.k_pages
        copy_slot[(1,)](
            pool, pages.block_table, torch.empty(1), page, slot, pool.stride(0), pool.stride(1)
        )
    assert [incident.kind for incident in run.incidents] == kinds


def test_a_page_of_another_sequence_is_a_neighbour():
    p = problem()
    k, v = tensors(p)
    with ttir.execute() as run:
        pages = paged(p, k, v, page_size=8)
        pool, o = pages.k_pages, torch.empty(2, 1)
        strides = (pool.stride(0), pool.stride(1))
        copy_slot[(1,)](pool, pages.block_table[1], o[0], 0, 0, *strides)
        owner = torch.tensor([[0], [1]])
        same = torch.arange(2), torch.arange(4) // 2
        run.judge([ttir.Footprint(tensor=o, name="o", labels=owner, reads={"k": same})])
    assert [incident.kind for incident in run.incidents] == ["neighbour-read"]


@triton.jit
def copy_page(pool, table, o, stride_page, WIDE: tl.constexpr):  # noqa: N803
    """The first number of each of four pages of sequence 0."""
    page = tl.arange(0, 4)
    number = tl.load(table + page)
    offset = number.to(tl.int64) * stride_page if WIDE else number * stride_page
    tl.store(o + page, tl.load(pool + offset))


@pytest.mark.parametrize(("wide", "kinds"), [(True, set()), (False, {"integer-overflow"})])
def test_pages_may_lie_far(wide, kinds):
    p = problem(seqlen_k=500)
    k, v = tensors(p)
    with ttir.execute() as run:
        pages = paged(p, k, v, page_size=128, far=True)
        assert pages.k_pages.numel() > 1 << 31
        o = torch.empty(4)
        copy_page[(1,)](pages.k_pages, pages.block_table, o, pages.k_pages.stride(0), WIDE=wide)
    assert kinds <= {incident.kind for incident in run.incidents}
    assert torch.equal(o, k[0, 0, ::128, 0]) is wide


@pytest.mark.parametrize(
    ("layouts", "far", "lie_far"),
    [
        ({}, None, False),
        ({"layout_q": Layout(pad=(1 << 31, 0, 0, 0))}, None, False),
        ({"layout_k": Layout(pad=(1 << 31, 0, 0, 0))}, None, True),
        ({"layout_v": Layout(pad=(1 << 31, 0, 0, 0))}, None, True),
        ({"layout_v": Layout(pad=(1 << 31, 0, 0, 0))}, False, False),
        ({}, True, True),
    ],
)
def test_pages_lie_as_far_as_keys_and_values_do(layouts, far, lie_far):
    p = problem(**layouts)
    found = paged(p, *tensors(p), page_size=16, far=far)
    first = int(found.block_table.min())
    assert (first * found.k_pages.stride(0) >= 1 << 31) is lie_far


# What a worker of a campaign does, in a process whose data is limited to less than a pool.
_LIMITED = """
import resource
import torch
from fa_verify import paged, ttir
from fa_verify.problem import Problem

resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))
p = Problem(batch=3, seqlen_q=1, seqlen_k=100, head_dim=64, head_dim_v=64, dtype="float16")
k = torch.ones(p.shape_k, dtype=torch.float16)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with ttir.redirected() as gpu, ttir.execute() as run:
    gpu.put(k)
    found = paged(p, k, k.clone(), page_size=16, far=True)
    assert found.k_pages.numel() > 1 << 31
    assert found.k_pages.is_cuda
    assert found.block_table.is_cuda
    assert run.unwritten(found.k_pages[0]).all()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_far_pool_takes_addresses_and_no_memory():
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 64 << 10, "KiB"


def test_a_card_without_room_for_a_pool_is_no_failure_of_the_kernel(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.Tensor, "new_empty", full)
    p = problem()
    k, v = (torch.empty(shape, device="meta") for shape in (p.shape_k, p.shape_v))
    with pytest.raises(UnsupportedProblemError, match="takes memory on a card"):
        pages._pools(p, k, v, 9, 16, far=True)
