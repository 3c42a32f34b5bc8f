"""Leases of cards, and the daemon that lets processes share one: the logic, without a card."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pebble
import pytest

from fa_verify import campaign, loader, plugin, worker
from fa_verify.backends import cards, sharing
from fa_verify.backends.base import FAULT, Setup
from fa_verify.backends.cards import Card, lease, room
from fa_verify.backends.sharing import Sharing
from fa_verify.campaign import running
from fa_verify.campaign.cases import CUDA_FORMS, SHARD
from fa_verify.case import Case
from fa_verify.pool import Pool
from fa_verify.record import CaseRecord
from fa_verify.ttir.launch import once

LARGE = tuple(Card(index=i, name=f"GPU-{i}", memory=24 << 30) for i in range(2))
SMALL = (Card(index=0, name="GPU-small", memory=4 << 30),)


def test_slots_follow_from_memory():
    assert [card.slots for card in LARGE] == [3, 3]
    assert SMALL[0].slots == 1  # a small card serves one process, whatever it needs
    assert room((*LARGE, *SMALL)) == 7


def test_leases_go_round_the_cards_and_end(tmp_path):
    held = [lease(LARGE, tmp_path, seconds=0) for _ in range(7)]
    places = [(x.card.index, x.slot) for x in held[:6]]
    assert places == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert held[6] is None  # nobody gets more than there is
    held[2].give_back()
    again = lease(LARGE, tmp_path, seconds=0)
    assert (again.card.index, again.slot) == (0, 1)
    assert lease(LARGE, tmp_path / "another machine", seconds=0) is not None


def _hold(folder, ready, leave):
    held = lease(SMALL, folder)
    ready.set()
    leave.wait(30)
    os._exit(0 if held else 1)  # as a worker that is killed: nothing is given back


def test_a_process_that_dies_gives_its_slot_back(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready, leave = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(tmp_path, ready, leave))
    process.start()
    assert ready.wait(60)
    assert lease(SMALL, tmp_path, seconds=0) is None
    leave.set()
    process.join()
    assert lease(SMALL, tmp_path, seconds=5) is not None


def test_a_share_is_of_what_is_free(tmp_path):
    held = lease(LARGE, tmp_path, seconds=0)
    assert held.share(3, 24 << 30) == pytest.approx(0.3)
    assert held.share(1, 24 << 30) == pytest.approx(0.9)  # who works alone has all of it
    assert held.share(3, 2 << 30) == pytest.approx(0.075)  # another program has the rest


def test_each_of_xdists_workers_leases_a_card_once(monkeypatch, pytestconfig):
    taken = []
    monkeypatch.setattr("fa_verify.backends.cards.take", lambda workers: taken.append(workers) or 1)
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "16")
    run = plugin._Run(pytestconfig, {"workerid": "gw3", "fa_verify": {"seed": 1, "stamp": "x"}})
    run._take_card()
    run._take_card()
    assert taken == [16]


def daemon(folder, code):
    """A command that writes down how it was called, as the driver's daemon is."""
    path = folder / "mps"
    told = folder / "told"
    path.write_text(
        f'#!/bin/sh\necho "$1|$CUDA_MPS_PIPE_DIRECTORY|$CUDA_VISIBLE_DEVICES|$(cat)" >> {told}\n'
        f"exit {code}\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path), told


FINE, BROKEN, HANGS = "pass", "raise SystemExit(1)", "import time; time.sleep(60)"


def test_sharing_starts_a_daemon_that_workers_join_until_it_ends(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    command, told = daemon(tmp_path, 0)
    shared = Sharing.start(command, FINE)
    folder = shared.folder
    sharing.join(folder)
    assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == str(folder)
    assert Sharing.start(command, FINE).folder is None  # one is in charge already
    shared.stop(command)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY")
    sharing.join(folder)
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert not folder.exists()
    # The daemon sees every card, whatever the worker may see.
    assert told.read_text().splitlines() == [f"-d|{folder}||", f"|{folder}||quit -t 1"]


def test_a_daemon_ends_with_whoever_started_it(tmp_path):
    command, told = daemon(tmp_path, 0)
    code = (
        "import os, signal; from fa_verify.backends.sharing import Sharing;"
        f"print(Sharing.start({command!r}, {FINE!r}).folder, flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {name: x for name, x in os.environ.items() if name != "CUDA_MPS_PIPE_DIRECTORY"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=False
    )
    folder = Path(done.stdout.decode().strip())
    end = time.monotonic() + 30
    while folder.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not folder.exists()
    assert told.read_text().splitlines()[-1] == f"|{folder}||quit -t 1"


@pytest.mark.parametrize("code", [1, None])
def test_without_a_daemon_processes_take_turns(tmp_path, monkeypatch, code):
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    command = "no-such-command" if code is None else daemon(tmp_path, code)[0]
    assert Sharing.start(command, FINE).folder is None


@pytest.mark.parametrize("probe", [BROKEN, HANGS])
def test_a_daemon_that_does_not_serve_is_ended_and_another_one_tried(tmp_path, monkeypatch, probe):
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setattr(sharing, "_PATIENCE", 1.0)
    command, told = daemon(tmp_path, 0)
    once = tmp_path / "once"
    second = f"import pathlib; p = pathlib.Path({str(once)!r})\nif not p.exists():\n p.touch(); "
    shared = Sharing.start(command, second + probe)
    assert shared.folder is not None
    shared.stop(command)
    said = [line.split("|")[0] + line.split("|")[3] for line in told.read_text().splitlines()]
    assert said == ["-d", "quit -t 1", "-d", "quit -t 1"]
    assert Sharing.start(command, probe).folder is None


def test_the_end_of_a_daemon_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    command, _ = daemon(tmp_path, 0)
    shared = Sharing.start(command, FINE)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (shared.folder / "nvidia-cuda-mps-control.pid").write_text(f"{process.pid}\n")
    threading.Thread(target=process.wait, daemon=True).start()  # as init does: no zombie stays
    monkeypatch.setattr(sharing, "_PATIENCE", 0.5)
    shared.stop(command)  # it does not end by itself, and is ended
    assert process.wait(30) == -signal.SIGTERM
    assert sharing._process(tmp_path / "none") == 0
    sharing._wait_for(process.pid)  # nobody is there: no wait


class _Scripted(Pool):
    """A pool whose runs end as told."""

    def __init__(self, folder, *ends):
        super().__init__(1, timeout=1, memory=1 << 30, cap=False)
        self._sharing = Sharing(folder)
        self._ends = list(ends)

        self.started = []

    def _scheduled(self, *_):
        self.started.append(Future())
        return self.started[-1]

    def end(self, number):
        """Let a run end, as the next of the ends says."""
        future, end = self.started[number], self._ends.pop(0)
        if isinstance(end, Exception):
            future.set_exception(end)
        else:
            future.set_result(end)


def died():
    return pebble.ProcessExpired("died", FAULT)


def test_a_death_on_a_shared_card_is_tried_again_alone(tmp_path):
    """The neighbour of a fault passes, the one that faults fails; and nobody shares any more.

    Nobody waits for it meanwhile: what else is in work has its record as soon as it ends.
    """
    (kernel,) = loader.load("kernels/flash_attention.py:flash")
    case, setup = Case.parse("pass=fwd s=4x4 d=8 dtype=float32 seed=1"), Setup(backend="cuda")
    fine = CaseRecord(
        kernel="", target="", source_hash="", case=str(case), setup="", verdict="pass"
    )
    pool = _Scripted(tmp_path, died(), died(), fine, fine, died(), died())
    neighbour, guilty, other = (pool.submit(kernel, case, setup) for _ in range(3))
    pool.end(0)
    pool.end(1)
    assert pool._sharing.folder is None
    pool.end(2)
    assert [future.done() for future in (neighbour, guilty, other)] == [False, False, True]
    pool.end(3)
    assert pool.result(neighbour, kernel, case, setup).verdict == "pass"
    pool.end(4)
    record = pool.result(guilty, kernel, case, setup)
    assert (record.verdict, record.failures[0].check) == ("fail", "crash")
    alone = pool.submit(kernel, case, setup)
    pool.end(5)
    assert pool.result(alone, kernel, case, setup).failures[0].check == "crash"
    assert not pool._ends
    pool.stop()


def test_a_worker_leaves_when_its_card_is_dead(monkeypatch):
    """What another process did to a shared card is no verdict: the case is run again."""

    class LeftError(Exception):
        pass

    def leave(code):
        raise LeftError(code)

    def dead():
        raise RuntimeError

    monkeypatch.setattr(worker.os, "_exit", leave)
    monkeypatch.setattr(worker.torch.cuda, "synchronize", lambda: None)
    worker._leave_if_dead()
    monkeypatch.setattr(worker.torch.cuda, "synchronize", dead)
    with pytest.raises(LeftError, match=str(FAULT)):
        worker._leave_if_dead()


def test_of_cases_that_die_together_only_the_guilty_one_fails(tmp_path):
    (kernel,) = loader.load("kernels/flash_attention.py:flash")
    case, setup = Case.parse("pass=fwd s=4x4 d=8 dtype=float32 seed=1"), Setup(backend="cuda")
    fine = CaseRecord(
        kernel="", target="", source_hash="", case=str(case), setup="", verdict="pass"
    )
    pool = _Scripted(tmp_path, fine, died(), fine)
    together = Future()
    pool._pool.schedule = lambda *_, **__: together
    futures = pool.submit_together(kernel, [(case, setup)] * 3)
    assert not any(future.done() for future in futures)
    together.set_exception(died())
    assert pool._sharing.folder is None
    for number in range(3):
        pool.end(number)
    verdicts = [pool.result(future, kernel, case, setup).verdict for future in futures]
    assert verdicts == ["pass", "fail", "pass"]
    pool.stop()


def test_cases_together_are_those_of_one_kernel_and_give_what_each_gives_alone():
    worker.start(60.0, 8 << 30, cap=False)
    target, setup = "kernels/flash_attention.py:flash", str(Setup())
    cases = [
        f"pass=bwd s=7x{keys} d=16 dtype=float16 mask=causal seed={keys}" for keys in (5, 9, 33)
    ]
    together = worker.run_together(target, [(case, setup) for case in cases])
    alone = [worker.run(target, case, setup) for case in cases]
    assert [r.verdict for r in together] == ["pass"] * 3
    assert [r.tensors for r in together] == [r.tensors for r in alone]


def test_a_worker_is_two_processes_where_there_are_cores_for_them():
    assert cards.workers(8, 16, 21) == (8, 2)
    assert cards.workers(8, 15, 21) == cards.workers(8, 16, 15) == (8, 1)
    assert cards.workers(None, 16, 21) == (16, 1)
    assert cards.workers(40, 16, 21) == (21, 1)  # no more than the cards have room for
    assert cards.workers(1, 16, 21) == (1, 1)  # who asks for one wants one
    plan = campaign.Plan(backend="cuda", workers=8, lanes=2)
    assert plan.processes == 16


def test_what_a_run_needs_is_compiled_ahead_form_by_form():
    kernels = loader.load("kernels/flash_attention.py")
    plan = campaign.Plan(backend="cuda", workers=8)
    paged = dataclasses.replace(plan, fence="page")
    ahead = list(running._ahead(kernels, plan))
    assert [str(s) for *_, s in running._ahead(kernels, paged)] == [str(s) for *_, s in ahead]
    assert len(ahead) == 2 * SHARD
    for kernel in kernels:
        mine = [(case, setup) for whose, case, setup in ahead if whose is kernel]
        first = list(itertools.islice(campaign.drawn(kernel, plan), SHARD))
        assert {case for case, _ in mine} == {case for case, _ in first}
        assert {str(setup) for _, setup in mine} == {str(setup) for _, setup in first}
    of_form = [setup.config % CUDA_FORMS for _, _, setup in ahead]
    assert sorted(of_form[: 2 * CUDA_FORMS]) == sorted(2 * list(range(CUDA_FORMS)))
    assert all(case.backward for _, case, _ in ahead[: 2 * CUDA_FORMS])
    for alone in ({"backend": "cpu", "workers": 8}, {"backend": "cuda", "workers": 1}):
        assert not list(running._ahead(kernels, campaign.Plan(**alone)))
    assert not list(running._ahead(kernels, campaign.Plan(backend="cuda", workers=8, long=True)))


def test_a_kernel_that_kills_who_compiles_it_is_left_to_its_cases(tmp_path):
    kernels = loader.load("kernels/flash_attention.py")
    case, setup = Case.parse("pass=fwd s=4x4 d=8 dtype=float32 seed=1"), Setup(backend="cuda")
    pool = _Scripted(tmp_path)
    started = []
    pool._pool.schedule = lambda *_, **__: started.append(Future()) or started[-1]
    pool.compile_ahead((kernel, case, setup) for kernel in kernels for _ in range(3))
    assert len(started) == 6
    started[0].set_result(None)
    started[1].set_running_or_notify_cancel()
    started[1].set_exception(died())
    assert [future.cancelled() for future in started] == [False, False, True] + [False] * 3
    assert pool._sharing.folder is None
    pool.compile_ahead((kernel, case, setup) for kernel in kernels)
    assert len(started) == 7  # the other kernel's
    pool.stop()


def test_processes_compile_ahead():
    (kernel,) = loader.load("kernels/flash_attention.py:flash")
    small = Case.parse("pass=fwd s=4x4 d=16 dtype=float16 seed=1")
    pool = running._pool(campaign.Plan(backend="cpu"))
    try:
        pool.compile_ahead([(kernel, small, Setup())])
        (future,) = pool._ahead[kernel.target]
        assert future.result() is None
    finally:
        pool.stop()


def test_a_case_whose_kernel_is_being_compiled_is_left_alone(monkeypatch):
    left = []

    class Backend:
        device = "cpu"

        def run(self, *_, **__):
            assert not once._patient.get()
            raise once.Busy

    monkeypatch.setattr(worker, "_backend", lambda _: Backend())
    monkeypatch.setattr(worker, "_leave_if_dead", lambda: left.append(1))
    worker.compile_ahead(
        "kernels/flash_attention.py:flash", "pass=fwd s=4x4 d=16 dtype=float16 seed=1", str(Setup())
    )
    assert left == [1]
    assert once._patient.get()


def test_the_first_cases_of_a_set_of_forms_are_spread_over_workers():
    kernels = loader.load("kernels/flash_attention.py")
    none = collections.Counter()
    card, cpu = (campaign.Plan(backend=name) for name in ("cuda", "cpu"))
    work = itertools.islice(running._work(kernels, card, none), 3 * SHARD)
    more, portions = collections.deque(), []
    while portion := running._next(more, work, 4):
        portions.append(len(portion))
    assert portions == [1] * 2 * SHARD + [4] * (SHARD // 4)
    assert not next(running._work(kernels, cpu, none)).compiles


def test_a_worker_gets_several_cases_of_one_kernel_but_long_ones_alone():
    kernels = loader.load("kernels/flash_attention.py")
    case = Case.parse("pass=fwd s=4x4 d=8 dtype=float32 seed=1")

    def item(kernel, **facts):
        return running._Item(kernel=kernel, case=case, setup=Setup(**facts))

    first, other = (item(kernel) for kernel in kernels)
    long = item(kernels[0], stress=7)
    more = collections.deque()
    work = iter([first, first, first, long, first, other, other])
    sizes = []
    while items := running._next(more, work, 2):
        sizes.append([(one.kernel.name, one.setup.stress) for one in items])
    assert sizes == [
        [("flash", 0)] * 2,
        [("flash", 0)],
        [("flash", 7)],
        [("flash", 0)],
        [("flash_atomic", 0)] * 2,
    ]


def test_a_run_on_a_card_compiles_few_forms_each_in_one_configuration():
    (kernel,) = loader.load("kernels/flash_attention.py:flash")
    plan = campaign.Plan(backend="cuda", cases=2 * SHARD)
    drawn = list(campaign.drawn(kernel, plan))
    forms = {}
    for case, setup in drawn:
        p = case.problem
        form = (p.head_dim, p.head_dim_v, p.dtype, p.dot_precision, p.softcap, p.mask.causal)
        forms.setdefault(form, set()).add(setup.config)
    assert len(forms) <= 20
    assert sorted(config for configs in forms.values() for config in configs) == list(range(20))
    other = campaign.drawn(kernel, campaign.Plan(backend="cuda", cases=20, seed=1))
    assert {case.problem.head_dim for case, _ in other} != {c.problem.head_dim for c, _ in drawn}


def test_lengths_that_a_kernel_refuses_cost_no_form():
    """It is asked again with other lengths; each new form would be compiled."""
    (kernel,) = loader.load("kernels/cached_attention.py:decode_paged")
    drawn = [
        case.problem
        for case, _ in campaign.drawn(kernel, campaign.Plan(backend="cuda", cases=SHARD, seed=7))
    ]
    forms = {(p.head_dim, p.head_dim_v, p.dtype, p.dot_precision, p.softcap) for p in drawn}
    assert len(forms) <= 20  # with another form for each refusal there were 60
