"""A pytest plugin: a seeded sample of every test's parameters, until time is up.

The test file has some hundred thousand combinations, which take pytest minutes to list: they are
drawn before. Each worker tunes nothing: it takes the configuration of its number of every kernel.
"""

import math
import os
import random
import time

import pytest
from triton.runtime.autotuner import Autotuner

COUNT = int(os.environ["SAMPLE_COUNT"])
SEED = int(os.environ["SAMPLE_SEED"])
LONGEST = int(os.environ["SAMPLE_LONGEST"])
END = float(os.environ["SAMPLE_END"])  # Unix time


def pytest_configure():
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    whole = Autotuner.__init__

    def pinned(self, fn, arg_names, configs, *args, **options):
        whole(self, fn, arg_names, [configs[worker % len(configs)]], *args, **options)

    Autotuner.__init__ = pinned


def rows_of(mark):
    """A parametrize mark's names, and its rows of values; none longer than asked for."""
    names = [part.strip() for part in mark.args[0].split(",")]
    rows = [list(row) if len(names) > 1 else [row] for row in mark.args[1]]
    if names[0].startswith("seqlen") and names[0] != "seqlen_new_eq_seqlen_q":
        rows = [row for row in rows if max(row) <= LONGEST]
    return names, rows


def pytest_pycollect_makeitem(collector, name, obj):
    """Put one list of drawn combinations in place of a test's parametrize marks."""
    marks = list(getattr(obj, "pytestmark", ())) if name.startswith("test_") else []
    axes = [rows_of(mark) for mark in marks if mark.name == "parametrize"]
    if not axes:
        return
    names = [name for names, _ in axes for name in names]
    total = math.prod(len(rows) for _, rows in axes)
    draw = random.Random(f"{SEED} {name}")  # noqa: S311 - reproducible, not secret
    values = []
    for number in draw.sample(range(total), min(COUNT, total)):
        rest, row = number, []
        for _, rows in axes:
            rest, place = divmod(rest, len(rows))
            row += rows[place]
        values.append(tuple(row))
    ids = ["-".join(str(value) for value in row) for row in values]
    obj.pytestmark = [mark for mark in marks if mark.name != "parametrize"]
    pytest.mark.parametrize(names, values, ids=ids)(obj)
    collector.config.stash.setdefault(TOTALS, {})[name] = total


TOTALS = pytest.StashKey[dict]()


def pytest_collection_modifyitems(items):
    """Let every test have its turn before time is up."""
    random.Random(SEED).shuffle(items)  # noqa: S311


def pytest_runtest_setup():
    if time.time() > END:
        pytest.skip("out of time")


def pytest_sessionfinish(session):
    totals = session.config.stash.get(TOTALS, {})
    path = os.environ["SAMPLE_TOTALS"]
    if totals:
        with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123
            file.writelines(f"{name} {total}\n" for name, total in totals.items())
