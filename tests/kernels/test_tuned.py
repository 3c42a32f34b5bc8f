"""Configurations of kernels with descriptors: on known cards, on others, where nothing is timed."""

import json
import types

import pytest
import torch
import triton

from fa_verify import Problem

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


def made(module):
    configs = [triton.Config({"BLOCK": block}, num_warps=4, maxnreg=96) for block in (16, 32)]
    return module.Tuned(triton.jit(_kernel_of_two_blocks), configs, KEY), configs


def pruned(tuned, configs, head_dim=64):
    return tuned._prune(configs, {"x": None}, head_dim=head_dim)


def test_an_unknown_card_tries_all_and_keeps_its_choice(tuned):
    one, configs = made(tuned)
    assert pruned(one, configs) == configs
    timings = {configs[0]: [2.0, 1.9, 2.1], configs[1]: [1.0, 0.9, 1.1]}
    tuned._keep("_kernel_of_two_blocks", one._asked, timings)
    again, configs = made(tuned)
    assert pruned(again, configs) == [configs[1]]
    assert pruned(again, configs, head_dim=80) == configs


def test_a_committed_table_comes_before_the_cache(tuned, monkeypatch):
    one, configs = made(tuned)
    pruned(one, configs)
    cache = {configs[0]: [2.0], configs[1]: [1.0]}
    tuned._keep("_kernel_of_two_blocks", one._asked, cache)
    tuned._TABLES.mkdir()
    table = tuned._kept().read_text().replace('"best": "BLOCK=32', '"best": "BLOCK=16')
    (tuned._TABLES / "A_card.json").write_text(table)
    assert pruned(one, configs) == [configs[0]]


def test_a_choice_that_is_no_longer_offered_is_tuned_anew(tuned):
    one, configs = made(tuned)
    pruned(one, configs)
    gone = triton.Config({"BLOCK": 64}, num_warps=4)
    tuned._keep("_kernel_of_two_blocks", one._asked, {gone: [1.0], configs[0]: [2.0]})
    assert pruned(one, configs) == configs


@pytest.mark.parametrize("text", ["", "{", "[1"])
def test_a_broken_cache_is_no_table(tuned, text):
    one, configs = made(tuned)
    tuned._kept().parent.mkdir(parents=True)
    tuned._kept().write_text(text)
    assert pruned(one, configs) == configs


def test_where_nothing_is_timed_every_configuration_is_offered(tuned, monkeypatch):
    one, configs = made(tuned)
    pruned(one, configs)
    tuned._keep("_kernel_of_two_blocks", one._asked, {configs[0]: [1.0], configs[1]: [2.0]})
    cpu = types.SimpleNamespace(get_active_torch_device=lambda: torch.device("cpu"))
    monkeypatch.setattr(triton.runtime.driver, "_active", cpu)
    assert pruned(one, configs) == configs


def test_what_was_just_tuned_is_kept_by_the_launch(tuned):
    one, configs = made(tuned)

    class Tuner:
        """Times both on the first launch, as triton.autotune does."""

        configs_timings: dict = {}  # noqa: RUF012

        def __getitem__(self, grid):
            def launch(*_arguments, **_keywords):
                if not self.configs_timings:
                    pruned(one, configs)
                    self.configs_timings = {configs[0]: [1.0], configs[1]: [2.0]}

            return launch

    one._tuner = Tuner()
    one[(1,)](None, head_dim=64)
    assert tuned._best("_kernel_of_two_blocks", "head_dim=64").startswith("BLOCK=16 ")
    tuned._kept().unlink()
    one[(1,)](None, head_dim=64)
    assert not tuned._kept().exists()


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
            return lambda *arguments, **_: seen.append(arguments[-1])

    monkeypatch.setattr(hopper, "_tuned", lambda _: Tuned())
    x = torch.zeros(1, 1, 16, 64, dtype=torch.float16)
    for bucket in (16, 512, 2048, 1 << 20):
        given = {"band_hi": 0, "HAS_HI": True, "seqlen_bucket": bucket}
        problem = Problem(seqlen_q=16, seqlen_k=16, head_dim=64, head_dim_v=64)
        hopper.forward(problem, given, x, x, x, x, torch.zeros(1, 1, 16))
    assert seen == [512, 512, 2048, 16384]
