"""`Shard`: the cases of one test, drawn, verified and shrunk by Hypothesis."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING, Any

import hypothesis
from hypothesis.errors import Flaky

from fa_verify.backends.base import Setup
from fa_verify.capabilities import Capabilities
from fa_verify.record import CaseRecord, Shrunk
from fa_verify.strategies import cases
from fa_verify.verdict import Verdict
from fa_verify.verify import verify

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fa_verify.backends.base import Backend
    from fa_verify.case import Case
    from fa_verify.kernel import Kernel
    from fa_verify.record import Writer

__all__ = ["Shard", "parameters"]

_SHARDS = 2  # of each kernel, dtype and pass: one kernel with gradients fills twelve workers


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
    verified: int = 0
    reason: str = "no case ran"
    _drawn: int = 0
    _failed: CaseRecord | None = None
    _original: str = ""

    def run(self) -> str | None:
        """Verify the shard's cases; what is wrong, ending in the replay line, or None."""

        @hypothesis.seed(self._seed())
        @hypothesis.settings(
            max_examples=self.examples,
            database=None,
            deadline=None,
            phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
            suppress_health_check=list(hypothesis.HealthCheck),
            print_blob=False,
            report_multiple_bugs=False,
        )
        @hypothesis.given(cases(self.kernel.takes, dtype=self.dtype, backward=self.backward))
        def probe(case: Case) -> None:
            self._verify(case)

        try:
            probe()
        except _KernelFailedError:
            return self._finding("")
        except Flaky:
            return self._finding(
                "not reproduced on the same case: the kernel is not deterministic\n"
            )
        return None

    def _seed(self) -> int:
        text = f"{self.seed}/{self.kernel.name}/{self.dtype}/{self.backward}/{self.index}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])

    def _verify(self, case: Case) -> None:
        failed = self._failed
        searching = failed is not None
        model = "hopper" if self.backend_name == "cpu" else "hardware"
        config = self._drawn + self.index if failed is None else Setup.parse(failed.setup).config
        setup = Setup(backend=self.backend_name, config=config, float_model=model)
        record = verify(
            case, self.kernel, setup, self.backend, independent=not searching, explain=searching
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

    def _finding(self, prefix: str) -> str:
        record = self._failed
        assert record is not None  # noqa: S101 - only a failing record leads here
        self.writer.write(Shrunk(original=self._original, record=record))
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
