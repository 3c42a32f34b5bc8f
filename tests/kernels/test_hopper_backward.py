"""The backward kernels for Hopper: that they are right, and when they are taken."""

import pytest
import torch

from fa_verify import loader
from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.case import Case
from fa_verify.resources.launches import launched
from fa_verify.verify import verify

HOPPER = {"hopper_dkdv_kernel", "hopper_dq_kernel"}
GENERAL = {"dkdv_kernel", "dq_kernel"}
PLAIN = "pass=bwd s=40x70 d=64 dtype=float16 seed=1"

CASES = {
    "80 = 64 + 16, grouped, lengths beside a block":
        "b=2 h=4/2 s=67x130 d=80 dtype=float16 mask=causal",
    "more queries than keys, fully masked rows, five heads":
        "h=5 s=200x70 d=64 dtype=bfloat16 mask=causal",
    "a window, padded columns, fewer columns of v, a negative scale":
        "h=2/1 s=130x150 d=104/40 dtype=float16 mask=l30.r5 scale=-0.3",
    "above 128 columns": "h=2 s=70x140 d=192/256 dtype=bfloat16 mask=causal",
    "strides": "b=2 h=2 s=20x72 d=24 dtype=bfloat16 q=bshd.s32 k=sbhd.at8 v=bhsd.s40",
    "one row and one key": "s=1x1 d=8 dtype=float16",
}  # fmt: skip


def flash(name="flash"):
    (kernel,) = loader.load(f"kernels/flash_attention.py:{name}")
    return kernel


def names(case, kernel=None):
    """The kernels that a case's backward pass launches."""
    found = launched(kernel or flash(), Case.parse(case), 0)
    assert not found.error
    return {one.name for one in found.kernels} & (HOPPER | GENERAL)


@pytest.mark.parametrize("name", ["flash", "flash_atomic"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_right_where_they_are_taken(case, name):
    kernel = flash(name)
    case = f"pass=bwd {case} seed=1"
    assert names(case, kernel) == (HOPPER if name == "flash" else {"hopper_dkdv_kernel"})
    record = verify(Case.parse(case), kernel, Setup(), CpuBackend())
    assert record.verdict == "pass", record.failures


ELSEWHERE = {
    "float32": PLAIN.replace("float16", "float32"),
    "a softcap": f"{PLAIN} cap=2.0",
    "rows of q that are no multiple of 16 bytes": PLAIN.replace("d=64", "d=60/64"),
    "rows of v that are no multiple of 16 bytes": PLAIN.replace("d=64", "d=64/60"),
    "strides that are no multiple of 16 bytes": f"{PLAIN} k=bhsd.s68",
    "columns apart": f"{PLAIN} q=bhds",
    "heads that share memory": f"{PLAIN} h=2 do=bhsd.shared",
    "an address that is no multiple of 16 bytes": f"{PLAIN} v=bhsd.at4",
}


@pytest.mark.parametrize("case", ELSEWHERE.values(), ids=ELSEWHERE)
def test_what_does_not_fit_takes_the_general_kernels(case):
    assert names(PLAIN) == HOPPER
    assert names(case) == GENERAL


def test_other_chips_take_the_general_kernels(monkeypatch):
    kernel = flash()
    monkeypatch.setattr(kernel.backward.__globals__["hopper_backward"], "hopper", lambda: False)
    assert names(PLAIN, kernel) == GENERAL


def test_the_table_is_whole(kernels):
    for tiles in kernels("hopper_configs").BACKWARD.values():
        assert {"dq", "atomic"} <= set(tiles)
        assert ("dkdv" in tiles) != ({"dk", "dv"} <= set(tiles))
        assert all(cut.stages >= 2 for cut in tiles.values())
        # Copies of lse lie side by side in shared memory, where the engine wants 128 bytes.
        assert all(cut.block_m * torch.float32.itemsize % 128 == 0 for cut in tiles.values())
