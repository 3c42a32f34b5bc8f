"""`OfModules`: what an `Alteration` has that leaves launches as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fa_verify.ttir.lowering.lower import Rule
    from fa_verify.ttir.options import Grid, Parameters

__all__ = ["OfModules"]


class OfModules:
    """An `Alteration`, or an edit, of modules alone.

    Attributes:
        rules: How operations run that it makes up: none.
    """

    __slots__ = ()

    rules: ClassVar[Mapping[str, Rule]] = {}

    def launch(
        self, kernel: str, grid: Grid, given: dict[str, Any], parameters: Parameters
    ) -> tuple[Grid, dict[str, Any]]:
        """Launches stay as they are."""
        del kernel, parameters
        return grid, given
