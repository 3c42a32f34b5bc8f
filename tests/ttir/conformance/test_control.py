"""Loops, hints, random numbers, and what a kernel says while it is compiled or run."""

# Triton reads the kernels in this file: their constexprs are upper-case and their names are short.
# ruff: noqa: N803

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from fa_verify import ttir

N = 64


def launch(kernel, *args, grid=(1,), **options):
    with ttir.execute() as run:
        kernel[grid](*args, **options)
    return [(i.kind, i.detail) for i in run.incidents]


@triton.jit
def loops(o, n, FLATTEN: tl.constexpr):
    total = 0
    for i in tl.range(0, n, num_stages=3, flatten=FLATTEN, loop_unroll_factor=2):
        for j in tl.range(i, n, 2, disallow_acc_multi_buffer=True, disable_licm=True):
            total += i * j
    for k in tl.static_range(3):
        total += k * 1000
    steps = 0
    while tl.condition(steps * steps < n, disable_licm=True):
        steps += 1
    tl.store(o, total)
    tl.store(o + 1, steps)


@pytest.mark.parametrize("flatten", [False, True])
def test_range_static_range_and_condition(flatten):
    o = torch.zeros(2, dtype=torch.int32)
    assert launch(loops, o, 7, flatten) == []
    assert o[0] == sum(i * j for i in range(7) for j in range(i, 7, 2)) + 3000
    assert o[1] == 3


@triton.jit
def hints(x, o, n, N: tl.constexpr):
    i = tl.max_contiguous(tl.multiple_of(tl.arange(0, N), N), N)
    same = tl.max_constancy(i // 16, 16)
    tl.assume(n > 0)
    tl.static_assert(N == 64, "N is 64")
    tl.static_print("compiled for", N)
    tl.debug_barrier()
    tl.device_assert(i < n, "within n")
    tl.device_print("n is", n)
    tl.store(o + i, tl.load(x + i) + same)


def test_hints_and_messages_change_no_number(capsys):
    x, o = torch.randn(N), torch.zeros(N)
    assert launch(hints, x, o, N, N, debug=True) == []
    assert torch.equal(o, x + torch.arange(N) // 16)
    assert f"n is: {N}\n" in capsys.readouterr().out
    assert launch(hints, x, o, N - 1, N, debug=True) == [("assertion-failed", "within n")]


@triton.jit
def streams(o, c, seed, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.rand(seed, i))
    tl.store(o + N + i, tl.randn(seed, i))
    a, b, d, e = tl.rand4x(seed, i)
    tl.store(o + 2 * N + i, a + b + d + e)
    a, b, d, e = tl.randn4x(seed, i)
    tl.store(o + 3 * N + i, a)
    a, b, d, e = tl.randint4x(seed, i)
    tl.store(c + i, a.to(tl.int32, bitcast=True))
    tl.store(c + N + i, e.to(tl.int32, bitcast=True))
    tl.store(c + 2 * N + i, tl.randint(seed, i).to(tl.int32, bitcast=True))
    counter = i.to(tl.uint32)
    zero = counter * 0
    a, b, d, e = tl.philox(seed, counter, zero, zero, zero)
    tl.store(c + 3 * N + i, b.to(tl.int32, bitcast=True))
    a, b, d, e = tl.philox_impl(counter, zero, zero, zero, zero + 42, zero)
    tl.store(c + 4 * N + i, d.to(tl.int32, bitcast=True))


def philox(counter, key, rounds=10):
    """Salmon et al. 2011, section 3.3: Philox-4x32-10."""
    c, k = [counter, 0, 0, 0], [key, 0]
    for _ in range(rounds):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [q >> 32 ^ c[1] ^ k[0], q & 0xFFFFFFFF, p >> 32 ^ c[3] ^ k[1], p & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def test_random_numbers_are_philox():
    o, c = torch.zeros(4, N), torch.zeros(5, N, dtype=torch.int32)
    assert launch(streams, o, c, 42, N) == []
    words = np.array([philox(i, 42) for i in range(N)], np.uint32).astype(np.int32)
    assert np.array_equal(c.numpy(), words[:, [0, 3, 0, 1, 2]].T)
    uniform = np.where(words < 0, ~words, words).astype(np.float32) * np.float32(4.6566127342e-10)
    assert np.array_equal(o[0].numpy(), uniform[:, 0])
    assert np.allclose(o[2], uniform.sum(1), rtol=1e-6)
    angle, radius = 2 * np.pi * uniform[:, 1], np.sqrt(-2 * np.log(np.maximum(uniform[:, 0], 1e-7)))
    assert np.allclose(o[3], radius * np.cos(angle), atol=1e-5)
    assert np.allclose(o[1], o[3])


@triton.jit
def merges(x, o, N: tl.constexpr):
    i = tl.arange(0, N)
    half = N // 2
    rising = tl.sort(tl.load(x + tl.arange(0, N // 2)))
    falling = tl.sort(tl.load(x + half + tl.arange(0, N // 2)), descending=True)
    bitonic = tl.reshape(tl.trans(tl.join(rising, falling)), (N,))
    tl.store(o + i, tl.bitonic_merge(bitonic))


def test_bitonic_merge():
    x, o = torch.randn(N), torch.zeros(N)
    assert launch(merges, x, o, N) == []
    assert torch.equal(o, x.sort().values)


@triton.jit
def place(o):
    p = tl.program_id(0) + tl.num_programs(0) * (
        tl.program_id(1) + tl.num_programs(1) * tl.program_id(2)
    )
    m = tl.extra.cuda.smid()
    tl.store(o + p, p * 1000 + m)
    tl.device_assert(tl.extra.cuda.globaltimer() > 0)


def test_programs_know_their_place_and_a_multiprocessor():
    o = torch.zeros(3, 2, 50, dtype=torch.int32)
    assert launch(place, o, grid=(50, 2, 3), debug=True) == []
    p = torch.arange(300)
    assert torch.equal(o.view(-1), (p * 1000 + p % 132).int())
