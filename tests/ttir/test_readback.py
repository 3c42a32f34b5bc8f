"""A program that reads back what its own threads stored."""

# Triton reads the kernels in this file: their constexprs are upper-case and their names are short.
# ruff: noqa: N803

import pytest
import torch
import triton
import triton.language as tl

from fa_verify import ttir


@triton.jit
def transposed(x_ptr, y_ptr, HOW: tl.constexpr, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    tile = x_ptr + tl.program_id(0) * N * N
    tl.store(tile + i * N + j, i + j * 2.0)
    if HOW == "barrier":
        tl.debug_barrier()
    if HOW == "atomic":
        tl.atomic_add(y_ptr, 1.0)
    if HOW == "same":
        back = tl.load(tile + i * N + j)
    elif HOW == "row":
        back = tl.load(tile + tl.arange(0, N))[None, :]  # row
    else:
        back = tl.load(tile + j * N + i)  # transposed
    tl.store(y_ptr + 1 + tl.program_id(0) * N * N + i * N + j, back + 0.0 * i)


@triton.jit
def updated(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    for k in range(3):
        tl.store(x_ptr + i, tl.load(x_ptr + i) + k)


@triton.jit
def two_pointers(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x_ptr + i, i * 1.0)
    tl.store(y_ptr + N - 1 - i, tl.load(y_ptr + N - 1 - i))  # two_pointers


def line_of(text):
    with open(__file__, encoding="utf-8") as source:  # noqa: PTH123
        return next(i for i, line in enumerate(source, 1) if line.rstrip().endswith(text))


def notes(kernel, *args, programs=3):
    with ttir.execute() as run:
        kernel[(programs,)](*args)
    assert run.incidents == []
    return run.notes


@pytest.mark.parametrize(("how", "line"), [("other", "# transposed"), ("row", "# row")])
def test_reading_through_another_tile_is_noted_as_possible(how, line):
    x, y = torch.zeros(4 * 256)[256:], torch.zeros(1 + 3 * 256)
    (note,) = notes(transposed, x, y, how, 16)
    assert (note.kind, note.line, note.argument) == ("read-back", line_of(line), "x_ptr")
    assert note.detail.startswith("possible: ")
    assert note.program_id == (0, 0, 0)
    diagonal = 16 if how == "other" else 0  # the same place in a tile of the same shape
    assert note.count == 3 * ((256 if how == "other" else 16) - diagonal)


@pytest.mark.parametrize("how", ["same", "barrier", "atomic"])
def test_the_same_place_and_barriers_are_in_order(how):
    x, y = torch.zeros(3 * 256), torch.zeros(1 + 3 * 256)
    assert notes(transposed, x, y, how, 16) == []


def test_load_add_store_in_a_loop_is_in_order():
    assert notes(updated, torch.zeros(48), torch.zeros(48), 16) == []


def test_two_arguments_over_one_storage_are_one_memory():
    x = torch.zeros(16)
    (note,) = notes(two_pointers, x, x, 16, programs=1)
    assert (note.line, note.argument) == (line_of("# two_pointers"), "y_ptr")
    assert notes(two_pointers, x, torch.zeros(16), 16, programs=1) == []
