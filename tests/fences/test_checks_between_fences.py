"""What checks see between fences: dropped NaN, slack written to."""

import dataclasses

import pytest
import torch

from fa_verify import Outputs, loader
from fa_verify.backends.base import Execution, Setup
from fa_verify.backends.call import call
from fa_verify.backends.fences.fence import OFF, POISON, Fence
from fa_verify.backends.fences.guard import Guard
from fa_verify.backends.fences.memory import Heap
from fa_verify.case import Case
from fa_verify.checks import poison, reruns, unmodified
from fa_verify.inputs import materialise
from fa_verify.trial import Trial

CASE = Case.parse("pass=fwd b=2 h=2 s=6x5 d=8 dtype=float32 dot=ieee k=bhsd.s8 v=bhsd.s8 seed=3")
PAGE = Fence(mode="page")


class Fenced:
    """Runs PyTorch kernels on the CPU between fences, as the CUDA backend runs Triton's."""

    device = "cpu"

    def __init__(self):
        self.guard = Guard("cpu", lambda: Heap("cpu"))
        self.fences = []

    def run(self, kernel, problem, inputs, setup, *, backward):
        self.fences.append(str(setup.fence))
        around = self.guard.around(
            inputs, setup.fence, unaligned=(), begins=lambda _: None, ended=lambda: None
        )
        with around:
            called = call(kernel, problem, inputs, backward=backward)
        return Execution(outputs=called.outputs, incidents=self.guard.incidents(setup.fence))


def trial(wrong=lambda k, o: o, fence=POISON, *, deterministic=True):
    (right,) = loader.load("tests/targets/plain.py:right")

    def forward(problem, q, k, v):
        outputs = right.forward(problem, q, k, v)
        return Outputs(wrong(k, outputs.o), outputs.lse)

    capabilities = dataclasses.replace(right.capabilities, deterministic=deterministic)
    kernel = dataclasses.replace(
        right, forward=forward, backward=None, capabilities=capabilities, target="k", source_hash=""
    )
    setup = Setup(backend="cuda", fence=fence, float_model="hardware")
    return Trial(kernel, CASE, setup, Fenced())


def reads_slack(k, o):
    """What lies behind each key but the last, if it is more than 0: NaN never is."""
    b, h, s, d = k.shape
    behind = k.as_strided((b, h, s - 1, 1), k.stride(), k.storage_offset() + d)
    return o + behind.fmax(torch.zeros(())).amax((2, 3), keepdim=True)


def reads_what_nobody_wrote(k, o):
    return o + torch.empty_like(o).nan_to_num(0.0).clamp(-1, 1)


@pytest.mark.parametrize("wrong", [reads_slack, reads_what_nobody_wrote])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("fence", [POISON, PAGE])
def test_a_nan_that_is_dropped_shows_as_a_number(wrong, deterministic, fence):
    found = trial(wrong, fence, deterministic=deterministic)
    assert found.execution.outputs.o.isfinite().all()
    assert [f.title for f in poison.other_poison(found)] == ["o depends on memory that is nobody's"]


@pytest.mark.parametrize("fence", [POISON, PAGE])
def test_right_kernels_do_not_care(fence):
    found = trial(fence=fence)
    assert found.execution.incidents == ()
    assert list(poison.other_poison(found)) == []
    first, second = found.backend.fences
    assert second == first.replace("page", "page.start") + ".finite"


def test_bits_that_follow_the_placement_are_no_fault():
    def follows(k, o):
        return o * (1 + 1e-6 * (k.data_ptr() % 64 != 0))

    found = trial(follows, PAGE)
    first = found.execution.outputs.o
    second = found.rerun(found.pristine, fence=dataclasses.replace(PAGE, start=True)).outputs.o
    assert not torch.equal(first, second)
    assert list(poison.other_poison(found)) == []


def test_it_is_asked_only_between_fences_of_nan():
    assert poison.between_fences(trial())
    assert "other poison" in [name for name, applies, _ in reruns.RERUNS if applies(trial())]
    for fence in (OFF, Fence(mode="poison", finite=True)):
        assert not poison.between_fences(trial(fence=fence))


@pytest.mark.parametrize("fence", [POISON, PAGE])
def test_slack_between_rows_of_an_input_in_a_slot_is_compared(fence):
    def writes(k, o):
        b, h, s, d = k.shape
        k.as_strided((b, h, s - 1, 1), k.stride(), k.storage_offset() + d)[1, 0, 2] = 7.0
        return o

    (failure,) = unmodified.check(trial(writes, fence))
    assert failure.title == "out-of-bounds-write into the slack of k"
    stride = materialise(CASE).k.stride()
    element = stride[0] + 2 * stride[2] + 8
    assert f"element {element} from its first one, (1, 0, 2, 8), belongs to" in failure.message
    assert list(unmodified.check(trial(fence=fence))) == []
