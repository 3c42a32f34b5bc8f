"""`Tool`: what watches a process while kernels run in it, and how it is asked to. No torch."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["TOOLS", "Tool", "find"]

_NAME = "compute-sanitizer"
# Bytes after each allocation that nobody may touch: a row too far then hits no other tensor.
_PADDING = 1 << 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool of compute-sanitizer, or an instrumentation mode of Triton.

    Attributes:
        name: As on the command line.
        sees: In a few words.
        probe: The planted fault (`probes`) that it must see; "": there is none to plant.
        options: Its own options of compute-sanitizer.
        mode: TRITON_INSTRUMENTATION_MODE; "" for the tools of compute-sanitizer.
    """

    name: str
    sees: str
    probe: str
    options: tuple[str, ...] = ()
    mode: str = ""

    def command(self, binary: str, log: Path, arguments: Sequence[str]) -> list[str]:
        """The command line that runs a process under it, what it says in `log`.

        Children of the process, such as ptxas, are not watched. Options are those of
        compute-sanitizer 2022.4 to 2025.3, which CUDA 12.0 to 13.0 bring.
        """
        if self.mode:
            return list(arguments)
        return [
            *(binary, "--tool", self.name, *self.options, "--log-file", str(log)),
            *("--target-processes", "application-only", "--strip-paths", "no"),
            *("--show-backtrace", "no", "--print-limit", "1000", *arguments),
        ]

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """Variables of the process: each tensor its own allocation, kernels with their lines."""
        found = dict(given)
        if self.mode:
            found["TRITON_INSTRUMENTATION_MODE"] = self.mode
        else:
            found["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        found["TRITON_DISABLE_LINE_INFO"] = "0"
        return found


TOOLS: Final[Mapping[str, Tool]] = {
    tool.name: tool
    for tool in (
        Tool(
            name="memcheck",
            sees="accesses outside allocations, misaligned ones",
            probe="store_past",
            options=(
                "--padding",
                str(_PADDING),
                "--destroy-on-device-error",
                "kernel",
                "--report-api-errors",
                "no",
            ),
        ),
        Tool(name="initcheck", sees="reads of memory that nobody wrote", probe="unwritten"),
        Tool(
            name="racecheck",
            sees="races in shared memory",
            probe="shared_race",
            options=("--racecheck-report", "analysis"),
        ),
        Tool(name="synccheck", sees="barriers that not all threads reach", probe="barrier"),
        Tool(name="consan", sees="races in shared and tensor memory", probe="", mode="consan"),
        Tool(name="gsan", sees="races in global memory", probe="global_race", mode="gsan"),
    )
}


def find() -> str | None:
    """compute-sanitizer's path: on PATH, or where the CUDA toolkit puts it."""
    roots = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places = [Path(root, "bin") for root in (*roots, "/usr/local/cuda")]
    return shutil.which(_NAME) or next(
        (found for place in places if (found := shutil.which(_NAME, path=str(place)))), None
    )
