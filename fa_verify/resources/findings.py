"""What there is to say of builds: what cannot run, broken limits, regressions from a baseline.

A configuration that does not fit a chip is no fault where an autotuner has another that does.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec

from fa_verify.case import Case
from fa_verify.resources.build import Finding
from fa_verify.resources.chips import CHIPS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from fa_verify.resources.build import Build, Usage

__all__ = ["Limits", "judge", "misfit"]

_FAST = ("wgmma", "tcgen05")  # on chips that have them, mma reaches a fraction of their rate
_ELSEWHERE = "; the autotuner has other configurations that fit"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a user allows; None: anything that the chip allows.

    Attributes:
        registers: Of a thread.
        spills: Bytes stored and loaded by a thread for want of registers.
        stack: Bytes of a thread.
        shared: Bytes of a program.
        tensor_cores: Every kernel with a product that tensor cores can compute must use them.
        slack: Registers that a build may take more of than its baseline.
    """

    registers: int | None = None
    spills: int | None = None
    stack: int | None = None
    shared: int | None = None
    tensor_cores: bool = False
    slack: int = 0


def judge(builds: Sequence[Build], limits: Limits, baseline: Iterable[Build] = ()) -> list[Build]:
    """Each distinct build once, with its findings.

    Args:
        builds: All that cases launch, with all configurations.
        limits: What is allowed.
        baseline: Builds of an earlier run.
    """
    before = {build.identity: build for build in baseline}
    fitting = _fitting(builds)
    judged: dict[tuple[str, ...], Build] = {}
    for build in builds:
        elsewhere = _launch(build) in fitting
        found = (
            *_against_chip(build, elsewhere=elsewhere),
            *_against_limits(build, limits),
            *_against_baseline(build, before.get(build.identity), limits.slack),
        )
        if build.identity not in judged or not elsewhere:
            judged[build.identity] = msgspec.structs.replace(build, findings=found)
    return list(judged.values())


def misfit(build: Build) -> str:
    """Why it cannot be launched, though another configuration might; "" if it can."""
    usage, chip = build.usage, CHIPS[build.chip]
    if usage.misfit:
        return usage.error
    if usage.shared > chip.shared:
        return f"{usage.shared} bytes of shared memory, {chip.name} has {chip.shared}"
    if usage.columns > chip.columns:
        return f"{usage.columns} columns of tensor memory, {chip.name} has {chip.columns}"
    return ""


def _launch(build: Build) -> tuple[str, ...]:
    """What one of several configurations has to serve."""
    return build.target, build.function, build.chip, build.case


def _fitting(builds: Iterable[Build]) -> set[tuple[str, ...]]:
    """Launches that some configuration can serve: nothing that it launches is a misfit."""
    fits: defaultdict[tuple[str, ...], dict[int, bool]] = defaultdict(dict)
    for build in builds:
        of_index = fits[_launch(build)]
        of_index[build.index] = of_index.get(build.index, True) and not misfit(build)
    return {launch for launch, by_index in fits.items() if any(by_index.values())}


def _against_chip(build: Build, *, elsewhere: bool) -> Iterator[Finding]:
    usage = build.usage
    why = misfit(build)
    if why:
        text = why + (_ELSEWHERE if elsewhere else "")
        yield Finding(kind="does not fit", text=text, fails=not elsewhere)
        return
    if usage.error:
        yield Finding(kind="does not compile", text=usage.error, fails=True)
        return
    problem = Case.parse(build.case).problem
    ieee = problem.dtype == "float32" and problem.dot_precision == "ieee"
    asked = sum(usage.dots.get(f"f32 {name}", 0) for name in ("tf32", "tf32x3"))
    if usage.tf32 and ieee and (usage.dots.get("f32 tf32") or not asked):
        who = "the kernel asks for it" if asked else "the kernel does not ask for it"
        text = f"{usage.tf32} tensor-core instructions read tf32 where ieee was asked; {who}"
        yield Finding(kind="tf32", text=text, fails=True)
    if usage.lost:
        text = (
            f"{usage.lost} descriptors of products are computed from registers that hold something "
            "else, a fault of ptxas 12.8: give narrow tiles two stages, or run it on a card"
        )
        yield Finding(kind="descriptors", text=text, fails=False)
    if usage.rewritten:
        text = (
            f"a loop writes {usage.rewritten} registers while products of the iteration before may "
            "read them, a fault of Triton: compute that operand after a product that is waited for"
        )
        yield Finding(kind="operands", text=text, fails=False)
    if usage.repeated:
        text = (
            f"{usage.repeated} products have operands of too few columns for their layout and are "
            "wrong, a fault of Triton 3.6 and 3.7 where an operand comes from bytes and from "
            "tl.join: give that side of the tile 32 or more, or load a wider type"
        )
        yield Finding(kind="layouts", text=text, fails=True)


def _against_limits(build: Build, limits: Limits) -> Iterator[Finding]:
    """Nothing of what cannot run: for some chips Triton then compiles a stub."""
    usage = build.usage
    if usage.error or misfit(build):
        return
    spills = usage.spill_stores + usage.spill_loads
    for kind, used, most, unit in (
        ("registers", usage.registers, limits.registers, "registers a thread"),
        ("spills", spills, limits.spills, "bytes spilled by a thread, stores and loads"),
        ("stack", usage.stack, limits.stack, "bytes of stack a thread"),
        ("shared memory", usage.shared, limits.shared, "bytes of shared memory"),
    ):
        if most is not None and used > most:
            yield Finding(kind=kind, text=f"{used} {unit}, the limit is {most}", fails=True)
    products = sorted(name for name in usage.dots if name not in ("f32 ieee", "f64"))
    if products and not usage.matrix:
        text = f"products of {', '.join(products)} without tensor cores"
        yield Finding(kind="no tensor cores", text=text, fails=limits.tensor_cores)


def _against_baseline(build: Build, before: Build | None, slack: int) -> Iterator[Finding]:
    if before is None or before.usage.error or misfit(before):
        return
    for text in _worse(build, before.usage, slack):
        yield Finding(kind="regression", text=text, fails=True)


def _worse(build: Build, before: Usage, slack: int) -> Iterator[str]:
    """What has become worse of something that could run."""
    now = build.usage
    why = now.error or misfit(build)
    if why:
        yield f"could run in the baseline: {why}"
        return
    if now.registers > before.registers + slack:
        yield f"registers {before.registers} -> {now.registers}"
    spills = [u.spill_stores + u.spill_loads for u in (before, now)]
    if spills[1] > spills[0]:
        yield f"bytes spilled {spills[0]} -> {spills[1]}"
    for kind in sorted(before.matrix.keys() - now.matrix.keys()):
        if kind in _FAST or not now.matrix:  # mma that became wgmma is no loss
            yield f"{before.matrix[kind]} {kind} instructions -> none"
