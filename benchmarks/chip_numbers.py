"""The chip's arithmetic against every float model of the executor.

    python benchmarks/chip_numbers.py record DIR --device cuda [--tables]
    python benchmarks/chip_numbers.py compare DIR

`record` runs small kernels on a device ("cpu" is the executor itself, under --model) and keeps what
they returned; inputs come from seeds. `compare` runs the same kernels on the executor under each
float model, and says which share of the elements is the same to the bit and how far the others are,
in units of the last place, and how many are NaN on one side
only. --tables also records the elementary functions of all mantissas.
"""

import argparse
import json
from pathlib import Path

import chip_kernels
import numpy as np
import torch
import triton
from chip_probes import BITS, elementwise, probes

from fa_verify import ttir

MODELS = {
    "default": ttir.FloatModel(),
    "correct": ttir.FloatModel(functions="correct"),
    "exact": ttir.FloatModel(accumulation="exact"),
    "hardware": ttir.FloatModel(
        accumulation="tensor_core", functions="stepwise", contraction="fused"
    ),
    "flush": ttir.FloatModel(subnormals="flush"),
    "nearest_away": ttir.FloatModel(accumulation="tensor_core", tf32="nearest_away"),
}


def bits(result):
    flat = result.cpu().contiguous().view(-1)
    return flat.view(BITS[flat.element_size()]).numpy()


def ordered(raw):
    """Bits of floats as integers in the order of the numbers."""
    wide_ = raw.astype(np.int64)
    low = np.int64(np.iinfo(raw.dtype).min) if raw.dtype.kind == "i" else np.int64(-128)
    if raw.dtype.kind == "u":
        wide_ = wide_.astype(np.int8).astype(np.int64)
    return np.where(wide_ < 0, low - wide_, wide_)


def measured(got, chip, dtype):
    """Share of elements with the same bits, the largest distance, and NaN against number."""
    same = got == chip
    if not dtype.is_floating_point:
        return {"equal": float(same.mean()), "ulps": int(np.abs(got.astype(np.int64) - chip).max())}
    nan = [
        torch.from_numpy(x.copy()).view(dtype).to(torch.float64).isnan().numpy()
        for x in (got, chip)
    ]
    both, one = nan[0] & nan[1], nan[0] ^ nan[1]
    distance = np.where(nan[0] | nan[1], 0, np.abs(ordered(got) - ordered(chip)))
    return {
        "equal": float((same | both).mean()), "ulps": int(distance.max()),
        "nan_or_number": int(one.sum()), "nan_bits": int((both & ~same).sum()),
    }  # fmt: skip


def record(device, folder, model, only, *, tables):
    results = {}
    for label, run in probes(only):
        if device == "cpu":
            with ttir.execute(ttir.Options(float_model=MODELS[model], sanitize=False)):
                raw = bits(run("cpu"))
        else:
            try:
                raw = bits(run(device))
            except (RuntimeError, triton.CompilationError) as error:
                print(f"{label}: {type(error).__name__} {str(error)[:200]}")
                continue
        results[label] = np.diff(raw, prepend=raw.dtype.type(0))  # sorted inputs: small differences
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / "chip_numbers.npz", **results)
    if tables:
        np.savez_compressed(folder / "chip_tables.npz", **function_tables(device))
    print(f"{len(results)} probes recorded on {device}")


def function_tables(device):
    """Distance from the correctly rounded result, for all mantissas of one or two binades."""
    mantissas = (np.arange(1 << 23, dtype=np.uint32) | 0x3F800000).view(np.float32)
    two = np.concatenate([mantissas, mantissas * np.float32(2)])
    fractions = np.arange(1 << 23).astype(np.float32) * np.float32(2**-23)
    inputs = {
        "exp2": fractions, "rsqrt": two, "sqrt": two, "reciprocal": mantissas,
        "exp2_negative": -fractions,
    }  # fmt: skip
    exact = {"exp2": np.exp2, "exp2_negative": np.exp2, "sqrt": np.sqrt,
             "rsqrt": lambda x: 1 / np.sqrt(x), "reciprocal": lambda x: 1 / x}  # fmt: skip
    found = {}
    for op, x in inputs.items():
        run = elementwise(
            chip_kernels.unary_kernel, lambda x=x: [torch.from_numpy(x)], "fp32", op.split("_")[0]
        )
        right = exact[op](x.astype(np.float64)).astype(np.float32)
        found[op] = (bits(run(device)) - right.view(np.int32)).astype(np.int8)
    return found


def compare(folder, only, names):
    table = {}
    with np.load(folder / "chip_numbers.npz") as saved:
        chip = {label: np.cumsum(saved[label], dtype=saved[label].dtype) for label in saved.files}
    for label, run in probes(only):
        if label not in chip:
            continue
        row = table[label] = {}
        for name in names:
            with ttir.execute(ttir.Options(float_model=MODELS[name], sanitize=False)):
                result = run("cpu")
            row[name] = measured(bits(result), chip[label], result.dtype)
        print(f"{label:44}", *[
            f"{name} {r['equal']:9.4%} {r['ulps']:>7} {r.get('nan_or_number') or '':5}"
            for name, r in row.items()
        ])  # fmt: skip
    (folder / "chip_numbers.json").write_text(json.dumps(table, indent=1))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="hardware", choices=MODELS)
    parser.add_argument("--models", default="default,hardware")
    parser.add_argument("--only", default="", help="part of a probe's name")
    parser.add_argument("--tables", action="store_true")
    args = parser.parse_args()
    if args.what == "record":
        record(args.device, args.folder, args.model, args.only, tables=args.tables)
    else:
        compare(args.folder, args.only, args.models.split(","))


if __name__ == "__main__":
    main()
