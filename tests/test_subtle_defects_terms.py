"""The defects of `test_subtle_defects` beside other terms: a bias, sinks, dropout, GQA, documents.

Each is an edit of a small right kernel, which passes the same case. Those of a backward pass leave
its forward pass right.
"""

from __future__ import annotations

import pytest
import torch

from fa_verify import loader
from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.case import Case
from fa_verify.verify import verify
from fa_verify.zoo.defects import KERNELS, Defect, planted

torch.set_num_threads(1)  # as the workers of a campaign do

TERMS, DOCUMENTS = "launch_terms.py:terms", "launch.py:varlen_forward"
HALVES = ("float16", "bfloat16")

# A case of each kind for either kernel; dtype is put in.
CASES = {
    (TERMS, "short"): "pass=bwd h=4/2 s=70x75 d=80 dtype={} mask=causal bias=hqk sinks=1 dlse=1"
    " dropout=0.1 seed=7",
    (TERMS, "many keys"): "pass=fwd h=4/2 s=200x700 d=80 dtype={} mask=causal bias=hqk sinks=1"
    " dropout=0.1 seed=7",
    (TERMS, "4096 keys"): "pass=fwd h=4/2 s=16x4096 d=32 dtype={} bias=hk seed=7",
    (TERMS, "large o"): "pass=fwd h=4/2 s=200x20 d=80 dtype={} bias=hqk sinks=1 v.values=mixed"
    " seed=7",
    (DOCUMENTS, "short"): "pass=fwd h=4/2 s=170x190 d=80 dtype={} mask=causal.docs40x41-130x149"
    " seed=7",
    (DOCUMENTS, "many keys"): "pass=fwd h=4/2 s=400x800 d=80 dtype={}"
    " mask=causal.docs150x300-250x500 seed=7",
    (DOCUMENTS, "4096 keys"): "pass=fwd h=4/2 s=20x4106 d=32 dtype={} mask=docs4x10-16x4096 seed=7",
    (DOCUMENTS, "large o"): "pass=fwd h=4/2 s=800x800 d=80 dtype={} mask=causal.docs300x300-500x500"
    " v.values=mixed seed=7",
    (DOCUMENTS, "two keys"): "pass=fwd h=4/2 s=120x120 d=80 dtype={} mask=docs3x3*40 seed=7",
}
FILE = {TERMS: "terms.py", DOCUMENTS: "varlen.py"}
SHIFT = {TERMS: "shift", DOCUMENTS: "highest"}
SEEN = {
    TERMS: "visible = inside(rows, seqlen_q, keys, seqlen_k)",
    DOCUMENTS: "visible = (keys < length_k)[None, :]",
}
NEXT = "        m = m_new\n"
DOT = "input_precision=PRECISION)"
PRODUCT = f"tl.dot(q_tile, tl.trans(k_tile), {DOT} * softmax_scale"
CUBIC = """exponent = tl.maximum((scores - {}[:, None]) * LOG2E, -127.0)
        part = exponent - tl.floor(exponent)
        series = ((0.077119 * part + 0.227564) * part + 0.695146) * part + 1.0
        p = tl.where(exponent == -127.0, 0.0, series * tl.exp2(tl.floor(exponent)))"""


def forward(target):
    """Defects of a forward pass: the case that shows them, and the edit."""
    shift = SHIFT[target]
    return {
        "l in fp16": ("short", NEXT, f"        l = l.to(tl.float16).to(tl.float32)\n{NEXT}"),
        "P in bf16": (
            "short",
            "tl.dot(p.to(v_tile.dtype)",
            "tl.dot(p.to(tl.bfloat16).to(v_tile.dtype)",
        ),
        "acc rounded each block": (
            "many keys",
            NEXT,
            f"        acc = acc.to(o.dtype.element_ty).to(tl.float32)\n{NEXT}",
        ),
        "q pre-scaled": (  # of terms.py: in the backward pass too
            "short",
            PRODUCT,
            f"tl.dot((q_tile * softmax_scale).to(q_tile.dtype), tl.trans(k_tile), {DOT}",
        ),
        "o off by a thousandth": ("large o", "(acc / l[:, None])", "(acc * 1.001 / l[:, None])"),
        "one key in 4096": (
            "4096 keys",
            SEEN[target],
            f"{SEEN[target]} & (keys % 4096 != 2048)[None, :]",
        ),
        "cubic exp2": (
            "short" if target == TERMS else "two keys",
            f"p = tl.exp2((scores - {shift}[:, None]) * LOG2E)",
            CUBIC.format(shift),
        ),
    }


