"""Each finding of the sanitizer: a kernel with the mistake, and next to it a right one."""

# Triton reads the kernels in this file: their constexprs are upper-case and their names are short.
# ruff: noqa: N803, SIM108, PTH123

import pytest
import torch
import triton
import triton.language as tl

from fa_verify import ttir


@triton.jit
def copy_rows(
    x_ptr, y_ptr, rows, cols, stride_x, stride_y, MASKED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    if MASKED:
        x = tl.load(x_ptr + row * stride_x + col, mask=col < cols, other=0.0)
    else:
        x = tl.load(x_ptr + row * stride_x + col)  # no mask
    tl.store(y_ptr + row * stride_y + col, x, mask=col < cols)


@triton.jit
def copy_tile(x_ptr, y_ptr, rows, cols, stride, GUARD: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    c = tl.arange(0, BLOCK)[None, :]
    if GUARD:
        inside = (r < rows) & (c < cols)
    else:
        inside = (r * cols + c) < rows * cols
    x = tl.load(x_ptr + r * stride + c, mask=inside, other=0.0)  # tile load
    tl.store(y_ptr + r * cols + c, x, mask=(r < rows) & (c < cols))


@triton.jit
def store_past(y_ptr, n, SLACK: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, i.to(tl.float32), mask=i < n + SLACK)  # the store


@triton.jit
def before_start(x_ptr, y_ptr, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i - SHIFT))  # reads before


@triton.jit
def write_all(y_ptr, SAME: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = 1.0 if SAME else tl.program_id(0).to(tl.float32)
    tl.store(y_ptr + i, tl.zeros([BLOCK], tl.float32) + value)  # everybody writes


@triton.jit
def store_rows(y_ptr, stride, SAME: tl.constexpr, BLOCK: tl.constexpr):
    i, j = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    tl.store(y_ptr + i * stride + j, j + (0 if SAME else 2 * i))  # rows


@triton.jit
def shift_in_place(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i + 1, mask=i + 1 < n, other=0.0)  # reads the neighbour
    tl.store(y_ptr + i, x, mask=i < n)  # writes in place


@triton.jit
def scale_in_place(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(x_ptr + i, 2 * x, mask=i < n)
    tl.store(x_ptr + i, 1 + tl.load(x_ptr + i, mask=i < n), mask=i < n)


@triton.jit
def mixed(x_ptr, y_ptr, PLAIN: tl.constexpr):
    pid = tl.program_id(0)
    tl.atomic_add(x_ptr, 1.0, sem="relaxed")
    if PLAIN:
        tl.store(y_ptr + pid, tl.load(x_ptr))  # plain read


@triton.jit
def last_one_sums(part_ptr, count_ptr, y_ptr, n, PROGRAMS: tl.constexpr):
    pid = tl.program_id(0)
    tl.store(part_ptr + pid, pid.to(tl.float32))
    done = tl.atomic_add(count_ptr, 1)
    if done == n - 1:
        parts = tl.load(part_ptr + tl.arange(0, PROGRAMS))
        tl.store(y_ptr, tl.sum(parts))


@triton.jit
def locked_add(lock_ptr, x_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    tl.store(x_ptr + i, tl.load(x_ptr + i) + 1.0)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0)


def line_of(text):
    with open(__file__, encoding="utf-8") as source:
        return next(i for i, line in enumerate(source, 1) if text in line and "line_of" not in line)


def only(run, kind):
    assert [x.kind for x in run.incidents] == [kind]
    return run.incidents[0]


def test_a_read_past_the_last_row_is_reported_with_place_and_program():
    x, y = torch.randn(6, 10), torch.empty(6, 10)
    with ttir.execute() as run:
        copy_rows[(6,)](x, y, 6, 10, 10, 10, False, 16)
    found = only(run, "out-of-bounds-read")
    assert found.kernel == "copy_rows"
    assert found.file == __file__
    assert found.line == line_of("# no mask")
    assert "# no mask" in found.source
    assert found.argument == "x_ptr"
    assert found.program_id == (5, 0, 0)
    assert found.offset == 60
    assert found.coordinates == (6, 0)
    assert found.count == 6
    assert "no mask" in found.detail
    assert "6 elements past the end" in found.detail
    assert torch.equal(x, y)  # what lies inside is copied all the same


def test_a_masked_copy_reports_nothing():
    x, y = torch.randn(6, 10), torch.empty(6, 10)
    with ttir.execute() as run:
        copy_rows[(6,)](x, y, 6, 10, 10, 10, True, 16)
    assert run.incidents == []
    assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32])
def test_a_step_into_the_slack_between_rows_lands_outside(dtype):
    x = torch.arange(6 * 24).reshape(6, 24).to(dtype)[:, :10]
    y = torch.empty(6, 10, dtype=dtype)
    with ttir.execute() as run:
        copy_rows[(6,)](x, y, 6, 10, x.stride(0), 10, False, 16)
    found = only(run, "out-of-bounds-read")
    assert found.program_id == (0, 0, 0)
    assert found.coordinates == (0, 10)
    assert found.count == 6 * 6
    assert "between the elements" in found.detail or "past the end" in found.detail
    with ttir.execute() as run:
        copy_rows[(6,)](x, y, 6, 10, x.stride(0), 10, True, 16)
    assert run.incidents == []
    assert torch.equal(x, y)


def test_a_flat_mask_that_lets_a_tile_leave_its_view_is_seen():
    base = torch.zeros(20, 16)
    x, y = base[:12, :10], torch.empty(12, 10)
    with ttir.execute() as run:
        copy_tile[(1,)](x, y, 12, 10, 16, False, 16)
    found = only(run, "out-of-bounds-read")
    assert found.line == line_of("# tile load")
    assert "the mask let it through" in found.detail
    with ttir.execute() as run:
        copy_tile[(1,)](x, y, 12, 10, 16, True, 16)
    assert run.incidents == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(3, 12, 10)[1],
        lambda: torch.randn(10, 12).mT,
        lambda: torch.randn(1, 10).expand(12, 10),
        lambda: torch.randn(12, 64)[:, 7:17],
        lambda: torch.randn(24, 20)[::2, ::2],
    ],
    ids=["slice", "transposed", "expanded", "padded rows", "steps"],
)
def test_reads_through_right_strides_are_legal_in_every_view(make):
    x, y = make(), torch.empty(12, 10)
    with ttir.execute() as run:
        strided_copy[(1,)](x, y, *x.stride(), 12, 10, 16)
    assert run.incidents == []
    assert torch.equal(x, y)


