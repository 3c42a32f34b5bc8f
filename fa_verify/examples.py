"""`Examples`: failing cases kept between runs, so that the next run begins with them.

They lie in a `hypothesis.database.DirectoryBasedExampleDatabase`, a file each, under the kernel's
target. A case that passes again is forgotten. No torch, no Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis.database import DirectoryBasedExampleDatabase

from fa_verify.backends.base import Setup
from fa_verify.case import Case
from fa_verify.errors import InvalidInputError
from fa_verify.verdict import Verdict

if TYPE_CHECKING:
    from pathlib import Path

    from fa_verify.kernel import Kernel
    from fa_verify.record import CaseRecord

__all__ = ["Examples"]

_MOST = 8  # of a kernel that are run again, the smallest


class Examples:
    """The failing cases of any number of kernels, in a folder."""

    def __init__(self, folder: Path) -> None:
        """Use the folder; it is made when there is something to keep."""
        self._database = DirectoryBasedExampleDatabase(folder)

    def of(self, kernel: Kernel, *, backend: str) -> list[tuple[Case, Setup]]:
        """What the kernel failed on with this backend and still takes, smallest cases first."""
        found = []
        for value in self._database.fetch(kernel.target.encode()):
            try:
                setup_text, _, case_text = value.decode().partition("\n")
                case, setup = Case.parse(case_text), Setup.parse(setup_text)
            except (InvalidInputError, UnicodeDecodeError):
                self._database.delete(kernel.target.encode(), value)  # of another version
                continue
            taken = kernel.takes is None or kernel.takes.reason_against(case.problem) is None
            if setup.backend == backend and taken:
                found.append((case, setup))
        return sorted(found, key=lambda item: (_size(item[0]), str(item)))[:_MOST]

    def learn(self, record: CaseRecord) -> None:
        """Keep a case that failed; forget one that passes."""
        value = f"{record.setup}\n{record.case}".encode()
        if record.verdict == Verdict.FAIL:
            self._database.save(record.target.encode(), value)
        elif record.verdict == Verdict.PASS:
            self._database.delete(record.target.encode(), value)


def _size(case: Case) -> int:
    p = case.problem
    return p.batch * p.heads_q * (p.seqlen_q + 1) * (p.seqlen_k + 1) * p.head_dim
