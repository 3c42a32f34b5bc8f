"""The folder ``kernels/`` as a private package, as fa_verify's loader sees it."""

import functools
import importlib.util
import sys
from pathlib import Path

import pytest

from fa_verify import ttir

FOLDER = Path(__file__).resolve().parents[2] / "kernels"
NAME = "_kernels_under_test"


def load(name):
    """The folder as the package `name`; ``load(name)("attention")`` is kernels/attention.py."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
        )
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return lambda module: importlib.import_module(f"{name}.{module}")


@pytest.fixture(scope="session")
def kernels():
    """``kernels("attention")`` is the module kernels/attention.py."""
    return load(NAME)


@pytest.fixture
def another_copy():
    """The same folder under another name."""
    return load("_kernels_loaded_twice")


@pytest.fixture
def on_the_cpu(kernels, monkeypatch):
    """Let each operator run on the CPU by itself, so that torch.compile meets no executor.

    Returns the names of the kernels that ran, so far.
    """
    ran = []

    def executed(function):
        @functools.wraps(function)
        def run(*args, **terms):
            with ttir.execute() as run:
                result = function(*args, **terms)
            assert run.incidents == []
            ran.extend(launch.kernel for launch in run.launches)
            return result

        return run

    operators = kernels("operators")
    for name in ("attention_forward", "attention_backward", "attention_backward_atomic"):
        monkeypatch.setattr(operators, name, executed(getattr(operators, name)))
    decoding = kernels("decode_attention")
    monkeypatch.setattr(decoding, "attention_with_cache", executed(decoding.attention_with_cache))
    fp8 = kernels("attention_fp8")
    monkeypatch.setattr(fp8, "attention_forward_fp8", executed(fp8.attention_forward_fp8))
    # What is noted inside an execution cannot be replayed outside.
    monkeypatch.setattr(kernels("replay"), "pinned", lambda: True)
    for module in (operators, kernels("sdpa")):
        monkeypatch.setattr(module, "triton_runs_on", lambda device_type: device_type == "cpu")
    return ran
