"""Which way of running a kernel finds which fault, and how fast: faults planted in right kernels.

    python benchmarks/planted_faults.py DIR [--only WORD] [--cpu-only] [--no-sanitizer]

Plants each fault in a copy of this project's kernels, or of the small ones that its selftest uses,
and verifies the copy on the same cases (three compiled forms of the default distribution) until one
fails: as any test would ("off": results against a reference, nothing else), between poison, between
unmapped pages, and on the CPU's executor. compute-sanitizer runs the first cases, its tools in
processes of their own. Prints a table, each cell with what found the fault, on which case, after
how many seconds (a warm process, compilation included), and writes it and all records to DIR.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch

from fa_verify import campaign, distribution, loader
from fa_verify.backends.base import Setup
from fa_verify.backends.fences.fence import Fence
from fa_verify.case import Case
from fa_verify.pool import Pool
from fa_verify.ttir.memory.views import span_of
from fa_verify.zoo.defects import KERNELS

CASES, SANITIZED = 24, 6
FORMS = (3, 4, 5)
OWN = Path("kernels")
SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
MODES = ("off", "poison", "page", "CPU executor")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One row: a patch (file, old, new) and the cases that can show it, if few do."""

    name: str
    patch: tuple[tuple[str, str, str], ...]
    target: str = "launch.py:flash"
    source: Path = KERNELS
    cases: tuple[str, ...] = ()
    tools: tuple[str, ...] = ("memcheck", "initcheck")


LAST = "(tl.program_id(0) == tl.num_programs(0) - 1)"
FAULTS = (
    Fault(
        name="read past the end (K without a mask; what it brings is masked later)",
        patch=(
            (
                "forward.py",
                "mask=inside(keys, seqlen_k, columns, head_dim)",
                "mask=(columns < head_dim)[None, :]",
            ),
        ),
    ),
    Fault(
        name="write past the end (two rows of lse, by the last program)",
        patch=(
            (
                "forward.py",
                "row_lse, mask=rows < seqlen_q)",
                f"row_lse, mask=(rows < seqlen_q) | ({LAST} & (rows < seqlen_q + 2)))",
            ),
        ),
    ),
    Fault(
        name="read before the start (a prefetch that begins an element early)",
        patch=(
            (
                "forward.py",
                "    begin = 0\n",
                "    tl.load(q_head - 1, volatile=True)\n    begin = 0\n",
            ),
        ),
    ),
    Fault(
        name="next head inside the storage (three rows of V; they weigh nothing)",
        patch=(
            (
                "forward.py",
                "mask=inside(keys, seqlen_k, columns_v, head_dim_v)",
                f"mask=inside(keys, seqlen_k + tl.where({LAST}, 0, 3), columns_v, head_dim_v)",
            ),
        ),
    ),
    Fault(
        name="stale workspace (parts that no split wrote are merged; they weigh nothing)",
        target="launch.py:decode_forward",
        patch=(
            (
                "decode.py",
                "mask=seen[:, None] & (columns < head_dim_v)[None, :]",
                "mask=(rows < seqlen_q)[:, None] & (columns < head_dim_v)[None, :]",
            ),
        ),
    ),
    Fault(
        name="unwritten tail (the last partial block of rows is forgotten)",
        patch=(
            (
                "forward.py",
                "blocks = tl.cdiv(seqlen_q, BLOCK_M)",
                "blocks = tl.maximum(seqlen_q // BLOCK_M, 1)",
            ),
            (
                "launch.py",
                'triton.cdiv(problem.seqlen_q, FORWARD["BLOCK_M"])\n        forward_kernel[',
                'max(problem.seqlen_q // FORWARD["BLOCK_M"], 1)\n        forward_kernel[',
            ),
        ),
    ),
    Fault(
        name="race on dQ (load, add, store)",
        target="launch.py:atomic",
        patch=(
            (
                "dkdv.py",
                """                tl.atomic_add(
                    places(dq_head, rows, columns, head_dim, 1),
                    tl.dot(ds, k_tile, input_precision=PRECISION) * softmax_scale,
                    mask=inside(rows, padded, columns, head_dim),
                    sem="relaxed",
                )
""",
                """                where = places(dq_head, rows, columns, head_dim, 1)
                within = inside(rows, padded, columns, head_dim)
                before = tl.load(where, mask=within, other=0.0)
                added = tl.dot(ds, k_tile, input_precision=PRECISION) * softmax_scale
                tl.store(where, before + added, mask=within)
""",
            ),
        ),
        tools=("memcheck", "racecheck"),
    ),
    Fault(
        name="missing barrier, its effect (a block meets the V of the block before)",
        patch=(
            (
                "forward.py",
                "places(v_head, keys, columns_v, stride_vn, stride_vd)",
                (
                    "places(v_head, tl.where(first_key > begin, keys - BLOCK_N, keys), columns_v, "
                    "stride_vn, stride_vd)"
                ),
            ),
        ),
        tools=("memcheck", "racecheck"),
    ),
    Fault(
        name="a configuration that skips a tile (16 rows: the first block of keys)",
        source=OWN,
        target="flash_attention.py:flash",
        patch=(
            (
                "forward.py",
                "        for step in tl.range(begin, end, BLOCK_N):\n",
                (
                    "        for step in tl.range(\n"
                    "            begin + (BLOCK_N if BLOCK_M == 16 else 0), end, BLOCK_N\n"
                    "        ):\n"
                ),
            ),
        ),
    ),
    Fault(
        name="i32 overflow (a row times its stride)",
        patch=(
            ("tiles.py", "rows.to(tl.int64)[:, None] * stride_row", "rows[:, None] * stride_row"),
        ),
        cases=("pass=fwd s=40x40 d=16 dtype=float16 k=bhsd.s60000000 seed=1",),
    ),
)


