"""`fa-verify mutate`: what it kills, proves, shows, writes and returns."""

import collections
import dataclasses
import json
import os
import subprocess
import sys
import time
import types
from concurrent.futures import Future

import pebble
import pytest

from fa_verify import loader
from fa_verify.backends.base import Setup
from fa_verify.case import Case
from fa_verify.mutation import _sampled
from fa_verify.mutation.choice import Choice, _Greedy, _is_plain, traits
from fa_verify.mutation.hunt import _CHUNK, _FURTHER, _KEPT, _LEAST, _ROUNDS, _TRIES, _WHOLES, Hunt
from fa_verify.mutation.outcome import Outcome, score
from fa_verify.mutation.proving import prove
from fa_verify.mutation.pursuit import pursuing
from fa_verify.mutation.quarry import Prey, Quarry
from fa_verify.mutation.subject import Fate, Subject
from fa_verify.mutation.table import render
from fa_verify.ttir.mutation.mutants import Mutant
from fa_verify.ttir.mutation.recorder import Found

TARGET = "fa_verify/zoo/kernels/launch.py:flash"


def mutate(folder, *options, target=TARGET):
    command = [sys.executable, "-c", "from fa_verify.cli import main; main()", "mutate", target]
    done = subprocess.run(
        [*command, "--report", str(folder), "-n", "1", *options],
        capture_output=True, text=True, timeout=400, check=False,
        env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    found = folder / "mutation.json"
    outcomes = [Outcome(**o) for o in json.loads(found.read_text())] if found.exists() else []
    return done.returncode, done.stdout + done.stderr, outcomes


def test_mutants_are_killed_and_proven_and_survive(tmp_path):
    code, said, outcomes = mutate(
        tmp_path, "--cases", "2", "--operators", "drop-mask", "--operators", "drop-other",
        "--operators", "grid", "--operators", "wrong-scale", "--min-score", "100",
    )  # fmt: skip
    fates = {o.fate for o in outcomes}
    assert {"killed", "equivalent", "survived"} <= fates, said
    assert code == 1, said  # a softcap of no case: its scale makes no difference
    survivors = [o for o in outcomes if o.fate == "survived"]
    assert any("softcap is times 2" in o.sentence for o in survivors)
    assert all(f"--only {o.id}" in said for o in survivors)
    masks = [o for o in outcomes if o.operator == "drop-mask" and o.fate == "killed"]
    assert masks
    assert all(o.file.endswith(".py") and o.source and o.case for o in masks)
    text = (tmp_path / "mutation.md").read_text()
    assert "| drop-mask |" in text
    assert "#### Survivors" in text


def test_one_mutant_alone_says_what_became_of_it(tmp_path):
    code, said, outcomes = mutate(tmp_path, "--cases", "1", "--only", "grid")
    assert code == 0, said
    (first, *_) = [o for o in outcomes if o.fate == "killed"]
    code, said, outcomes = mutate(tmp_path / "again", "--cases", "1", "--only", first.id)
    assert code == 0, said
    assert [o.id for o in outcomes] == [first.id]
    assert f"killed by {first.check}" in said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--only", "nothing"], "only='nothing': begins no mutant's id"),
        (["--operators", "nothing"], "operators='nothing': no mutant of this kind"),
        (["--functions", "nothing"], "functions='nothing': no mutant of this function"),
        (["--budget", "0.01s"], "budget=0.01 s: over before the kernel itself had run"),
    ],
)
def test_a_name_of_nothing_is_misuse(tmp_path, options, says):
    code, said, _ = mutate(tmp_path, "--cases", "1", *options)
    assert code == 2
    assert says in said


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("tests/targets/wrong.py:wrong", "passes none of 1 cases; mend it first: "),
        ("tests/targets/plain.py:right", "launches no Triton kernel"),
    ],
)
def test_what_cannot_be_mutated_says_why(tmp_path, target, says):
    code, said, _ = mutate(tmp_path, "--cases", "1", target=target)
    assert code == 2
    assert says in said


def outcome(**fields):
    return Outcome(
        **{"id": "grid-1", "kernel": "k", "operator": "grid", "says": "a grid", "fate": "killed"}
        | fields
    )


def test_score_counts_neither_equivalent_nor_invalid_mutants():
    outcomes = [
        outcome(), outcome(), outcome(fate="survived"), outcome(fate="equivalent"),
        outcome(fate="invalid"),
    ]  # fmt: skip
    found = score(outcomes)
    assert (found.killed, found.survived, found.equivalent, found.invalid) == (2, 1, 1, 1)
    assert found.share == pytest.approx(2 / 3)
    assert score([]).share == 1


