"""`LaunchMutant`: one change of how a kernel is launched: grid, arguments, constants."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.ttir.options import Edit, Grid, Parameters

__all__ = ["LaunchMutant", "launch_mutants"]

_AXES = "xyz"
# A scale twice as large, and one that mistakes the base of the exponential for 2.
_FACTORS = {"x2": 2.0, "/ln2": 1.4426950408889634}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchMutant:
    """One change of a launch.

    Attributes:
        kernel: The Triton function that is launched.
        operator: The kind of change; label: which of its kind; names: of the arguments changed.
    """

    kernel: str
    operator: str
    label: str
    names: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """A short name."""
        text = repr((self.kernel, self.label, self.names))
        return f"{self.operator}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"

    @property
    def says(self) -> str:
        """What is wrong, as the beginning of a sentence."""
        if self.operator == "grid":
            more = "too many" if self.label[1] == "+" else "too few"
            return f"the grid has one program {more} along {self.label[0]}"
        if self.operator == "swap-arguments":
            return f"{self.names[0]} and {self.names[1]} are passed in each other's place"
        if self.operator == "wrong-block":
            much = "twice" if self.label == "double" else "half"
            return f"{self.names[0]} is {much} what the launcher counted with"
        return f"{self.names[0]} is {self.label.replace('x', 'times ')} what it should be"

    def edit(self, kernel: str) -> Edit | None:
        """As an `Alteration`: modules stay as they are."""
        del kernel
        return None

    def launch(
        self, kernel: str, grid: Grid, given: dict[str, Any], parameters: Parameters
    ) -> tuple[Grid, dict[str, Any]]:
        """As an `Alteration`: its own kernel is launched otherwise."""
        del parameters
        if kernel != self.kernel:
            return grid, given
        if self.operator == "grid":
            programs = list(grid)
            at = _AXES.index(self.label[0])
            programs[at] = max(0, programs[at] + int(self.label[1:]))
            return (programs[0], programs[1], programs[2]), given
        if self.operator == "swap-arguments":
            a, b = self.names
            return grid, {**given, a: given[b], b: given[a]}
        (name,) = self.names
        old = given[name]
        if self.operator == "wrong-block":
            return grid, {**given, name: old * 2 if self.label == "double" else old // 2}
        return grid, {**given, name: old * _FACTORS[self.label]}


def launch_mutants(
    kernel: str, grid: Grid, given: dict[str, Any], parameters: Parameters
) -> Iterator[LaunchMutant]:
    """All that a launch allows."""
    for axis, extent in zip(_AXES, grid, strict=True):
        if axis == "x" or extent > 1:
            for by in ("+1", "-1"):
                yield LaunchMutant(kernel=kernel, operator="grid", label=axis + by)
    run_time = parameters.run_time
    integers = [name for name in run_time if type(given[name]) is int]
    for a, b in pairwise(integers):
        yield LaunchMutant(kernel=kernel, operator="swap-arguments", label="swap", names=(a, b))
    for name in run_time:
        if type(given[name]) is float:
            for label in _FACTORS:
                yield LaunchMutant(
                    kernel=kernel, operator="wrong-scale", label=label, names=(name,)
                )
    for name in sorted(parameters.counted | parameters.blocks):
        # Twice as large a block that nobody counts with covers what it must, and padding besides.
        for label in ("double", "half") if name in parameters.counted else ("half",):
            yield LaunchMutant(kernel=kernel, operator="wrong-block", label=label, names=(name,))
