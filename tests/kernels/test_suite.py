"""The suite over the repository's own kernels, as any project would run it over its own."""

import collections
import dataclasses
import os

import pytest

import fa_verify.suite.shard
from fa_verify import loader
from fa_verify.backends import make
from fa_verify.record import Writer
from fa_verify.suite.shard import Shard, parameters
from fa_verify.verify import verify

# Cases for each kernel; nightly runs ask for more.
CASES = int(os.environ.get("FA_VERIFY_CASES", "96"))
SHARDS = parameters(loader.load("kernels"), CASES)


@pytest.fixture
def writer(tmp_path):
    writer = Writer(tmp_path / "record.jsonl")
    yield writer
    writer.close()


@pytest.mark.parametrize("fields", SHARDS.values(), ids=SHARDS)
def test_kernel_is_right(fields, writer):
    shard = Shard(
        **fields,
        backend=make("cpu", seconds=60.0),
        backend_name="cpu",
        seed=0,
        writer=writer,
    )
    finding = shard.run()
    assert finding is None, finding
    assert shard.verified > 0, shard.reason


def test_a_shard_on_a_card_has_one_configuration_and_few_forms(writer, monkeypatch):
    """Run here: what is compiled for a card is for the head dims of three forms or fewer."""
    fields = next(x for x in SHARDS.values() if x["kernel"].name == "flash")
    cpu, tried = make("cpu", seconds=60.0), []

    def judged(case, kernel, setup, backend, **kwargs):
        tried.append((case, setup))
        plain = dataclasses.replace(setup, backend="cpu", float_model="hopper")
        return verify(case, kernel, plain, cpu, **kwargs)

    monkeypatch.setattr(fa_verify.suite.shard, "verify", judged)
    fields = {**fields, "examples": 24}
    shard = Shard(**fields, backend=cpu, backend_name="cuda", seed=0, writer=writer)
    assert shard.run() is None
    assert len({setup.config for _, setup in tried}) == 1
    assert {setup.backend for _, setup in tried} == {"cuda"}
    drawn = tried[: 24 - 24 // 6]
    common = collections.Counter((x.problem.head_dim, x.problem.head_dim_v) for x, _ in drawn)
    assert sum(count for _, count in common.most_common(2)) >= 15