def test_a_sentence_says_what_the_cases_made_of_it():
    survived = {"fate": "survived", "cases": 8, "file": "k.py", "line": 3}
    assert outcome(**survived).sentence == "a grid at k.py:3: never made a difference in 8 cases"
    reached = outcome(**survived, reached=3)
    assert "made a difference in 3 of 8 cases, and to no output" in reached.sentence
    changed = outcome(**survived, reached=3, changed=2)
    assert "other bits in 2 of 8 cases, which no" in changed.sentence
    text = render([outcome(**survived, source="x = 1 | 2")], "none", ["a case"])
    assert "| all | 1 | 0 | 1 | 0 | 0 | 0.0% |" in text
    assert "* `grid-1` (k) a grid at k.py:3" in text


class Workers:
    """Processes that give each mutant the fate that a table says, and keep account of who ran."""

    def __init__(self, fates):
        self.fates, self.ran = fates, []

    def schedule(self, function, args, timeout):
        del function, timeout
        _, case, _, tasks = args
        future, seed = Future(), int(case.rpartition("seed=")[2])
        self.ran.append((seed, [mutant for mutant, _ in tasks]))
        kinds = [self.fates.get((mutant, seed), "same") for mutant, _ in tasks]
        if "dies" in kinds:
            future.set_exception(pebble.ProcessExpired("died"))
        elif "hangs" not in kinds:
            future.set_result([(Fate(kind=kind, check="numerics"), 0.0) for kind in kinds])
        return future


class Letter(str):
    """A mutant that is nothing but its name."""

    __slots__ = ()
    id = property(str)


def hunted(fates, end=None, cases=3, cheapest=1):
    hunt = object.__new__(Hunt)
    hunt.workers, hunt._end, hunt._pool, hunt._choices = 2, end, Workers(fates), {}
    hunt._pace = 0.0
    hunt.cases = [
        Prey(
            n,
            "k.py:k",
            Case.parse(f"pass=fwd s=1x1 d=1 dtype=float16 seed={n}"),
            "",
            (False, cheapest * n),
        )
        for n in range(cases)
    ]
    quarries = [Quarry(Letter(name), Found(says="wrong")) for name in "abcdef"]
    for quarry in quarries:
        for n in range(cases):
            quarry.meets(n, 0, differs=True)
    told = []
    hunt.run(quarries, lambda name, left: told.append((name, left)))
    return {str(q.mutant): q for q in quarries}, hunt._pool.ran, told


def test_a_killed_mutant_meets_no_more_cases_and_the_others_meet_all():
    found, ran, told = hunted({("b", 1): "killed", ("c", 2): "within"})
    assert found["b"].fate.kind == "killed"
    assert found["b"].killer == 1
    assert found["b"].tried == {0, 1}
    assert all(found[name].fate is None for name in "acdef")
    assert all(found[name].tried == {0, 1, 2} for name in "acdef")
    assert found["c"].changed == {2}
    assert sum("b" in mutants for _, mutants in ran) == 2
    assert told[-1] == ("whole", 5)


def test_a_process_is_given_less_where_mutants_take_long():
    hunt = object.__new__(Hunt)
    hunt.workers = 1
    for pace, size in ((0.0, _CHUNK), (0.1, _CHUNK), (2.0, 10), (60.0, _LEAST)):
        hunt._pace = pace
        trails = [types.SimpleNamespace(alone=False) for _ in range(99)]
        assert len(hunt._chunk({0: trails})) == size
        assert len(trails) == 99 - size


def test_a_mutant_meets_the_first_cases_that_were_chosen_the_cheapest_first():
    found, ran, _ = hunted({}, cases=_TRIES + 9, cheapest=-1)
    assert all(q.due == q.tried == set(range(_TRIES)) for q in found.values())
    seeds = [seed for seed, mutants in ran if "a" in mutants]
    assert seeds[:_TRIES] == sorted(range(_TRIES), reverse=True)  # later numbers are cheaper here
    assert set(seeds[_TRIES:]) == set(range(_WHOLES))


def test_a_sample_has_the_same_share_of_each_kind():
    def quarry(operator, n):
        mutant = types.SimpleNamespace(id=f"{operator}-{n:03d}", kernel="k", operator=operator)
        return Quarry(mutant, Found(says="wrong"))

    kept = [quarry("often", n) for n in range(90)] + [quarry("seldom", n) for n in range(10)]
    picked = _sampled(kept, 50, seed=1)
    assert collections.Counter(q.mutant.operator for q in picked) == {"often": 45, "seldom": 5}
    assert [q.mutant.id for q in _sampled(kept, 50, seed=1)] == [q.mutant.id for q in picked]
    assert [q.mutant.id for q in _sampled(kept, 50, seed=2)] != [q.mutant.id for q in picked]


