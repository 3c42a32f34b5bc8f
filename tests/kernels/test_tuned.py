"""Configurations of kernels with descriptors: on known cards, on others, where nothing is timed."""

import json
import types

import pytest
import torch
import triton

from fa_verify import Problem
from fa_verify.ttir.launch.autotune import pinned

KEY = ["head_dim"]


def _kernel_of_two_blocks(x, head_dim, BLOCK: triton.language.constexpr):  # noqa: N803
    pass


@pytest.fixture
def tuned(kernels, monkeypatch, tmp_path):
    """The module on a card called "A card", with tables and cache of its own."""
    module = kernels("tuned")
    driver = types.SimpleNamespace(get_active_torch_device=lambda: torch.device("cuda"))
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A card")
    monkeypatch.setattr(module, "_TABLES", tmp_path / "tables")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return module


class Launches:
    """A kernel, or its autotuner, that notes how it is launched."""

    def __init__(self, timings=None):
        self.seen, self.configs_timings = [], timings

    arg_names = ("x", "head_dim")

    def __getitem__(self, _grid):
        return lambda *_, **keywords: self.seen.append(keywords)


def made(module, timed=(2.0, 1.0)):
    """A kernel of two configurations, of which the tuner measures these times."""
    configs = [triton.Config({"BLOCK": block}, num_warps=4, maxnreg=96) for block in (16, 32)]
    one = module.Tuned(triton.jit(_kernel_of_two_blocks), configs, KEY)
    one._kernel = Launches()
    one._tuner = Launches({config: [time] for config, time in zip(configs, timed, strict=True)})
    return one


def blocks(one):
    return [keywords["BLOCK"] for keywords in one._kernel.seen]


def test_an_unknown_card_tunes_once_and_keeps_its_choice(tuned):
    one = made(tuned)
    for _ in range(3):
        one[(1,)](None, head_dim=64)
    assert len(one._tuner.seen) == 1
    assert blocks(one) == [32, 32]
    one[(1,)](None, 80)
    assert len(one._tuner.seen) == 2
    again = made(tuned, timed=(1.0, 2.0))
    again[(1,)](None, head_dim=64)
    assert blocks(again) == [32]
    assert again._kernel.seen[0] == {
        "head_dim": 64, "BLOCK": 32, "num_warps": 4, "num_ctas": 1, "num_stages": 3, "maxnreg": 96,
    }  # fmt: skip


def test_a_committed_table_comes_before_the_cache(tuned):
    made(tuned)[(1,)](None, head_dim=64)
    tuned._TABLES.mkdir()
    table = tuned._kept().read_text().replace('"best": "BLOCK=32', '"best": "BLOCK=16')
    (tuned._TABLES / "A_card.json").write_text(table)
    one = made(tuned)
    one[(1,)](None, head_dim=64)
    assert blocks(one) == [16]


def test_a_choice_that_is_no_longer_offered_is_tuned_anew(tuned):
    gone = triton.Config({"BLOCK": 64}, num_warps=4)
    tuned._keep("_kernel_of_two_blocks", "head_dim=64", {gone: [1.0]})
    one = made(tuned)
    one[(1,)](None, head_dim=64)
    assert len(one._tuner.seen) == 1
    assert not blocks(one)


@pytest.mark.parametrize("text", ["", "{", "[1"])
def test_a_broken_cache_is_no_table(tuned, text):
    tuned._kept().parent.mkdir(parents=True)
    tuned._kept().write_text(text)
    one = made(tuned)
    one[(1,)](None, head_dim=64)
    assert len(one._tuner.seen) == 1


def test_a_cache_that_cannot_be_written_costs_one_tuning_a_process(tuned, tmp_path):
    (tmp_path / "cache").write_text("no folder")
    one = made(tuned)
    one[(1,)](None, head_dim=64)
    one[(1,)](None, head_dim=64)
    assert len(one._tuner.seen) == 1
    assert blocks(one) == [32]


def test_where_nothing_is_timed_every_configuration_is_offered(tuned, monkeypatch):
    made(tuned)[(1,)](None, head_dim=64)
    cpu = types.SimpleNamespace(get_active_torch_device=lambda: torch.device("cpu"))
    monkeypatch.setattr(triton.runtime.driver, "_active", cpu)
    one = made(tuned)
    one[(1,)](None, head_dim=64)
    assert len(one._tuner.seen) == 1
    assert not blocks(one)


def test_a_pinned_configuration_comes_before_the_fastest(tuned):
    one = made(tuned)
    one[(1,)](None, head_dim=64)
    with pinned(0, {}):
        one[(1,)](None, head_dim=64)
        one[(1,)](None, head_dim=96)
    assert len(one._tuner.seen) == 3
    assert not blocks(one)
    one[(1,)](None, head_dim=64)
    assert blocks(one) == [32]


def test_descriptors_are_shaped_before_the_launch(tuned):
    one = made(tuned)
    one[(1,)](None, head_dim=64)
    shaped = []
    for config in one._configs:
        config.pre_hook = lambda values: shaped.append((values["x"], values["BLOCK"]))
    one[(1,)]("x", head_dim=64)
    assert shaped == [("x", 32)]


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen", [512, 1024, 2048, 4096, 8192, 16384])
def test_the_table_of_an_h200_names_what_is_offered_and_was_fastest(
    kernels, head_dim, causal, seqlen
):
    """A configuration that is no longer offered would be tuned anew, and nobody be told."""
    module = kernels("tuned")
    table = json.loads((module._TABLES / "NVIDIA_H200.json").read_text())
    found = table["hopper_forward_kernel"][
        f"head_dim={head_dim},HAS_HI={causal},seqlen_bucket={seqlen}"
    ]
    configs = kernels("configs")
    offered = configs.described(configs.HOPPER_FORWARD, head_dim, None)
    assert set(found["milliseconds"]) == set(map(module._text, offered))
    assert found["milliseconds"][found["best"]] == min(found["milliseconds"].values())
    assert table["run"]["script"] == "benchmarks/tune_forward.py"


def test_lengths_outside_the_table_take_its_ends(kernels, monkeypatch):
    hopper = kernels("hopper_forward")
    seen = []

    class Tuned:
        def __getitem__(self, _grid):
            return lambda *arguments, **_: seen.append(arguments[place])

    place = hopper.hopper_forward_kernel.arg_names.index("seqlen_bucket")
    monkeypatch.setattr(hopper, "_tuned", lambda *_: Tuned())
    x = torch.zeros(1, 1, 16, 64, dtype=torch.float16)
    for bucket in (16, 512, 2048, 1 << 20):
        given = {"band_lo": 0, "band_hi": 0, "HAS_LO": False, "HAS_HI": True}
        given["seqlen_bucket"] = bucket
        problem = Problem(seqlen_q=16, seqlen_k=16, head_dim=64, head_dim_v=64)
        hopper.forward(problem, given, x, x, x, x, torch.zeros(1, 1, 16))
    assert seen == [512, 512, 2048, 16384]