@triton.jit
def strided_copy(x_ptr, y_ptr, s0, s1, rows, cols, BLOCK: tl.constexpr):
    r = tl.arange(0, BLOCK)[:, None]
    c = tl.arange(0, BLOCK)[None, :]
    inside = (r < rows) & (c < cols)
    tl.store(y_ptr + r * cols + c, tl.load(x_ptr + r * s0 + c * s1, mask=inside), mask=inside)


def test_a_write_outside_is_dropped_and_reported():
    storage = torch.zeros(64)
    y = storage[8:40]
    with ttir.execute() as run:
        store_past[(3,)](y, 32, 3, 16)
    found = only(run, "out-of-bounds-write")
    assert found.line == line_of("# the store")
    assert found.program_id == (2, 0, 0)
    assert found.coordinates == (32,)
    assert found.count == 3
    assert torch.equal(y, torch.arange(32.0))
    assert not storage[40:].any()
    with ttir.execute() as run:
        store_past[(3,)](y, 32, 0, 16)
    assert run.incidents == []


def test_a_read_before_the_first_element_yields_poison():
    storage = torch.ones(64)
    x, y = storage[16:48], torch.zeros(16)
    with ttir.execute() as run:
        before_start[(1,)](x, y, 4, 16)
    found = only(run, "out-of-bounds-read")
    assert found.offset == -4
    assert found.coordinates is None
    assert "before the beginning" in found.detail
    assert y[:4].isnan().all()
    assert (y[4:] == 1).all()


def test_an_empty_argument_has_no_legal_element():
    x, y = torch.empty(0), torch.zeros(16)
    with ttir.execute() as run:
        before_start[(1,)](x, y, 0, 16)
    assert only(run, "out-of-bounds-read").count == 16
    assert y.isnan().all()


def test_reading_what_nobody_wrote_is_reported_once_per_line():
    y = torch.zeros(4, 10)
    with ttir.execute() as run:
        x = torch.empty(4, 10)
        x[:3] = 1.0
        copy_rows[(4,)](x, y, 4, 10, 10, 10, True, 16)
    found = only(run, "uninitialised-read")
    assert found.argument == "x_ptr"
    assert found.program_id == (3, 0, 0)
    assert found.coordinates == (3, 0)
    assert found.count == 10
    assert y[3].isnan().all()


