"""`mutate`: shows how well the suite guards a kernel, by planting small defects in its IR.

No source is needed: the defects are put into what Triton compiles, and into its launches.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.text import Text

from fa_verify import loader
from fa_verify.errors import InvalidInputError
from fa_verify.mutation import table
from fa_verify.mutation.choice import Choice
from fa_verify.mutation.hunt import Hunt
from fa_verify.mutation.outcome import Outcome, score

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fa_verify.mutation.quarry import Quarry

__all__ = ["mutate"]

_EVERY = 5.0  # seconds between two reports of what is known by then


def mutate(
    target: str,
    folder: Path,
    *,
    only: Sequence[str] = (),
    operators: Sequence[str] = (),
    functions: Sequence[str] = (),
    cases: int = 64,
    budget: float | None = None,
    seed: int = 0,
    sample: int | None = None,
    workers: int | None = None,
    min_score: float | None = None,
) -> int:
    """Make mutants of a kernel, run the suite on each, print and write what became of them.

    Args:
        target: The kernel, or several: of mutants that they share each is tried on cases of all.
        folder: Where mutation.json and mutation.md are written.
        only: Ids (or beginnings of ids) of mutants; empty: all.
        operators: Kinds of change; empty: all.
        functions: Triton functions that are mutated; empty: all.
        cases: How many cases of each kernel (`choice.Choice`).
        budget: Seconds for all; mutants that had fewer cases for it say so.
        seed: Of the distribution, and of the sample.
        sample: At most so many mutants, of each function and operator as large a share.
        workers: Processes; None: one a core.
        min_score: Percent below which the exit code is 1; None: no limit.

    Returns:
        0, or 1 where the score is below `min_score`.
    """
    console = Console(highlight=False)
    begin = time.monotonic()
    kernels = loader.load(target)
    if not kernels:
        msg = f"target={target!r}: holds no Kernel; name a file or folder that does"
        raise InvalidInputError(msg)
    workers = workers or len(os.sched_getaffinity(0))
    hunt = Hunt(workers, None if budget is None else begin + budget)
    try:
        for kernel in kernels:
            hunt.survey(kernel.target, Choice(kernel, cases, seed), cases)
        if not hunt.cases and not hunt.unfit:
            msg = f"budget={budget:g} s: over before the kernel itself had run; give it more time"
            raise InvalidInputError(msg)
        if not hunt.cases:
            case, why = hunt.unfit[0]
            msg = f"target={target!r}: passes none of {cases} cases; mend it first: {why} [{case}]"
            raise InvalidInputError(msg)
        if not hunt.quarries:
            msg = (
                f"target={target!r}: launches no Triton kernel in {cases} cases: nothing to mutate"
            )
            raise InvalidInputError(msg)
        wanted = _wanted(
            list(hunt.quarries.values()), only=only, operators=operators, functions=functions,
            sample=sample, seed=seed,
        )  # fmt: skip
        console.print(
            f"{len(wanted)} of {len(hunt.quarries)} mutants on {len(hunt.cases)} cases, which "
            f"pass without them, after {time.monotonic() - begin:.0f} s"
        )
        names = ", ".join(kernel.name for kernel in kernels)
        for name in _unmet(hunt.quarries.values(), only):
            console.print(
                f"only={name!r}: no case runs such a mutant's code; left out (--cases says how "
                "many are tried)"
            )
        report = _Report(folder, console, names, hunt, wanted, begin)
        with contextlib.suppress(KeyboardInterrupt):  # what is known by then is written
            hunt.run(wanted, report.tell)
    finally:
        hunt.stop()
    outcomes = report.write()
    _show(console, outcomes, target)
    console.print(Text(report.headline(outcomes)))
    console.print(Text(str(folder / "mutation.md"), style="dim"), soft_wrap=True)
    return int(min_score is not None and 100 * score(outcomes).share < min_score)


class _Report:
    """What is known of the mutants, told and written while they are tried."""

    def __init__(  # noqa: PLR0917
        self, folder: Path, console: Console, names: str, hunt: Hunt, wanted: list[Quarry],
        begin: float,
    ) -> None:  # fmt: skip
        self._folder, self._console, self._names, self._hunt = folder, console, names, hunt
        self._wanted, self._begin = wanted, begin
        self._next = time.monotonic()

    def tell(self, name: str, left: int) -> None:
        """Say how many mutants are left, and write the report, every now and then."""
        if time.monotonic() >= self._next:
            self._console.print(Text(f"{name}: {left} mutants left", style="dim"))
            self.write()
            self._next = time.monotonic() + _EVERY

    def headline(self, outcomes: Sequence[Outcome]) -> str:
        """The score, and what it was found with."""
        total, hunt = score(outcomes), self._hunt
        sampled = len(self._wanted) < len(hunt.quarries)
        all_of = f"sampled from {len(hunt.quarries)}, " if sampled else ""
        undone = sum(q.fate is None and not q.due <= q.tried for q in self._wanted)
        over = f"; the time was over before {undone} had met all cases" if undone else ""
        return (
            f"{100 * total.share:.1f}% of {total.killed + total.survived} mutants of {self._names} "
            f"killed; {total.survived} survived, {total.equivalent} proven equivalent, "
            f"{total.invalid} invalid ({all_of}{len(hunt.cases)} cases, "
            f"{time.monotonic() - self._begin:.0f} s on {hunt.workers} workers{over})"
        )

    def write(self) -> list[Outcome]:
        """Write what is known by now."""
        names = {prey.number: str(prey.case) for prey in self._hunt.cases}
        outcomes = [_outcome(quarry, names) for quarry in self._wanted]
        unfit = [f"{why} [{case}]" for case, why in self._hunt.unfit]
        _write(self._folder, outcomes, table.render(outcomes, self.headline(outcomes), unfit))
        return outcomes


def _wanted(
    quarries: list[Quarry],
    *,
    only: Sequence[str],
    operators: Sequence[str],
    functions: Sequence[str],
    sample: int | None,
    seed: int,
) -> list[Quarry]:
    """The mutants that were asked for.

    Raises:
        InvalidInputError: A name fits none.
    """
    for option, what, asked, there in (
        ("operators", "of this kind", operators, {q.mutant.operator for q in quarries}),
        ("functions", "of this function", functions, {q.mutant.kernel for q in quarries}),
    ):
        for name in asked:
            if name not in there:
                names = ", ".join(sorted(there))
                msg = f"{option}={name!r}: no mutant {what} here; there are {names}"
                raise InvalidInputError(msg)
    if only and len(_unmet(quarries, only)) == len(only):
        msg = f"only={only[0]!r}: begins no mutant's id; a run's mutation.json lists them"
        raise InvalidInputError(msg)
    kept = [
        q
        for q in quarries
        if (not only or q.mutant.id.startswith(tuple(only)))
        and (not operators or q.mutant.operator in operators)
        and (not functions or q.mutant.kernel in functions)
    ]
    return kept if sample is None or len(kept) <= sample else _sampled(kept, sample, seed)


def _unmet(quarries: Iterable[Quarry], only: Sequence[str]) -> list[str]:
    """Names that begin no mutant's id: the cases do not run its code, or there is none."""
    ids = [q.mutant.id for q in quarries]
    return [name for name in only if not any(x.startswith(name) for x in ids)]


