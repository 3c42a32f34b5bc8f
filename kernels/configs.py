"""Autotune configurations: which block sizes fit, by bytes an element and columns a row.

A list is chosen by the width of the rows, so that each configuration in it fits: 227 KB of shared
memory and 255 registers a thread on Hopper. The first suits long sequences, the last short ones.
"""

import functools

import triton

__all__ = [
    "DKDV", "DQ", "FORWARD", "HOPPER_FORWARD", "HOPPER_FORWARD_FP8", "autotuned", "described",
]  # fmt: skip


def _configs(*rows):  # noqa: ANN002
    return [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=warps, num_stages=stages)
        for m, n, warps, stages in rows
    ]


# (bytes an element, most columns of a q or v row): (BLOCK_M, BLOCK_N, num_warps, num_stages) ...
# float32 dots in "ieee" (no tensor cores) or "tf32x3" (two parts of each operand) fill registers as
# 8-byte elements would, and are listed so: larger blocks spill by the kilobyte.
FORWARD = {
    (2, 128): _configs((128, 128, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (16, 32, 4, 2)),
    (2, 256): _configs((64, 64, 8, 2), (64, 32, 8, 2), (16, 32, 4, 1)),
    (4, 128): _configs((64, 64, 8, 2), (64, 32, 4, 2), (16, 16, 4, 1)),
    (4, 256): _configs((32, 32, 8, 1), (32, 16, 8, 1), (16, 16, 4, 1)),
    (8, 128): _configs((32, 32, 8, 1), (16, 32, 4, 1), (16, 16, 4, 1)),
    (8, 256): _configs((16, 16, 8, 1), (16, 16, 4, 1)),
}
# head_dim: (BLOCK_M, BLOCK_N, num_warps, num_stages, most registers, ONE_LOOP, ORDER) ...
# ORDER: see hopper_forward.py; from 1 on it needs two stages, and so do head dims with a tail.
HOPPER_FORWARD = {
    64: (
        (64, 128, 4, 2, None, False, 1), (64, 128, 4, 2, None, True, 1),
        (64, 64, 4, 2, None, False, 2), (64, 64, 4, 2, None, True, 2),
    ),
    80: ((64, 64, 4, 2, None, False, 2), (64, 64, 4, 2, None, True, 2)),
    96: (
        (64, 128, 4, 2, None, False, 3), (64, 64, 4, 2, None, False, 3),
        (64, 64, 4, 2, None, True, 3),
    ),
    128: ((64, 128, 4, 1, 168, False, 0), (64, 128, 4, 1, 168, True, 0)),
    256: ((64, 128, 4, 1, None, False, 0), (64, 128, 4, 1, None, True, 0)),
}  # fmt: skip
# The same with q and k in fp8. Each list holds one loop: lower limits of the band need it.
HOPPER_FORWARD_FP8 = {
    64: (
        (64, 128, 4, 2, None, False, 1), (64, 128, 4, 2, None, True, 1),
        (64, 64, 4, 2, None, False, 2), (64, 64, 4, 2, None, True, 2),
    ),
    96: (
        (64, 128, 4, 2, None, False, 3), (64, 64, 4, 2, None, False, 3),
        (64, 64, 4, 2, None, True, 3),
    ),
    128: (
        (64, 128, 4, 1, 168, False, 0), (64, 128, 4, 1, 168, True, 0),
        (64, 128, 4, 2, None, False, 1),
    ),
    256: (
        (64, 128, 4, 1, None, False, 0), (64, 128, 4, 1, None, True, 0),
        (64, 64, 4, 2, None, False, 1),
    ),
}  # fmt: skip
DKDV = {
    (2, 128): _configs((64, 128, 8, 2), (64, 64, 8, 2), (32, 64, 4, 2), (16, 16, 4, 1)),
    (2, 256): _configs((32, 64, 8, 2), (32, 32, 8, 1), (16, 16, 4, 1)),
    (4, 128): _configs((32, 64, 8, 2), (32, 32, 8, 2), (16, 16, 4, 1)),
    (4, 256): _configs((32, 32, 8, 1), (16, 32, 8, 1), (16, 16, 4, 1)),
    (8, 128): _configs((16, 32, 8, 1), (16, 16, 8, 1), (16, 16, 4, 1)),
    (8, 256): _configs((16, 16, 8, 1), (16, 16, 4, 1)),
}
DQ = {
    (2, 128): _configs((128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (16, 16, 4, 1)),
    (2, 256): _configs((64, 32, 8, 2), (32, 64, 8, 1), (16, 16, 4, 1)),
    (4, 128): _configs((64, 32, 8, 2), (32, 32, 4, 1), (16, 16, 4, 1)),
    (4, 256): _configs((32, 32, 8, 1), (32, 16, 8, 1), (16, 16, 4, 1)),
    (8, 128): _configs((32, 32, 8, 1), (16, 32, 8, 1), (16, 16, 4, 1)),
    (8, 256): _configs((16, 16, 8, 1), (16, 16, 4, 1)),
}


def described(table, head_dim, pre_hook):
    """Configurations of a kernel with descriptors for one head_dim; the hook shapes these."""
    return [
        triton.Config(
            {"BLOCK_M": m, "BLOCK_N": n, "ONE_LOOP": one_loop, "ORDER": order},
            num_warps=warps,
            num_stages=stages,
            maxnreg=registers,
            pre_hook=pre_hook,
        )
        for m, n, warps, stages, registers, one_loop, order in table[head_dim]
    ]


_KEY = ["seqlen_bucket", "BLOCK_D", "TAIL_D", "BLOCK_DV", "TAIL_DV", "HAS_LO", "HAS_HI", "SOFTCAP",
        "DOT_PRECISION", "VECTOR", "BIAS", "BIAS_VECTOR", "ALIBI", "DROPOUT"]  # fmt: skip


def _divides(config, sparse):
    """Whether each tile lies in one block of a mask with gaps; 0: of another mask."""
    return not (sparse % config.kwargs["BLOCK_M"] or sparse % config.kwargs["BLOCK_N"])


def autotuned(kernel, table, reset_to_zero=()):
    """Return ``choose(arguments, element_size)``: the kernel, autotuned over the list that fits.

    Args:
        kernel: A ``triton.jit`` function.
        table: FORWARD, DKDV or DQ.
        reset_to_zero: Arguments that the kernel accumulates into; zeroed before each timed run.
    """
    key = [name for name in _KEY if name in kernel.arg_names]

    @functools.cache
    def tuned(element_size, columns, sparse):
        fits = (config for config in table[element_size, columns] if _divides(config, sparse))
        configs = list(fits)
        return triton.autotune(configs, key=key, reset_to_zero=reset_to_zero or None)(kernel)

    def choose(arguments, element_size):
        widest = max(
            arguments["BLOCK_D"] + arguments["TAIL_D"], arguments["BLOCK_DV"] + arguments["TAIL_DV"]
        )
        if arguments["DOT_PRECISION"] != "tf32":
            element_size = 8
        return tuned(element_size, 128 if widest <= 128 else 256, arguments["SPARSE"])

    return choose
