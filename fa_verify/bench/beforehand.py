"""What a bench compiles, compiled beforehand in many processes: kernels, and flex_attention.

Triton's cache and Inductor's then hold it. flex_attention is compiled anew for each point: what was
not ready in time is left out, and says so.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    from fa_verify.bench.points import Point

__all__ = ["FLEX", "compile_all", "groups", "run", "run_flex"]

FLEX = "flex"


def compile_all(
    targets: Sequence[str],
    peers: Sequence[str],
    points: Sequence[Point],
    workers: int,
    seconds: float | None,
) -> tuple[list[str], frozenset[Point]]:
    """Run each kernel once on one sequence of each point, and flex_attention on each point.

    A process that a fault ends takes the rest of this with it, and nothing else: what is not
    compiled here is compiled later.

    Args:
        targets: Kernels, as `loader.load` reads them.
        peers: Which of `points.PEERS`.
        points: What will be timed.
        workers: Processes.
        seconds: After which nothing further is begun; None: no limit.

    Returns:
        What went wrong, and the points for which flex_attention, if it is a peer, is not ready.
    """
    begin = time.monotonic()
    context = multiprocessing.get_context("spawn")  # a fork would inherit a context
    failed: list[str] = []
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        jobs: dict[Future[list[str]], Point | None] = {
            pool.submit(run, tuple(targets), group): None for group in groups(points)
        }
        if FLEX in peers:
            jobs |= {pool.submit(run_flex, p): p for p in points if p.direction != "decode"}
        waiting = frozenset(point for point in jobs.values() if point)
        try:
            left = None if seconds is None else seconds - (time.monotonic() - begin)
            for job in as_completed(jobs, left):
                failed += job.result()
                waiting -= {jobs[job]}
        except TimeoutError:
            pool.shutdown(cancel_futures=True)
            waiting -= {jobs[job] for job in jobs if job.done() and not job.cancelled()}
        except BrokenProcessPool as error:
            failed.append(str(error))
    return failed, waiting


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


def run_flex(point: Point) -> list[str]:
    """Run in a process of the pool: Inductor's cache then holds what the point needs."""
    from fa_verify.bench import contestants  # noqa: PLC0415

    try:
        contestants.peer(FLEX).prepare(point, contestants.inputs(point, "cuda", 0))()
    except Exception as error:  # noqa: BLE001 - told again where the point is timed
        return [f"{FLEX}: {type(error).__name__}"]
    return []
