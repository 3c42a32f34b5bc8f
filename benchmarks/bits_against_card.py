"""The project's own kernels on a card and on the executor, element by element.

    python benchmarks/bits_against_card.py record DIR --device cuda
    python benchmarks/bits_against_card.py compare DIR

`record` keeps what kernels/flash_attention.py returned ("cpu" is the executor itself). `compare`
runs the same cases on the executor under each float model; the backward pass is handed the recorded
o and lse, so that it is compared by itself. Distances are in units of the last place.
"""

import argparse
import contextlib
import functools
from pathlib import Path

import numpy as np
import torch
from chip_numbers import MODELS, bits, ordered

from fa_verify import Outputs, loader, ttir
from fa_verify.case import Case
from fa_verify.inputs import materialise
from fa_verify.ttir.launch.autotune import pinned

DTYPES = ("float16", "bfloat16", "float32 dot=ieee", "float32 dot=tf32", "float32 dot=tf32x3")
SHAPES = ("s=64x80 d={}", "s=64x80 d={} mask=causal")
# Families whose probabilities do not depend on how exp2 is computed: 2^0, and one key.
EXACT = ("s=64x80 d=64 qk.values=zeros", "s=64x1 d=80", "s=32x64 d=128 mask=causal qk.values=zeros")
CASES = [
    f"pass=bwd h=1/1 {shape} dtype={dtype} seed=5"
    for dtype in DTYPES
    for shape in [s.format(d) for s in SHAPES for d in (64, 80, 128)] + list(EXACT)
]
TENSORS = ("o", "lse", "dq", "dk", "dv")
STEPS = (0, 1, 2, 4, 16, 64)


def run(line, device, outputs=None):
    """Tensors of one case by name; `outputs` goes to the backward pass instead of its own."""
    case = Case.parse(line)
    x = materialise(case, device)
    with contextlib.nullcontext() if device == "cpu" else pinned(0, {}):
        kernel = load()
        found = kernel.forward(case.problem, x.q, x.k, x.v)
        grads = kernel.backward(case.problem, x.q, x.k, x.v, outputs or found, x.do)
    return {name: getattr(found if name in ("o", "lse") else grads, name) for name in TENSORS}


@functools.lru_cache
def load():
    (kernel,) = loader.load("kernels/flash_attention.py:flash")
    return kernel


def executor(line, model, outputs=None):
    with ttir.execute(ttir.Options(float_model=MODELS[model], sanitize=False)):
        return run(line, "cpu", outputs)


def record(folder, device, model):
    found = {}
    for number, line in enumerate(CASES):
        tensors = executor(line, model) if device == "cpu" else run(line, device)
        found |= {f"{number}/{name}": bits(tensor) for name, tensor in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / "bits_against_card.npz", **found)
    print(f"{len(CASES)} cases recorded on {device}")


def compare(folder, models):
    with np.load(folder / "bits_against_card.npz") as saved:
        card = dict(saved)
    print(f"{'case':62} {'model':10} {'tensor':6} share within {STEPS} ulp, largest")
    for number, line in enumerate(CASES):
        outputs = None
        for model in models:
            shapes = executor(line, model, outputs)
            if outputs is None:
                outputs = Outputs(*[
                    torch.from_numpy(card[f"{number}/{name}"]).view(shapes[name].dtype)
                    .reshape(shapes[name].shape) for name in ("o", "lse")
                ])  # fmt: skip
                shapes = executor(line, model, outputs)
            for name, tensor in shapes.items():
                distance = np.abs(ordered(bits(tensor)) - ordered(card[f"{number}/{name}"]))
                shares = [f"{(distance <= step).mean():8.3%}" for step in STEPS]
                print(f"{line:62} {model:10} {name:6}", *shares, distance.max())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="hardware", choices=MODELS)
    parser.add_argument("--models", default="default,hardware")
    args = parser.parse_args()
    if args.what == "record":
        record(args.folder, args.device, args.model)
    else:
        compare(args.folder, args.models.split(","))


if __name__ == "__main__":
    main()
