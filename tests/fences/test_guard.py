"""Fences around kernels that run on the CPU: slots in torch's own memory, launches made up."""

import dataclasses

import pytest
import torch

from fa_verify.backends.fences import poison
from fa_verify.backends.fences.fence import OFF, Fence
from fa_verify.backends.fences.guard import Guard
from fa_verify.backends.fences.memory import Heap, tensor_over
from fa_verify.case import Case
from fa_verify.inputs import duplicate, materialise
from fa_verify.spool import Argument, Launch

POISON = Fence(mode="poison")
FENCES = [POISON, Fence(mode="page"), Fence(mode="page", start=True)]
CASE = Case.parse("pass=bwd b=2 h=2 s=20x33 d=40 dtype=float16 q=bshd.s8.at3 seed=3")


class Run:
    """One run of `body` between fences."""

    def __init__(self, body, fence=POISON, *, unaligned=(), guard=None, case=CASE):
        self.pristine = materialise(case)
        self.inputs = duplicate(self.pristine)
        self.guard = guard or Guard("cpu", lambda: Heap("cpu"))
        around = self.guard.around(
            self.inputs, fence, unaligned=unaligned, begins=lambda _: None, ended=lambda: None
        )
        with around:
            self.result = body(self.inputs)
        self.incidents = self.guard.incidents(fence)


@pytest.mark.parametrize("fence", [OFF, *FENCES])
def test_the_kernel_sees_its_inputs_as_they_were_and_right_results_come_out(fence):
    def body(x):
        work = torch.zeros(3, 5)
        scaled = x.q * 2
        cat = torch.cat([x.k, x.v], -1)
        left, right = cat.split(40, -1)
        out = torch.empty(4, 4)
        out.copy_(torch.eye(4))
        return work, scaled, left + right, out, x.q.transpose(1, 2).contiguous(), (x.q == 0).sum()

    run, plain = Run(body, fence), body(materialise(CASE))
    for a, b in zip(run.result, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        assert a.stride() == b.stride()
    assert run.incidents == ()
    for (_, a), (_, b) in zip(run.inputs.named(), run.pristine.named(), strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


@pytest.mark.parametrize("fence", FENCES)
def test_terms_lie_between_fences_too(fence):
    terms = "bias=hqk alibi=1 sinks=1 dlse=1 bias.layout=sbhd.d1.at3"
    case = Case.parse(f"pass=bwd b=2 h=2 s=20x33 d=40 dtype=float16 {terms} seed=3")
    run = Run(lambda x: x.sinks + x.dlse.sum() + x.bias.sum(), fence, case=case)
    for (name, a), (_, b) in zip(run.inputs.named(), run.pristine.named(), strict=True):
        assert torch.equal(a, b), name
        assert run.guard.slots(fence).at(a.data_ptr()) is not None
    assert not bool(run.result.isnan().any())


def test_a_write_behind_a_term_is_seen():
    case = Case.parse("pass=fwd h=2 s=20x33 d=40 dtype=float16 sinks=1 seed=3")

    def body(x):
        tensor_over(x.sinks.data_ptr() + 8, 4, "cpu")[0].fill_(0)

    (incident,) = Run(body, case=case).incidents
    assert incident.argument == "sinks"


@pytest.mark.parametrize("fence", FENCES)
def test_inputs_keep_their_alignment_unless_the_fence_is_flush(fence):
    run = Run(lambda _: None, fence)
    assert [x.data_ptr() % 16 for _, x in run.inputs.named()] == [6, 0, 0, 0]  # q starts at 3
    flush = dataclasses.replace(fence, flush=True)
    run = Run(lambda _: torch.empty(33), flush, unaligned=("q", "k"))
    assert run.result.data_ptr() % 16 == 0  # torch promises it
    for name, tensor in run.inputs.named():
        slot = run.guard.slots(flush).at(tensor.data_ptr())
        near = (slot.at.first, slot.region.nbytes - slot.at.last)[not fence.start]
        if fence.mode == "page":
            assert near == 0 if name in ("q", "k") else near < 16


def test_what_torch_leaves_unwritten_is_poison_and_nothing_else_is():
    def body(x):
        y = torch.empty(4, 4)
        y[0] = 1
        return y, x.k.new_empty(7), torch.zeros(3), torch.empty_like(x.v), torch.ones(2)

    y, new, zeros, like, ones = Run(body).result
    assert poison.left(y).sum() == 12
    assert poison.left(new).all()
    assert poison.left(like).all()
    assert not poison.left(zeros).any()
    assert ones.tolist() == [1, 1]


def launched(*arguments):
    """As if a Triton function had been launched with these (name, label, tensor)."""
    return Launch(
        kernel="forward_kernel",
        file="flash.py",
        line=7,
        arguments=tuple(
            Argument(
                name=name,
                label=label,
                shape=tuple(x.shape),
                strides=x.stride(),
                offset=x.storage_offset(),
                itemsize=x.element_size(),
            )
            for name, label, x in arguments
        ),
    )


@pytest.mark.parametrize(("distance", "where"), [(4 * 6, (4, 0)), (4 * 6 + 7, (5, 1)), (-2, None)])
def test_a_write_beside_an_output_names_the_argument_and_the_element(distance, where):
    guard = Guard("cpu", lambda: Heap("cpu"))

    def body(_):
        o = torch.empty(4, 6)
        guard.launches.append(launched(("o_ptr", "1", o)))
        tensor_over(o.data_ptr() + 4 * distance, 4, "cpu")[0].fill_(0)
        return o

    (incident,) = Run(body, guard=guard).incidents
    assert (incident.kind, incident.argument) == ("out-of-bounds-write", "o_ptr")
    assert (incident.kernel, incident.file, incident.line) == ("forward_kernel", "flash.py", 7)
    assert (incident.coordinates, incident.offset, incident.count) == (where, distance, 1)


def test_a_tensor_that_grows_moves_to_where_there_is_room():
    def body(_):
        x = torch.ones(4)
        x.resize_(3)
        x.resize_(9, 9)[2:] = 5
        return x, torch.empty(0).resize_(5).fill_(1)

    x, y = Run(body).result
    assert (x[0].tolist()[:3], int(x[2:].sum()), y.sum()) == ([1, 1, 1], 5 * 63, 5)


def test_a_workspace_that_a_launcher_keeps_is_not_handed_out_again():
    kept = []
    guard = Guard("cpu", lambda: Heap("cpu"))

    def body(_):
        if not kept:
            kept.append(torch.full((100,), 3.0))
        torch.empty(100).fill_(1)
        return kept[0].clone()

    for _ in range(4):
        assert Run(body, guard=guard).result.tolist() == [3.0] * 100
    assert Run(body, guard=guard).incidents == ()


def test_gradients_by_autograd_come_out_the_same():
    def body(x):
        leaf = x.q.float().detach().requires_grad_()
        loss = (leaf.sin() @ x.k.float().transpose(-1, -2)).sum()
        return torch.autograd.grad(loss, leaf)[0]

    assert torch.equal(Run(body).result, body(materialise(CASE)))


def test_compiled_code_is_compiled_between_fences_too():
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    run = Run(torch.compile(lambda x: x.k * 2 + x.v.sum(), backend=backend))
    assert len(graphs) == 1  # without it, torch runs the function uncompiled and does not say so
    torch.testing.assert_close(run.result, run.pristine.k * 2 + run.pristine.v.sum())
