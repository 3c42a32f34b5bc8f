"""`Shard`: the cases of one test: what failed before, what Hypothesis draws, what it climbs to."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING, Any

import hypothesis
from hypothesis.errors import Flaky

from fa_verify.backends.base import Setup
from fa_verify.capabilities import Capabilities
from fa_verify.case import Case
from fa_verify.distribution import forms, work
from fa_verify.neighbours import around
from fa_verify.record import CaseRecord, Shrunk
from fa_verify.strategies import cases, shrink
from fa_verify.verdict import Verdict
from fa_verify.verify import verify

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fa_verify.backends.base import Backend
    from fa_verify.examples import Examples
    from fa_verify.kernel import Kernel
    from fa_verify.record import Writer

__all__ = ["Shard", "parameters"]

_SHARDS = 2  # of each kernel, dtype and pass: one kernel with gradients fills twelve workers
_CLIMB = 6  # one case in so many belongs to the search for larger errors
# Cases for each form that a shard has compiled on a card, where one takes as long as many cases do:
# twelve shards of three have more than `campaign.cases.CUDA_FORMS`.
_OF_A_FORM, _FORMS = 12, 3
_CHEAP = 1 << 25  # most work of the case that such a search starts from: it runs it over and over
_HIGHEST = 1e6  # err/bound; Hypothesis climbs finite numbers only
_SHRINK_SECONDS = 20.0


def parameters(kernels: Sequence[Kernel], cases: int) -> dict[str, dict[str, Any]]:
    """The shards of a suite: kernel x dtype x pass x shard, as fields of `Shard` by test id.

    Args:
        kernels: What to verify.
        cases: How many cases each kernel gets in all, spread evenly over its shards.
    """
    found: dict[str, dict[str, Any]] = {}
    for kernel in kernels:
        takes = kernel.takes or Capabilities()
        passes = (False, True) if kernel.backward and takes.backward else (False,)
        kinds = [
            (dtype, backward, index)
            for dtype in takes.dtypes
            for backward in passes
            for index in range(_SHARDS)
        ]
        for dtype, backward, index in kinds:
            found[f"{kernel.name}-{dtype}-{'bwd' if backward else 'fwd'}-{index}"] = {
                "kernel": kernel,
                "dtype": dtype,
                "backward": backward,
                "index": index,
                "examples": -(-cases // len(kinds)),
            }
    return found


def _height(record: CaseRecord) -> float:
    """The largest error over its deterministic bound, of all tensors."""
    return min(_HIGHEST, max((stats.ratio for stats in record.tensors.values()), default=0.0))


class _KernelFailedError(AssertionError):
    """The kernel is wrong on this case; Hypothesis shrinks what raises it."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Shard:
    """Some cases of one kernel, dtype and pass.

    Attributes:
        kernel: The kernel.
        backend: What runs it.
        backend_name: "cpu" or "cuda".
        dtype: Of the cases.
        backward: Whether they ask for gradients.
        index: Which shard of its kernel, dtype and pass.
        examples: How many cases.
        seed: The run's seed; the shard's follows from it.
        writer: Where records go.
        kept: What failed in earlier runs; None: nothing is kept.
        verified: Cases that reached pass or fail.
        reason: The last reason why a case did not.
    """

    kernel: Kernel
    backend: Backend
    backend_name: str
    dtype: str
    backward: bool
    index: int
    examples: int
    seed: int
    writer: Writer
    kept: Examples | None = None
    verified: int = 0
    reason: str = "no case ran"
    _drawn: int = 0
    _failed: CaseRecord | None = None
    _original: str = ""
    _highest: float = -1.0
    _start: Case | None = None

    def run(self) -> str | None:
        """Verify the shard's cases; what is wrong, ending in the replay line, or None."""
        return self._known() or self._random() or self._climbed()

    def _known(self) -> str | None:
        """What failed before, judged by the deterministic bound alone: a search found it."""
        if self.kept is None or self.index:
            return None
        for case, setup in self.kept.of(self.kernel, backend=self.backend_name):
            if (case.problem.dtype, case.backward) != (self.dtype, self.backward):
                continue
            record = self._judged(case, setup, explain=True)
            self.writer.write(record)
            if record.verdict == Verdict.FAIL:
                self._original, self._failed = record.case, record
                return self._finding("it failed in an earlier run\n")
        return None

    def _random(self) -> str | None:
        """Cases of the default distribution."""

        @hypothesis.seed(self._seed())
        @hypothesis.settings(
            self._settings(),
            max_examples=self.examples - self.examples // _CLIMB,
            phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        )
        @hypothesis.given(
            cases(self.kernel.takes, dtype=self.dtype, backward=self.backward, forms=self._forms())
        )
        def probe(case: Case) -> None:
            self._verify(case)

        try:
            probe()
        except _KernelFailedError:
            self._explain(independent=False)
        except Flaky:  # by chance bounds alone, which count where nobody searched; or by chance
            if not self._explain(independent=True):
                return self._finding(
                    "not reproduced on the same case: the kernel is not deterministic\n"
                )
        return None if self._failed is None else self._finding("")

    def _explain(self, *, independent: bool) -> bool:
        """Put the likely cause to the failing case; whether it fails again."""
        record = self._failed
        assert record is not None  # noqa: S101 - only a failing record leads here
        case, setup = Case.parse(record.case), Setup.parse(record.setup)
        again = verify(
            case, self.kernel, setup, self.backend, independent=independent, explain=True
        )
        if again.failures:
            self._failed = again
        return bool(again.failures)

    def _climbed(self) -> str | None:
        """Cases around the one with the largest error over its deterministic bound, uphill."""
        examples, start = self.examples // _CLIMB, self._start
        if not examples or start is None:
            return None
        setup = self._setup(self._config())

        @hypothesis.seed(self._seed())
        @hypothesis.settings(
            self._settings(),
            max_examples=examples,
            phases=(hypothesis.Phase.generate, hypothesis.Phase.target),
        )
        @hypothesis.given(around(start, self.kernel.takes))
        def probe(case: Case) -> None:
            record = self._judged(case, setup)
            self.writer.write(record)
            if record.verdict == Verdict.FAIL:
                self._original, self._failed = record.case, record
                raise _KernelFailedError(record.failures[0].title)
            hypothesis.target(_height(record))

        try:
            probe()
        except (_KernelFailedError, Flaky):
            self._shrink(setup)
            return self._finding("found by a search for larger errors\n")
        return None

    def _shrink(self, setup: Setup) -> None:
        """Make the failing case small."""
        record = self._failed
        assert record is not None  # noqa: S101 - only a failing record leads here
        wanted = {(f.check, f.title) for f in record.failures[:1]}

        def fails(case: Case) -> bool:
            tried = self._judged(case, setup)
            return bool(wanted & {(f.check, f.title) for f in tried.failures})

        small = shrink(
            Case.parse(record.case),
            fails,
            capabilities=self.kernel.takes,
            max_seconds=_SHRINK_SECONDS,
        )
        explained = self._judged(small, setup, explain=True)
        self._failed = explained if explained.failures else record

    def _judged(self, case: Case, setup: Setup, *, explain: bool = False) -> CaseRecord:
        record = verify(case, self.kernel, setup, self.backend, independent=False, explain=explain)
        if record.verdict == Verdict.ERROR:
            raise RuntimeError(record.reason)
        return record

    @staticmethod
    def _settings() -> hypothesis.settings:
        return hypothesis.settings(
            database=None,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            print_blob=False,
            report_multiple_bugs=False,
        )

    def _forms(self) -> tuple[str, ...]:
        """What cases on a card are compiled for; none on the CPU, where all forms are free."""
        if self.backend_name != "cuda":
            return ()
        count = min(_FORMS, -(-self.examples // _OF_A_FORM))
        return forms(self._seed(), count, self.kernel.takes, dtype=self.dtype)

    def _config(self) -> int:
        """The configuration of the next case; of all of a shard's on a card."""
        scattered = self._seed() % 840  # a multiple of every number of configurations up to 8
        return scattered if self.backend_name == "cuda" else self._drawn + self.index

    def _setup(self, config: int) -> Setup:
        model = "hopper" if self.backend_name == "cpu" else "hardware"
        return Setup(backend=self.backend_name, config=config, float_model=model)

    def _seed(self) -> int:
        text = f"{self.seed}/{self.kernel.name}/{self.dtype}/{self.backward}/{self.index}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])

    def _verify(self, case: Case) -> None:
        failed = self._failed
        searching = failed is not None
        config = self._config() if failed is None else Setup.parse(failed.setup).config
        setup = self._setup(config)
        record = verify(
            case, self.kernel, setup, self.backend, independent=not searching, explain=False
        )
        if not searching:
            self._drawn += 1
            self.writer.write(record)
            self.verified += record.verdict in (Verdict.PASS, Verdict.FAIL)
            self.reason = record.reason or self.reason
        if record.verdict == Verdict.ERROR:
            raise RuntimeError(record.reason)
        if record.verdict == Verdict.FAIL:
            self._original = self._original or record.case
            self._failed = record
            raise _KernelFailedError(record.failures[0].title)
        if record.verdict == Verdict.PASS and work(case.problem) <= _CHEAP:
            height = _height(record)
            if height > self._highest:
                self._highest, self._start = height, case

    def _finding(self, prefix: str) -> str:
        record = self._failed
        assert record is not None  # noqa: S101 - only a failing record leads here
        self.writer.write(Shrunk(original=self._original, record=record))
        if self.kept is not None:
            self.kept.learn(record)
        lines = [prefix] if prefix else []
        for failure in record.failures:
            lines.append(f"{record.kernel}: {failure.title}")
            lines += [f"  {line}" for line in failure.message.splitlines()]
            if failure.diagnosis:
                lines.append(f"  likely: {failure.diagnosis}")
            if failure.location:
                lines.append(f"  {failure.location}: {failure.source.strip()}")
        lines += [f"smallest case: {record.case}", record.replay]
        return "\n".join(lines)
