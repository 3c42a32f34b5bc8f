"""The folder ``kernels/`` as a private package, as fa_verify's loader sees it."""

import importlib.util
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "kernels"
NAME = "_kernels_under_test"


@pytest.fixture(scope="session")
def kernels():
    """``kernels("attention")`` is the module kernels/attention.py."""
    if NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            NAME, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
        )
        sys.modules[NAME] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[NAME])
    return lambda module: importlib.import_module(f"{NAME}.{module}")