DS = "ds = ds.to(q_tile.dtype)"
ROUNDED = (
    "tl.sum((o_tile.to(tl.float32) * do_tile.to(tl.float32)).to(o.dtype.element_ty)"
    ".to(tl.float32), 1)"
)
BACKWARD = {  # the dtypes that show it, the tensor, and the edit
    "P in bf16": (
        ("float16",),
        "dv",
        ("terms.py", "weights.to(do_tile.dtype)", "weights.to(tl.bfloat16).to(do_tile.dtype)"),
    ),
    "dS in bf16": (
        ("float16",),
        "dk",
        ("terms.py", DS, DS.replace("ds.to", "ds.to(tl.bfloat16).to")),
    ),
    "sums rounded each block": (
        HALVES,
        "dv",
        ("terms.py", DS, f"dv_acc = dv_acc.to(q_tile.dtype).to(tl.float32)\n            {DS}"),
    ),
    "dk off by a thousandth": (
        ("float16",),
        "dk",
        ("terms.py", "(dk_acc * softmax_scale)", "(dk_acc * softmax_scale * 1.001)"),
    ),
    "delta of rounded products": (
        HALVES,
        "dq",
        (
            "dq.py",
            "tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)",
            ROUNDED,
        ),
    ),
    "tf32 where ieee was declared": (
        ("float32",),
        "dq",
        ("launch.py", 'problem.dot_precision if problem.dtype == "float32" else "tf32"', '"tf32"'),
    ),
}


def outside(case, target, edits, folder):
    """The failures of numbers on a case: titles, of a right kernel or one with an edit."""
    where = str(KERNELS / target)
    if edits:
        defect = Defect(name="edit", defect="One.", tag="ttir", kernel=target, patch=edits)
        where = planted([defect], folder)[defect]
    (kernel,) = loader.load(where)
    record = verify(Case.parse(case), kernel, Setup(), CpuBackend())
    return record.verdict, [x.title for x in record.failures if x.check == "numerics"]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("which", list(CASES))
def test_the_right_kernels_pass(which, dtype, tmp_path):
    assert outside(CASES[which].format(dtype), which[0], (), tmp_path)[0] == "pass"


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", list(forward(TERMS)))
@pytest.mark.parametrize("target", [TERMS, DOCUMENTS])
def test_a_subtle_defect_is_caught(target, name, dtype, tmp_path):
    if (name, dtype) == ("P in bf16", "bfloat16"):
        pytest.skip("P belongs in bfloat16 there")
    kind, old, new = forward(target)[name]
    _, titles = outside(
        CASES[target, kind].format(dtype), target, ((FILE[target], old, new),), tmp_path
    )
    assert any(title.startswith(("o ", "lse ")) for title in titles), titles


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name, (dtypes, *_) in BACKWARD.items() for dtype in dtypes],
)
def test_one_of_a_backward_pass_is_caught(name, dtype, tmp_path):
    _, tensor, edit = BACKWARD[name]
    case = "pass=bwd h=4/2 s=200x75 d=80 dtype={} bias=hqk sinks=1 dlse=1 dropout=0.1 seed=7"
    assert outside(case.format(dtype), TERMS, (), tmp_path)[0] == "pass"
    _, titles = outside(case.format(dtype), TERMS, (edit,), tmp_path / "edited")
    assert any(title.startswith(f"{tensor} ") for title in titles), titles
