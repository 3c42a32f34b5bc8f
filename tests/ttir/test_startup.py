"""What a process pays before its first kernel runs."""

import os
import subprocess
import sys
from pathlib import Path

import triton

from fa_verify.ttir.launch.compiler import installation

CODE = """
import sys
import torch
from fa_verify import ttir
from tests.ttir.test_launcher import fill

with ttir.execute() as run:
    fill[(4,)](torch.empty(64), 64, 1.0)
assert len(run.launches) == 1
assert "torch._dynamo" not in sys.modules
"""


def test_a_launch_does_not_load_torch_compile():
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    result = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_compiled_kernels_are_kept_for_one_installation(tmp_path, monkeypatch):
    source = tmp_path / "compiler" / "code_generator.py"
    source.parent.mkdir()
    source.write_text("1", encoding="utf-8")
    monkeypatch.setattr(triton, "__file__", str(tmp_path / "__init__.py"))
    keys = [installation.__wrapped__()]
    os.utime(source, ns=(1, 1))
    keys.append(installation.__wrapped__())
    keys.append(installation.__wrapped__())
    (source.parent / "passes.py").touch()
    keys.append(installation.__wrapped__())
    assert keys[1] == keys[2]
    assert len(set(keys)) == 3
    assert all(key.startswith(triton.__version__) for key in keys)