@triton.jit
def add_or_exchange(x_ptr, EXCHANGE: tl.constexpr, N: tl.constexpr):
    at = x_ptr + tl.arange(0, N)
    if EXCHANGE:
        tl.atomic_xchg(at, 1.0)
    else:
        tl.atomic_add(at, 1.0)


def test_an_atomic_addition_to_what_nobody_wrote_reads_it():
    with ttir.execute() as run:
        add_or_exchange[(3,)](torch.empty(8), False, 8)
    found = only(run, "uninitialised-read")
    assert (found.argument, found.count, found.program_id) == ("x_ptr", 8, (0, 0, 0))


def test_an_atomic_addition_to_zeros_or_to_what_was_exchanged_reads_what_is_written():
    with ttir.execute() as run:
        add_or_exchange[(3,)](torch.zeros(8), False, 8)
        x = torch.empty(8)
        add_or_exchange[(1,)](x, True, 8)
        add_or_exchange[(3,)](x, False, 8)
    assert run.incidents == []
    assert (x == 4.0).all()


def test_memory_written_by_a_kernel_or_by_torch_may_be_read():
    z = torch.zeros(4, 10)
    with ttir.execute() as run:
        x = torch.empty(4, 10)
        x.fill_(2.0)
        y = torch.empty(4, 10)
        assert run.unwritten(y).all()
        copy_rows[(4,)](x, y, 4, 10, 10, 10, True, 16)
        assert not run.unwritten(y).any()
        copy_rows[(4,)](y, z, 4, 10, 10, 10, True, 16)
    assert run.incidents == []


def test_declared_memory_counts_as_unwritten_element_by_element():
    buffer = torch.zeros(8, 24)
    x, y = buffer[:4, :10], torch.zeros(4, 10)
    with ttir.execute() as run:
        run.declare(buffer, "buffer", written=False)
        run.declare(x, "x", written=True)
        copy_rows[(4,)](x, y, 4, 10, 24, 10, True, 16)
        assert run.incidents == []
        assert run.unwritten(buffer).sum() == 8 * 24 - 40
        copy_rows[(5,)](buffer[:5], torch.zeros(5, 10), 5, 10, 24, 10, True, 16)
    found = only(run, "uninitialised-read")
    assert found.coordinates == (4, 0)


def test_memory_seen_through_two_element_sizes_is_one_memory():
    z = torch.zeros(2, 10)
    with ttir.execute() as run:
        workspace = torch.empty(160, dtype=torch.uint8)
        y = workspace.view(torch.float32).view(4, 10)
        copy_rows[(2,)](torch.ones(2, 10), y, 2, 10, 10, 10, True, 16)
        assert run.unwritten(workspace).sum() == 80
        copy_rows[(2,)](y[:2], z, 2, 10, 10, 10, True, 16)
        assert run.incidents == []
        copy_rows[(2,)](y[2:], z, 2, 10, 10, 10, True, 16)
    assert only(run, "uninitialised-read").coordinates == (0, 0)


def test_an_output_left_unwritten_is_known():
    with ttir.execute() as run:
        y = torch.empty(40)
        store_past[(2,)](y, 32, 0, 16)
        assert run.unwritten(y).nonzero().flatten().tolist() == list(range(32, 40))
    assert run.incidents == []


@pytest.mark.parametrize("memory_limit", [1, 1 << 30], ids=["program by program", "in lockstep"])
def test_programs_that_write_different_values_race(memory_limit):
    options = ttir.Options(memory_limit=memory_limit)
    with ttir.execute(options) as run:
        y = torch.zeros(16)
        write_all[(3,)](y, False, 16)
    found = only(run, "race")
    assert found.line == line_of("# everybody writes")
    assert found.argument == "y_ptr"
    assert "program (" in found.detail
    with ttir.execute(options) as run:
        y = torch.zeros(16)
        write_all[(3,)](y, True, 16)
    assert run.incidents == []


@pytest.mark.parametrize("stride", [0, 1])
@pytest.mark.parametrize("programs", [1, 3])
def test_one_store_that_gives_an_element_several_values_races_with_itself(stride, programs):
    with ttir.execute() as run:
        store_rows[(programs,)](torch.zeros(15 * stride + 16), stride, False, 16)
    found = only(run, "race")
    assert found.line == line_of("# rows")
    assert programs > 1 or "several values to the same element at once" in found.detail
    with ttir.execute() as run:
        store_rows[(programs,)](torch.zeros(16), 0, True, 16)  # the same value, many times
        store_rows[(programs,)](torch.zeros(256), 16, False, 16)
    assert run.incidents == []


