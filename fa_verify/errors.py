"""Errors that mean the harness was misused. A wrong kernel is data, never an exception."""

from __future__ import annotations

__all__ = [
    "InvalidInputError",
    "KernelLoadError",
    "ResultError",
    "UnsupportedProblemError",
    "UnwritableError",
]


class InvalidInputError(ValueError):
    """A value breaks a rule. The message gives name=value, the rule, and what to do."""


class UnwritableError(InvalidInputError):
    """A file of results cannot be written, or not any more."""


class KernelLoadError(Exception):
    """A kernel target could not be found or imported."""


class UnsupportedProblemError(Exception):
    """Raised by a kernel's launcher for a problem it does not take; the verdict: `unsupported`."""


class ResultError(TypeError):
    """A launcher returned what is no result, which does not say that it takes no such problem."""
