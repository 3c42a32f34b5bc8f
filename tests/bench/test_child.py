"""Points are timed in a process of their own: a fault is told, and the rest goes on."""

from __future__ import annotations

import contextlib
import os
import time
import types
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch

from fa_verify.bench import beforehand, contestants, timing
from fa_verify.bench.child import Child, Lost, Order, serve
from fa_verify.bench.points import Point, Roof, Timed

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

NAMES = {"a": False, "b": False, "c": True}
ORDER = Order(
    targets=("kernels",), peers=("c",), dtypes=("float16",), directions=("forward",),
    rounds=1, milliseconds=1.0,
)  # fmt: skip


def point(seqlen: int) -> Point:
    return Point(
        direction="forward", dtype="float16", head_dim=64, causal=False, seqlen=seqlen, batch=2,
        heads=3,
    )  # fmt: skip


def serving(pipe: Connection, at_fault: set[str], *, speaks: bool) -> None:
    """Time in a millisecond whatever is not at fault; what is ends the process."""
    pipe.send(Roof(device=str(os.getpid()), torch="", triton="", tflops={}))
    while (asked := pipe.recv()) is not None:
        which, without = asked
        for name in NAMES:
            if name in without:
                continue
            pipe.send(name)
            if name in at_fault and which.seqlen == 2:
                if speaks:
                    pipe.send(Lost("illegal memory access"))
                    return
                os._exit(7)
        pipe.send(
            [
                Timed(point=which, name=name, peer=peer, milliseconds=1.0)
                for name, peer in NAMES.items()
                if name not in without
            ]
        )


def sound(pipe: Connection, _order: Order) -> None:
    serving(pipe, set(), speaks=False)


def dies(pipe: Connection, _order: Order) -> None:
    serving(pipe, {"b"}, speaks=False)


def tells(pipe: Connection, _order: Order) -> None:
    serving(pipe, {"a", "c"}, speaks=True)


def hopeless(pipe: Connection, _order: Order) -> None:
    serving(pipe, set(NAMES), speaks=False)


def stillborn(_pipe: Connection, _order: Order) -> None:
    os._exit(9)


def test_where_no_process_starts_every_contestant_is_told_so() -> None:
    child = Child(ORDER, NAMES, stillborn, "fork")
    row = child.row(point(1))
    child.close()
    assert [t.name for t in row] == list(NAMES)
    assert {t.error for t in row} == {"its process ended with exit code 9"}
    assert child.roof is None


def rows(target: object) -> tuple[list[list[tuple[str, float, str]]], set[str]]:
    """Rows of three points, the second with faults, and the process that measured the roof."""
    child = Child(ORDER, NAMES, target, "fork")
    found = []
    for seqlen in (1, 2, 3):
        found.append([(t.name, t.milliseconds, t.error) for t in child.row(point(seqlen))])
        assert child.roof is not None
    roofs = {child.roof.device}
    child.close()
    return found, roofs


GOOD = [("a", 1.0, ""), ("b", 1.0, ""), ("c", 1.0, "")]


def test_nothing_is_lost_where_nothing_fails() -> None:
    assert rows(sound)[0] == [GOOD, GOOD, GOOD]


def test_who_is_left_out_does_not_run_and_says_why() -> None:
    child = Child(ORDER, NAMES, dies, "fork")
    row = child.row(point(2), {"b": "not ready"})
    child.close()
    assert [(t.name, t.milliseconds, t.error) for t in row] == [
        GOOD[0], ("b", 0.0, "not ready"), GOOD[2],
    ]  # fmt: skip


def test_a_process_that_dies_takes_one_contestant_of_one_point_with_it() -> None:
    found, _ = rows(dies)
    lost = ("b", 0.0, "its process ended with exit code 7")
    assert found == [GOOD, [GOOD[0], lost, GOOD[2]], GOOD]


def test_last_words_are_told() -> None:
    found, _ = rows(tells)
    assert found[1] == [
        ("a", 0.0, "illegal memory access"), GOOD[1], ("c", 0.0, "illegal memory access"),
    ]  # fmt: skip
    assert found[2] == GOOD


def test_a_point_that_nobody_survives_ends() -> None:
    found, _ = rows(hopeless)
    assert [name for name, milliseconds, error in found[1] if error and not milliseconds] == [
        "a", "b", "c",
    ]  # fmt: skip
    assert found[2] == GOOD


def test_what_is_compiled_alike_is_one_job_of_one_sequence() -> None:
    jobs = list(beforehand.groups([point(1), point(2), point(1)]))
    assert [[p.seqlen for p in job] for job in jobs] == [[1, 2]]
    assert {p.batch for job in jobs for p in job} == {1}


def slow(one: Point) -> list[str]:
    """Stand in for a compilation: as many fifths of a second as the point has keys."""
    time.sleep(0.2 * one.seqlen)
    return [] if one.seqlen < 3 else ["flex: Error"]


@pytest.mark.parametrize(
    ("peers", "seconds", "failed", "unready"),
    [
        (["flex"], None, ["3 alike", "flex: Error"], set()),
        (["flex"], 0.4, ["3 alike"], {3}),  # the second runs then, and is waited for
        (["fa2"], None, ["3 alike"], set()),
    ],
)
def test_points_that_flex_is_not_compiled_for_in_time_are_named(
    peers: list[str],
    seconds: float | None,
    failed: list[str],
    unready: set[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def pool(workers: int, **_: object) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(workers)

    monkeypatch.setattr(beforehand, "ProcessPoolExecutor", pool)
    monkeypatch.setattr(beforehand, "run", lambda _, group: [f"{len(group)} alike"])
    monkeypatch.setattr(beforehand, "run_flex", slow)
    points = [point(1), point(2), point(3)]
    told, waiting = beforehand.compile_all([], peers, points, 1, seconds)
    assert sorted(told) == failed
    assert {one.seqlen for one in waiting} == unready


REFUSES = """
from fa_verify import Kernel

def forward(problem, q, k, v):
    if problem.seqlen_q > 1:
        raise ValueError("too long")

mine = Kernel(name="mine", forward=forward)
"""


def test_what_cannot_be_compiled_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REFUSES)
    cpu = contestants.inputs
    monkeypatch.setattr(contestants, "inputs", lambda p, _device, seed: cpu(p, "cpu", seed))
    failed = beforehand.run((str(tmp_path / "mine.py"),), (point(1), point(2)))
    # `o` of nothing is no attribute: the first point fails as well, in other words.
    assert failed == ["mine: AttributeError", "mine: ValueError"]


def test_what_a_child_says_of_the_device_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.__version__ is no plain str."""
    said: list[object] = []
    pipe = types.SimpleNamespace(send=said.append, recv=lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "card")
    monkeypatch.setattr(timing, "peak", lambda *_: 1.0)
    order = msgspec.structs.replace(ORDER, targets=(), peers=())
    serve(pipe, order)  # type: ignore[arg-type]
    (roof,) = said
    assert msgspec.json.decode(msgspec.json.encode(roof), type=Roof) == roof
