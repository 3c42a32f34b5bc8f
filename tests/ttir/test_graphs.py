"""CUDA graphs: nothing runs while one is captured, all of it at each replay."""

# Triton reads the kernels in this file: their constexprs are upper-case and their names are short.
# ruff: noqa: N803

import copy

import pytest
import torch
import triton
import triton.language as tl

from fa_verify import ttir
from fa_verify.ttir.scripts.redirect import redirected

CUDA = {"device": "cuda"}


@pytest.fixture(autouse=True)
def run():
    with redirected(), ttir.execute() as run:
        yield run


@triton.jit
def scaled(x_ptr, y_ptr, n, factor, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) * factor, mask=i < n)


@triton.jit
def add_up(x_ptr, sum_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(sum_ptr, tl.sum(tl.load(x_ptr + i, mask=i < n, other=0.0), 0))


@triton.jit
def unmasked(x_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i))  # past the end


tuned = triton.autotune([triton.Config({"BLOCK": 16})], key=["n"])(scaled)


def captured(function):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


def test_nothing_runs_while_it_is_captured(run):
    x, count = torch.empty(40, **CUDA), torch.zeros(1, **CUDA)

    def work():
        assert torch.cuda.is_current_stream_capturing()
        count.add_(1)
        y = torch.empty_like(x)
        scaled[(3,)](x, y, 40, 2.0, BLOCK=16)
        return y

    _, y = captured(work)
    assert not torch.cuda.is_current_stream_capturing()
    assert (len(run.launches), count.item()) == (0, 0)
    assert y.is_cuda
    assert run.unwritten(y).all()
    assert y.isnan().all()


def test_each_replay_takes_what_is_in_the_inputs_then(run):
    x, count = torch.empty(40, **CUDA), torch.zeros(1, **CUDA)
    weight = torch.randn(40, 6, **CUDA)

    def work():
        count.add_(1)
        y = torch.empty_like(x)
        tuned[lambda meta: (triton.cdiv(40, meta["BLOCK"]),)](x, y, 40, 2.0)
        total = torch.zeros(1, **CUDA)
        add_up[(3,)](y, total, 40, BLOCK=16)
        left, right = (y[None] @ weight).split(3, 1)
        values, places = y.max(0)
        return y, total, torch.cat([left, right, total[None]], 1).half(), values, places

    graph, (y, total, joined, values, places) = captured(work)
    at = y.data_ptr()
    for turn in range(3):
        given = torch.randn(40, **CUDA)
        x.copy_(given)
        graph.replay()
        due = given * 2
        assert torch.equal(y, due)
        torch.testing.assert_close(total, due.sum()[None])
        product = torch.cat([(due[None] @ weight), due.sum()[None, None]], 1)
        torch.testing.assert_close(joined, product.half())
        assert (values, places) == tuple(due.max(0))
        assert count.item() == turn + 1
    assert y.data_ptr() == at
    assert len(run.launches) == 6
    assert not run.incidents


def test_a_graph_captured_in_inference_mode_is_replayed_in_and_out_of_it():
    x, weight = torch.empty(3, 4, **CUDA), torch.randn(5, 4, **CUDA)
    layer = torch.nn.functional.linear
    with torch.inference_mode():
        graph, y = captured(lambda: layer(x.half().float(), weight).t().reshape(-1).to(x.dtype))
    for mode in (True, False):
        with torch.inference_mode(mode):
            x.copy_(torch.randn(3, 4, **CUDA))
            graph.replay()
            torch.testing.assert_close(y, layer(x.half().float(), weight).t().reshape(-1))


def test_random_numbers_are_new_at_each_replay():
    graph, x = captured(lambda: torch.rand(8, **CUDA))
    drawn = []
    for _ in range(2):
        graph.replay()
        drawn.append(x.clone())
    assert not torch.equal(*drawn)


def test_what_is_made_on_the_cpu_is_made_at_once():
    graph, (here, there) = captured(lambda: (torch.ones(3), torch.ones(3, **CUDA)))
    assert torch.equal(here, torch.ones(3))
    assert there.isnan().all()
    here.zero_()
    graph.replay()
    assert torch.equal(here, torch.zeros(3))
    assert torch.equal(there.cpu(), torch.ones(3))


