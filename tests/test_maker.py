"""What a maker hands over is what the worker would have made."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from fa_verify.case import Case
from fa_verify.inputs import fingerprint, materialise
from fa_verify.maker import AHEAD, Maker

PLAIN = "pass=bwd b=2 h=4/2 s=33x65 d=64 dtype=bfloat16 seed=3"
STRIDED = "pass=bwd b=2 h=4/2 s=5x7 d=16 dtype=float16 q=bshd.s64 k=bhsd.at16 v=bhsd.shared seed=4"
LARGE = "pass=fwd h=12/12 s=2048x2048 d=128 dtype=float32 seed=1"
TERMS = "pass=bwd h=4/2 s=9x9 d=16 dtype=float32 bias=hqk alibi=1 sinks=1 dropout=0.25 seed=5"


@pytest.fixture
def maker():
    made = Maker()
    yield made
    made.stop()


def test_every_bit_is_the_same_slack_strides_and_offsets_too(maker):
    cases = [PLAIN, STRIDED, PLAIN.replace("seed=3", "seed=6"), TERMS, STRIDED]
    for text in cases[:AHEAD]:
        maker.begin(text)
    for index, text in enumerate(cases):
        got, due = maker.result(text), materialise(Case.parse(text))
        maker.begin(cases[(index + AHEAD) % len(cases)])  # while this one is still in use
        assert got is not None
        assert got.dropout_seed == due.dropout_seed
        assert [name for name, _ in got.named()] == [name for name, _ in due.named()]
        for (_, one), (_, other) in zip(got.named(), due.named(), strict=True):
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            assert one.stride() == other.stride()
            assert one.storage_offset() == other.storage_offset()
        ours, theirs = fingerprint(due), fingerprint(got)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_what_does_not_fit_or_cannot_be_made_is_left_to_the_worker(maker):
    for text in (LARGE, "nonsense", PLAIN):
        maker.begin(text)
        assert (maker.result(text) is None) == (text != PLAIN)


def test_nothing_is_taken_for_another_case(maker):
    for text in (PLAIN, STRIDED):
        maker.begin(text)
    got, due = maker.result(STRIDED), materialise(Case.parse(STRIDED))
    assert got is not None
    assert torch.equal(got.k, due.k)
    assert maker.result(PLAIN) is None


def test_a_worker_goes_on_without_it(maker):
    maker.begin(PLAIN)
    assert maker.result(PLAIN) is not None
    maker.stop()
    maker.begin(PLAIN)
    assert maker.result(PLAIN) is None


def test_it_ends_with_its_worker():
    reading, writing = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.close(reading)
        Maker()  # it has a copy of what is written to
        signal.pause()
    os.close(writing)
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    assert os.read(reading, 1) == b""  # once the maker has closed its copy
