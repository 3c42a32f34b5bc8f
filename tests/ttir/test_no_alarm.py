"""What is no mistake, however it looks: idle lanes, views, memory that torch wrote or did not."""

# Triton reads the kernels in this file: their constexprs are upper-case and their names are short.
# ruff: noqa: N803

import pytest
import torch
import triton
import triton.language as tl

from fa_verify import ttir


@triton.jit
def idle_lanes(x_ptr, y_ptr, n, zero, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    on = i < n
    wild = (i - n) // tl.where(on, 1, zero) * 1000003 + i * (1 << 28)
    x = tl.load(x_ptr + tl.where(on, i, wild), mask=on, other=1.0)
    tl.store(y_ptr + tl.where(on, i, -wild), x, mask=on)
    tl.atomic_add(y_ptr + BLOCK + tl.where(on, 0, wild), 1.0, mask=on)


@triton.jit
def chosen(x_ptr, y_ptr, z_ptr, n, OFF: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    at = tl.where(i < n, x_ptr + i, y_ptr + i - n + OFF)  # half of x, half of y
    tl.store(z_ptr + i, tl.load(at))  # chosen


@triton.jit
def copy(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n), mask=i < n)  # copy


def line_of(text):
    with open(__file__, encoding="utf-8") as source:  # noqa: PTH123
        return next(i for i, line in enumerate(source, 1) if line.rstrip().endswith(text))


def test_idle_lanes_may_divide_by_zero_wrap_and_point_anywhere():
    x, y = torch.arange(40.0)[8:24], torch.zeros(40)[1:34]
    with ttir.execute() as run:
        idle_lanes[(1,)](x, y, 5, 0, 32)
    assert (run.incidents, run.notes) == ([], [])
    assert y[:5].tolist() == [8.0, 9.0, 10.0, 11.0, 12.0]
    assert y[32] == 5.0
    assert not y[5:32].any()


def test_a_pointer_chosen_by_select_belongs_lane_by_lane_to_what_was_chosen():
    buffer = torch.arange(64.0)
    x, y, z = buffer[:8], buffer[8:16], torch.zeros(16)  # side by side: x goes on in y
    with ttir.execute() as run:
        chosen[(1,)](x, y, z, 8, 0, 16)
    assert run.incidents == []
    assert torch.equal(z, buffer[:16])
    with ttir.execute() as run:
        chosen[(1,)](x, y, z, 9, 1, 16)
    (past_x, past_y) = run.incidents if len(run.incidents) == 2 else (run.incidents[0], None)
    assert (past_x.kind, past_x.line) == ("out-of-bounds-read", line_of("# chosen"))
    assert past_x.argument == "x_ptr"
    assert past_x.landed == "y_ptr[0]"
    assert past_y is None
    with ttir.execute() as run:
        chosen[(1,)](x, y, z, 8, 1, 16)
    assert [(i.argument, i.offset) for i in run.incidents] == [("y_ptr", 8)]


def launch(make):
    """Incidents of a copy from a tensor made within the execution."""
    with ttir.execute() as run:
        x = make()
        copy[(2,)](x, torch.zeros(32), 32, 16)
    return [(i.kind, i.line, i.count) for i in run.incidents]


def _by_numpy(tensor):
    tensor.numpy()[:] = 1.0
    return tensor


WRITTEN = {
    "zeros": lambda: torch.zeros(32),
    "new_zeros": lambda: torch.ones(1).new_zeros(32),
    "full_like": lambda: torch.full_like(torch.empty(32), 2.0),
    "fill_": lambda: torch.empty(32).fill_(1.0),
    "copy_": lambda: torch.empty(32).copy_(torch.ones(32)),
    "random_": lambda: torch.empty(32).normal_(),
    "out=": lambda: torch.add(torch.ones(32), 1.0, out=torch.empty(32)),
    "out= that grows": lambda: torch.add(torch.ones(32), 1.0, out=torch.empty(0)),
    "two halves": lambda: _halves(torch.empty(32)),
    "through a view": lambda: _through_view(torch.empty(4, 8)),
    "foreach": lambda: _foreach([torch.empty(16), torch.empty(32)]),
    "clone": lambda: torch.empty(32).fill_(1.0).clone(),
    "index of columns": lambda: _columns(torch.empty(32, 2)),
    "written through NumPy": lambda: _by_numpy(torch.empty(32)),
    "resized after writing": lambda: torch.ones(8).resize_(32).fill_(1.0),
}
HOLES = {  # how many elements nobody wrote
    "empty": (lambda: torch.empty(32), 32),
    "empty_like": (lambda: torch.empty_like(torch.ones(32)), 32),
    "new_empty": (lambda: torch.ones(1).new_empty(32), 32),
    "new_empty_strided": (lambda: torch.ones(1).new_empty_strided((32,), (1,)), 32),
    "one element left": (lambda: _but_one(torch.empty(32)), 1),
    "every other": (lambda: _every_other(torch.empty(32)), 16),
    "a view of empty": (lambda: torch.empty(3, 32)[1], 32),
    "grown by resize_": (lambda: torch.empty(8).fill_(1.0).resize_(32), 24),
    "grown from what was written": (lambda: torch.ones(8).resize_(32), 24),
}


def _halves(x):
    x[:16] = 1.0
    x[16:].zero_()
    return x


def _through_view(x):
    x.t().copy_(torch.ones(8, 4))
    return x.reshape(-1)


def _foreach(tensors):
    torch._foreach_zero_(tensors)
    return tensors[1]


def _columns(x):
    x[:, 0] = 1.0
    return x.as_strided((32,), (2,)).contiguous()


def _but_one(x):
    x[:31] = 1.0
    return x


def _every_other(x):
    x[::2] = 1.0
    return x


@pytest.mark.parametrize("how", WRITTEN)
def test_what_torch_wrote_may_be_read(how):
    assert launch(WRITTEN[how]) == []


@pytest.mark.parametrize("how", HOLES)
def test_what_nobody_wrote_is_told_element_by_element(how):
    make, holes = HOLES[how]
    assert launch(make) == [("uninitialised-read", line_of("# copy"), holes)]


def test_memory_that_nobody_wrote_between_two_launches():
    with ttir.execute() as run:
        work, y = torch.empty(32), torch.zeros(32)
        copy[(1,)](torch.ones(32), work, 32, 16)  # half of it: the grid is one program short
        copy[(2,)](work, y, 32, 16)
    assert [(i.kind, i.coordinates, i.count) for i in run.incidents] == [
        ("uninitialised-read", (16,), 16)
    ]


def test_memory_freed_and_given_out_again_starts_afresh():
    with ttir.execute() as run:
        for _ in range(20):
            x = torch.empty(32)
            del x
            y = torch.zeros(32)
            copy[(2,)](y, torch.empty(32), 32, 16)
            torch.add(y, 1.0, out=torch.empty(4).resize_(0))
            z = torch.ones(32)
            copy[(2,)](z, y, 32, 16)
    assert run.incidents == []