def test_a_fault_is_found_at_its_replay(run):
    x, y = torch.ones(10, **CUDA), torch.empty(16, **CUDA)
    graph, _ = captured(lambda: unmasked[(1,)](x, y, BLOCK=16))
    assert not run.incidents
    graph.replay()
    (incident,) = run.incidents
    assert (incident.kind, incident.argument) == ("out-of-bounds-read", "x_ptr")
    assert incident.source.endswith("# past the end")


def test_memory_of_a_graph_is_unwritten_at_each_replay(run):
    y = torch.empty(16, **CUDA)

    def work():
        x = torch.empty(16, **CUDA)
        unmasked[(1,)](x, y, BLOCK=16)
        x.fill_(1)

    graph, _ = captured(work)
    graph.replay()
    graph.replay()
    (incident,) = run.incidents
    assert (incident.kind, incident.count) == ("uninitialised-read", 32)


def net():
    return torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 2)
    ).cuda()


def step(model, optimiser, x):
    loss = model(x).square().mean()
    loss.backward()
    optimiser.step()
    return loss


def test_a_training_step_in_a_graph():
    model = net()
    other = copy.deepcopy(model)
    optimisers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, other)]
    x = torch.empty(4, 8, **CUDA)
    graph, loss = captured(lambda: step(model, optimisers[0], x))
    for _ in range(3):
        x.copy_(torch.randn(4, 8, **CUDA))
        graph.replay()
        optimisers[1].zero_grad()
        torch.testing.assert_close(loss, step(other, optimisers[1], x))
        for mine, due in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine, due)


def test_graphed_callables():
    model = net()
    other = copy.deepcopy(model)
    optimisers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, other)]
    graphed = torch.cuda.make_graphed_callables(model, (torch.randn(4, 8, **CUDA),))
    for _ in range(3):
        x = torch.randn(4, 8, **CUDA)
        losses = []
        for m, optimiser in zip((graphed, other), optimisers, strict=True):
            optimiser.zero_grad()
            losses.append(step(m, optimiser, x))
        torch.testing.assert_close(*losses)


WAITS = {
    "item": lambda x: x.sum().item(),
    "if": lambda x: bool(x.sum() > 0),
    "cpu": lambda x: x.cpu(),
    "to cpu": lambda x: x.to("cpu"),
    "from cpu": lambda _: torch.ones(3).cuda(),
    "synchronize": lambda _: torch.cuda.synchronize(),
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.unique(),
    "graph": lambda _: captured(lambda: None),
}


@pytest.mark.parametrize("name", WAITS)
def test_waiting_for_a_value_is_an_error_as_on_a_gpu(name):
    x = torch.ones(3, **CUDA)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        captured(lambda: WAITS[name](x))
    WAITS[name](x)


def test_places_may_be_chosen_by_tensors():
    x, at = torch.arange(5.0, **CUDA), torch.tensor([3, 1], **CUDA)
    graph, (read, x) = captured(lambda: (x[at], x.index_put_((at,), x.new_zeros(2))))
    graph.replay()
    assert torch.equal(read.cpu(), torch.tensor([3.0, 1.0]))
    assert torch.equal(x.cpu(), torch.tensor([0.0, 0, 2, 0, 4]))


def test_operators_for_cuda_are_noted_by_their_parts(run):
    with torch.library._scoped_library("graphs", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")

        def twice(x):
            y = torch.empty_like(x)
            scaled[(1,)](x, y, x.numel(), 2.0, BLOCK=16)
            return y + 0

        library.impl("twice", twice, "CUDA")
        x = torch.zeros(16, **CUDA)
        graph, y = captured(lambda: torch.ops.graphs.twice(x))
        x.fill_(4)
        graph.replay()
    assert (y == 8).all()
    assert len(run.launches) == 1


def test_what_cannot_be_noted_is_unsupported_and_remembered(run):
    x, weight = torch.ones(2, 2, **CUDA), torch.ones(2, 2, **CUDA)
    with pytest.raises(ttir.Unsupported, match="mkldnn"):
        captured(lambda: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""))
    assert len(run.unsupported) == 1


def test_a_graph_is_captured_once_and_replayed_after_that():
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="without a preceding"):
        graph.replay()
    with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
        pass
    graph.replay()
    with pytest.raises(RuntimeError, match="already owns"):
        graph.capture_begin()
    graph.reset()
    graph.capture_begin(pool=graph.pool())
    graph.capture_end()
