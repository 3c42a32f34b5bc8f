"""Autotuners and heuristics run one configuration, and call what they call on a GPU."""

# Triton reads the kernels in this file: their constexprs are upper-case and their names are short.
# ruff: noqa: N803

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

from fa_verify import ttir


@triton.jit
def add_block(x_ptr, n, scale_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    if scale_ptr is not None:
        x *= tl.load(scale_ptr)
    tl.store(x_ptr + i, x + BLOCK, mask=i < n)


@triton.jit
def add_even(x_ptr, n, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(x_ptr + i, tl.load(x_ptr + i) + BLOCK)
    else:
        tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < n) - BLOCK, mask=i < n)


def configs(*blocks, **fields):
    return [triton.Config({"BLOCK": block}, **fields) for block in blocks]


def grid(meta):
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def blocks_run(kernel, *arguments, config=0, launches=1, **kwargs):
    with ttir.execute(ttir.Options(config=config)) as run:
        for _ in range(launches):
            kernel[grid](torch.ones(64), *arguments, **kwargs)
    assert run.incidents == []
    return [launch.constants["BLOCK"] for launch in run.launches]


def never(*_, **__):
    raise AssertionError


def keep_large(offered, named, **kwargs):
    assert named["n"] == 64
    assert callable(kwargs["grid"])
    return [c for c in offered if c.kwargs["BLOCK"] >= 16]


def model(x_ptr, n, BLOCK, **_):
    assert x_ptr.shape == (64,)
    return n / BLOCK  # the larger the better


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [8, 16, 32, 64]),
        ({"do_bench": never}, [8, 16, 32, 64]),
        ({"cache_results": True, "do_bench": never}, [8, 16, 32, 64]),
        ({"pre_hook": never, "post_hook": never}, [8, 16, 32, 64]),  # called when tuning only
        ({"restore_value": ["x_ptr"], "reset_to_zero": ["x_ptr"]}, [8, 16, 32, 64]),
        ({"prune_configs_by": {"early_config_prune": keep_large}}, [16, 16, 32, 64]),
        ({"prune_configs_by": {"perf_model": model, "top_k": 2}}, [64, 32, 32, 64]),
        ({"prune_configs_by": {"perf_model": model, "top_k": 0.25}}, [64, 64, 64, 64]),
        (
            {"prune_configs_by": {"early_config_prune": keep_large, "perf_model": model,
                                  "top_k": 1}},
            [64, 64, 64, 64],
        ),
    ],
)  # fmt: skip
def test_one_of_the_configurations_that_a_gpu_may_choose_runs(fields, expected):
    tuned = triton.autotune(configs(8, 16, 32, 64), key=["n"], **fields)(add_block)
    ran = [blocks_run(tuned, 64, None, config=i)[0] for i in range(4)]
    assert ran == expected
    assert tuned.best_config.kwargs == {"BLOCK": expected[-1]}


def test_pruning_away_everything_is_an_error():
    nothing = {"early_config_prune": lambda *_, **__: []}
    tuned = triton.autotune(configs(8, 16), key=["n"], prune_configs_by=nothing)(add_block)
    with pytest.raises(Exception, match="early_config_prune"), ttir.execute():
        tuned[grid](torch.ones(64), 64, None)


class Unfit:
    """Stands for a kernel that finds at its launch what it needs: more than there is from 32 on."""

    @staticmethod
    def run(*args, **kwargs):
        if kwargs["BLOCK"] >= 32:
            raise OutOfResources(1, 0, "shared memory")
        return add_block.run(*args, **kwargs)


def test_a_configuration_that_does_not_fit_gives_way_to_the_next():
    tuned = triton.autotune(configs(32, 64, 16, 8), key=[])(add_block)
    tuned.fn = Unfit
    assert [blocks_run(tuned, 64, None, config=i) for i in range(4)] == [[16], [16], [16], [8]]


def test_where_nothing_fits_the_launch_says_so():
    tuned = triton.autotune(configs(32, 64), key=[])(add_block)
    tuned.fn = Unfit
    with pytest.raises(OutOfResources), ttir.execute():
        tuned[grid](torch.ones(64), 64, None)


def test_keys_may_be_none_and_arguments_named():
    tuned = triton.autotune(configs(8, 16), key=["n", "scale_ptr"])(add_block)
    assert blocks_run(tuned, 64, None, config=1, launches=2) == [16, 16]
    assert blocks_run(tuned, scale_ptr=torch.ones(1), n=64) == [8]


def test_a_configurations_hook_sees_all_arguments_at_each_launch():
    seen = []
    tuned = triton.autotune(
        configs(8, 16, pre_hook=lambda kwargs: seen.append(dict(kwargs)), num_warps=2), key=[]
    )(add_block)
    blocks_run(tuned, 64, None, config=1, launches=2)
    assert [s["BLOCK"] for s in seen] == [16, 16]
    assert seen[0].keys() >= {"x_ptr", "n", "scale_ptr", "num_warps", "num_stages"}


def test_only_compiling_compiles_every_configuration_and_runs_none():
    tuned = triton.autotune(configs(8, 16), key=[])(add_block)
    with ttir.execute() as run:
        kernels = tuned.warmup(torch.float32, 64, None, grid=(1,))
    assert len(kernels) == 2
    assert run.launches == []


@pytest.mark.parametrize("outer", ["autotune", "heuristics"])
@pytest.mark.parametrize(("n", "value"), [(64, 1 + 16), (63, 1 - 16)])
def test_heuristics_and_autotuners_nest_in_both_orders(outer, n, value):
    def even(kwargs):
        return kwargs["n"] % (16 if outer == "heuristics" else kwargs["BLOCK"]) == 0

    tune = triton.autotune(configs(8, 16), key=["n"])
    guess = triton.heuristics({"EVEN": even})
    kernel = tune(guess(add_even)) if outer == "autotune" else guess(tune(add_even))
    with ttir.execute(ttir.Options(config=1)) as run:
        x = torch.ones(64)
        kernel[grid](x, n)
    assert (x[:n] == value).all()
    assert (x[n:] == 1).all()
    assert run.launches[0].constants["EVEN"] is (n == 64)
    assert run.incidents == []


def test_heuristics_see_earlier_heuristics():
    guess = triton.heuristics(
        {"BLOCK": lambda kwargs: triton.next_power_of_2(kwargs["n"]),
         "EVEN": lambda kwargs: kwargs["n"] == kwargs["BLOCK"]}
    )  # fmt: skip
    with ttir.execute() as run:
        guess(add_even)[(1,)](torch.ones(64), 33)
    assert (run.launches[0].constants["BLOCK"], run.launches[0].constants["EVEN"]) == (64, False)
