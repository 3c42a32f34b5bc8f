"""What launchers do besides computing: grids, arguments, hooks, compiled kernels' attributes."""

# Triton reads the kernels in this file: their constexprs are upper-case and their names are short.
# ruff: noqa: N803, N806

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import _allocation
from triton.tools.tensor_descriptor import TensorDescriptor

from fa_verify import ttir

runtime = triton.knobs.runtime


@triton.jit
def fill(x_ptr, n, value, BLOCK: tl.constexpr = 16):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + i, value, mask=i < n)


@triton.jit
def place(x_ptr):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = (z * tl.num_programs(1) + y) * tl.num_programs(0) + x
    tl.store(x_ptr + at, x + 10 * y + 100 * z)


@pytest.mark.parametrize("grid", [(1, 1 << 16), (1, 1, 1 << 16), (1 << 31,)])
def test_an_axis_of_a_grid_has_an_end(grid):
    out = torch.zeros(16, dtype=torch.int32)
    with ttir.execute() as run, pytest.raises(RuntimeError, match="invalid argument: grid="):
        place[grid](out)
    assert not run.launches
    assert not out.any()


@pytest.mark.parametrize("grid", [(3,), [3], (3, 2), (3, 2, 2), lambda _: (3, 2), (1, 1, 5)])
def test_a_grid_has_up_to_three_axes(grid):
    x, y, z = (*(grid({}) if callable(grid) else grid), 1, 1)[:3]
    out = torch.full((z, y, x), -1, dtype=torch.int32)
    with ttir.execute() as run:
        place[grid](out)
    expected = (
        torch.arange(x) + 10 * torch.arange(y)[:, None] + 100 * torch.arange(z)[:, None, None]
    )
    assert torch.equal(out, expected.int())
    assert run.launches[0].grid == (x, y, z)


@pytest.mark.parametrize("grid", [(0,), (3, 0), (2, 1, 0)])
def test_an_empty_grid_runs_nothing(grid):
    x = torch.zeros(64)
    with ttir.execute():
        fill[grid](x, 64, 1.0)
    assert (x == 0).all()


@pytest.mark.parametrize(
    ("arguments", "kwargs"),
    [
        ((40, 1.0), {}),
        ((40,), {"value": 1.0}),
        ((), {"value": 1.0, "n": 40, "BLOCK": 16}),
        ((40, 1.0, 16), {"num_warps": 8, "num_stages": 5, "num_ctas": 1, "maxnreg": 128}),
    ],
)
def test_arguments_go_by_position_or_name_and_options_are_passed_on(arguments, kwargs):
    x = torch.zeros(48)
    with ttir.execute() as run:
        kernel = fill[(3,)](x, *arguments, **kwargs)
    assert x.sum() == 40
    assert run.launches[0].num_warps == kwargs.get("num_warps", 4) == kernel.metadata.num_warps
    assert kernel.metadata.maxnreg == kwargs.get("maxnreg")


@pytest.mark.parametrize("value", [True, 3, -1, 2**31, 2**40, -(2**63), 2**64 - 1, 1.5, 0.1, 16])
def test_scalars_keep_their_value(value):
    x = torch.zeros(1, dtype=torch.float64)
    with ttir.execute():
        fill[(1,)](x, 1, value, BLOCK=1)
    exact = float(torch.tensor(value, dtype=torch.float32)) if isinstance(value, float) else value
    assert x.item() == float(exact)


class Pair(NamedTuple):
    ptr: object
    n: object
    scale: tl.constexpr = tl.constexpr(3)


@triton.jit
def from_tuples(pair, other):
    tl.store(pair.ptr, (pair.n + other[1][0]) * pair.scale)
    tl.store(other[0], pair[1])


def test_tuples_and_named_tuples_are_passed():
    x, y = torch.zeros(1), torch.zeros(1)
    with ttir.execute():
        from_tuples[(1,)](Pair(x, 4), (y, (5, None)))
    assert (x.item(), y.item()) == (27, 4)


