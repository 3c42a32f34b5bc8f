"""What a kernel says to its author, prints and assertions; barriers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fa_verify.ttir.numbers.floats import RAW, Array, encode
from fa_verify.ttir.ops.pointers import address_of
from fa_verify.ttir.sanitizer.hints import assume

if TYPE_CHECKING:
    from fa_verify.ttir.lowering.lower import Env, Lowering, Rule, Step
    from fa_verify.ttir.memory.values import Pointer
    from fa_verify.ttir.syntax.ir import Op, Type


def print_(op: Op, low: Lowering) -> Step:
    """tt.print: one line a program."""
    prefix = next((w.strip('"') for w in op.words), "")
    _, _, flags = op.attrs.get("isSigned", "").strip("<>").partition(":")
    signed = [flag.strip() != "0" for flag in flags.split(",")]
    printed = list(zip([low.slot(x) for x in op.operands], op.operands, signed, strict=False))
    hexadecimal = op.attrs.get("hex") == "true"
    machine = low.machine

    def step(env: Env) -> None:
        values = [
            _as_printed(env[s], x.type, signed=of, hexadecimal=hexadecimal) for s, x, of in printed
        ]
        nx, ny, _ = machine.grid
        for lane, linear in enumerate(machine.lanes.linear.tolist()):
            shown = " ".join([str(v[lane if v.shape[0] > 1 else 0]) for v in values])
            at = (linear % nx, linear // nx % ny, linear // (nx * ny))
            line = f"pid {at}{prefix}{shown}".replace("\n", "").replace("'", "")
            print(line)  # noqa: T201 - what the kernel asks

    return step


def _as_printed(value: Array | Pointer, type_: Type, *, signed: bool, hexadecimal: bool) -> Array:
    """Elements of each program as they are shown: numbers, addresses, or the bits of either."""
    x = value if isinstance(value, np.ndarray) else address_of(value, type_)
    if hexadecimal:
        raw = encode(x, type_.scalar) if type_.scalar in RAW else x
        size = raw.dtype.itemsize
        words = [f"0x{n:0{2 * size}x}" for n in raw.view(f"u{size}").flat]
        x = np.array(words, object).reshape(raw.shape)
    elif x.dtype.kind == "i" and not signed:
        x = x.view(f"u{x.dtype.itemsize}")
    return np.broadcast_to(x, (x.shape[0], *type_.shape))


def assert_(op: Op, low: Lowering) -> Step:
    """tt.assert: a failed assertion is an incident; the program goes on."""
    condition = low.slot(op.operands[0])
    message = next((w.strip('"') for w in op.words), "")
    site, machine = low.site(op), low.machine

    def step(env: Env) -> None:
        test = env[condition]
        if test.all():
            return
        lane = int(np.argmin(test.reshape(test.shape[0], -1).all(axis=1)))
        count = int(np.count_nonzero(~test))
        machine.accesses.reports.program(lane, "assertion-failed", site, count, message)

    return step


def barrier(op: Op, low: Lowering) -> Step:
    """gpu.barrier, ttg.barrier: a program has no threads here, but what they may see is watched."""
    del op
    machine = low.machine

    def step(env: Env) -> None:
        del env
        if machine.accesses.read_back is not None:
            machine.accesses.read_back.barrier()

    return step


def ordered(op: Op, low: Lowering) -> None:
    """tt.grid_dependency_*: launches run one after the other, so there is nothing to wait for."""
    del op, low


RULES: dict[str, Rule] = {
    "tt.print": print_,
    "tt.assert": assert_,
    "gpu.barrier": barrier,
    "ttg.barrier": barrier,
    "llvm.intr.assume": assume,
    "tt.grid_dependency_wait": ordered,
    "tt.grid_dependency_launch_dependents": ordered,
}
