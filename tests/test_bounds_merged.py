"""(B67): a kernel that splits the keys, and merges the parts by their lse, keeps its bounds."""

import dataclasses
import math

import pytest
import torch

from fa_verify.arithmetic import DEFAULT, Arithmetic
from fa_verify.bounds import bound_forward
from fa_verify.case import Case
from fa_verify.inputs import materialise
from fa_verify.problem import Problem

MERGED = Arithmetic(merged_by_lse=True)
CASES = [
    f"pass=fwd h=2/2 s={queries}x{keys} d={dim} dtype={dtype} scale={scale} qk.values={qk} seed=3"
    for queries, keys, dim, dtype, scale, qk in (
        (1, 130, 65, "float16", 10000.0, "two-level"),
        (3, 130, 64, "bfloat16", 10000.0, "normal"),
        (16, 300, 1, "float16", 300.0, "increasing"),
        (16, 300, 16, "float16", 0.25, "normal"),
        (5, 77, 32, "bfloat16", 30.0, "duplicates"),
    )
]


def split_attention(problem, q, k, v, parts, *, weight=1.0):
    """Attention in float32 over parts of the keys, merged with weights exp(lse_part - lse)."""
    c = problem.scale * math.log2(math.e)
    sums = []
    for keys, values in zip(k.float().chunk(parts, 2), v.chunk(parts, 2), strict=True):
        s = q.float() @ keys.mT
        m = s.amax(-1, keepdim=True)
        p = torch.exp2(s * c - m * c)
        l = p.sum(-1, keepdim=True)  # noqa: E741
        o = (p.to(v.dtype).float() @ values.float()) / l
        sums.append((o, m * problem.scale + l.log()))
    o, lse = (torch.stack(x) for x in zip(*sums, strict=True))
    m = lse.amax(0)
    total = (lse - m).exp().sum(0).log() + m
    merged = ((lse - total).exp() * o).sum(0) * weight
    return merged.to(v.dtype), total.squeeze(-1)


def worst(case, arithmetic, parts, *, ones=False, weight=1.0):
    x = materialise(Case.parse(case))
    x = dataclasses.replace(x, v=torch.ones_like(x.v)) if ones else x
    problem = Case.parse(case).problem
    got = split_attention(problem, x.q, x.k, x.v, parts, weight=weight)
    ratios = []
    for result, bounded in zip(got, bound_forward(problem, arithmetic, x.q, x.k, x.v), strict=True):
        error = (result.double() - bounded.reference).abs()
        ratios.append(float((error / bounded.det).nan_to_num(0.0).max()))
    return max(ratios)


@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 7])
@pytest.mark.parametrize("case", CASES)
def test_merged_parts_keep_the_declared_bound(case, parts, ones):
    assert worst(case, MERGED, parts, ones=ones) <= 1


def test_weights_of_rounded_lse_leave_the_hull_and_must_be_declared():
    assert worst(CASES[0], DEFAULT, 7, ones=True) > 1


def test_a_clear_winner_does_not_hide_that_weights_do_not_sum_to_1():
    """Of logits of 1,289 a weight of 10^-5 is lost in lse, but not in the sum of the parts."""
    problem = Problem(seqlen_q=2, seqlen_k=2, head_dim=1, head_dim_v=1, dtype="float32")
    problem = dataclasses.replace(problem, softmax_scale=1e4)
    q, k, v = (
        torch.tensor(x).view(1, 1, -1, 1) for x in ([1.0, 3e2], [-0.128947, -0.130068], [1, 0.8])
    )
    o, _ = split_attention(problem, q, k, v.float(), 2)
    ratios = []
    for arithmetic in (MERGED, DEFAULT):
        bounded, _ = bound_forward(problem, arithmetic, q, k, v.float())
        error = (o.double() - bounded.reference).abs() / bounded.det
        ratios.append(float(error[0, 0, 0]))  # beside a row whose logits need the slow bound
    assert ratios[0] <= 1 < ratios[1]


@pytest.mark.parametrize("case", CASES[3:])
def test_a_part_weighed_wrongly_is_seen(case):
    assert worst(case, MERGED, 7, ones=True, weight=1.02) > 1
