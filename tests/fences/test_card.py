"""Fences on a card: mapped pages, launches that fault in processes of their own."""

import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

from fa_verify import loader
from fa_verify.backends import make
from fa_verify.backends.base import FAULT, Setup
from fa_verify.backends.fences.fence import Fence
from fa_verify.case import Case
from fa_verify.inputs import materialise
from fa_verify.kernel import Kernel, Outputs
from fa_verify.verify import verify

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CASE = Case.parse("pass=fwd b=2 h=2 s=33x47 d=40 dtype=float16 k=bhsd.s8 seed=3")
FENCES = ("off", "poison", "page", "page.start", "page.flush", "page.start.flush", "page.only-k")


@triton.jit
def _touch(k_ptr, o_ptr, count, at, write: tl.constexpr):
    """Read or write one element of o or k, wherever `at` says, and write all of o."""
    lane = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(o_ptr + lane, tl.zeros([1024], tl.float16), mask=lane < count)
    if write:
        tl.store(o_ptr + at, 1.0)
    else:
        tl.store(o_ptr, tl.load(k_ptr + at) * 0.0)


def touching(at, *, write):
    def forward(problem, q, k, v):
        o = torch.empty(problem.shape_o, dtype=q.dtype, device=q.device)
        _touch[(triton.cdiv(o.numel(), 1024),)](k, o, o.numel(), at, write=write)
        return Outputs(o)

    return Kernel(name="touch", forward=forward, target="t.py:touch", source_hash="0")


def touched(at, what, fence):
    """What a run says that lives to tell."""
    setup = Setup(backend="cuda", fence=Fence.parse(fence), float_model="hardware")
    kernel = touching(int(at), write=what == "write")
    backend = make("cuda")
    execution = backend.run(kernel, CASE.problem, materialise(CASE, "cuda"), setup, backward=False)
    nan = bool(execution.outputs.o.isnan().any())
    return f"nan={nan} incidents={[(i.argument, i.offset) for i in execution.incidents]}"


def run(at, what, fence):
    command = [sys.executable, __file__, str(at), what, fence]
    return subprocess.run(command, capture_output=True, text=True, check=False)


O_SIZE = 2 * 2 * 33 * 40
K_SPAN = 2 * 2 * 47 * 48 - 8


@pytest.mark.parametrize(("at", "what", "fence"), [
    (K_SPAN, "read", "page"), (-1, "read", "page.start"),
    (O_SIZE, "write", "page"), (-1, "write", "page.start"),
    (K_SPAN, "read", "page.only-k"), (K_SPAN + 8, "read", "page.gap16"),
])  # fmt: skip
def test_an_access_past_a_page_faults(at, what, fence):
    done = run(at, what, fence)
    assert done.returncode == FAULT, done.stderr
    assert "illegal memory access" in done.stderr


@pytest.mark.parametrize(("at", "what", "fence", "says"), [
    (O_SIZE, "write", "poison", f"nan=False incidents=[('o_ptr', {O_SIZE})]"),
    (-3, "write", "poison", "nan=False incidents=[('o_ptr', -3)]"),
    (-3, "write", "page", "nan=False incidents=[('o_ptr', -3)]"),
    (K_SPAN, "read", "poison", "nan=True incidents=[]"),
    (K_SPAN, "read", "page.only-q", "nan=True incidents=[]"),
    (K_SPAN, "read", "page.gap16", "nan=True incidents=[]"),
    (0, "read", "page", "nan=False incidents=[]"),
    (K_SPAN - 1, "read", "page.flush", "nan=False incidents=[]"),
])  # fmt: skip
def test_an_access_into_poison_shows(at, what, fence, says):
    assert touched(at, what, fence) == says


@pytest.mark.parametrize("fence", FENCES)
def test_right_kernels_pass_between_all_fences(fence):
    (kernel,) = loader.load("kernels/flash_attention.py:flash")
    backend = make("cuda")
    for text in (
        "pass=bwd b=2 h=4/2 s=33x47 d=40 dtype=float16 mask=causal k=bshd.s8.at3 seed=3",
        "pass=bwd b=1 h=2 s=1x300 d=64 dtype=float32 dot=ieee seed=4",
    ):
        setup = Setup(backend="cuda", fence=Fence.parse(fence), float_model="hardware")
        record = verify(Case.parse(text), kernel, setup, backend)
        assert record.verdict == "pass", record
        assert Setup.parse(record.setup).fence == setup.fence


def test_slots_are_used_again():
    (kernel,) = loader.load("kernels/flash_attention.py:flash")
    backend = make("cuda")
    fence = Fence(mode="page")
    for _ in range(20):
        setup = Setup(backend="cuda", fence=fence)
        backend.run(kernel, CASE.problem, materialise(CASE, "cuda"), setup, backward=False)
    slots = backend._guard.slots(fence)
    assert slots.taken >= 20 * 5
    assert slots.mapped < slots.taken / 5


if __name__ == "__main__":
    touched(*sys.argv[1:])
