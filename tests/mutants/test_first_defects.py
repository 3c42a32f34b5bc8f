"""The first defects: small textual variants of the real kernels, caught and named within 100 cases.

Each is drawn from the default distribution, shrunk as a campaign shrinks, and diagnosed on the
shrunken case. `pytest -rP` shows cases to detection, the shrunken case, and the diagnosis.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path

import pytest
import torch

from fa_verify import Kernel, distribution, loader, strategies
from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.verify import verify

KERNELS = Path(__file__).parents[2] / "kernels"
SEED = 2026
CASES = 100
SHRINK_SECONDS = 8.0
CONFIGS = 4

torch.set_num_threads(1)  # as the workers of a campaign do


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A defect.

    Attributes:
        name: What is wrong.
        said: What the diagnosis must say.
        edits: (old, new) texts; each old must occur exactly once in kernels/.
        kernel: The kernel that has the defect.
        dtypes: Restricts the kernel's declared dtypes, where the defect is one of a dtype.
    """

    name: str
    said: str
    edits: tuple[tuple[str, str], ...]
    kernel: str = "flash"
    dtypes: tuple[str, ...] = ()


def cut(head_dim: int) -> tuple[str, str]:
    """A head_dim's tail is forgotten by the launcher."""
    old = "    return block, tail, block + tail > head_dim"
    return old, old.replace("tail,", f"0 if head_dim == {head_dim} else tail,")


def unmasked(arguments: str, rows: str, then: str) -> tuple[str, str]:
    """A load without its row mask; what follows it tells it from its likes."""
    end = f"  # fmt: skip\n{then}"
    old = arguments.format(rows) + end
    return old, arguments.format("False") + end


Q_LOAD = "BLOCK_M, BLOCK_D, TAIL_D, {}, PADDED_D, VECTOR,\n    )"
K_LOAD = "BLOCK_N, BLOCK_D, TAIL_D, {}, PADDED_D, VECTOR,\n            )"
V_LOAD = "BLOCK_N, BLOCK_DV, TAIL_DV, {}, PADDED_DV, VECTOR,\n            )"
ROUND_ACC = "            acc = acc.to(tl.float16).to(tl.float32)\n"

MUTANTS = (
    Mutant("BLOCK_D = 64 with head_dim 80", "BLOCK_D=64", (cut(80),)),
    Mutant("BLOCK_D = 64 with head_dim 96", "BLOCK_D=64", (cut(96),)),
    Mutant(
        "no boundary handling in the load of q",
        "no boundary handling: the load of q",
        (unmasked(Q_LOAD, "True", "    if SOFTCAP"),),
    ),
    Mutant(
        "no boundary handling in the load of k",
        "no boundary handling: the load of k",
        (unmasked(K_LOAD, "MASKED == 1", "            scores"),),
    ),
    Mutant(
        "no boundary handling in the load of v",
        "no boundary handling: the load of v",
        (unmasked(V_LOAD, "MASKED == 1", "            acc"),),
    ),
    Mutant(
        "zero-padded keys counted in the softmax denominator",
        "zero-padded keys count in the softmax denominator",
        (("    visible = keys < seqlen_k\n", "    visible = keys >= 0\n"),),
    ),
    Mutant(
        "o addressed with q's strides",
        "o is addressed with q's strides",
        (("*v.stride(), *o.stride()[:3], **", "*v.stride(), *q.stride()[:3], **"),),
    ),
    Mutant(
        "lse stored without a mask",
        "the store of lse",
        (("row_lse, mask=queries < seqlen_q)", "row_lse)"),),
    ),
    Mutant(
        "rescale factor omitted from l",
        "the rescale factor is omitted from l",
        (("l = l * rescale + tl.sum(p, 1)", "l = l + tl.sum(p, 1)"),),
    ),
    Mutant(
        "rescale factor omitted from acc",
        "the rescale factor is omitted from acc",
        (
            ("            acc = acc * rescale[:, None]\n", ""),
            ("            acc_tail = acc_tail * rescale[:, None]\n", ""),
        ),
    ),
    Mutant(
        "m starting at 0",
        "the running maximum m starts at 0",
        (('m = tl.full((BLOCK_M,), float("-inf"),', "m = tl.full((BLOCK_M,), 0.0,"),),
    ),
    Mutant(
        "accumulation in fp16",
        "the accumulator acc is kept in float16",
        (("            m = m_new\n", "            m = m_new\n" + ROUND_ACC),),
        dtypes=("float16",),
    ),
    Mutant(
        "TF32 where ieee was asked",
        "the dots are in TF32",
        (('problem.dot_precision if problem.dtype == "float32" else "tf32"', '"tf32"'),),
        dtypes=("float32",),
    ),
    Mutant(
        "scale missing",
        "softmax_scale is missing",
        (('"softmax_scale": _scale(problem.scale),', '"softmax_scale": 1.0,'),),
    ),
    Mutant(
        "causal off by one",
        "the causal mask is off by one: query i also sees the key after its diagonal",
        (("right = 0 if mask.causal", "right = 1 if mask.causal"),),
    ),
    Mutant(
        "dq missing scale",
        "dq lacks the factor softmax_scale",
        (("dq_acc * softmax_scale, dq_tail * softmax_scale", "dq_acc, dq_tail"),),
    ),
    Mutant(
        "delta omitted",
        "delta = sum(do * o) is omitted",
        (("(dp - row_delta[None, :])", "dp"), ("(dp - row_delta[:, None])", "dp")),
    ),
    Mutant(
        "dq by load, add and store",
        "by load, add and store",
        (
            (
                'tl.atomic_add(pointers, dq_acc, mask=inside, sem="relaxed")',
                "tl.store(pointers, tl.load(pointers, inside) + dq_acc, mask=inside)",
            ),
        ),
        kernel="flash_atomic",
    ),
)


