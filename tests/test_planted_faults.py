"""The faults of `benchmarks/planted_faults.py` still have a place in the kernels."""

import sys
from pathlib import Path

import pytest

from fa_verify import loader

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import planted_faults


@pytest.mark.parametrize("fault", planted_faults.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted_and_loaded(fault, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1])
    (kernel,) = loader.load(planted_faults.plant(fault, tmp_path / "kernels"))
    assert planted_faults.cases_of(fault, kernel)
