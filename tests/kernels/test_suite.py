"""The suite over the repository's own kernels, as any project would run it over its own."""

import os

import pytest

from fa_verify import loader
from fa_verify.backends import make
from fa_verify.record import Writer
from fa_verify.suite.shard import Shard, parameters

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
