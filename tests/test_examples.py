"""Failed cases kept between runs, and the suite's search uphill."""

import dataclasses
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_verify import Capabilities, Kernel, Outputs, reference
from fa_verify.backends import make
from fa_verify.backends.base import Setup
from fa_verify.campaign import Plan, run
from fa_verify.case import Case
from fa_verify.distribution import MAX_WORK, draw, work
from fa_verify.examples import Examples
from fa_verify.loader import load
from fa_verify.neighbours import around
from fa_verify.record import CaseRecord, Writer
from fa_verify.suite.shard import Shard

SMALL = "pass=fwd s=3x1 d=1 dtype=float16 seed=0"
LARGE = "pass=fwd s=9x9 d=8 dtype=float16 seed=1"
(KERNEL,) = load("tests/targets/wrong.py:wrong")


def record(case, verdict, setup=Setup(), kernel=KERNEL):  # noqa: B008 - frozen
    return CaseRecord(
        kernel=kernel.name, target=kernel.target, source_hash="", case=case, setup=str(setup),
        verdict=verdict,
    )  # fmt: skip


@pytest.fixture
def kept(tmp_path):
    return Examples(tmp_path / "kept")


def cases(kept, kernel=KERNEL, backend="cpu"):
    return [str(case) for case, _ in kept.of(kernel, backend=backend)]


def test_what_fails_is_kept_until_it_passes_and_the_smallest_come_first(kept, tmp_path):
    assert cases(kept) == []
    assert not (tmp_path / "kept").exists()
    for case in (LARGE, SMALL):
        kept.learn(record(case, "fail", Setup(config=2)))
    assert kept.of(KERNEL, backend="cpu")[0] == (Case.parse(SMALL), Setup(config=2))
    assert cases(Examples(tmp_path / "kept")) == [SMALL, LARGE]
    kept.learn(record(SMALL, "inconclusive", Setup(config=2)))
    assert cases(kept) == [SMALL, LARGE]
    kept.learn(record(SMALL, "pass", Setup(config=2)))
    assert cases(kept) == [LARGE]


def test_other_kernels_backends_and_what_is_no_longer_taken_are_left_alone(kept):
    kept.learn(record(SMALL, "fail"))
    assert cases(kept, dataclasses.replace(KERNEL, target="other.py:wrong")) == []
    assert cases(kept, backend="cuda") == []
    narrow = dataclasses.replace(KERNEL, capabilities=Capabilities(head_dims=(64,)))
    assert cases(kept, narrow) == []
    assert cases(kept) == [SMALL]


def test_what_cannot_be_read_is_forgotten(kept):
    kept.learn(record("pass=sideways", "fail"))
    kept.learn(record(SMALL, "fail"))
    assert cases(kept) == [SMALL]


class Heard:
    def __init__(self):
        self.records = []
        self.small = []

    def record(self, record):
        self.records.append(record)

    def shrinking(self, record):
        pass

    def shrunk(self, shrunk):
        self.small.append(shrunk.record)


def test_a_campaign_begins_with_what_failed_before(kept):
    plan = Plan(cases=6, max_failures=2, shrinks=1, shrink_seconds=2.0)
    first, second = Heard(), Heard()
    run((KERNEL,), plan, first, kept)
    (small,) = first.small
    assert small.case in cases(kept)
    run((KERNEL,), plan, second, kept)
    again, *_ = second.records
    assert (again.case, again.verdict) == (cases(kept)[0], "fail")
    assert "--drawn" not in again.replay  # a search found it: det alone judges it
    known = {record.case for record in second.records if "--drawn" not in record.replay}
    drawn = [record for record in second.records if "--drawn" in record.replay]
    assert known >= {small.case}
    assert len(drawn) >= 2  # beside what was known


def found_by_shard(kernel, tmp_path, kept=None):
    """What a shard of twelve cases finds."""
    writer = Writer(tmp_path / "r.jsonl")
    shard = Shard(
        kernel=kernel, backend=make("cpu", seconds=60.0), backend_name="cpu", dtype="float16",
        backward=False, index=0, examples=12, seed=0, writer=writer, kept=kept,
    )  # fmt: skip
    try:
        return shard.run()
    finally:
        writer.close()


def lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]


def test_a_shard_begins_with_what_failed_before_and_keeps_the_smallest(kept, tmp_path):
    assert "smallest case" in found_by_shard(KERNEL, tmp_path, kept)
    assert cases(kept)
    found = found_by_shard(KERNEL, tmp_path, kept)
    assert found.startswith("it failed in an earlier run")
    assert cases(kept)[0] in found


def breaking(is_broken):
    """A kernel that is right until it breaks."""

    def forward(problem, q, k, v):
        exact = reference.forward(problem, q, k, v)
        return Outputs((exact.o + 1000.0 * is_broken()).to(q.dtype), exact.lse.float())

    takes = Capabilities(head_dims_v=range(1, 257), window=True, softcap=True, backward=False)
    return Kernel(name="breaking", forward=forward, capabilities=takes)


def test_a_shard_ends_with_a_search_around_its_largest_error(tmp_path):
    torch.set_num_threads(1)
    assert found_by_shard(breaking(lambda: False), tmp_path) is None
    found = [line for line in lines(tmp_path) if line["type"] == "case"]
    drawn = [line for line in found if "--drawn" in line["replay"]]
    searched = [line for line in found if "--drawn" not in line["replay"]]
    assert (len(drawn), len(searched)) == (10, 2)
    highest = max(
        (line for line in drawn if line["verdict"] == "pass" and small(line["case"])),
        key=lambda line: max(stats["ratio"] for stats in line["tensors"].values()),
    )
    shape = Case.parse(highest["case"]).problem
    for line in searched:
        near = Case.parse(line["case"]).problem
        assert near.head_dim == shape.head_dim
        assert near.mask == shape.mask
        assert abs(near.seqlen_q - shape.seqlen_q) <= 3


def test_what_the_search_finds_is_made_small(tmp_path):
    def drawn_are_done():
        return len(lines(tmp_path)) > 10

    found = found_by_shard(breaking(drawn_are_done), tmp_path)
    assert found.startswith("found by a search for larger errors")
    assert "smallest case: pass=fwd s=1x1 d=1 " in found


def small(text):
    return work(Case.parse(text).problem) <= 1 << 25


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_cases_around_one_are_taken_and_compile_to_the_same(data):
    takes = Capabilities(window=True, empty=False, head_dims=(64,))
    case = data.draw(st.sampled_from(draw(0, 30, takes)))
    near = data.draw(around(case, takes))
    assert takes.reason_against(near.problem) is None
    assert work(near.problem) <= MAX_WORK
    same = ("head_dim", "head_dim_v", "dtype", "mask", "softcap", "layout_q", "heads_q", "batch")
    for name in same:
        assert getattr(near.problem, name) == getattr(case.problem, name)
    assert near.values.qk == case.values.qk
