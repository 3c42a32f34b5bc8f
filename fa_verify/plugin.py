"""The pytest plugin: ``pytest -n auto --kernel file.py:name`` runs the suite and merges one report.

It imports nothing but pytest until ``--kernel`` is given: other people's runs must not notice it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fa_verify.backends.cards import Lease
    from fa_verify.kernel import Kernel
    from fa_verify.record import Writer
    from fa_verify.suite.shard import Shard

_SUITE = "fa_verify.suite"
_DEFAULT_SEED = 0
_DEFAULT_CASES = 120
_DEFAULT_EXAMPLES = ".fa_verify/examples"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options; all do nothing without --kernel."""
    group = parser.getgroup("fa_verify", "verify attention kernels")
    group.addoption(
        "--kernel",
        action="append",
        default=[],
        metavar="TARGET",
        help="run fa_verify's suite on this kernel: file.py:name, file, folder, module:name",
    )
    group.addoption(
        "--fa-cases",
        type=int,
        default=_DEFAULT_CASES,
        metavar="N",
        help=f"cases for each kernel (default {_DEFAULT_CASES})",
    )
    group.addoption(
        "--fa-seed",
        default=str(_DEFAULT_SEED),
        metavar="SEED",
        help="seed of the run; 'random' draws one (nightly runs) and prints it",
    )
    group.addoption(
        "--fa-backend", choices=["auto", "cpu", "cuda"], default="auto", help="where kernels run"
    )
    group.addoption("--fa-report", default="fa-verify-report", metavar="DIR",
                    help="folder of the record and the merged report")  # fmt: skip
    group.addoption(
        "--fa-examples",
        default=_DEFAULT_EXAMPLES,
        metavar="DIR",
        help=f"folder of cases that failed before; they run first (default {_DEFAULT_EXAMPLES})",
    )
    group.addoption(
        "--fa-no-examples", action="store_true", help="neither run nor keep failed cases"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """``--kernel`` without paths runs the suite alone."""
    if not any(arg == "--kernel" or arg.startswith("--kernel=") for arg in args):
        return
    named = early_config.known_args_namespace.file_or_dir
    if not named:
        args += ["--pyargs", _SUITE]


def pytest_configure(config: pytest.Config) -> None:
    """With --kernel: fix the seed for all workers, one BLAS thread, and a fresh folder."""
    if not config.getoption("--kernel"):
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if config.getoption("--fa-cases") < 1:
        msg = f"--fa-cases={config.getoption('--fa-cases')}: must be at least 1"
        raise pytest.UsageError(msg)
    worker = getattr(config, "workerinput", None)
    config.pluginmanager.register(_Run(config, worker), "fa_verify_run")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without --kernel the suite has nothing to run on."""
    suite = collection_path == Path(__file__).parent / "suite" / "test_kernel.py"
    return True if suite and not config.getoption("--kernel") else None


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand the run's seed to an xdist worker."""
    run = node.config.pluginmanager.get_plugin("fa_verify_run")
    if run is not None:
        node.workerinput["fa_verify"] = {"seed": run.seed, "stamp": run.stamp}


class _Run:
    """One pytest run with --kernel, in the controller and in each worker."""

    def __init__(self, config: pytest.Config, workerinput: dict[str, Any] | None) -> None:
        self.config = config
        self.folder = Path(config.getoption("--fa-report"))
        self.controller = workerinput is None
        handed = (workerinput or {}).get("fa_verify")
        seed = config.getoption("--fa-seed")
        if handed:
            self.seed, self.stamp = handed["seed"], handed["stamp"]
        else:
            if seed != "random" and not seed.isdecimal():
                msg = f"--fa-seed={seed}: a whole number, or 'random'"
                raise pytest.UsageError(msg)
            self.seed = int.from_bytes(os.urandom(4)) if seed == "random" else int(seed)
            self.stamp = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}"
        self.worker = (workerinput or {}).get("workerid", "main")
        self._writer: Writer | None = None
        self._begin = time.monotonic()
        self._backend_name = ""
        self._lease: Lease | None = None
        self._kernels: list[Kernel] = []

    def pytest_report_header(self) -> str:
        """The seed, so that the run can be repeated."""
        return f"fa_verify: --fa-seed={self.seed}, records in {self.folder}"

    def pytest_sessionstart(self) -> None:
        """Load the kernels; a bad target ends the run as misuse."""
        from fa_verify.errors import InvalidInputError, KernelLoadError  # noqa: PLC0415
        from fa_verify.loader import load  # noqa: PLC0415 - only with --kernel

        try:
            targets = self.config.getoption("--kernel")
            self._kernels = [kernel for target in targets for kernel in load(target)]
        except (InvalidInputError, KernelLoadError) as error:
            raise pytest.UsageError(str(error)) from error
        if not self._kernels:
            msg = f"--kernel={', '.join(targets)}: no Kernel found, nothing would be verified"
            raise pytest.UsageError(msg)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Kernel x dtype x pass x shard."""
        if "fa_verify_shard" not in metafunc.fixturenames:
            return
        from fa_verify.suite.shard import parameters  # noqa: PLC0415

        shards = parameters(self._kernels, self.config.getoption("--fa-cases"))
        metafunc.parametrize(
            "fa_verify_shard", list(shards.values()), ids=list(shards), indirect=True
        )

    @pytest.fixture
    def fa_verify_shard(self, request: pytest.FixtureRequest) -> Shard:
        """The shard of this test."""
        from fa_verify.backends import make, resolve  # noqa: PLC0415
        from fa_verify.examples import Examples  # noqa: PLC0415
        from fa_verify.suite.shard import Shard  # noqa: PLC0415

        option = self.config.getoption
        self._backend_name = resolve(option("--fa-backend"))
        if self._backend_name == "cuda":
            self._take_card()
        return Shard(
            **request.param,
            backend=make(self._backend_name, seconds=60.0),
            backend_name=self._backend_name,
            seed=self.seed,
            writer=self._open(),
            kept=None if option("--fa-no-examples") else Examples(Path(option("--fa-examples"))),
        )

    def _take_card(self) -> None:
        """Lease a card, once a process; who finds no slot free waits until another worker ends."""
        if self._lease is None:
            from fa_verify.backends import cards  # noqa: PLC0415

            self._lease = cards.take(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))

    def _open(self) -> Writer:
        if self._writer is None:
            import torch  # noqa: PLC0415

            from fa_verify.checking import start_line  # noqa: PLC0415
            from fa_verify.record import Writer  # noqa: PLC0415

            torch.set_num_threads(1)
            self._writer = Writer(self.folder / f"{self.stamp}-{self.worker}.jsonl")
            targets = self.config.getoption("--kernel")
            self._writer.write(start_line(targets, self.seed, self._backend_name))
        return self._writer

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Close this process's record."""
        if self._writer is not None:
            from fa_verify.record import End  # noqa: PLC0415

            seconds = time.monotonic() - self._begin
            self._writer.write(End(seconds=seconds, cases=0, exit_code=int(exitstatus)))
            self._writer.close()

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Merge the records of all workers into one report and print its table."""
        from rich.console import Console  # noqa: PLC0415

        from fa_verify.report import files, table  # noqa: PLC0415

        records = sorted(self.folder.glob(f"{self.stamp}-*.jsonl"))
        if not self.controller or not records:
            return
        summary = files.summary_of(records)
        terminalreporter.section("fa_verify")
        table.show(Console(file=terminalreporter._tw._file, highlight=False), summary, failures=0)  # noqa: SLF001 - the reporter's own stream
        for path in files.write(summary, self.folder):
            terminalreporter.write_line(f"  {path}")
