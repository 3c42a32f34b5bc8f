"""A step into a neighbour's part of a tensor, told by what a program writes."""

# Triton reads the kernels in this file: their constexprs are upper-case and their names are short.
# ruff: noqa: N803

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from fa_verify import ttir
from fa_verify.ttir.sanitizer.regions import Map

HEADS, GROUP, ROWS, WIDTH, BLOCK = 4, 2, 20, 16, 16


@triton.jit
def attend(
    q_ptr, k_ptr, o_ptr, sq, sk, so, rows,
    FLAT_Q: tl.constexpr, FLAT_K: tl.constexpr, FLAT_O: tl.constexpr, PER_PROGRAM: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, WIDTH)[None, :]
    for i in range(PER_PROGRAM):
        head = tl.program_id(1) * PER_PROGRAM + i
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
        flat = row + head * rows < tl.num_programs(1) * PER_PROGRAM * rows
        within = (row < rows) & (column < WIDTH)
        q = q_ptr + head * sq + row * WIDTH + column
        x = tl.load(q, mask=flat if FLAT_Q else within, other=0.0)  # q
        total = tl.zeros([BLOCK, WIDTH], tl.float32)
        for start in range(0, rows, BLOCK):
            key = start + tl.arange(0, BLOCK)[:, None]
            k = k_ptr + head // GROUP * sk + key * WIDTH + column
            kv_heads = tl.num_programs(1) * PER_PROGRAM // GROUP
            within_k = (key < rows) & (column < WIDTH)
            flat_k = key + head // GROUP * rows < kv_heads * rows
            seen = tl.load(k, mask=flat_k if FLAT_K else within_k, other=0.0)  # k
            total += x * tl.sum(tl.where(within_k, seen, 0.0), 0)[None, :]
        o = o_ptr + head * so + row * WIDTH + column
        tl.store(o, total, mask=flat if FLAT_O else within)  # o


def line_of(text):
    with open(__file__, encoding="utf-8") as source:  # noqa: PTH123
        return next(i for i, line in enumerate(source, 1) if line.rstrip().endswith(text))


def dense(heads):
    return torch.randn(heads, ROWS, WIDTH)


def sliced(heads):
    """Heads without a gap between them, inside a larger buffer."""
    return torch.randn(heads + 3, ROWS, WIDTH)[2 : heads + 2]


def labels(heads):
    return torch.arange(heads).reshape(heads, 1, 1)


def launch(make, *, q=False, k=False, o=False, per_program=1):
    qs, ks = make(HEADS), make(HEADS // GROUP)
    with ttir.execute() as run:
        run.label(qs, "q", labels(HEADS))
        run.label(ks, "k", labels(HEADS // GROUP))
        out = torch.empty(HEADS, ROWS, WIDTH)
        attend[(2, HEADS // per_program)](
            qs, ks, out, qs.stride(0), ks.stride(0), out.stride(0), ROWS,
            q, k, o, per_program, GROUP, WIDTH, BLOCK,
        )  # fmt: skip
        whole = torch.arange(HEADS)
        reads = {
            "q": (whole, whole),
            "k": (whole // GROUP, torch.arange(HEADS // GROUP)),
        }
        run.judge([ttir.Footprint(tensor=out, name="o", labels=labels(HEADS), reads=reads)])
    return run.incidents


@pytest.mark.parametrize("make", [dense, sliced])
def test_a_flat_mask_that_lets_a_tile_read_the_next_head_is_reported(make):
    found = launch(make, q=True)
    assert [i.kind for i in found] == ["neighbour-read"]
    assert found[0].line == line_of("# q")
    assert found[0].argument == "q_ptr"
    assert found[0].program_id == (1, 0, 0)
    assert found[0].mask is True
    assert found[0].landed.startswith("q[1, ")
    assert "o[0, " in found[0].detail
    assert found[0].count == HEADS - 1  # the last head's neighbour is masked off


@pytest.mark.parametrize("make", [dense, sliced])
def test_keys_of_the_next_key_head_are_nobodys_business(make):
    found = launch(make, k=True)
    assert [(i.kind, i.line) for i in found] == [("neighbour-read", line_of("# k"))]
    assert found[0].landed.startswith("k[1, ")
    assert found[0].count == 2 * GROUP  # both blocks of rows of each query head of the first


@pytest.mark.parametrize("make", [dense, sliced])
def test_a_tile_that_writes_the_next_head_races_and_its_read_is_told_too(make):
    found = launch(make, q=True, o=True)
    assert {(i.kind, i.line) for i in found} == {
        ("race", line_of("# o")), ("neighbour-read", line_of("# q")),
    }  # fmt: skip


@pytest.mark.parametrize("make", [dense, sliced])
@pytest.mark.parametrize("per_program", [1, 2, 4])
def test_right_kernels_of_any_number_of_heads_a_program_are_left_alone(make, per_program):
    assert launch(make, per_program=per_program) == []


@triton.jit
def negate(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, -tl.load(x_ptr + at))


@pytest.mark.parametrize("shift", [0, 1])
def test_as_many_regions_as_programs_cost_no_more_than_their_number(shift):
    heads = 65_000
    x, numbers = torch.ones(heads, 4), torch.arange(heads)
    with ttir.execute() as run:
        run.label(x, "x", numbers[:, None])
        y = torch.empty(heads, 4)
        negate[(heads - shift,)](x[shift:], y, 4)
        together = {"x": (numbers, numbers)}
        run.judge([ttir.Footprint(tensor=y, name="y", labels=numbers[:, None], reads=together)])
    assert [i.count for i in run.incidents] == ([heads - 1] if shift else [])


def test_elements_of_several_regions_and_unlabelled_copies_are_not_judged():
    assert launch(lambda heads: torch.randn(1, ROWS, WIDTH).expand(heads, -1, -1)) == []
    with ttir.execute() as run:
        run.judge([])
    assert run.incidents == []


def test_elements_that_share_a_place_are_found_there():
    x = torch.zeros(4).expand(3, 4)
    found = Map(x, "x", torch.arange(3)[:, None]).find(np.arange(-1, 5))
    assert found.tolist() == [0, 1, 1, 1, 1, 0]
