"""Memory an execution takes: that of its tensors and of one wave, whatever the grid."""

# Triton reads the kernels in this file: their constexprs are upper-case and their names are short.
# ruff: noqa: N803, T201

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from fa_verify import ttir

HEADS, D, BLOCK = 8, 128, 128
MB = 1 << 20


@triton.jit
def forward(q_ptr, k_ptr, v_ptr, o_ptr, n, BLOCK: tl.constexpr, D: tl.constexpr):
    blocks = n // BLOCK
    head, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    rows, d = tl.arange(0, BLOCK), tl.arange(0, D)
    tile = rows[:, None] * D + d[None, :]
    at = (head * n + block * BLOCK) * D + tile
    q = tl.load(q_ptr + at)
    m = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK, D), tl.float32)
    for start in range(0, n, BLOCK):
        there = (head * n + start) * D + tile
        s = tl.dot(q, tl.trans(tl.load(k_ptr + there))) * 0.1
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, 1)
        v = tl.load(v_ptr + there)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None])
        m = m_new
    tl.store(o_ptr + at, (acc / total[:, None]).to(o_ptr.dtype.element_ty))


def launch(n):
    q = torch.zeros(1, HEADS, n, D, dtype=torch.float16)
    with ttir.execute() as run:
        o = torch.empty_like(q)
        forward[HEADS * n // BLOCK,](q, q.clone(), q.clone(), o, n, BLOCK=BLOCK, D=D)
    assert not run.incidents


def peak():
    """Bytes. getrusage would start from what the parent had at its fork."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def main(n):
    launch(BLOCK)  # imports, compiles
    before = peak()
    launch(n)
    print(peak() - before)


def rise(n):
    """Bytes by which the peak of a fresh process rises in a forward of (1, 8, n, 128)."""
    command = [sys.executable, __file__, str(n)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(result.stdout)


def tensors(n):
    return 4 * HEADS * n * D * 2


def test_memory_does_not_grow_with_the_grid():
    small, large = rise(1024), rise(4096)
    assert small >= tensors(1024)  # the measurement sees something
    # Per element of o: who wrote it (4 bytes), whether it was written (1). Four waves for chance.
    extra = tensors(4096) - tensors(1024)
    assert large - small < extra + extra // 8 * 5 + 32 * MB


@pytest.mark.slow
def test_a_long_sequence_stays_under_2_gb():
    assert rise(8192) < 2 << 30


if __name__ == "__main__":
    main(int(sys.argv[1]))