def test_the_case_that_brings_most_comes_next_and_plain_ones_have_their_turns():
    lines = [
        "pass=fwd s=9x9 d=8 dtype=float16 bias=qk sinks=1 seed=1",
        "pass=fwd s=9x9 d=8 dtype=float16 bias=qk sinks=1 seed=2",
        "pass=bwd s=64x64 d=40 dtype=float32 mask=causal cap=2.0 seed=3",
    ]
    greedy = _Greedy([(Case.parse(line), Setup()) for line in lines])
    seen = collections.Counter()
    order = [greedy.best(seen)[0].seed for _ in lines]
    assert order.index(3) < 2  # before the second of two that have the same traits
    assert greedy.best(seen) is None
    (kernel,) = loader.load(TARGET)
    choice = Choice(kernel, 16, 0)
    cases = [case for case, _ in choice.first(12)]
    assert len(set(map(str, cases))) == 12
    assert _is_plain(cases[0])
    assert _is_plain(cases[4])
    shared = set(traits(cases[0])) & set(traits(cases[4]))
    alike = [case for case, _ in choice.alike([cases[0], cases[4]], 4)]
    assert alike
    assert not set(alike) & set(cases)
    assert all(shared <= set(traits(case)) for case in alike)


@pytest.mark.parametrize(
    ("line", "plain"),
    [
        ("pass=fwd s=64x64 d=64 dtype=float16 seed=1", True),
        ("pass=fwd s=64x64 d=64 dtype=float16 mask=l5 sinks=1 seed=1", True),
        ("pass=fwd s=64x64 d=64 dtype=float16 fp8=head seed=1", True),
        ("pass=fwd h=2/2 s=64x64 d=64 dtype=float16 q=bhsd.at8 seed=1", True),
        ("pass=fwd h=2/2 s=64x64 d=64 dtype=float16 fp8=head q=bhsd.at8 seed=1", False),
        ("pass=fwd s=64x64 d=64 dtype=float16 fp8=block64 seed=1", False),
        ("pass=fwd s=64x64 d=64 dtype=float16 scale=-0.1 seed=1", False),
        ("pass=fwd s=64x64 d=64 dtype=float16 cap=5.0 seed=1", False),
        ("pass=fwd s=64x64 d=40 dtype=float16 seed=1", False),
        ("pass=fwd s=64x64 d=64 dtype=float32 seed=1", False),
    ],
)
def test_plain_is_what_fast_paths_are_made_for(line: str, plain: bool) -> None:
    assert _is_plain(Case.parse(line)) == plain


