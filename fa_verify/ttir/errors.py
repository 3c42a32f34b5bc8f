"""What stops an execution: an operation that cannot be run, or the end of the time allowed."""

from __future__ import annotations


class Unsupported(Exception):  # noqa: N818 - a verdict, not a fault of the caller
    """A kernel uses something this executor cannot run; it never yields a wrong number instead.

    Attributes:
        what: What cannot be run.
        op: The operation's name, "" if not one operation's fault.
        file: Source file of the operation, "" if unknown.
        line: Line in `file`, 0 if unknown.
    """

    def __init__(self, what: str, *, op: str = "", file: str = "", line: int = 0) -> None:
        """State `what` cannot be run and where it was written."""
        where = f" at {file}:{line}" if file else ""
        named = f" ({op})" if op and op not in what else ""
        super().__init__(f"cannot run {what}{named}{where}")
        self.what, self.op, self.file, self.line = what, op, file, line


class TimeLimit(Exception):  # noqa: N818
    """The deadline in `Options` passed while a kernel was running."""