@triton.jit
def optional(x_ptr, y_ptr):
    if y_ptr is not None:
        tl.store(y_ptr, 1.0)
    tl.store(x_ptr, 2.0)


def test_an_argument_may_be_none():
    x, y = torch.zeros(1), torch.zeros(1)
    with ttir.execute():
        optional[(1,)](x, None)
        assert (x.item(), y.item()) == (2, 0)
        optional[(1,)](x, y)
    assert y.item() == 1


@triton.jit
def double(x):
    return x * 2


@triton.jit
def treble(x):
    return apart(x, 3)


@triton.jit(noinline=True)
def apart(x, factor):
    return x * factor


@triton.constexpr_function
def next_power(n):
    return 1 << (n - 1).bit_length()


@triton.jit
def apply(x_ptr, FUNCTION: tl.constexpr, N: tl.constexpr):
    BLOCK: tl.constexpr = next_power(N)
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i, FUNCTION(tl.load(x_ptr)) + BLOCK, mask=i < N)


@pytest.mark.parametrize(("function", "value"), [(double, 2), (treble, 3)])
def test_functions_are_arguments_and_constexpr_functions_are_called(function, value):
    x = torch.ones(5)
    with ttir.execute() as run:
        apply[(1,)](x, function, 5)
    assert (x == value + 8).all()
    assert run.incidents == []


NUMBER = 3


@triton.jit
def reads_a_global(x_ptr):
    tl.store(x_ptr, NUMBER)


def test_a_global_that_is_no_constexpr_is_an_error():
    with pytest.raises(Exception, match="NUMBER"), ttir.execute():
        reads_a_global[(1,)](torch.zeros(1))


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["x_ptr"])
def unspecialised(x_ptr, n):
    tl.store(x_ptr, n)


@triton.jit
def specialised(x_ptr, n):
    tl.store(x_ptr, n)


@pytest.mark.parametrize(("kernel", "variants"), [(unspecialised, 1), (specialised, 4)])
def test_arguments_are_specialised_as_asked(kernel, variants):
    x = torch.zeros(4, dtype=torch.int32)
    with ttir.execute():
        kernels = [kernel[(1,)](x[at:], n) for at in (0, 1) for n in (7, 16)]
    assert x.tolist() == [16, 16, 0, 0]
    assert len({id(k) for k in kernels}) == variants
    hinted = sum("tt.divisibility" in k.asm["ttir"] for k in kernels)
    assert hinted == (0 if variants == 1 else 3)


@triton.jit(debug=True)
def asserts(x_ptr, n):
    tl.device_assert(n < 5, "too large")
    tl.store(x_ptr, n)


def test_a_kernel_with_debug_on_checks_its_assertions():
    with ttir.execute() as run:
        asserts[(1,)](torch.zeros(1), 4)
        assert run.incidents == []
        asserts[(1,)](torch.zeros(1), 7)
    assert [(i.kind, i.detail) for i in run.incidents] == [("assertion-failed", "too large")]


# -- compiled kernels
def test_a_compiled_kernel_answers_what_launchers_ask():
    with ttir.execute():
        kernel = fill[(3,)](torch.zeros(40), 40, 1.0, num_warps=8)
    assert "tt.store" in kernel.asm["ttir"]
    assert ".target sm_90" in kernel.asm.get("ptx")
    assert kernel.n_spills == 0
    # As the tutorial's softmax works out how many programs fit a multiprocessor.
    assert 65536 // (kernel.n_regs * 32 * 8) == 8
    assert 232448 // kernel.metadata.shared > 0
    assert kernel.metadata.name == kernel.name == "fill"
    assert kernel.metadata.target.arch == 90


