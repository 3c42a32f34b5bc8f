"""Checks what a kernel tells the compiler, and what its arguments were specialised for.

A claim (multiple_of, max_contiguous, max_constancy, assume) is held to its words, whether or not it
misleads the compiler here. Divisible means every value or, where values count up by one, the first
of each such run, as Triton's AxisInfo.h has it. (Of an axis along which nothing counts up, as that
of the rows in `multiple_of(pointers, (16, 16))`, values inside a run along another axis are not
meant: no access is widened along such an axis.) Contiguous and constant mean aligned groups of the
claimed length, or of as many values as one access can take, if that is less; of integers that are
not contiguous `claims` then asks whether an access is misled. In the IR a claim belongs to the
operation that computes the value: that line is told.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from fa_verify.ttir.memory.values import Pointer, total

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from fa_verify.ttir.lowering.lower import Env, Lowering, Step
    from fa_verify.ttir.numbers.floats import Array
    from fa_verify.ttir.sanitizer.findings import Findings, Site
    from fa_verify.ttir.syntax.ir import Function, Op

_NAMES = {
    "tt.divisibility": "multiple_of", "tt.contiguity": "max_contiguous",
    "tt.constancy": "max_constancy",
}  # fmt: skip
# Bytes, and so elements, of the widest access: 256 bits on sm_100 (PTX ISA, ld.global.v8.b32).
_WIDEST = 32
_NUMBERS = re.compile(r"\d+")


def watched(op: Op, low: Lowering, step: Step) -> Step:
    """The step of an operation and, while sanitizing, a look at the claims made of its result."""
    claims = [
        (name, _numbers(op.attrs[name], len(op.results[0].type.shape)))
        for name in _NAMES
        if name in op.attrs and op.results
    ]
    if not claims:
        return step
    machine, site, value = low.machine, low.site(op), op.results[0]
    shape, scalar = value.type.shape, value.type.scalar
    terms, slot = low.terms(value), low.slot(value)
    contiguous = next((claim for name, claim in claims if name == "tt.contiguity"), ())

    def look(env: Env) -> None:
        step(env)
        if machine.accesses.believed is not None and scalar != "ptr" and contiguous:
            machine.accesses.believed(site, total(terms(env)), contiguous)
        if not machine.accesses.sanitize:
            return
        values = _places(env[slot]) if scalar == "ptr" else [(total(terms(env)), 1)]
        of_what = " bytes into its memory" if scalar == "ptr" else ""
        for numbers, unit in values:
            for name, claim in claims:
                wrong = _broken(name, numbers, claim, shape, unit)
                if wrong.any():
                    where = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
                    at = f" at {tuple(int(x) for x in where[1:])} of the tile" if shape else ""
                    text = ", ".join(map(str, claim))
                    detail = f"{_NAMES[name]}(..., {text}) is claimed, but the value{at} is "
                    detail += f"{int(numbers[where])}{of_what}" + _why(name)
                    lane, count = int(where[0]), int(np.count_nonzero(wrong))
                    if name == "tt.contiguity" and scalar != "ptr":
                        machine.accesses.claimed(lane, site, count, detail)
                    else:
                        machine.accesses.reports.program(lane, "false-hint", site, count, detail)

    return look


def _why(name: str) -> str:
    return {
        "tt.divisibility": "",
        "tt.contiguity": ", which does not follow its neighbour by one",
        "tt.constancy": ", unlike its neighbour",
    }[name]


def _numbers(text: str, rank: int) -> tuple[int, ...]:
    """The claim along each axis: `dense<16> : ...`, `dense<[1, 8]> : ...` or `16 : i32`."""
    inner = (
        text.split("<", 1)[1].split(">", 1)[0] if "<" in text else text.split(":", maxsplit=1)[0]
    )
    found = tuple(int(x) for x in _NUMBERS.findall(inner))
    return found * max(rank, 1) if len(found) == 1 else found


def _places(pointer: Pointer) -> list[tuple[Array, int]]:
    """Bytes from the beginning of its storage, and how many bytes an element has.

    On a GPU torch lets storages begin at multiples of 512 (CUDACachingAllocator.cpp,
    kMinBlockSize), here of 64: where they happen to lie is nothing a kernel could be wrong about.
    """
    if pointer.which is not None:
        return []  # which argument, and so how large an element, varies from lane to lane
    arg = pointer.args[0]
    size = arg.flat.itemsize
    return [(arg.address - arg.key + total(pointer.terms) * size, size)]


def _broken(
    name: str, numbers: Array, claim: tuple[int, ...], shape: tuple[int, ...], unit: int
) -> Array:
    """Where a claim does not hold; of the shape of `numbers`."""
    wrong = np.zeros(numbers.shape, np.bool_)
    if name == "tt.divisibility":
        return _undivided(numbers, claim, unit) if shape else numbers % claim[0] != 0
    for axis, (extent, length) in enumerate(zip(shape, claim, strict=False), 1):
        group = min(length, extent, _WIDEST)
        if group <= 1:
            continue
        change = np.diff(numbers, axis=axis, prepend=np.take(numbers, [0], axis) - unit)
        if numbers.shape[axis] == 1:
            change = np.zeros(numbers.shape, numbers.dtype)
        starts = np.arange(numbers.shape[axis]) % group == 0
        starts = starts.reshape([-1 if d == axis else 1 for d in range(numbers.ndim)])
        if name == "tt.contiguity":
            wrong |= (change != unit) & (~starts | (numbers.shape[axis] == 1))
        else:
            wrong |= (change != 0) & ~starts
    return wrong


def _undivided(numbers: Array, claim: tuple[int, ...], unit: int) -> Array:
    """Where values that are claimed to be divisible, and are meant to be, are not."""
    inside = [_follows(numbers, axis, unit) for axis in range(1, numbers.ndim)]
    wrong = np.zeros(numbers.shape, np.bool_)
    for axis, length in enumerate(claim):
        if length <= 1:
            continue
        meant = ~inside[axis]
        others = [x for other, x in enumerate(inside) if other != axis]
        if others:
            followed = np.zeros(numbers.shape, np.bool_)
            along = (slice(None),) * (axis + 1)
            followed[(*along, slice(None, -1))] = inside[axis][(*along, slice(1, None))]
            meant &= followed | ~np.logical_or.reduce(others)
        wrong |= meant & (numbers % length != 0)
    return wrong


def _follows(numbers: Array, axis: int, unit: int) -> Array:
    """Which values are one more than their neighbour before them."""
    follows = np.zeros(numbers.shape, np.bool_)
    here = (slice(None),) * axis + (slice(1, None),)
    follows[here] = np.diff(numbers, axis=axis) == unit
    return follows


def assume(op: Op, low: Lowering) -> Step:
    """llvm.intr.assume: a promise that the condition holds."""
    condition, site, machine = low.slot(op.operands[0]), low.site(op), low.machine

    def step(env: Env) -> None:
        if machine.accesses.sanitize and not env[condition].all():
            test = env[condition].reshape(env[condition].shape[0], -1)
            lane = int(np.argmin(test.all(axis=1)))
            machine.accesses.reports.program(
                lane, "false-hint", site, int(np.count_nonzero(~test)), "what is assumed is false"
            )

    return step


class Specialisation:
    """What the arguments of one compiled kernel were taken to be."""

    def __init__(self, function: Function, site: Site) -> None:
        """Read a function's argument attributes."""
        self._site = site
        self._due = [
            (index, _numbers(attrs["tt.divisibility"], 0)[0])
            for index, attrs in enumerate(function.attributes)
            if "tt.divisibility" in attrs
        ]

    def check(
        self, names: Sequence[str], values: Sequence[Any], number_of: Callable[[Any], int],
        findings: Findings,
    ) -> None:  # fmt: skip
        """Report each argument that is not divisible as the kernel takes it to be."""
        for index, due in self._due:
            number = number_of(values[index])
            if number % due:
                detail = f"compiled for {names[index]} divisible by {due}; it is {number}"
                self._report(names[index], detail, findings)

    def constants(
        self, given: Iterable[tuple[str, Any]], compiled: Mapping[str, Any], findings: Findings
    ) -> None:
        """Report each integer that was compiled in (1, or a constexpr) and is now another one."""
        for name, value in given:
            due = compiled.get(name, value)
            if type(value) is int and isinstance(due, int) and value != due:
                detail = f"compiled for {name}={due}; it is {value}"
                self._report(name, detail, findings)

    def _report(self, name: str, detail: str, findings: Findings) -> None:
        findings.add("false-hint", self._site, name, (0, 0, 0), 0, 1, detail)
