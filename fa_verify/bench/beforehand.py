"""Kernels compiled beforehand, in many processes: a bench of a hundred points compiles as many."""

from __future__ import annotations

import itertools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fa_verify.bench.points import Point

__all__ = ["compile_all", "groups", "run"]


def compile_all(targets: Sequence[str], points: Sequence[Point], workers: int) -> list[str]:
    """Run each kernel once on one sequence of each point; return what went wrong.

    Triton's cache then holds what the points need. A process that a fault ends takes the rest of
    this with it, and nothing else: what is not compiled here is compiled later.
    """
    context = multiprocessing.get_context("spawn")  # a fork would inherit a context
    failed = []
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        jobs = [pool.submit(run, tuple(targets), group) for group in groups(points)]
        for job in as_completed(jobs):
            try:
                failed += job.result()
            except BrokenProcessPool as error:
                return [*failed, str(error)]
    return failed


def groups(points: Sequence[Point]) -> Iterator[tuple[Point, ...]]:
    """Points that are mostly compiled alike, one sequence each: a job each."""

    def alike(point: Point) -> tuple[object, ...]:
        return point.direction, point.dtype, point.head_dim, point.causal

    small = [msgspec.structs.replace(point, batch=1) for point in points]
    for _, group in itertools.groupby(sorted(small, key=alike), alike):
        yield tuple(dict.fromkeys(group))


def run(targets: tuple[str, ...], points: tuple[Point, ...]) -> list[str]:
    """Run in a process of the pool."""
    from fa_verify import loader  # noqa: PLC0415 - the parent needs no torch
    from fa_verify.bench import contestants  # noqa: PLC0415

    failed = []
    kernels = {k.target: k for target in targets for k in loader.load(target)}
    for point, tested in itertools.product(points, kernels.values()):
        try:
            given = contestants.inputs(point, "cuda", 0)
            contestants.kernel(tested).prepare(point, given)()
        except Exception as error:  # noqa: BLE001 - told again where the point is timed
            failed.append(f"{tested.name}: {type(error).__name__}")
    return failed