@pytest.mark.parametrize("pointer", [torch.zeros(40), torch.float32, "mock"])
def test_only_compiling_runs_nothing(pointer):
    if pointer == "mock":
        pointer = triton.runtime.jit.MockTensor(torch.float32)
    with ttir.execute() as run:
        kernel = fill.warmup(pointer, 40, 1.0, BLOCK=16, grid=(3,))
        assert run.launches == []
        x = torch.zeros(48)
        kernel._init_handles()
        kernel[(3, 1, 1)](x, 40, 1.0, 16)
    assert x.sum() == 40


def test_a_source_is_compiled_without_a_launch():
    signature = {"x_ptr": "*fp32", "n": "i32", "value": "fp32", "BLOCK": "constexpr"}
    source = triton.compiler.ASTSource(fn=fill, signature=signature, constexprs={"BLOCK": 32})
    with ttir.activated():
        text = triton.compile(source).asm["ttir"]
    assert "tensor<32xi32>" in text
    assert "@fill" in text


@pytest.mark.skipif(not hasattr(triton, "AsyncCompileMode"), reason="not in this Triton")
def test_compiling_may_be_put_off_to_threads():
    x = torch.zeros(40, dtype=torch.float64)
    with ttir.execute(), ThreadPoolExecutor(2) as pool, triton.AsyncCompileMode(pool):
        fill.warmup(x, 40, 1.0, BLOCK=4, grid=(10,))
        fill[(10,)](x, 40, 1.0, BLOCK=4)
    assert (x == 1).all()


# -- hooks
def test_hooks_are_called_with_what_they_get_on_a_gpu():
    seen = []
    x = torch.zeros(40, dtype=torch.float16)
    fill.add_pre_run_hook(lambda *_, **kwargs: seen.append(("pre_run", kwargs["BLOCK"])))
    runtime.jit_cache_hook = lambda **kwargs: seen.append(("cache", "BLOCK" in kwargs["repr"]))
    try:
        with ttir.execute():
            fill[(5,)](x, 40, 1.0, BLOCK=8, num_stages=7)
    finally:
        fill.pre_run_hooks.clear()
        runtime.jit_cache_hook = None
    assert seen[0] == ("pre_run", 8)
    assert seen[1][0] == "cache"
    assert (x == 1).all()


@triton.jit(launch_metadata=lambda grid, kernel, args: {"work": grid[0] * args["n"]})
def with_metadata(x_ptr, n):
    tl.store(x_ptr, n)


def test_launch_hooks_get_the_launch_s_metadata():
    seen = []

    def enter(metadata):
        seen.append(metadata.get())

    runtime.launch_enter_hook.add(enter)
    try:
        with ttir.execute():
            with_metadata[(2,)](torch.zeros(1), 5)
    finally:
        runtime.launch_enter_hook.remove(enter)
    assert (seen[0]["name"], seen[0]["work"]) == ("with_metadata", 10)


# -- questions inside kernels, scratch memory
@triton.jit
def asks_for_the_target(x_ptr):
    if tl.target_info.is_cuda():
        if tl.target_info.cuda_capability_geq(9, 0):
            tl.store(x_ptr, 90)
        else:
            tl.store(x_ptr, 80)


def test_a_kernel_is_compiled_for_a_hopper():
    x = torch.zeros(1)
    with ttir.execute():
        asks_for_the_target[(1,)](x)
    assert x.item() == 90


@triton.jit
def with_descriptors(x_ptr, y_ptr, BLOCK: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [16, 16], [16, 1], [BLOCK, BLOCK])
    y = tl.make_tensor_descriptor(y_ptr, [16, 16], [16, 1], [BLOCK, BLOCK])
    y.store([0, 0], x.load([0, 0]) * 2)


@triton.jit
def with_descriptors_of_others(x, y):
    y.store([0, 0], x.load([0, 0]) * 2)


def doubled(programs=1, **options):
    y = torch.empty(16, 16)
    with_descriptors[(programs,)](torch.ones(16, 16), y, 16, **options)
    return (y == 2).all()


