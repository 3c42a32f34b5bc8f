"""Options of the command line that several commands take."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "BUDGET",
    "DTYPE",
    "SEED",
    "WORKERS",
    "Seconds",
    "fence",
    "most",
    "report_folder",
    "several",
]

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


class Seconds(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """A duration such as 90, 90s, 2m or 1h."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Seconds as a float."""
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", str(value))
        if match is None or float(match[1]) == 0:
            self.fail(f"{value!r}: give a duration above 0 such as 90s, 2m or 1h", param, ctx)
        return float(match[1]) * _UNITS[match[2]]


WORKERS = click.option(
    "-n",
    "--workers",
    type=click.IntRange(min=1),
    default=None,
    help="Workers: a process each; on a card two, where there are cores.  [default: one a core]",
)
BUDGET = click.option(
    "--budget", type=Seconds(), default=None, help="Stop after this long: 90s, 2m, 1h."
)
SEED = click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Seed of the run; the same seed draws the same cases.",
)
DTYPE = click.option(
    "--dtype",
    type=click.Choice(["float16", "bfloat16", "float32", "float8_e4m3fn"]),
    default=None,
    help="Only this dtype. float8_e4m3fn: only cases whose q, k and v are in it.",
)


def most(name: str, text: str) -> Callable[[Any], Any]:
    """A limit, ``--max-NAME``."""
    return click.option(f"--max-{name}", type=click.IntRange(min=0), default=None, help=text)


def fence(default: str | None, text: str) -> Callable[[Any], Any]:
    """What lies around tensors on a card."""
    return click.option(
        "--fence",
        type=click.Choice(["off", "poison", "page"]),
        default=default,
        show_default=default is not None,
        help=text,
    )


def report_folder(folder: str, text: str) -> Callable[[Any], Any]:
    """Where a report goes."""
    return click.option(
        "--report",
        "folder",
        type=click.Path(file_okay=False, path_type=Path),
        default=Path(folder),
        show_default=True,
        help=text,
    )


def several(
    name: str, of: click.ParamType[Any], default: tuple[Any, ...], text: str
) -> Callable[[Any], Any]:
    """An option that may be given several times; the parameter is its plural."""
    plural = name.replace("-", "_") + ("es" if name.endswith("ch") else "s")
    return click.option(
        f"--{name}",
        plural,
        multiple=True,
        type=of,
        default=default,
        show_default=True,
        help=f"{text} Repeatable.",
    )
