"""torch.compile while kernels are executed."""

# ruff: noqa: N803

import pytest
import torch
import triton
import triton.language as tl

from fa_verify import ttir


@triton.jit
def increment_kernel(x, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)


def doubled_and_one(x):
    x = x * 2
    y = torch.empty_like(x)
    increment_kernel[(1,)](x, y, len(x), BLOCK=64)
    return y.relu()


@torch.library.custom_op("fa_verify_tests::increment", mutates_args=())
def increment(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    increment_kernel[(1,)](x, y, len(x), BLOCK=64)
    return y


@increment.register_fake
def _(x):
    return torch.empty_like(x)


increment.register_autograd(lambda _, grad: grad)


def by_operator(x):
    return increment(x * 2).relu()


@pytest.mark.parametrize("function", [doubled_and_one, by_operator])
@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_what_is_compiled_runs_as_it_is_and_is_watched(function, fullgraph, before):
    if before:
        compiled = torch.compile(function, fullgraph=fullgraph, backend="eager")
    x = torch.ones(40, requires_grad=True)
    with ttir.execute() as run:
        if not before:
            compiled = torch.compile(function, fullgraph=fullgraph, backend="eager")
        y = compiled(x)
    assert torch.equal(y, torch.full((40,), 3.0))
    assert [launch.kernel for launch in run.launches] == ["increment_kernel"]
    assert run.incidents == []


def test_a_defect_is_seen_in_what_is_compiled():
    compiled = torch.compile(lambda x: increment(x[:30])[:20].sum(), fullgraph=True)
    with ttir.execute() as run, ttir.redirected():
        compiled(torch.empty(40))
    assert [incident.kind for incident in run.incidents] == ["uninitialised-read"]


def test_outside_it_is_compiled_again():
    frames = []

    def backend(graph, _):
        frames.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: x.sin() + 1, fullgraph=True, backend=backend)
    with ttir.execute():
        compiled(torch.ones(3))
    assert frames == []
    compiled(torch.ones(3))
    assert len(frames) == 1


def test_an_execution_inside_of_what_is_compiled():
    @torch.compiler.disable
    def executed(x):
        with ttir.execute() as run:
            return doubled_and_one(x), len(run.launches)

    compiled = torch.compile(lambda x: executed(x + 1)[0] - 1, backend="eager")
    assert torch.equal(compiled(torch.ones(40)), torch.full((40,), 4.0))


def test_as_a_decorator_with_options():
    with ttir.execute():

        @torch.compile(fullgraph=True, dynamic=True)
        def squared(x):
            return x * x

        assert squared(torch.full((2,), 3.0)).tolist() == [9.0, 9.0]
