"""Leases of cards, and the daemon that lets processes share one: the logic, without a card."""

from __future__ import annotations

import collections
import itertools
import multiprocessing
import os
import stat
from concurrent.futures import Future

import pebble
import pytest

from fa_verify import campaign, loader, plugin, worker
from fa_verify.backends import sharing
from fa_verify.backends.base import FAULT, Setup
from fa_verify.backends.cards import Card, lease, room
from fa_verify.backends.sharing import Sharing
from fa_verify.campaign import running
from fa_verify.campaign.cases import SHARD
from fa_verify.case import Case
from fa_verify.pool import Pool
from fa_verify.record import CaseRecord

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


def test_sharing_starts_a_daemon_that_workers_join_until_it_ends(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    command, told = daemon(tmp_path, 0)
    shared = Sharing.start(command)
    folder = shared.folder
    sharing.join(folder)
    assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == str(folder)
    assert Sharing.start(command).folder is None  # one is in charge already
    shared.stop(command)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY")
    sharing.join(folder)
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert not folder.exists()
    # The daemon sees every card, whatever the worker may see.
    assert told.read_text().splitlines() == [f"-d|{folder}||", f"|{folder}||quit -t 1"]


@pytest.mark.parametrize("code", [1, None])
def test_without_a_daemon_processes_take_turns(tmp_path, monkeypatch, code):
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    command = "no-such-command" if code is None else daemon(tmp_path, code)[0]
    assert Sharing.start(command).folder is None


class _Scripted(Pool):
    """A pool whose runs end as told."""

    def __init__(self, folder, *ends):
        super().__init__(1, timeout=1, memory=1 << 30, cap=False)
        self._sharing = Sharing(folder)
        self._ends = list(ends)

    def submit(self, kernel, case, setup, **options):
        future, end = Future(), self._ends.pop(0)
        if isinstance(end, Exception):
            future.set_exception(end)
        else:
            future.set_result(end)
        if self._sharing.folder is not None:
            self._again[future] = lambda: self.submit(kernel, case, setup, **options)
        return future


def died():
    return pebble.ProcessExpired("died", FAULT)


def test_a_death_on_a_shared_card_is_tried_again_alone(tmp_path):
    """The neighbour of a fault passes, the one that faults fails; and nobody shares any more."""
    (kernel,) = loader.load("kernels/flash_attention.py:flash")
    case, setup = Case.parse("pass=fwd s=4x4 d=8 dtype=float32 seed=1"), Setup(backend="cuda")
    fine = CaseRecord(
        kernel="", target="", source_hash="", case=str(case), setup="", verdict="pass"
    )
    pool = _Scripted(tmp_path, died(), died(), fine, died(), died())
    neighbour, guilty = (pool.submit(kernel, case, setup) for _ in range(2))
    assert pool.result(neighbour, kernel, case, setup).verdict == "pass"
    assert pool._sharing.folder is None
    record = pool.result(guilty, kernel, case, setup)
    assert (record.verdict, record.failures[0].check) == ("fail", "crash")
    alone = pool.submit(kernel, case, setup)
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


def test_spare_processes_run_the_first_cases_from_the_end():
    (kernel,) = loader.load("kernels/flash_attention.py:flash")
    plan = campaign.Plan(backend="cpu", cases=2, spare=1)
    ahead = list(running._first((kernel,), plan))
    assert [case for _, case, _ in ahead] == [c for c, _ in campaign.drawn(kernel, plan)][::-1]
    pool = running._pool(plan)
    try:
        small = Case.parse("pass=fwd s=4x4 d=16 dtype=float16 seed=1")
        done = pool.compile_ahead([(kernel, small, Setup())])
        assert [future.result() for future in done] == [None]
    finally:
        pool.stop()
    pool = running._pool(campaign.Plan(backend="cpu"))
    assert pool.compile_ahead(ahead) == []
    pool.stop()


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
    plan = campaign.Plan(backend="cuda", cases=2 * 96)
    drawn = list(campaign.drawn(kernel, plan))
    forms = {}
    for case, setup in drawn:
        p = case.problem
        form = (p.head_dim, p.head_dim_v, p.dtype, p.dot_precision, p.softcap, p.mask.causal)
        forms.setdefault(form, set()).add(setup.config)
    assert 6 <= len(forms) <= 12
    assert sorted(config for configs in forms.values() for config in configs) == list(range(12))
    other = campaign.drawn(kernel, campaign.Plan(backend="cuda", cases=12, seed=1))
    assert {case.problem.head_dim for case, _ in other} != {c.problem.head_dim for c, _ in drawn}
