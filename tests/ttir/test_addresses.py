"""Pointers made from integers, loaded from memory, or cast to elements of another size."""

# Triton reads the kernels in this file: their constexprs are upper-case and their names are short.
# ruff: noqa: N803

import pytest
import torch
import triton
import triton.language as tl
from torch._subclasses import FakeTensorMode

from fa_verify import ttir

N = 16


def run(kernel, *args, grid=(1,)):
    with ttir.execute() as seen:
        kernel[grid](*args)
    return [(i.kind, i.argument, i.coordinates) for i in seen.incidents]


@triton.jit
def scale_each(table, n, N: tl.constexpr):
    p = tl.load(table + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    i = tl.arange(0, N)
    tl.store(p + i, 10 * tl.load(p + i, mask=i < n), mask=i < n)


def table_of(tensors):
    return torch.tensor([x.data_ptr() for x in tensors])


def test_a_table_of_addresses_reaches_tensors_that_are_no_arguments():
    tensors = [torch.full((N,), float(i)) for i in range(3)]
    assert run(scale_each, table_of(tensors), N, N, grid=(3,)) == []
    assert [x.tolist() for x in tensors] == [[10.0 * i] * N for i in range(3)]


def test_fake_tensors_lie_nowhere():
    x = torch.ones(N)
    with FakeTensorMode():
        fake = torch.ones(N)
    assert run(scale_each, table_of([x]), N, N) == []
    assert (x.tolist(), fake.shape) == ([10.0] * N, (N,))


def test_a_step_past_a_tensor_reached_by_address_is_out_of_bounds():
    storage = torch.ones(60)
    views = [storage[4:16], storage[20:32]]
    name = "a tensor given by its address"
    want = [(f"out-of-bounds-{kind}", name, (12,)) for kind in ("read", "write")]
    assert run(scale_each, table_of(views), 13, N, grid=(2,)) == want
    assert [x.tolist() for x in views] == [[10.0] * 12] * 2
    assert (storage == 10).sum() == 24


@pytest.mark.parametrize("address", [0, 8])
def test_no_tensor_lies_at_a_made_up_address(address):
    kinds = run(scale_each, torch.tensor([address]), 1, N)
    name = "an address of no tensor's element"
    assert [k[:2] for k in kinds] == [("out-of-bounds-read", name), ("out-of-bounds-write", name)]


def test_a_made_up_address_behind_a_mask_is_never_used():
    assert run(scale_each, torch.tensor([0]), 0, N) == []


def test_an_address_inside_an_element_is_nobodys():
    x = torch.ones(N)
    kinds = run(scale_each, torch.tensor([x.data_ptr() + 2]), 1, N)
    assert [k[0] for k in kinds] == ["out-of-bounds-read", "out-of-bounds-write"]
    assert x.tolist() == [1.0] * N


@triton.jit
def write_all(table):
    tl.store(tl.load(table).to(tl.pointer_type(tl.float32)), tl.program_id(0) * 1.0)


def test_programs_that_write_the_same_address_race():
    x = torch.zeros(4)
    with ttir.execute() as seen:
        write_all[(2,)](table_of([x]))
    assert [i.kind for i in seen.incidents] == ["race"]


def test_what_nobody_wrote_is_noticed_through_an_address():
    with ttir.execute() as seen:
        x = torch.empty(N)
        scale_each[(1,)](table_of([x]), N, N)
    assert [i.kind for i in seen.incidents] == ["uninitialised-read"]


@triton.jit
def by_bytes(x, o, STEP: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    address = (x + i).to(tl.int64, bitcast=True) + STEP
    tl.store(o + i, tl.load(address.to(tl.pointer_type(tl.int32))))


def test_arithmetic_on_addresses_counts_bytes():
    x, o = torch.arange(N + 1, dtype=torch.int32), torch.zeros(N, dtype=torch.int32)
    assert run(by_bytes, x, o, 4, N) == []
    assert o.tolist() == list(range(1, N + 1))
    assert run(by_bytes, x, o, 8, N)[0][0] == "out-of-bounds-read"


@triton.jit
def other_elements(x, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.load(x.to(tl.pointer_type(o.dtype.element_ty)) + i))


@pytest.mark.parametrize("target", [torch.int8, torch.int16, torch.int64, torch.float16], ids=str)
def test_a_pointer_cast_sees_the_same_bytes(target):
    x = torch.arange(1000, 1000 + 2 * N, dtype=torch.int32)
    o = torch.zeros(N, dtype=target)
    assert run(other_elements, x, o, N) == []
    assert torch.equal(o, x.view(target)[:N])


def test_a_pointer_cast_keeps_the_bounds():
    x, o = torch.ones(N, dtype=torch.int32), torch.zeros(N, dtype=torch.int64)
    assert run(other_elements, x, o, N) == [("out-of-bounds-read", "x", (N // 2,))]


@triton.jit
def through_a_pointer(table, o, N: tl.constexpr):
    p = tl.load(table.to(tl.pointer_type(tl.pointer_type(tl.float32))) + tl.program_id(0))
    i = tl.arange(0, N)
    tl.store(o + tl.program_id(0) * N + i, tl.load(p + i))
    tl.store(table.to(tl.pointer_type(tl.pointer_type(tl.float32))) + 2, p + 1)


@pytest.mark.skipif(triton.__version__ >= "3.9", reason="3.9 has no pointers to pointers")
def test_pointers_are_loaded_and_stored():
    x, o = torch.randn(N), torch.zeros(1, N)
    table = torch.tensor([x.data_ptr(), 0, 0])
    assert run(through_a_pointer, table, o, N) == []
    assert torch.equal(o[0], x)
    assert table[2] == x.data_ptr() + 4


@triton.jit
def add_either(a, b, old, N: tl.constexpr):
    i = tl.arange(0, N)
    p = tl.where(i % 2 == 0, a + i, b + i // 2)
    tl.store(old + tl.program_id(0) * N + i, tl.atomic_add(p, i + 1, mask=i < N - 1))


def test_atomics_through_a_pointer_into_several_arguments():
    a, b = torch.zeros(N, dtype=torch.int32), torch.full((N,), 100, dtype=torch.int32)
    old = torch.zeros(2, N, dtype=torch.int32)
    assert run(add_either, a, b, old, N, grid=(2,)) == []
    i = torch.arange(N - 1, dtype=torch.int32)
    assert torch.equal(old[0, :-1], torch.where(i % 2 == 0, 0, 100).int())
    assert torch.equal(old[1, :-1], torch.where(i % 2 == 0, i + 1, 100 + i + 1).int())
    assert torch.equal(a[:-1], torch.where(i % 2 == 0, 2 * (i + 1), 0).int())
    assert b[: N // 2 - 1].tolist() == [100 + 2 * (2 * k + 2) for k in range(N // 2 - 1)]


@triton.jit
def there_and_back(x, y, o, N: tl.constexpr):
    i = tl.arange(0, N)
    p = tl.load(x + i).to(tl.pi32_t)
    q = tl.load(y + i).to(tl.pi32_t)
    tl.store(o + i, tl.where(i % 2 == 0, p, q).to(tl.int64))


def test_an_address_survives_being_a_pointer():
    g = torch.Generator().manual_seed(0)
    bounds = torch.iinfo(torch.int64)
    x, y = (torch.randint(bounds.min, bounds.max, (N,), generator=g) for _ in "xy")
    x[0], o = x.data_ptr() + 3, torch.zeros(N, dtype=torch.int64)
    assert run(there_and_back, x, y, o, N) == []
    assert torch.equal(o, torch.where(torch.arange(N) % 2 == 0, x, y))
