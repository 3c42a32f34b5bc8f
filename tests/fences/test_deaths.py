"""Faults kill worker processes, not the run: nothing is lost, and the record says what ran."""

import msgspec

from fa_verify import campaign, loader
from fa_verify.backends.base import FAULT
from fa_verify.pool import Pool, _death
from fa_verify.record import End, Writer, read
from fa_verify.report.summary import summarise
from fa_verify.spool import Argument, Launch, Running

DIES = """
import os
from tests.targets.plain import right
from fa_verify import Capabilities, Kernel

def forward(problem, q, k, v):
    if problem.seqlen_k % 2:
        os._exit({code})
    return right.forward(problem, q, k, v)

dies = Kernel(
    name="dies", forward=forward,
    capabilities=Capabilities(dtypes=("float32",), head_dims=(16,), backward=False),
)
"""


class Recorder:
    """Writes every record to a file at once, as the command line does."""

    def __init__(self, path):
        self.writer = Writer(path)
        self.record = self.shrunk = self.writer.write

    def shrinking(self, record):
        pass


def target(tmp_path, code=FAULT):
    (tmp_path / "dies.py").write_text(DIES.format(code=code))
    (kernel,) = loader.load(f"{tmp_path / 'dies.py'}:dies")
    return kernel


def test_twenty_faults_kill_twenty_workers_and_no_case_is_lost(tmp_path):
    kernel = target(tmp_path)
    plan = campaign.Plan(
        cases=48, workers=2, max_failures=100, shrinks=0, spool=tmp_path / "running"
    )
    recorder = Recorder(tmp_path / "run.jsonl")
    campaign.run((kernel,), plan, recorder)
    recorder.writer.close()
    records = list(read(tmp_path / "run.jsonl"))
    due = [str(case) for case, _ in campaign.drawn(kernel, plan)]
    assert sorted(record.case for record in records) == sorted(due)
    died = [r for r in records if r.failures]
    assert len(died) >= 20
    assert {f.check for r in died for f in r.failures} == {"crash"}
    assert {r.verdict for r in records} == {"pass", "fail"}, [r.reason for r in records if r.reason]
    assert not (tmp_path / "running").exists()
    summary = summarise([*records, End(seconds=1.0, cases=len(records), exit_code=1)])
    assert summary.cases == 48


def test_a_death_leaves_on_disk_what_the_process_was_at(tmp_path, monkeypatch):
    kernel = target(tmp_path)
    plan = campaign.Plan(spool=tmp_path / "running")
    pool = Pool(1, timeout=9, memory=8 << 30, cap=True, spool=plan.spool)
    try:
        case, setup = next(x for x in campaign.drawn(kernel, plan) if x[0].problem.seqlen_k % 2)
        record = pool.result(pool.submit(kernel, case, setup), kernel, case, setup)
        assert record.failures[0].title == "the card faulted"
        (left,) = (tmp_path / "running").iterdir()
        assert str(case) in left.read_text()
    finally:
        pool.stop()


def test_a_death_is_told_by_the_launch_that_was_begun():
    x = Argument(name="k_ptr", label="k", shape=(2, 3), strides=(3, 1), offset=0, itemsize=2)
    launch = Launch(kernel="forward", file="f.py", line=3, arguments=(x,))
    last = Running(
        launch=launch, alone=True, fence="page.start", error="CUDA error: an illegal access"
    )
    failure = _death(FAULT, last)
    assert failure.title == "an illegal access in forward"
    assert failure.location == "f.py:3"
    assert "its last launch was forward(k_ptr), fence=page.start" in failure.message
    failure = _death(FAULT, msgspec.structs.replace(last, alone=False))  # it may be an earlier one
    assert (failure.title, failure.location) == ("an illegal access", "")
    assert _death(-11, Running()).title == "the worker died"


def test_a_fault_without_a_launch_is_of_an_operation_of_torch():
    last = Running(case="s=4x8 d=16", error="CUDA error: misaligned address")
    failure = _death(FAULT, last, watched=True)
    assert failure.title == "misaligned address"
    assert "no Triton function: an operation of torch's faulted" in failure.message
    assert "torch" not in _death(FAULT, last).message  # without a fence nobody watched