def test_descriptors_made_in_a_kernel_need_an_allocator_as_on_a_gpu():
    triton.set_allocator(_allocation.NullAllocator())
    with ttir.execute(), pytest.raises(RuntimeError, match="no allocator was set"):
        doubled()
    with ttir.execute() as run:
        x, y = torch.ones(16, 16), torch.empty(16, 16)
        described = [TensorDescriptor.from_tensor(t, [16, 16]) for t in (x, y)]
        with_descriptors_of_others[(1,)](*described)
    assert (y == 2).all()
    assert not run.incidents


@pytest.mark.parametrize("options", [{}, {"num_ctas": 2}])
def test_the_allocator_is_asked_before_each_launch(options):
    asked = []

    def allocate(size, alignment, stream):
        asked.append((size, alignment, stream))
        return torch.empty(size, dtype=torch.int8)

    with ttir.execute() as run:
        triton.set_allocator(allocate)
        assert doubled(3, **options)
        assert doubled(**options)
    ctas = options.get("num_ctas", 1)
    assert asked == [(3 * ctas * 256, 128, 0), (ctas * 256, 128, 0)]
    assert not run.incidents


@triton.jit
def with_descriptors_in_a_loop(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    for i in range(n):
        x = tl.make_tensor_descriptor(x_ptr + i * 256, [16, 16], [16, 1], [BLOCK, BLOCK])
        y = tl.make_tensor_descriptor(y_ptr + i * 256, [16, 16], [16, 1], [BLOCK, BLOCK])
        y.store([0, 0], x.load([0, 0]) * 2)


def test_the_allocator_is_asked_for_what_triton_needs_on_the_chip():
    types = {"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    aligned = {(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]]}
    source = ASTSource(with_descriptors_in_a_loop, types, {(3,): 16}, aligned)
    chip = GPUTarget("cuda", 90, 32)
    needed = triton.compile(source, target=chip, options={"num_stages": 3}).metadata
    asked = []

    def allocate(size, *_):
        asked.append(size)
        return torch.empty(size, dtype=torch.int8)

    x, y = torch.ones(3, 16, 16), torch.empty(3, 16, 16)
    with ttir.execute():
        triton.set_allocator(allocate)
        with_descriptors_in_a_loop[(5,)](x, y, 3, 16, num_stages=3)
    assert (y == 2).all()
    assert asked == [5 * needed.global_scratch_size]
    assert needed.global_scratch_size > 256  # pipelined: more than one of each


def test_a_buffer_that_is_too_small_is_reported():
    with ttir.execute() as run:
        triton.set_allocator(lambda size, *_: torch.empty(size - 1, dtype=torch.int8))
        assert doubled()
    (incident,) = run.incidents
    assert (incident.kind, incident.argument) == ("out-of-bounds-write", "scratch memory")
    assert "asked for 256 bytes and gave 255" in incident.detail
    with ttir.execute(ttir.Options(sanitize=False)) as run:
        assert doubled()
    assert not run.incidents


def test_a_buffer_without_an_address_is_refused():
    triton.set_allocator(lambda *_: "memory")
    with ttir.execute(), pytest.raises(TypeError, match="data_ptr"):
        doubled()


@triton.jit
def depends_on_the_launch_before(x_ptr):
    tl.extra.cuda.gdc_wait()
    tl.store(x_ptr, tl.load(x_ptr) + 1)
    tl.extra.cuda.gdc_launch_dependents()


def test_dependent_and_cooperative_launches_run_in_order():
    x = torch.zeros(1)
    with ttir.execute() as run:
        for _ in range(3):
            depends_on_the_launch_before[(1,)](x, launch_pdl=True, launch_cooperative_grid=True)
    assert x.item() == 3
    assert run.incidents == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_warps": 3}, "power of 2"),
        ({"num_warps": 64}, "out of resource"),
        ({"num_wraps": 4}, "num_wraps"),
    ],
)
def test_options_that_a_gpu_refuses_are_refused(options, error):
    with pytest.raises(Exception, match=error), ttir.execute():
        fill[(3,)](torch.zeros(40), 40, 1.0, **options)
