"""Worker processes: what a limit of time means on a machine with more to do than it has cores."""

import os

import pytest

from fa_verify import loader, pool
from fa_verify.backends.base import Setup
from fa_verify.case import Case
from fa_verify.pool import Pool

CASE = Case.parse("pass=fwd s=4x4 d=8 dtype=float32 seed=1")


@pytest.mark.parametrize(("load", "verdict"), [(8.0, "pass"), (0.5, "fail")])
def test_a_case_that_others_keep_waiting_gets_their_time_once_more(load, verdict, monkeypatch):
    """The kernel is late by 4 s; the limit is 2 s, eight times that where eight want one core."""
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(pool, "_GRACE", 0.5)
    (kernel,) = loader.load("tests/targets/wrong.py:late")
    workers, setup = Pool(1, timeout=2, memory=1 << 30, cap=False), Setup(backend="cpu")
    try:
        record = workers.result(workers.submit(kernel, CASE, setup), kernel, CASE, setup)
    finally:
        workers.stop()
    assert record.verdict == verdict, record
    assert [x.title for x in record.failures] == ["the kernel hangs"] * (verdict == "fail")
