"""Makes a kernel of an expression, runs it, and compares its result."""

import importlib.util
from math import prod

import numpy as np
import pytest
import torch

from fa_verify import ttir

HEAD = """import triton
import triton.language as tl


@triton.jit
def total(a, b):
    return a + b


@triton.jit
def earlier(a, b):
    return a


@triton.jit
def later(a, b):
    return b


@triton.jit
def larger(a, i, b, j):
    return tl.where(a > b, a, b), tl.where(a > b, i, j)


@triton.jit
def collatz(x):
    steps = 0
    while x > 1:
        if x % 2 == 0:
            x = x // 2
        else:
            x = 3 * x + 1
        steps += 1
    return steps


@triton.jit
def kernel("""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def source(expression, shapes, result):
    """A kernel that loads tiles a, b, c row-major, evaluates, and stores row-major."""
    names = "abc"[: len(shapes)]
    body = [
        f"{name} = tl.reshape(tl.load({name}_ptr + tl.arange(0, {prod(shape)})), {shape})"
        for name, shape in zip(names, shapes, strict=True)
    ]
    body.append(f"r = {expression}")
    size = prod(result)
    where = f" + tl.arange(0, {size}), tl.reshape(r, ({size},))" if result else ", r"
    body.append(f"tl.store(o_ptr{where})")
    arguments = ", ".join(["o_ptr", *(f"{name}_ptr" for name in names)])
    return f"{HEAD}{arguments}):\n" + "".join(f"    {line}\n" for line in body)


@pytest.fixture(scope="session")
def evaluate(tmp_path_factory):
    """(expression, tensors, like) -> the expression's value, a tensor like `like`."""
    folder = tmp_path_factory.mktemp("kernels")
    made = {}

    def call(expression, tensors, like):
        text = source(expression, [tuple(x.shape) for x in tensors], tuple(like.shape))
        if text not in made:
            path = folder / f"kernel_{len(made)}.py"
            path.write_text(text, encoding="utf-8")
            spec = importlib.util.spec_from_file_location(path.stem, path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            made[text] = module.kernel
        out = torch.zeros(like.shape, dtype=like.dtype)
        with ttir.execute() as run:
            made[text][(1,)](out, *tensors)
        assert run.incidents == []
        return out

    return call


def _bits(x):
    """Elements as integers, NaNs all alike."""
    x = x.contiguous()
    raw = x.view(INTEGERS[x.element_size()]).long()
    return raw if not x.dtype.is_floating_point else torch.where(x.isnan(), -1, raw)


@pytest.fixture(scope="session")
def agree():
    """(got, want, ulps): equal to the bit, or within units in the last place."""

    def check(got, want, ulps):
        if not ulps:
            assert torch.equal(_bits(got), _bits(want)), (got, want)
            return
        spacing = np.spacing(want.abs().to(got.dtype).numpy()).astype(np.float64)
        assert (np.abs(got.double().numpy() - want.numpy()) <= ulps * spacing).all(), (got, want)

    return check
