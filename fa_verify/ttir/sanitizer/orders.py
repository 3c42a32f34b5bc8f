"""Runs a launch again in the opposite order when the values that atomics return are used.

Programs that draw tickets, or go by who came first, may compute something else on each run. Some
mean to (a list in any order), so that a difference beyond rounding is only noted. Programs that
wait for each other are not run again. Sums whose order follows the tickets differ in rounding only:
n terms, added in two orders, differ by at most 2 n u times the sum of their magnitudes (Higham,
Accuracy and Stability of Numerical Algorithms, 4.2), for which the largest value of the tensor is
taken, n being the number of programs.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from fa_verify.ttir.lowering.roots import ADDRESSES
from fa_verify.ttir.sanitizer.findings import Findings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fa_verify.ttir.engine.program import Program
    from fa_verify.ttir.options import Options

_LARGEST = 1 << 26  # bytes of what a kernel writes; more is not kept twice


class Orders:
    """What a launch's tensors held before it, if it is to be run again."""

    def __init__(self, program: Program, names: Sequence[str], tensors: Sequence[Any]) -> None:
        """Keep what the program may write to."""
        self._program = program
        self._written: list[tuple[str, torch.Tensor]] = []
        if program.tickets is None or program.waits or ADDRESSES in program.stored:
            return
        positions = [i for i in program.stored if isinstance(tensors[i], torch.Tensor)]
        size = sum(tensors[i].untyped_storage().nbytes() for i in positions)
        if size <= _LARGEST and len(positions) == len(program.stored):
            self._written = [(names[i], tensors[i]) for i in sorted(positions)]
        self._before = [_bytes(tensor).clone() for _, tensor in self._written]

    def compare(
        self, run: Callable[..., None], options: Options, grid: Sequence[int],
        findings: Findings,
    ) -> None:  # fmt: skip
        """Run again from the start in the opposite order, compare, and put the first results back.

        Args:
            run: Runs the launch under options, reporting to findings.
            options: Those of the first run.
            grid: Programs along x, y, z.
            findings: Where a difference is reported.
        """
        count = grid[0] * grid[1] * grid[2]
        if not self._written or count < 2:
            return
        first = [_bytes(tensor).clone() for _, tensor in self._written]
        values = [tensor.detach().clone() for _, tensor in self._written]
        self._put(self._before)
        other = dataclasses.replace(
            options,
            schedule="forward" if options.schedule == "reverse" else "reverse",
            sanitize=False,
        )
        run(options=other, findings=Findings(0))
        for (name, tensor), value in zip(self._written, values, strict=True):
            self._look(name, value, tensor.detach(), count, findings)
        self._put(first)

    def _put(self, kept: Sequence[torch.Tensor]) -> None:
        for (_, tensor), content in zip(self._written, kept, strict=True):
            _bytes(tensor).copy_(content)

    def _look(
        self, name: str, first: torch.Tensor, second: torch.Tensor, count: int, findings: Findings
    ) -> None:
        wrong = _apart(first, second, count)
        site = self._program.tickets
        if site is None or not bool(wrong.any()):
            return
        place = wrong.nonzero()[0].tolist()
        at = tuple(place)
        findings.add(
            "order-dependence", site, name, (0, 0, 0), 0, int(wrong.sum()),
            f"what programs make of this atomic's result depends on their order: {name}{place} is "
            f"{first[at].item()}, and {second[at].item()} in the opposite order",
        )  # fmt: skip


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _apart(first: torch.Tensor, second: torch.Tensor, count: int) -> torch.Tensor:
    """Where two results differ by more than the rounding of sums in another order."""
    if not first.dtype.is_floating_point:
        return first != second
    a, b = first.to(torch.float64), second.to(torch.float64)
    finite = torch.cat([x[torch.isfinite(x)].abs().flatten() for x in (a, b)])
    largest = float(finite.max()) if finite.numel() else 0.0
    rounding = count * torch.finfo(first.dtype).eps * largest  # 2 n u: eps is 2 u
    same = (a == b) | (torch.isnan(a) & torch.isnan(b)) | ((a - b).abs() <= rounding)
    return ~same
