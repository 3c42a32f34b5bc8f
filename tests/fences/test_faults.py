"""Where a fault lies, found by runs in a pool that knows where it lies."""

import re
from concurrent.futures import Future

import msgspec
import pytest

from fa_verify import faults, loader
from fa_verify.backends.base import Setup
from fa_verify.backends.fences.fence import Fence
from fa_verify.case import Case
from fa_verify.pool import _record
from fa_verify.record import FailureRecord
from fa_verify.spool import Argument, Launch, Running
from fa_verify.verdict import Verdict

CASE = Case.parse("pass=fwd s=3x5 d=8 dtype=float16 seed=1")


def argument(name, label):
    return Argument(
        name=name, label=label, shape=(2, 2, 5, 8), strides=(80, 40, 8, 1), offset=0, itemsize=2
    )


LAUNCH = Launch(
    kernel="forward",
    file="f.py",
    line=3,
    arguments=(argument("q_ptr", "q"), argument("k_ptr", "k"), argument("o_ptr", "1")),
)


class Faulty:
    """Dies wherever an access `reach` bytes past a tensor meets a page."""

    def __init__(self, label, reach, *, start=False, write=False, on_cpu=True):
        self.label, self.reach, self.start = label, reach, start
        self.write, self.on_cpu, self.deaths = write, on_cpu, {}

    def submit(self, kernel, case, setup, **_):
        done = Future()
        done.set_result(None)
        return done

    def result(self, future, kernel, case, setup):
        fence, failures = setup.fence, ()
        if setup.backend == "cpu" and self.on_cpu:
            failures = (
                FailureRecord(
                    check="memory", title="out-of-bounds-read through k_ptr",
                    message="(2, 0, 0, 0)",
                    tensor="k_ptr", location="f.py:9", source="tl.load(k)", diagnosis="no mask",
                ),
            )  # fmt: skip
        elif setup.backend == "cuda" and fence.mode == "poison" and self.write:
            failures = (
                FailureRecord(
                    check="memory", title="out-of-bounds-write through o_ptr",
                    message="elements 320 to 323", tensor="o_ptr",
                ),
            )  # fmt: skip
        met = fence.only in ("", self.label) and fence.start == self.start
        if setup.backend == "cuda" and fence.mode == "page" and met and self.reach > fence.gap:
            failures = (FailureRecord(check="crash", title="a fault", message="exit code 71"),)
            self.deaths[str(setup)] = Running(launch=LAUNCH, alone=True, fence=str(fence))
        verdict = Verdict.FAIL if failures else Verdict.PASS
        return _record(kernel, case, setup, verdict, failures=failures)

    def last(self, record):
        return self.deaths.get(record.setup, Running())

    def stop(self):
        pass


def located(pool, fence, monkeypatch):
    monkeypatch.setattr(faults, "Pool", lambda *_, **__: pool)
    (kernel,) = loader.load("tests/targets/plain.py:right")
    setup = Setup(backend="cuda", fence=Fence.parse(fence))
    record = pool.result(None, kernel, CASE, setup)
    if not record.failures:  # a fault all the same, of a card without fences
        crash = FailureRecord(check="crash", title="a fault", message="exit code 71")
        record = msgspec.structs.replace(record, verdict="fail", failures=(crash,))
    found = faults.located(pool, kernel, record, seconds=60.0)
    (failure,) = found.failures
    assert (failure.check, failure.title) == ("crash", "a fault")  # the same fault, told better
    return failure


@pytest.mark.parametrize("reach", [1, 2, 16, 17, 100, 4000, 1 << 20])
@pytest.mark.parametrize("start", [False, True])
def test_the_argument_is_named_and_the_access_measured(reach, start, monkeypatch):
    fence = "page.start" if start else "page"
    failure = located(Faulty("k", reach, start=start), fence, monkeypatch)
    assert failure.tensor == "k_ptr"
    side = "before the first" if start else "behind the last"
    assert f"an unmapped page {side} element of k_ptr" in failure.message
    least, most = map(int, re.search(r"goes (\d+) to (\d+) elements", failure.message).groups())
    assert least <= -(-reach // 2) <= most <= least + 8
    assert "nothing is written there: it reads" in failure.message


def test_the_executor_has_the_line(monkeypatch):
    failure = located(Faulty("k", 40), "page", monkeypatch)
    assert (failure.location, failure.source) == ("f.py:9", "tl.load(k)")
    assert failure.diagnosis == "no mask"
    assert "on the CPU, out-of-bounds-read through k_ptr: (2, 0, 0, 0)" in failure.message


def test_a_write_is_told_by_its_canaries(monkeypatch):
    failure = located(Faulty("1", 8, write=True, on_cpu=False), "page", monkeypatch)
    assert failure.tensor == "o_ptr"
    assert "out-of-bounds-write through o_ptr: elements 320 to 323" in failure.message
    assert "at most to element (2, 0, 0, 7)" in failure.message


def test_a_fault_without_fences_is_looked_for_with_pages(monkeypatch):
    failure = located(Faulty("q", 8, start=True), "poison", monkeypatch)
    assert failure.tensor == "q_ptr"


def test_a_wild_access_stays_what_it_was(monkeypatch):
    failure = located(Faulty("elsewhere", 8, on_cpu=False), "page", monkeypatch)
    assert (failure.tensor, failure.message) == ("", "exit code 71")


def test_other_records_come_back_as_they_are():
    (kernel,) = loader.load("tests/targets/plain.py:right")
    crash = FailureRecord(check="crash", title="the worker died", message="exit code -9")
    for record in (
        _record(kernel, CASE, Setup(backend="cuda"), Verdict.PASS),
        _record(kernel, CASE, Setup(), Verdict.FAIL, failures=(crash,)),
    ):
        assert faults.located(Faulty("k", 1), kernel, record, seconds=1.0) is record
    fault = _record(kernel, CASE, Setup(backend="cuda"), Verdict.FAIL, failures=(crash,))
    assert faults.located(None, kernel, fault, seconds=0.0) is fault  # a budget is over