def test_cases_are_kept_for_functions_that_few_run():
    (kernel,) = loader.load(TARGET)
    hunt = object.__new__(Hunt)
    hunt.cases, hunt.quarries, hunt._looked_at, hunt._choices = [], {}, 0, {}

    def look(target, drawn):
        for number, (case, setup) in enumerate(drawn, hunt._looked_at):
            hunt.cases.append(Prey(number, target, case, setup, (False, 0)))
            for name in ("all", "cap") if case.problem.softcap else ("all",):
                mutant = types.SimpleNamespace(id=name, kernel=name)
                hunt.quarries.setdefault(name, Quarry(mutant, Found(says="x"))).cases.add(number)
        hunt._looked_at += len(drawn)

    hunt._look = look
    hunt.survey("k.py:k", Choice(kernel, 45, 0), 45)
    first = 45 - 45 // _FURTHER
    assert len({prey.case for prey in hunt.cases}) == first
    capped = [prey.case.problem.softcap > 0 for prey in hunt.cases]
    kept = first // _KEPT
    assert not all(capped[:-kept])
    assert all(capped[-kept : -kept // 2])


def test_a_mutant_that_takes_too_long_once_is_no_endless_loop(monkeypatch):
    (kernel,) = loader.load(TARGET)
    case = Case.parse("pass=fwd s=9x9 d=8 dtype=float16 seed=1")
    subject = Subject(kernel, case, Setup(), 1 << 30)
    (mutant, *_) = (m for m in subject.looked()[0].found if m.operator == "wrong-scale")
    asked = []

    def trial(base, mutant, times):
        del base, mutant
        asked.append(times)
        slow = times < least
        error = ("the deadline passed", "timeout") if slow else ("no", "compilation")
        execution = types.SimpleNamespace(error=error[0], error_kind=error[1])
        return types.SimpleNamespace(execution=execution)

    monkeypatch.setattr(subject, "_trial", trial)
    least = 2.0
    assert subject.try_part(mutant, 0).kind == "invalid"
    least = 9.0
    assert subject.try_part(mutant, 0) == Fate(
        kind="killed", check="timeout", message="the deadline passed"
    )
    assert asked == [1.0, 3.0, 1.0, 3.0]


def test_what_waits_for_others_gives_a_mutant_no_more_time():
    (kernel,) = loader.load(TARGET)

    def slow(*arguments):
        time.sleep(1.0)
        return kernel.forward(*arguments)

    case = Case.parse("pass=fwd s=9x9 d=8 dtype=float16 seed=1")
    subject = Subject(dataclasses.replace(kernel, forward=slow), case, Setup(), 1 << 30)
    subject.looked()
    (part,) = subject.parts
    assert 0 < part.spent < part.execution.seconds - 0.9


def test_what_is_proven_is_proven_on_every_case_that_is_asked():
    names = "abc"
    mutants = {
        name: Mutant(kernel="k", place=((name, 1, 1),), op="o", operator="x", label="")
        for name in names
    }
    quarries = {name: Quarry(mutants[name], Found(says=name), cases={0, 1}) for name in names}
    cases = [
        Prey(
            n,
            "k.py:k",
            Case.parse(f"pass=fwd s=9x9 d=8 dtype=float16 seed={n}"),
            Setup(),
            (False, -n),
        )
        for n in (0, 1)
    ]
    asked = []

    def ask(prey, chunk):
        asked.append((prey.number, [mutant.place[0][0] for mutant in chunk]))
        future = Future()
        if prey.number == 0 and mutants["c"] in chunk:
            future.set_exception(TimeoutError())
        else:
            said = {mutants["a"]: "why", mutants["b"]: "", mutants["c"]: "why"}
            future.set_result({mutant: {said[mutant]} for mutant in chunk})
        return future

    prove([quarries["a"], quarries["b"]], cases, ask, lambda: False, lambda: None)
    assert asked == [(1, ["a", "b"]), (0, ["a"])]
    assert quarries["a"].proof == "why"
    assert quarries["b"].proof == ""
    prove([quarries["c"]], cases, ask, lambda: False, lambda: None)
    assert quarries["c"].proof == ""


def test_a_process_that_dies_is_put_down_to_the_mutant_that_kills_it_alone():
    found, _, _ = hunted({("d", 1): "dies"})
    assert found["d"].fate.check == "crash"
    assert all(found[name].fate is None for name in "abcef")
    assert all(found[name].tried == {0, 1, 2} for name in "abcef")


def test_a_hunt_ends_in_time_and_keeps_what_it_knows():
    begin = time.monotonic()
    found, _, _ = hunted({("a", 0): "killed", ("f", 0): "hangs"}, end=begin + 0.5)
    assert time.monotonic() - begin < 10
    assert found["a"].fate.kind == "killed"
    assert found["f"].fate is None
    assert not found["f"].tried


def test_further_cases_run_what_lives_and_are_unlike_those_it_met():
    known = [{"path a", "one"}, {"path a", "one"}, {"path b", "one"}, {"path b", "many"}]
    offered = [{"path b", "many"}, {"path a", "one"}, {"path a", "many"}, {"path b", "one"}]
    assert pursuing(offered, known, [{0, 1}], 1) == [2]  # its path, and what it has not met
    assert len(pursuing(offered, known, [{0, 1}, {2, 3}], 9)) == 4
    assert pursuing(offered, known, [set()], 3) == []
    assert pursuing([], known, [{0}], 3) == []


def test_cases_are_chosen_for_what_survives():
    (kernel,) = loader.load(TARGET)
    choice = Choice(kernel, 30, 0)
    hunt = object.__new__(Hunt)
    hunt.cases, hunt._looked_at, hunt._choices = [], 0, {TARGET: (choice, 24)}
    quarry = Quarry(Letter("a"), Found(says="x"))

    def look(target, drawn):
        for number, (case, setup) in enumerate(drawn, hunt._looked_at):
            hunt.cases.append(Prey(number, target, case, setup, (False, 0)))
            if case.problem.softcap:
                quarry.meets(number, 0, differs=True)
        hunt._looked_at += len(drawn)

    hunt._look = look
    look(TARGET, choice.first(20))
    before = set(quarry.cases)
    (trail,) = hunt._pursued([quarry])
    found = hunt.cases[20:]
    assert len(found) == 24 // _ROUNDS
    usual = sum(bool(prey.case.problem.softcap) for prey in hunt.cases[:20]) / 20
    assert sum(bool(prey.case.problem.softcap) for prey in found) / len(found) > max(usual, 0.5)
    assert {prey.number for prey in trail.left} == quarry.cases - before
    assert hunt._pursued([]) == []


def test_mutants_of_several_kernels_meet_cases_of_each(tmp_path):
    code, said, outcomes = mutate(
        tmp_path, "--cases", "1", "--only", "grid", "--only", "no-such",
        target="fa_verify/zoo/kernels/launch.py",
    )  # fmt: skip
    assert code == 0, said
    assert "only='no-such': no case runs such a mutant's code" in said
    assert len({o.kernel for o in outcomes}) > 3, said
