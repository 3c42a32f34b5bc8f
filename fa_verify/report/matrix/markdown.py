"""A matrix as Markdown: what a pull request shows, and a page with every tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa_verify.report import text
from fa_verify.report.marks import escape, fence, table
from fa_verify.report.matrix.words import HOW, bias, headline, missing, remark, ulps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.report.matrix.cells import Cell, Errors
    from fa_verify.report.matrix.places import Matrix, Place

__all__ = ["overview", "render"]


def render(matrix: Matrix) -> str:
    """The whole page."""
    blocks = ["# Precision matrix", f"{escape(headline(matrix))}.", HOW]
    for place in matrix.places:
        blocks += [
            f"## {escape(place.device)}",
            fence([text.clean(command) for command in place.commands], "sh"),
            escape("; ".join(place.versions)),
            "Worst err/bound of any tensor (cases):",
            overview(place),
            *(f"{escape(kernel)}. {missing(place, kernel)}" for kernel in place.cells
              if missing(place, kernel)),
            "Each tensor: worst err/bound; error in ulps of half of the cases (of all); bias.",
            *_details(place),
            "<sub>Sources: " + escape("; ".join(place.sources)) + "</sub>",
        ]  # fmt: skip
    return "\n\n".join(block for block in blocks if block) + "\n"


def overview(place: Place) -> str:
    """A row for each kernel and variant, a column for each precision."""
    return "\n\n".join(_overview(place, *some) for some in place.tables)


def _overview(place: Place, precisions: tuple[str, ...], kernels: tuple[str, ...]) -> str:
    body = []
    for kernel in kernels:
        rows = place.cells[kernel]
        for variant in place.variants(kernel):
            cells = [_worst(rows[variant].get(precision)) for precision in precisions]
            body.append([escape(kernel), escape(variant), *cells, ""])
    return table(["kernel", "variant", *precisions, ""], body, left=2)


def _worst(cell: Cell | None) -> str:
    if cell is None:
        return "no case"
    ratio = text.number(cell.ratio)
    if cell.failed:
        return f"**{ratio}, {remark(cell)}** ({text.count(cell.cases)})"
    return f"{ratio} ({text.count(cell.cases)})"


def _details(place: Place) -> Iterator[str]:
    for kernel, rows in place.cells.items():
        tensors = place.tensors(kernel)
        body = [
            [escape(variant), precision, text.count(cell.cases),
             *(_errors(cell.tensors.get(name)) for name in tensors), remark(cell)]
            for variant in place.variants(kernel)
            for precision in place.precisions
            if (cell := rows[variant].get(precision)) is not None
        ]  # fmt: skip
        head = ["variant", "precision", "cases", *tensors, ""]
        yield f"<details><summary>{escape(kernel)}</summary>"
        yield table(head, body, left=2)
        yield "</details>"


def _errors(errors: Errors | None) -> str:
    if errors is None:
        return "-"
    return f"{text.number(errors.ratio)}, {ulps(errors)}, {bias(errors)}"
