"""``python -m fa_verify.ttir script.py [args]``: see --help."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from fa_verify.ttir import options
from fa_verify.ttir.scripts import script

# Before torch looks for GPUs: everything is to happen on the CPU, also where there is one.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

_DESCRIPTION = """\
Run a program written for Triton on a GPU on the CPU, with every access of its kernels watched.
Tensors asked for on cuda are made on the CPU. Under pytest every test is watched on its own, also
with xdist (-n). Exit code: the program's own; 1 if it raised, after an incident, or after something
that cannot be run; 2 for misuse.
"""


def main(arguments: list[str]) -> int:
    """Parse the command line and run.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(
        prog="python -m fa_verify.ttir",
        usage="%(prog)s [options] (script.py | -m module) [arguments ...]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--no-sanitize", action="store_true", help="run only, look for nothing")
    parser.add_argument(
        "--schedule", default="forward", metavar="ORDER",
        help="order of programs: forward (default), reverse, serial, shuffled, shuffled:SEED",
    )  # fmt: skip
    parser.add_argument(
        "--config", type=int, default=0, metavar="N",
        help="autotune configuration to pin, modulo the number offered (default 0)",
    )  # fmt: skip
    parser.add_argument(
        "--float", default="hopper", metavar="MODEL",
        help=f"how the chip's arithmetic is imitated: {', '.join(options.FLOAT_MODELS)}",
    )  # fmt: skip
    parser.add_argument(
        "--no-benchmarks", action="store_true",
        help="do not run what is given to triton.testing.do_bench (default: run it once)",
    )  # fmt: skip
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE",
                        help="run a module, such as pytest, instead of a script")  # fmt: skip
    parser.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    target = given.module or given.script
    if not target:
        parser.error("give a script, or -m and a module")
    name, rest = target[0], target[1:]
    if given.module is None and not Path(name).exists():
        parser.error(f"script={name!r}: no such file")
    if given.module is not None and _missing(name):
        parser.error(f"module={name!r}: cannot be found")

    try:
        chosen = options.parse_options(
            schedule=given.schedule, config=given.config, sanitize=not given.no_sanitize,
            floats=given.float,
        )  # fmt: skip
    except ValueError as error:
        parser.error(str(error))
    if given.module is None:
        return script.run_script(name, rest, chosen, benchmarks=not given.no_benchmarks)
    if name != "pytest":
        return script.run_module(name, rest, chosen, benchmarks=not given.no_benchmarks)
    handed = ["-p", "fa_verify.ttir.scripts.plugin", f"--ttir-schedule={given.schedule}",
              f"--ttir-config={given.config}", f"--ttir-float={given.float}"]  # fmt: skip
    handed += ["--ttir-no-sanitize"] * given.no_sanitize
    handed += ["--ttir-no-benchmarks"] * given.no_benchmarks
    # Workers share the cores, and tiles are small: waiting threads would cost more than they bring.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A fresh process: pytest rewrites the assertions of plugins, which must not be imported yet.
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001
    command = [sys.executable, *flags, "-m", "pytest", *handed, *rest]
    return os.execv(sys.executable, command)  # noqa: S606 - no shell is wanted


def _missing(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ImportError:
        return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
