"""The "hopper-bits" model gives what an H200 gave, to the bit, for every probe.

h200_digests.json holds a digest of what each probe of benchmarks/chip_numbers.py returned on the
card (torch 2.11, Triton 3.6); its `compare` says how many elements of a recording differ.
"""

import hashlib
import json
import sys
from pathlib import Path

import pytest
import torch

from fa_verify import ttir
from fa_verify.ttir import FLOAT_MODELS

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import chip_numbers
import chip_probes

DIGESTS = json.loads((Path(__file__).parent / "h200_digests.json").read_text())


def digest(raw, dtype):
    """Of the numbers: zeros and NaN lose their sign, as the probes' order of zeros is not fixed."""
    values = torch.from_numpy(raw.copy()).view(dtype)
    if dtype.is_floating_point:
        wide = values.to(torch.float64)
        values = torch.where(wide.isnan(), torch.nan, wide + 0.0)
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]


def probed(label, run, model):
    with ttir.execute(ttir.Options(float_model=model, sanitize=False)):
        result = run("cpu")
    return digest(chip_numbers.bits(result), result.dtype)


@pytest.mark.parametrize("family", ["dot/", "function/", "arithmetic/", "cast/", "copy/"])
def test_an_h200_gave_the_same_bits(family):
    model = FLOAT_MODELS["hopper-bits"]
    wrong = [
        label
        for label, run in chip_probes.probes(family)
        if "m=128" not in label and probed(label, run, model) != DIGESTS[label]
    ]  # fmt: skip
    assert wrong == []


def test_the_default_does_not_pretend_to():
    default = FLOAT_MODELS["hopper"]
    probes = dict(chip_probes.probes("fp16->fp32 wide m=16"))
    same = [label for label, run in probes.items() if probed(label, run, default) == DIGESTS[label]]
    assert len(probes) == 2
    assert same == []