@pytest.mark.parametrize("memory_limit", [1, 1 << 30], ids=["program by program", "in lockstep"])
def test_reading_what_another_program_writes_is_a_race_whoever_comes_first(memory_limit):
    for schedule in ("forward", "reverse"):
        x = torch.randn(64)
        with ttir.execute(ttir.Options(schedule=schedule, memory_limit=memory_limit)) as run:
            shift_in_place[(4,)](x, x, 64, 16)
        assert {i.kind for i in run.incidents} == {"race"}
        lines = {line_of("# reads the neighbour"), line_of("# writes in place")}
        assert {i.line for i in run.incidents} <= lines
    x, y = torch.randn(64), torch.empty(64)
    with ttir.execute() as run:
        shift_in_place[(4,)](x, y, 64, 16)
    assert run.incidents == []
    assert torch.equal(y[:63], x[1:])


def test_a_program_may_read_what_it_wrote_itself():
    x = torch.arange(50.0)
    with ttir.execute() as run:
        scale_in_place[(4,)](x, 50, 16)
    assert run.incidents == []
    assert torch.equal(x, 2 * torch.arange(50.0) + 1)


def test_plain_and_atomic_access_do_not_mix():
    with ttir.execute() as run:
        mixed[(4,)](torch.zeros(1), torch.zeros(4), True)
    found = only(run, "race")
    assert found.line == line_of("# plain read")
    assert "atomically" in found.detail
    x = torch.zeros(1)
    with ttir.execute() as run:
        mixed[(4,)](x, torch.zeros(4), False)
    assert run.incidents == []
    assert x.item() == 4


def test_an_atomic_counter_orders_what_came_before_it():
    y = torch.zeros(1)
    for schedule in ("forward", "reverse", "shuffled"):
        with ttir.execute(ttir.Options(schedule=schedule)) as run:
            part, count = torch.empty(8), torch.zeros(1, dtype=torch.int32)
            last_one_sums[(8,)](part, count, y, 8, 8)
        assert run.incidents == []
        assert y.item() == 28


def test_a_lock_orders_its_critical_sections():
    x, lock = torch.zeros(16), torch.zeros(1, dtype=torch.int32)
    with ttir.execute() as run:
        locked_add[(5,)](lock, x, 16)
    assert run.incidents == []
    assert (x == 5).all()


def test_without_sanitize_nothing_is_reported_and_nothing_outside_is_touched():
    storage = torch.zeros(64)
    with ttir.execute(ttir.Options(sanitize=False)) as run:
        store_past[(3,)](storage[8:40], 32, 3, 16)
    assert run.incidents == []
    assert not storage[40:].any()
    assert torch.equal(storage[8:40], torch.arange(32.0))


def test_incidents_are_capped_and_counted():
    x, y = torch.randn(6, 10), torch.empty(6, 10)
    with ttir.execute(ttir.Options(max_incidents=1)) as run:
        for _ in range(3):
            copy_rows[(6,)](x, y, 6, 10, 10, 10, False, 16)
        store_past[(3,)](torch.zeros(32), 32, 3, 16)
    assert only(run, "out-of-bounds-read").count == 18


@triton.jit
def far_row(x_ptr, y_ptr, stride, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    if WIDE:
        row = row.to(tl.int64)
    at = row * stride + i  # the product
    tl.store(y_ptr + tl.program_id(0) * BLOCK + i, tl.load(x_ptr + at, mask=i < BLOCK))


def test_a_product_that_wraps_on_its_way_to_an_address_is_reported():
    x, y = torch.zeros(16), torch.zeros(4, 16)
    with ttir.execute() as run:
        far_row[(4,)](x, y, 1 << 30, False, 16)
    found = next(i for i in run.incidents if i.kind == "integer-overflow")
    assert found.line == line_of("# the product")
    assert found.program_id == (2, 0, 0)
    assert str(1 << 31) in found.detail
    with ttir.execute() as run:
        far_row[(4,)](x, y, 1 << 30, True, 16)
    assert {i.kind for i in run.incidents} == {"out-of-bounds-read"}