def plant(fault: Fault, folder: Path) -> str:
    """The target of a copy with the fault."""
    shutil.copytree(fault.source, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, old, new in fault.patch:
        text = (folder / name).read_text(encoding="utf-8")
        if text.count(old) != 1:
            sys.exit(f"{fault.name}: {old!r} occurs {text.count(old)} times in {name}")
        (folder / name).write_text(text.replace(old, new), encoding="utf-8")
    return f"{folder}/{fault.target}"


def cases_of(fault: Fault, kernel) -> list[Case]:
    if fault.cases:
        return [Case.parse(text) for text in fault.cases]
    return distribution.draw(0, CASES, kernel.takes, forms=FORMS)


def setup_of(mode: str, index: int) -> Setup:
    if mode == "CPU executor":
        return Setup(config=index)
    fence = Fence(mode=mode, start=mode == "page" and index // len(FORMS) % 2 == 1)
    return Setup(backend="cuda", config=index, float_model="hardware", fence=fence)


def hunt(pool: Pool, fault: Fault, kernel, mode: str) -> tuple[str, list]:
    """What a mode says of a fault, and its records."""
    begin, records = time.monotonic(), []
    for index, case in enumerate(cases_of(fault, kernel)):
        setup = setup_of(mode, index)
        record = pool.result(pool.submit(kernel, case, setup), kernel, case, setup)
        records.append(record)
        if record.verdict not in ("pass", "unsupported", "inconclusive"):
            seconds = time.monotonic() - begin
            found = ", ".join(dict.fromkeys(f.title for f in record.failures)) or record.verdict
            found += f" (case {index + 1}, {seconds:.1f} s)"
            break
    else:
        found = ""
    print(f"{mode}: {fault.name}: {found or 'not found'}", flush=True)
    return found, records


def sanitize(fault: Fault, target: str, tool: str) -> str:
    """What a tool of compute-sanitizer says of a fault."""
    begin = time.monotonic()
    command = [SANITIZER, "--tool", tool, "--error-exitcode", "9", "--print-limit", "3"]
    command += [sys.executable, __file__, "--child", target, "--only", fault.name]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=100, check=False
        )
    except subprocess.TimeoutExpired:
        return "no end in 100 s"
    kinds = collections.Counter(re.findall(r"========= ([A-Z][a-z]+ [a-z _]+)", done.stdout))
    kinds.pop("Target application returned an error", None)
    seconds = time.monotonic() - begin
    says = next((kind for kind in kinds if "rror" not in kind), "") or next(iter(kinds), "")
    found = ""
    if done.returncode == 9:
        found = f"{tool}: {says.strip()} ({seconds:.0f} s)"
    elif done.returncode:
        found = f"{tool} ended with {done.returncode}: {done.stderr.strip()[-200:]!r}"
    print(f"{tool}: {fault.name}: {found or f'not found in {seconds:.0f} s'}", flush=True)
    return found


def child(target: str, fault: Fault) -> None:
    """Run the first cases, inputs in allocations that end with their last element."""
    from fa_verify.backends.call import call
    from fa_verify.inputs import materialise
    from fa_verify.ttir.launch.autotune import pinned

    (kernel,) = loader.load(target)
    for index, case in enumerate(cases_of(fault, kernel)[:SANITIZED]):
        tensors, given = {}, materialise(case)
        for name, x in given.named():
            flat = x.as_strided((span_of(x),), (1,)).to("cuda", copy=True)
            tensors[name] = flat.as_strided(x.shape, x.stride(), 0)
        with pinned(index, {}):
            call(kernel, case.problem, given.having(tensors), backward=case.backward)
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default=Path("planted-faults"))
    parser.add_argument("--only", default="")
    parser.add_argument("--cpu-only", action="store_true")
    parser.add_argument("--no-sanitizer", action="store_true")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--child", default="")
    options = parser.parse_args()
    faults = [fault for fault in FAULTS if options.only in fault.name]
    if options.child:
        child(options.child, faults[0])
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    kernels = options.folder / "kernels"
    shutil.rmtree(kernels, ignore_errors=True)
    targets = {fault: plant(fault, kernels / f"{i:02d}") for i, fault in enumerate(faults)}
    modes = MODES[-1:] if options.cpu_only else MODES
    pool = Pool(options.workers, timeout=60.0, memory=campaign.Plan().memory, cap=False)
    # One after the other: a module is loaded once, by whoever comes first.
    loaded = {fault: loader.load(target)[0] for fault, target in targets.items()}
    cells: dict[tuple[str, str], str] = {}
    with ThreadPoolExecutor(options.workers) as threads:
        started = {
            (fault.name, mode): threads.submit(hunt, pool, fault, loaded[fault], mode)
            for mode in modes
            for fault in faults
        }
        with (options.folder / "records.jsonl").open("wb") as out:
            for key, future in started.items():
                cells[key], records = future.result()
                out.write(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
        pool.stop()
        show(options.folder, faults, modes, cells)
        if not options.cpu_only and not options.no_sanitizer:
            ran = {
                fault.name: [
                    threads.submit(sanitize, fault, targets[fault], tool) for tool in fault.tools
                ]
                for fault in faults
            }
            for name, futures in ran.items():
                said = [future.result() for future in futures]
                cells[name, "compute-sanitizer"] = "; ".join(filter(None, said))
            show(options.folder, faults, (*modes[:3], "compute-sanitizer", modes[3]), cells)
    shutil.rmtree(kernels, ignore_errors=True)


def show(folder: Path, faults, modes, cells) -> None:
    """Print the table and write it."""
    lines = [f"| planted | {' | '.join(modes)} |", f"|{'---|' * (len(modes) + 1)}"]
    for fault in faults:
        row = [fault.name, *(cells[fault.name, mode] or "not found" for mode in modes)]
        lines.append(f"| {' | '.join(row)} |")
    text = "\n".join(lines) + "\n"
    (folder / "table.md").write_text(text, encoding="utf-8")
    print(text, flush=True)


if __name__ == "__main__":
    main()