def mutate(mutant: Mutant, folder: Path) -> Kernel:
    """A copy of kernels/ with the defect, loaded by path."""
    copy = folder / "kernels"
    shutil.copytree(KERNELS, copy, ignore=shutil.ignore_patterns("__pycache__"))
    files = sorted(copy.glob("*.py"))
    for old, new in mutant.edits:
        counts = {file.name: file.read_text().count(old) for file in files}
        assert sum(counts.values()) == 1, f"{old!r} occurs {counts}: adapt the mutant to kernels/"
        (file,) = (file for file in files if counts[file.name])
        file.write_text(file.read_text().replace(old, new))
    (kernel,) = loader.load(f"{copy / 'flash_attention.py'}:{mutant.kernel}")
    if mutant.dtypes:
        narrowed = dataclasses.replace(kernel.capabilities, dtypes=mutant.dtypes)
        kernel = dataclasses.replace(kernel, capabilities=narrowed)
    return kernel


def first_failure(kernel: Kernel):
    """How many cases it took, the case, and its record."""
    backend = CpuBackend()
    for index, case in enumerate(distribution.draw(SEED, CASES, kernel.capabilities)):
        record = verify(case, kernel, Setup(config=index % CONFIGS), backend)
        assert record.verdict != "error", record.reason
        if record.verdict == "fail":
            return index + 1, case, record
    return pytest.fail(f"not caught in {CASES} cases")


def shrunken(kernel: Kernel, case, record):
    """The smallest failing case, explained, as `fa_verify.campaign` finds it."""
    backend, setup = CpuBackend(), Setup.parse(record.setup)
    wanted = (record.failures[0].check, record.failures[0].title)

    def fails(candidate) -> bool:
        tried = verify(candidate, kernel, setup, backend, independent=False)
        return wanted in {(f.check, f.title) for f in tried.failures}

    if not fails(case):  # only the probabilistic bound saw it, which a search may not use
        return case, verify(case, kernel, setup, backend, explain=True)
    small = strategies.shrink(
        case, fails, capabilities=kernel.capabilities, max_seconds=SHRINK_SECONDS
    )
    return small, verify(small, kernel, setup, backend, independent=False, explain=True)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_is_caught_and_named(mutant, tmp_path):
    kernel = mutate(mutant, tmp_path)
    count, case, record = first_failure(kernel)
    small, explained = shrunken(kernel, case, record)
    sys.stdout.write(f"{mutant.name}: caught by case {count}; shrunken: {small}\n")
    for f in explained.failures:
        sys.stdout.write(f"  {f.check}: {f.title}: {f.message}\n    -> {f.diagnosis}\n")
    assert any(mutant.said in failure.diagnosis for failure in explained.failures)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flash", "flash_atomic"])
def test_the_right_kernel_beside_them_passes(name):
    (kernel,) = loader.load(f"{KERNELS / 'flash_attention.py'}:{name}")
    backend = CpuBackend()
    for index, case in enumerate(distribution.draw(SEED, 15, kernel.capabilities)):
        record = verify(case, kernel, Setup(config=index % CONFIGS), backend)
        assert record.verdict in ("pass", "inconclusive", "unsupported"), record
