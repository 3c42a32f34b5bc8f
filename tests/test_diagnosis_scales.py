"""Scales of fp8 operands in the diagnosis: a fault is named, and another one is not."""

import dataclasses
import math

import pytest
import torch

from fa_verify import Arithmetic, Capabilities, Kernel, Outputs, reference
from fa_verify.backends.base import Incident, Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.case import Case
from fa_verify.diagnosis import explain, scales
from fa_verify.diagnosis.evidence import gather
from fa_verify.diagnosis.incidents import explain as of_incident
from fa_verify.diagnosis.neighbours import moderate, simpler
from fa_verify.terms import Terms
from fa_verify.trial import Trial

FORWARD = explain.Pass(names=("o", "lse"), backward=False)
TAKES = Capabilities(
    dtypes=("bfloat16",), fp8=("tensor", "head", "block"), backward=False,
    head_dims_v=range(1, 257), window=True, softcap=True,
)  # fmt: skip


def misread(fault, q, k, v, s):
    """The operands and scales of a kernel with a fault."""
    if fault == "k_scale is not applied":
        s["k_scale"] = torch.ones_like(s["k_scale"])
    elif fault == "v is multiplied by k_scale":
        s["v_scale"] = s["k_scale"]
    elif fault == "k_scale is that of the block before" and s["k_scale"].numel() > 1:
        s["k_scale"] = s["k_scale"].flatten().roll(1).view(s["k_scale"].shape)
        s["k_scale"][0, 0, 0] = torch.nan
    elif fault == "v_scale of the first head serves every head":
        s["v_scale"] = s["v_scale"][:, :1].expand_as(s["v_scale"]).contiguous()
    elif fault == "q is read as e5m2":
        q = q.view(torch.float8_e5m2).double()
    elif fault == "no scales are applied":
        s = {name: torch.ones_like(x) for name, x in s.items()}
    return q, k, v, s


def kernel_of(fault):
    def forward(problem, q, k, v, **given):
        q, k, v, given = misread(fault, q, k, v, dict(given))
        found = reference.forward(problem, q, k, v, Terms(**given))
        return Outputs(found.o.to(torch.bfloat16), found.lse.float())

    return Kernel(
        name="plain", forward=forward, capabilities=TAKES, arithmetic=Arithmetic(p_dtype="float32")
    )


CASE = Case.parse("pass=fwd b=2 h=4/2 s=90x150 d=24/16 dtype=bfloat16 fp8=block32 seed=5")


def explained(fault, case=CASE):
    kernel = kernel_of(fault)
    base = moderate(case, plain=True)
    trials = [
        Trial(kernel, one, Setup(), CpuBackend()) for one in (case, base, *list(simpler(base))[:4])
    ]
    seen = [explain.Witness(trial, gather(trial)) for trial in trials]
    return explain.explain(FORWARD, seen, math.inf)


@pytest.mark.parametrize(
    "fault",
    [
        "k_scale is not applied", "v is multiplied by k_scale", "no scales are applied",
        "k_scale is that of the block before", "v_scale of the first head serves every head",
        "q is read as e5m2",
    ],
)  # fmt: skip
def test_the_fault_is_named(fault):
    found = explained(fault)
    assert found is not None
    assert fault in found.text.partition(" (a model")[0]


def test_nothing_is_named_where_nothing_is_wrong():
    assert explained("") is None


def test_a_scale_is_read_wherever_a_wrong_index_leads():
    trial = Trial(kernel_of(""), CASE, Setup(), CpuBackend())
    x, found = trial.pristine, dict(scales.slips(trial))
    after = found["k_scale is that of the next block"]["k"]()
    rows = x.k.double()[1, 0, :32]
    assert torch.equal(after[1, 0, :32], rows * x.k_scale[1, 0, 1].double())
    last = x.k.double()[0, 1, 128:] * x.k_scale[1, 0, 0].double()
    assert torch.equal(after[0, 1, 128:], last)
    assert torch.isnan(after[1, 1, 128:]).all()
    own = found["k_scale is read at the query's head"]["k"]()
    assert torch.equal(own[0, 1, :32], x.k.double()[0, 0, :32] * x.k_scale[0, 1, 0].double())
    tensor = dataclasses.replace(CASE, problem=dataclasses.replace(CASE.problem, fp8="tensor"))
    plain = Trial(kernel_of(""), tensor, Setup(), CpuBackend())
    assert not any("block" in text or "head" in text for text, _ in scales.slips(plain))


def test_what_p_is_multiplied_by():
    right = kernel_of("")
    lifted = dataclasses.replace(right, arithmetic=Arithmetic(p_scale=256.0))
    texts = [c.sentence for c in scales.lifts(Trial(lifted, CASE, Setup(), CpuBackend()))]
    assert texts[0] == "P times 512 saturates at e4m3's largest number, 448"
    assert "small weights are lost" in texts[-1]
    assert not list(scales.lifts(Trial(right, CASE, Setup(), CpuBackend())))


def test_a_scale_read_outside_its_entries_has_a_wrong_index():
    stray = Incident(
        kind="out-of-bounds-read", kernel="f", file="f.py", line=7, source="tl.load(k_scale + i)",
        argument="k_scale", program_id=(1, 0, 0), coordinates=(0, 0, 5), offset=5, count=1,
        detail="1 element past the end, no mask",
    )  # fmt: skip
    expected = "k_scale is read outside its entries: the index of a block or a head is wrong"
    assert of_incident(stray, (stray,), CASE.problem) == expected
    plain = dataclasses.replace(CASE.problem, fp8="")
    assert of_incident(stray, (stray,), plain) != expected
