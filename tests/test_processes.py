"""The process that workers are forked from is started before the command has imported much."""

import subprocess
import sys

_EARLY = """
import os
import sys
from multiprocessing import forkserver

from fa_verify import cli, processes

processes.start()
assert not {"torch", "triton"} & set(sys.modules)
first = forkserver._forkserver._forkserver_pid
assert first

import pebble  # as `Pool` does, with a worker's imports in place

with pebble.ProcessPool(max_workers=1, context=processes.context()) as pool:
    assert pool.schedule(os.getppid).result() == first
    assert pool.schedule(eval, args=("'torch' in __import__('sys').modules",)).result()
assert forkserver._forkserver._forkserver_pid == first
"""


def test_workers_are_forked_from_a_process_that_began_before_torch_was_imported():
    done = subprocess.run(
        [sys.executable, "-c", _EARLY], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