def _sampled(kept: list[Quarry], sample: int, seed: int) -> list[Quarry]:
    """The same share of each function and operator, in an order drawn from the seed.

    So the sample's score estimates that of all, with a standard error of at most that of a plain
    sample: sqrt(p (1 - p) / n) for a score p of n mutants.
    """
    shuffled = sorted(kept, key=lambda q: q.mutant.id)
    random.Random(seed).shuffle(shuffled)  # noqa: S311 - a sample, no secret
    kinds: dict[tuple[str, str], list[Quarry]] = {}
    for quarry in shuffled:
        kinds.setdefault((quarry.mutant.kernel, quarry.mutant.operator), []).append(quarry)
    places = [
        ((place + 0.5) / len(kind), turn, quarry)
        for turn, kind in enumerate(kinds.values())
        for place, quarry in enumerate(kind)
    ]
    return [quarry for *_, quarry in sorted(places, key=lambda x: x[:2])[:sample]]


def _outcome(quarry: Quarry, names: dict[int, str]) -> Outcome:
    found, fate = quarry.found, quarry.fate
    kind, message = "survived", ""
    if fate is not None:
        kind, message = fate.kind, fate.message
    elif quarry.proof and not quarry.changed:
        kind, message = "equivalent", quarry.proof
    return Outcome(
        id=quarry.mutant.id,
        kernel=quarry.mutant.kernel,
        operator=quarry.mutant.operator,
        says=found.says,
        file=_shown(found.file),
        line=found.line,
        source=linecache.getline(found.file, found.line).strip() if found.file else "",
        fate=kind,
        check=fate.check if fate is not None else "",
        message=message,
        cases=len(quarry.tried) if kind in ("killed", "invalid") else len(quarry.cases),
        reached=len(quarry.parts),
        changed=len(quarry.changed),
        case="" if quarry.killer is None else names[quarry.killer],
        seconds=quarry.seconds,
    )


def _shown(file: str) -> str:
    path = Path(file)
    here = Path.cwd()
    return str(path.relative_to(here)) if file and path.is_relative_to(here) else file


def _show(console: Console, outcomes: Sequence[Outcome], target: str) -> None:
    """Survivors, each with its line; one alone, with how to run it again."""
    for outcome in outcomes:
        if outcome.fate == "survived" or len(outcomes) == 1:
            console.print(Text(f"{outcome.id}: {outcome.sentence}"), soft_wrap=True)
            if outcome.source:
                console.print(Text(f"    {outcome.source}", style="dim"), soft_wrap=True)
            console.print(
                Text(f"    fa-verify mutate {target} --only {outcome.id}", style="dim"),
                soft_wrap=True,
            )


def _write(folder: Path, outcomes: Sequence[Outcome], text: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "mutation.json").write_bytes(
            msgspec.json.format(msgspec.json.encode(outcomes), indent=1)
        )
        (folder / "mutation.md").write_text(text, encoding="utf-8")
    except OSError as error:
        msg = f"report={str(folder)!r}: cannot be written ({error.strerror}); choose another folder"
        raise InvalidInputError(msg) from error
