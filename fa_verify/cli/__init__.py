"""The command line; all work is done below.

Exit codes: 0 all pass, 1 a kernel failed, 2 misuse, 3 nothing was verified or a sanitizer that was
asked for is unavailable, 4 the harness broke.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING

import click
from rich.console import Console

from fa_verify.cli import doubting, measuring, reading, verifying
from fa_verify.errors import InvalidInputError, KernelLoadError
from fa_verify.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_BROKE = 4
_MISUSE = 2


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def _cli() -> None:
    """Numerical-correctness and fuzz-testing harness for Triton attention kernels."""


for _command in (
    *(verifying.check, verifying.replay, verifying.list_kernels),
    *(doubting.selftest, doubting.mutate),
    *(measuring.resources, measuring.bench),
    *(reading.report, reading.matrix, reading.compare),
):
    _cli.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking must not start a context
    errors = Console(stderr=True, highlight=False)
    with contextlib.suppress(ValueError):  # not of the main thread: whoever owns that decides
        signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = _cli.main(
            list(sys.argv[1:] if arguments is None else arguments),
            prog_name="fa-verify",
            standalone_mode=False,
        )
    except click.ClickException as error:
        error.show()
        code = _MISUSE
    except (InvalidInputError, KernelLoadError) as error:
        errors.print(f"fa-verify: {error}", style="red", markup=False, soft_wrap=True)
        code = _MISUSE
    except (click.Abort, KeyboardInterrupt):
        errors.print("fa-verify: interrupted; what was recorded is kept", markup=False)
        code = 130
    except Exception:  # noqa: BLE001 - ours to report: 4 says that the harness broke
        errors.print(traceback.format_exc(), markup=False, soft_wrap=True)
        code = _BROKE
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    sys.exit(code or 0)


def _interrupt(*_: object) -> None:
    """End as Ctrl-C does: what is known is written, and what was started is ended; once only."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt
