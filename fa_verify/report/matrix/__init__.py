"""The precision matrix: each kernel and variant by precision, each tensor's errors in a cell.

Its numbers come from records alone. A matrix is small and can be added to another, so that runs on
several devices, or at several times, are read as one.
"""

from fa_verify.report.matrix.cells import Cell, Errors
from fa_verify.report.matrix.places import Matrix, Place, matrix

__all__ = ["Cell", "Errors", "Matrix", "Place", "matrix"]
