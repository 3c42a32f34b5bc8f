"""Records that look like a real run's, from a seed: no kernel, no torch."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from fa_verify.case import Case, Values
from fa_verify.layouts import Layout
from fa_verify.masks import Mask
from fa_verify.problem import Problem
from fa_verify.record import CaseRecord, End, FailureRecord, Shrunk, Start, TensorStats

SNAPSHOTS = Path(__file__).parents[1] / "snapshots"

PRECISIONS = (
    ("float16", "ieee"),
    ("bfloat16", "ieee"),
    ("float32", "ieee"),
    ("float32", "tf32"),
    ("float32", "tf32x3"),
)
LEVEL = {"o": 0.42, "lse": 0.11, "dq": 0.27, "dk": 0.24, "dv": 0.33}

TAIL = FailureRecord(
    check="numerics",
    title="dq outside its bound",
    tensor="dq",
    message=(
        "dq[0, 0, 3, 64]: got 0, expected 0.7531 +- 0.0042, err/bound 179\n"
        "544 of 1360 elements are outside"
    ),
    diagnosis="Only head_dim 64 and above is wrong: the tail of head_dim past BLOCK_D is left out.",
    location="kernels/flash_broken.py:88",
    source="    dq += tl.dot(ds.to(k.dtype), k) * scale",
)
STRAY = FailureRecord(
    check="memory",
    title="read outside k",
    tensor="k",
    message="k_ptr reads element 5440 of 5440 in program (0, 2, 0); mask= is missing on axis 0",
    diagnosis="The load of k has no boundary mask in seqlen_k.",
    location="kernels/flash_broken.py:61",
    source="    k = tl.load(k_ptrs)",
)
HANG = FailureRecord(
    check="timeout", title="no answer in 20 s", message="killed after 20.0 s", tensor=""
)
NONFINITE = FailureRecord(
    check="nonfinite",
    title="NaN in o",
    tensor="o",
    message="o[0, 1, 7, 0]: got nan, expected 0 (row 7 is fully masked), 64 of 4096 elements",
    diagnosis="m stays -inf in a fully masked row, and exp(-inf - -inf) is NaN.",
    location="kernels/flash_broken.py:72",
    source="    p = tl.exp2(qk - m_new[:, None])",
)


def a_problem(rng: random.Random, dtype: str, dot: str) -> Problem:
    """A problem that the default distribution might draw."""
    group = rng.choice((1, 1, 2, 4))
    heads_kv = rng.choice((1, 2))
    head_dim = rng.choice((16, 32, 64, 64, 72, 80, 80, 96, 128, 128, 192, 256))
    mask = rng.choice(
        (Mask(), Mask(causal=True), Mask(causal=True, window_left=127), Mask(window_left=64))
    )
    return Problem(
        batch=rng.choice((1, 1, 2)),
        heads_q=group * heads_kv,
        heads_kv=heads_kv,
        seqlen_q=rng.choice((0, 1, 17, 127, 128, 129, 300, 1024)),
        seqlen_k=min(4096, round(2 ** rng.uniform(0, 12))),
        head_dim=head_dim,
        head_dim_v=head_dim if rng.random() < 0.9 else 64,
        dtype=dtype,
        dot_precision=dot,
        mask=mask,
        softcap=rng.choice((0.0, 0.0, 0.0, 30.0)),
        layout_q=rng.choice((Layout(), Layout(order="bshd"), Layout(pad=(0, 0, 8, 0)))),
    )


def some_tensors(rng: random.Random, case: Case, factor: float) -> dict[str, TensorStats]:
    """Statistics that grow a little with length, as fp32 accumulation does."""
    p = case.problem
    found = {}
    for name in ("o", "lse", "dq", "dk", "dv") if case.backward else ("o", "lse"):
        elements = math.prod(
            {"o": p.shape_o, "lse": p.shape_lse, "dq": p.shape_q, "dk": p.shape_k, "dv": p.shape_v}[
                name
            ]
        )
        drift = (1 + math.log2(1 + p.seqlen_k)) / 12
        ratio = min(0.95, LEVEL[name] * factor * drift * rng.lognormvariate(0, 0.45))
        found[name] = TensorStats(
            elements=elements,
            inconclusive=elements // 500 if name == "dq" and rng.random() < 0.03 else 0,
            ratio=ratio,
            ratio_prob=min(0.99, ratio * 2.1),
            ratio_median=ratio / 9,
            ulp=rng.lognormvariate(0, 0.8) * (40 if p.dtype == "float32" else 1.2),
            rule_2x=ratio * 1.3 if name == "o" and p.dtype != "float32" else None,
            worst=(0, 0, 0, 0),
        )
    return found


def record(
    case: Case, *, kernel="flash", verdict="pass", file="kernels/flash.py", **fields
) -> CaseRecord:
    """A line with the fields that every case has."""
    target = f"{file}:{kernel}"
    return CaseRecord(
        kernel=kernel,
        target=target,
        source_hash="0123456789ab",
        case=str(case),
        setup="backend=cpu config=0 schedule=forward model=hopper",
        verdict=verdict,
        replay=f"fa-verify replay {target} '{case}' --setup 'backend=cpu config=0'",
        **fields,
    )


def make_run(
    *, cases=400, seed=0, broken=True, factor=1.0, kernels=("flash", "flash_atomic")
) -> list[Start | CaseRecord | End]:
    """A whole run. `factor` scales the errors; `broken` adds a kernel with four faults."""
    rng = random.Random(seed)  # noqa: S311  # no secret
    names = (*kernels, *(("flash_broken",) if broken else ()))
    lines: list[Start | CaseRecord | End] = [
        Start(
            version="0.1.0",
            command="fa-verify check kernels --seed 7",
            seed=7,
            backend="cpu",
            device="CPU (TTIR, 2 threads)",
            python="3.11.9",
            torch="2.11.0",
            triton="3.6.0",
            platform="Linux x86_64",
            started="2026-01-02T03:04:05+00:00",
            targets=("kernels",),
            false_alarm=1e-12,
        )
    ]
    for number in range(cases):
        dtype, dot = PRECISIONS[number // len(names) % len(PRECISIONS)]
        name = names[number % len(names)]
        case = Case(
            problem=a_problem(rng, dtype, dot),
            values=Values(
                qk=rng.choice(("normal", "one-hot", "near-ties")), logits=rng.choice((1.0, 10.0))
            ),
            seed=number,
            backward=rng.random() < 0.6,
        )
        seconds = {
            "kernel": rng.uniform(0.02, 0.3),
            "judge": rng.uniform(0.05, 0.2),
            "checks": 0.04,
        }
        lines.append(_line(rng, case, name, factor, seconds))
        if lines[-1].verdict == "fail" and (small := _shrunk(lines[-1])):
            lines.append(small)
    lines.append(End(seconds=cases * 0.21, cases=cases, exit_code=1 if broken else 0))
    return lines


def _line(rng, case, name, factor, seconds) -> CaseRecord:
    file = "kernels/flash_broken.py" if name == "flash_broken" else "kernels/flash.py"
    shared = {"kernel": name, "file": file, "seconds": seconds}
    p = case.problem
    if p.head_dim == 192 and name != "flash":
        return record(case, verdict="unsupported", reason=f"head_dim={p.head_dim}", **shared)
    if p.softcap and name == "flash_broken":
        return record(case, verdict="unsupported", reason="softcap", **shared)
    tensors = some_tensors(rng, case, factor * (1.2 if name == "flash_atomic" else 1.0))
    if rng.random() < 0.01:
        reason = "the bound says nothing about any element of o (logits overflow float32)"
        return record(case, verdict="inconclusive", reason=reason, **shared)
    if name != "flash_broken":
        return record(case, tensors=tensors, **shared)
    failures = _faults_of(case)
    for failure in failures:
        if failure.tensor in tensors:
            old = tensors[failure.tensor]
            ratio = 1.7e308 if failure is NONFINITE else rng.lognormvariate(4, 1.5) + 2
            tensors[failure.tensor] = TensorStats(
                elements=old.elements, ratio=ratio, ratio_prob=ratio, ulp=ratio * 3
            )
    if not failures:
        return record(case, tensors=tensors, **shared)
    if HANG in failures:
        tensors = {}
    return record(case, verdict="fail", failures=failures, tensors=tensors, **shared)


def _faults_of(case: Case) -> tuple[FailureRecord, ...]:
    p = case.problem
    if p.seqlen_q == 300:
        return (HANG,)
    if p.head_dim in (72, 80, 96) and case.backward:
        return (TAIL,)
    if p.seqlen_k % 64 and p.seqlen_k > 64 and p.head_dim == 128:
        return (STRAY, TAIL) if case.backward else (STRAY,)
    if p.mask.causal and p.seqlen_k < p.seqlen_q and p.head_dim < 64:
        return (NONFINITE,)
    return ()


def _shrunk(line: CaseRecord) -> Shrunk | None:
    """What shrinking would find; a case that hangs is not shrunk."""
    if HANG in line.failures:
        return None
    failure = line.failures[0]
    dtype = Case.parse(line.case).problem.dtype
    text = {
        TAIL: f"pass=bwd s=4x1 d=65/1 dtype={dtype} seed=0",
        STRAY: f"pass=fwd s=1x65 d=1 dtype={dtype} seed=0",
        NONFINITE: f"pass=fwd s=2x1 d=1 dtype={dtype} mask=causal seed=0",
    }[failure]
    small = record(
        Case.parse(text),
        kernel=line.kernel,
        file="kernels/flash_broken.py",
        verdict="fail",
        failures=(failure,),
    )
    return Shrunk(original=line.case, record=small)


@pytest.fixture(scope="session")
def run():
    """`make_run`: the lines of a whole run."""
    return make_run


@pytest.fixture(scope="session")
def line():
    """`record`: one line."""
    return record


@pytest.fixture
def snapshot():
    """Compare a text with its golden file. To renew one: delete it, run, read what was written."""

    def check(name: str, text: str) -> None:
        path = SNAPSHOTS / name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            pytest.fail(f"{path.name} was written: read it, then run again")
        assert text == path.read_text(encoding="utf-8")

    return check
