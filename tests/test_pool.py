"""Worker processes: what a limit of time means where others, or a compiler, are at work."""

import os

import msgspec
import pytest

from fa_verify import loader, pool
from fa_verify.backends.base import Setup
from fa_verify.case import Case
from fa_verify.pool import Pool
from fa_verify.spool import Launch, Running, launched

CASE = Case.parse("pass=fwd s=4x4 d=8 dtype=float32 seed=1")


def judged(*, card=False):
    """The verdict on a kernel that is late by 4 s, with a limit of 2 s, as if on a card or not."""
    (kernel,) = loader.load("tests/targets/wrong.py:late")
    workers, setup = Pool(1, timeout=2, memory=1 << 30, cap=False), Setup(backend="cpu")
    workers._card = card
    try:
        record = workers.result(workers.submit(kernel, CASE, setup), kernel, CASE, setup)
    finally:
        workers.stop()
    assert [x.title for x in record.failures] == ["the kernel hangs"] * (record.verdict == "fail")
    return record.verdict


@pytest.mark.parametrize(("load", "verdict"), [(8.0, "pass"), (0.5, "fail")])
def test_a_case_that_others_keep_waiting_gets_their_time_once_more(load, verdict, monkeypatch):
    """The kernel is late by 4 s; the limit is 2 s, eight times that where eight want one core."""
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(pool, "_GRACE", 0.5)
    assert judged() == verdict


@pytest.mark.parametrize(("began", "verdict"), [(False, "pass"), (True, "fail")])
def test_before_its_first_launch_on_a_card_a_case_has_more_time(began, verdict, monkeypatch):
    """The kernel is late by 4 s; the limit is 2 s, and 8 s where it may have been compiled."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(pool, "_GRACE", 0.5)
    monkeypatch.setattr(pool, "launched", lambda *_: began)
    assert judged(card=True) == verdict


def test_what_was_launched_is_read_from_what_processes_were_at(tmp_path):
    """Of the case asked for alone."""
    at, other = ("t", "c", "s"), ("t", "d", "s")
    launch = Launch(kernel="k", file="f.py", line=1, arguments=())
    (tmp_path / "1.json").write_bytes(msgspec.json.encode(Running(target="t", case="c", setup="s")))
    assert not launched(tmp_path, at)
    running = Running(target="t", case="d", setup="s", launch=launch)
    (tmp_path / "2.json").write_bytes(msgspec.json.encode(running))
    assert launched(tmp_path, other)
    assert not launched(tmp_path, at)
