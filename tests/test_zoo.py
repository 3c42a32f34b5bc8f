"""The tables of the zoo, the kernels that defects are planted in, and the planting."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from fa_verify import distribution, loader
from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.case import Case
from fa_verify.errors import InvalidInputError
from fa_verify.verify import verify
from fa_verify.zoo.defects import KERNELS, Defect, planted, rows

torch.set_num_threads(1)  # as the workers of a campaign do

ROWS = {row.name: row for row in rows()}
RIGHT = (
    *(f"launch.py:{name}" for name in ("flash", "atomic", "decode_forward", "paged_forward")),
    *(f"launch.py:{name}" for name in ("varlen_forward", "masked_forward")),
    "launch_terms.py:terms",
    "launch_fp8.py:fp8",
)


def verdicts(target, cases, seed=3):
    (kernel,) = loader.load(target)
    backend = CpuBackend()
    for case in distribution.draw(seed, cases, kernel.takes, max_elements=40_000):
        yield verify(case, kernel, Setup(), backend)


@pytest.mark.parametrize("name", RIGHT)
def test_the_right_kernels_pass(name):
    records = list(verdicts(f"{KERNELS / name}", 6))
    assert {record.verdict for record in records} <= {"pass", "inconclusive"}, records


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("kvblocks-floor-div", "numerics"),
        ("dkdv-store-no-row-mask", "memory"),
        ("bwd-sq-gg-sk-nan", "unwritten"),
        ("empty-lse-plus-inf", "nonfinite"),
        ("flex-full-vs-partial", "numerics"),
        ("flex-paged-upper-bound", "memory"),
        ("splitkv-max-len", "memory"),
        ("page-offsets-int32", "memory"),
        ("overprovisioned-tiles", "memory"),
        ("crossattn-padding", "memory"),
        ("duplicate-cu-seqlens", "memory"),
        ("custom-mask-bound", "numerics"),
        ("documents-packed-diagonal", "numerics"),
        ("documents-ignored", "numerics"),
        ("gaps-ignored", "numerics"),
        ("dbias-broadcast", "numerics"),
        ("sink-empty-row", "nonfinite"),
        ("lse-grad-ignored", "numerics"),
        ("counter-not-advanced", "dropout"),
    ],
)
def test_a_planted_defect_is_caught(name, check, tmp_path):
    (target,) = planted([ROWS[name]], tmp_path).values()
    assert any(check == f.check for record in verdicts(target, 30) for f in record.failures)


def test_every_patch_fits_the_kernels(tmp_path):
    defects = [row for row in ROWS.values() if row.patch]
    assert len(defects) > 100
    assert len(set(planted(defects, tmp_path).values())) == len(defects)


def test_a_patch_that_no_longer_fits_is_misuse(tmp_path):
    stale = dataclasses.replace(ROWS["scale-missing"], patch=(("launch.py", "no such text", ""),))
    with pytest.raises(InvalidInputError, match="occurs 0 times"):
        planted([stale], tmp_path)


def test_a_defect_of_a_dtype_is_planted_in_a_kernel_of_that_dtype(tmp_path):
    defect = ROWS["l-in-fp16 (bfloat16)"]
    (kernel,) = loader.load(planted([defect], tmp_path)[defect])
    assert kernel.capabilities.dtypes == ("bfloat16",)


@pytest.mark.parametrize("row", [row for row in ROWS.values() if row.tag == "meta"])
def test_the_test_of_a_meta_row_exists(row):
    file, _, name = row.test.partition("::")
    source = (Path(__file__).parents[1] / file).read_text(encoding="utf-8")
    assert re.search(rf"^def {name}\(", source, re.MULTILINE)


@pytest.mark.parametrize(
    "fields",
    [
        {"tag": "ttir"},
        {"tag": "gpu-only"},
        {"tag": "meta"},
        {"tag": "not-yet", "why": "later", "patch": (("launch.py", "a", "b"),)},
        {"tag": "other", "why": "never"},
    ],
)
def test_a_row_says_how_it_is_covered(fields):
    with pytest.raises(InvalidInputError, match="tag="):
        Defect(name="row", defect="something", **fields)


def test_the_public_reports_are_all_there():
    reported = [row for row in ROWS.values() if row.source]
    assert len({row.name.partition(" (")[0] for row in reported}) == 113
    assert all(row.defect.endswith(".") for row in ROWS.values())


def test_bits_do_not_depend_on_how_a_tile_was_loaded():
    # In shuffled order another path loaded a transposed k, and BLAS then summed differently.
    (kernel,) = loader.load(f"{KERNELS / 'launch.py'}:decode_forward")
    line = "pass=fwd s=767x337 d=250 dtype=float16 k=bhds v=bshd qk.values=row-shift seed=984570050"
    assert verify(Case.parse(line), kernel, Setup(), CpuBackend()).verdict == "pass"


def test_a_report_says_where_it_was_made():
    for row in ROWS.values():
        for one in filter(None, row.source.split("; ")):
            assert re.match(r"[\w.-]+/[\w.-]+(#\d+| )", one) or one == "FV#1460", (row.name, one)


def test_a_row_that_sees_no_key_and_has_no_sink_gives_no_nan():
    line = (
        "pass=bwd h=8/8 s=18x1 d=1 dtype=float16 mask=l1.r1.topleft sinks=1 sinks.values=off seed=3"
    )
    (kernel,) = loader.load(f"{KERNELS / 'launch_terms.py'}:terms")
    assert verify(Case.parse(line), kernel, Setup(), CpuBackend()).verdict == "pass"
