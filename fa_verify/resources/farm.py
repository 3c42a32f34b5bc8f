"""`Farm`: worker processes for one chip after the other, and what was compiled before."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING, Any

import msgspec
import pebble

from fa_verify.errors import InvalidInputError
from fa_verify.resources import work
from fa_verify.resources.build import Build, Refusal, Usage
from fa_verify.resources.work import Looked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from fa_verify.case import Case
    from fa_verify.kernel import Kernel
    from fa_verify.resources.chips import Chip
    from fa_verify.resources.work import Part

__all__ = ["Farm"]


class Farm:
    """Looks and compiles in parallel.

    Attributes:
        builds: What each case launches with each configuration, and what that takes.
        refusals: Cases on which launchers raised.
        cached: Compilations that were known from an earlier run.
    """

    def __init__(self, workers: int, timeout: float, cache: Path | None) -> None:
        """Start nothing yet."""
        self.builds: list[Build] = []
        self.refusals: list[Refusal] = []
        self.cached = 0
        self._workers, self._timeout, self._cache = workers, timeout, cache
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["fa_verify.resources.work"])

    def run(self, chip: Chip, pairs: Sequence[tuple[Kernel, Case]]) -> None:
        """Compile what kernels launch on cases, each distinct kernel once.

        Processes serve one chip only: a module may choose by the chip as it is imported.
        """
        pool = pebble.ProcessPool(
            self._workers, context=self._context, initializer=work.start, initargs=(chip.name,)
        )
        try:
            looks = [
                (kernel, case, self._schedule(pool, work.look, kernel, case, chip))
                for kernel, case in pairs
            ]
            started: list[tuple[Kernel, Case, Part, Future[Usage] | Usage]] = []
            usages: dict[str, Future[Usage] | Usage] = {}
            for kernel, case, future in looks:
                for part in self._parts(kernel, case, chip, future):
                    if part.key not in usages:
                        known = self._known(part.key)
                        usages[part.key] = known or self._schedule(
                            pool, work.build, kernel, case, chip, part
                        )
                    started.append((kernel, case, part, usages[part.key]))
            self.builds += [self._build(chip, *item) for item in started]
        finally:
            pool.stop()  # type: ignore[no-untyped-call]
            pool.join()

    def _schedule(
        self,
        pool: pebble.ProcessPool,
        task: Callable[..., Any],
        kernel: Kernel,
        case: Case,
        chip: Chip,
        *rest: Part,
    ) -> Future[Any]:
        future: Future[Any] = pool.schedule(
            task, args=(kernel.target, str(case), chip.name, *rest), timeout=self._timeout
        )
        return future

    def _parts(
        self, kernel: Kernel, case: Case, chip: Chip, future: Future[Looked]
    ) -> tuple[Part, ...]:
        """What a case launches; why it does not, if it does not."""
        try:
            looked = future.result()
        except (TimeoutError, pebble.ProcessExpired) as error:
            looked = Looked(parts=(), error=_died(error, self._timeout), compiling=False)
        if looked.error:
            self.refusals.append(
                Refusal(
                    kernel=kernel.name,
                    target=kernel.target,
                    chip=chip.name,
                    case=str(case),
                    error=looked.error,
                    fails=looked.compiling,
                )
            )
        return looked.parts

    def _known(self, key: str) -> Usage | None:
        if self._cache is None:
            return None
        try:
            usage = msgspec.json.decode((self._cache / f"{key}.json").read_bytes(), type=Usage)
        except (OSError, msgspec.DecodeError):  # not there, or torn: compile it
            return None
        self.cached += 1
        return usage

    def _build(
        self, chip: Chip, kernel: Kernel, case: Case, part: Part, usage: Future[Usage] | Usage
    ) -> Build:
        if not isinstance(usage, Usage):
            try:
                usage = usage.result()
            except (TimeoutError, pebble.ProcessExpired) as error:
                usage = Usage(error=f"the compiler: {_died(error, self._timeout)}")
            else:
                self._keep(part.key, usage)
        return Build(
            kernel=kernel.name,
            target=kernel.target,
            function=part.function,
            location=part.location,
            chip=chip.name,
            config=part.config,
            index=part.index,
            form=part.form,
            case=str(case),
            usage=usage,
        )

    def _keep(self, key: str, usage: Usage) -> None:
        if self._cache is None:
            return
        try:
            self._cache.mkdir(parents=True, exist_ok=True)
            (self._cache / f"{key}.json").write_bytes(msgspec.json.encode(usage))
        except OSError as error:
            msg = f"cache={str(self._cache)!r}: cannot be written ({error.strerror}); --no-cache"
            raise InvalidInputError(msg) from error


def _died(error: Exception, timeout: float) -> str:
    if isinstance(error, pebble.ProcessExpired):
        return f"died with exit code {error.exitcode}"
    return f"no result in {timeout:g} s"
