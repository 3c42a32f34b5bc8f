"""det against an adversary who chooses every rounding error.

A small kernel of which every rounding adds ``theta`` times the most that it may, |theta| <= 1. For
an element of each tensor the thetas are climbed to the largest error in float64: all are set to the
sign in which the error grows, twice. The error that they make is then evaluated in 100 bits. What
det claims of every rounding that is declared, it claims of these.
"""

from __future__ import annotations

import dataclasses
import math

import mpmath
import pytest
import torch

from fa_verify.arithmetic import Arithmetic
from fa_verify.bounds import bound_backward, bound_forward
from fa_verify.masks import Mask
from fa_verify.problem import Problem

mp = mpmath.mp.clone()
mp.prec = 100
PRECISION = {"float16": 11, "bfloat16": 8, "tf32": 11, "float32": 24}
BLOCK = 2


class Adversary:
    """Hands out errors in the order in which roundings ask for them."""

    def __init__(self, thetas, formats, exp2_ulps, number):
        """Start a run.

        Args:
            thetas: In that order; 0 beyond.
            formats: Place -> format that it rounds to.
            exp2_ulps: Error of exp2 in units of 2^-24.
            number: float, or mp.mpf.
        """
        self._given, self.formats, self._ulps, self.number = thetas, formats, exp2_ulps, number
        self._math = math if number is float else mp
        self.thetas = []

    def _theta(self):
        place = len(self.thetas)
        self.thetas.append(self._given[place] if place < len(self._given) else 0)
        return self.thetas[-1]

    def near(self, x, place=""):
        """Round to nearest; (B2)."""
        form = self.formats.get(place, "float32")
        theta = self._theta()
        if not x:
            return x
        exponent = max(math.frexp(float(abs(x)))[1] - 1, -14 if form == "float16" else -126)
        half = self.number(2) ** (exponent - PRECISION[form])
        return x + theta * min(half, abs(x))

    def exp2(self, x):
        """2^x, exact at 0."""
        error = 1 + self._theta() * self._ulps * self.number(2) ** -24
        return self.number(2) ** x * error if x else self.number(1)

    def log2(self, x):
        """Within 2^-22."""
        return self._math.log(x) / self.ln2 + self._theta() * self.number(2) ** -22

    def divide(self, x, y):
        """Within 2 ulp."""
        return x / y * (1 + self._theta() * self.number(2) ** -22)

    @property
    def ln2(self):
        """The constant."""
        return self._math.log(self.number(2))

    def dot(self, a, b, acc=0, place=""):
        """Products are rounded where there is a place; sums one after the other."""
        for x, y in zip(a, b, strict=True):
            acc = self.near(acc + (self.near(x * y, place) if place else x * y))
        return acc


def attention(by, problem, keys, q, k, v):
    """O, not rounded to its format, and lse of one row that sees these keys."""
    product = "product" if problem.dtype == "float32" else ""
    if "q" in by.formats:
        q = [by.near(x * problem.scale, "q") for x in q]
    factor = by.near((1 if "q" in by.formats else problem.scale) / by.ln2)
    m, total, acc = None, 0, [0] * problem.head_dim_v
    for first in range(0, len(keys), BLOCK):
        block = keys[first : first + BLOCK]
        y = [by.near(by.dot(q, k[j], place=product) * factor) for j in block]
        new = max(y) if m is None else max(m, *y)
        p = [by.exp2(by.near(x - new)) for x in y]
        alpha = 0 if m is None else by.exp2(by.near(m - new))
        added = p[0]
        for x in p[1:]:
            added = by.near(added + x)
        total = by.near(by.near(total * alpha) + added, "l")
        cast = [by.near(x, "P") for x in p]
        for d in range(problem.head_dim_v):
            acc[d] = by.near(acc[d] * alpha)
            acc[d] = by.near(by.dot(cast, [v[j][d] for j in block], acc[d], product), "acc")
        m = new
    o = [by.divide(x, total) for x in acc]
    return o, by.near(by.near(m + by.log2(total)) * by.near(by.ln2))


def scores(by, problem, q, k, v, do, o, lse):
    """P and dS as the products for the gradients read them, of one row and one key."""
    product = "product" if problem.dtype == "float32" else ""
    y = by.near(by.dot(q, k, place=product) * by.near(problem.scale / by.ln2))
    p = by.exp2(by.near(y - by.near(lse * by.near(1 / by.ln2))))
    x = by.near(by.dot(do, v, place=product) - by.dot(do, o, place="delta"))
    return by.near(p, "P"), by.near(by.near(p * x), "dS")


def gradient(by, problem, pairs, name):
    """The first element of dq of the row, or of dk or dv of the key, that these pairs are of.

    Args:
        by: The adversary.
        problem: The problem.
        pairs: q, k, v, do, o, lse of each pair.
        name: dq, dk or dv.
    """
    place = "product" if problem.dtype == "float32" else ""
    found = [scores(by, problem, *pair) for pair in pairs]
    left = [p if name == "dv" else ds for p, ds in found]
    right = [pair[{"dq": 1, "dk": 0, "dv": 3}[name]][0] for pair in pairs]
    total = by.dot(left, right, place=place)
    return total if name == "dv" else by.near(total * by.near(problem.scale))


def climbed(value, formats, exp2_ulps, reference):
    """The largest error that the thetas make of ``value(adversary)``."""

    def error(thetas, number=float):
        by = Adversary(thetas, formats, exp2_ulps, number)
        found = value(by) - (0.0 if number is float else reference)
        return found, by.thetas

    most = 0.0
    for sign in (-1, 1):
        _, thetas = error([])
        for _ in range(2):
            base, _ = error(thetas)
            grows = []
            for index, theta in enumerate(thetas):
                step = 0.5 if theta <= 0 else -0.5
                nudged = [*thetas[:index], theta + step, *thetas[index + 1 :]]
                grows.append((error(nudged)[0] - base) / step * sign)
            thetas = [math.copysign(1, g) if g else t for g, t in zip(grows, thetas, strict=True)]
        most = max(most, float(abs(error(thetas, mp.mpf)[0])))
    return most


PROBLEM = Problem(seqlen_q=3, seqlen_k=5, head_dim=2, head_dim_v=2, softmax_scale=0.71)


def ratios(problem, arithmetic, formats, *, seed, spread=1.0, exp2_ulps=5.0):
    """Name -> err/det of the adversary, for the last row and the first key."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (problem.shape_q, problem.shape_k, problem.shape_v, problem.shape_o)
    sizes = (spread, spread, 1.0, 1.0)
    q, k, v, do = (
        (size * torch.randn(shape, generator=generator)).to(getattr(torch, problem.dtype))
        for shape, size in zip(shapes, sizes, strict=True)
    )
    bounds = bound_forward(problem, arithmetic, q, k, v)
    o, lse = bounds[0].reference.to(q.dtype), bounds[1].reference.float()
    bounds += bound_backward(problem, arithmetic, q, k, v, do, o=o, lse=lse)
    x = [one[0, 0].tolist() for one in (q, k, v, do, o, lse)]
    allowed = problem.mask.allowed(problem.seqlen_q, problem.seqlen_k)
    keys, queries = allowed[-1].nonzero()[0].tolist(), allowed[:, 0].nonzero()[0].tolist()

    def pair(i, j):
        return x[0][i], x[1][j], x[2][j], x[3][i], x[4][i], x[5][i]

    of_row, of_key = [pair(-1, j) for j in keys], [pair(i, 0) for i in queries]
    values = {
        "o": lambda by: by.near(attention(by, problem, keys, x[0][-1], x[1], x[2])[0][0], "out"),
        "lse": lambda by: attention(by, problem, keys, x[0][-1], x[1], x[2])[1],
        "dq": lambda by: by.near(gradient(by, problem, of_row, "dq"), "out"),
        "dk": lambda by: by.near(gradient(by, problem, of_key, "dk"), "out"),
        "dv": lambda by: by.near(gradient(by, problem, of_key, "dv"), "out"),
    }
    found = {}
    for bounded in bounds:
        name = bounded.name
        place = {"o": (0, 0, -1, 0), "lse": (0, 0, -1), "dq": (0, 0, -1, 0)}.get(name, (0, 0, 0, 0))
        exact = values[name](Adversary([], {}, 0.0, mp.mpf))
        assert abs(exact - float(bounded.reference[place])) <= 1e-12 * abs(exact)
        error = climbed(values[name], {"out": problem.dtype} | formats, exp2_ulps, exact)
        found[name] = error / float(bounded.det[place])
    return found


def declared(dtype, *, causal=False):
    """A problem, an arithmetic that declares no more than the defaults, and what rounds."""
    mask = Mask(causal=causal, alignment="top-left")
    casts = {} if dtype == "float32" else {"P": dtype, "dS": dtype}
    problem = dataclasses.replace(PROBLEM, dtype=dtype, mask=mask)
    return problem, Arithmetic(block_n=BLOCK, ds_scale="after"), casts


@pytest.mark.parametrize("spread", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_worst_of_all_declared_roundings_stays_within_det(dtype, causal, spread):
    problem, arithmetic, casts = declared(dtype, causal=causal)
    for seed in (1, 2):
        found = ratios(problem, arithmetic, casts, seed=seed, spread=spread)
        assert max(found.values()) <= 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_where_casts_decide_the_worst_comes_close(dtype):
    problem, arithmetic, casts = declared(dtype)
    found = ratios(problem, arithmetic, casts, seed=1)
    assert min(found[name] for name in ("dq", "dk", "dv")) > 0.95, "nothing is given away"
    assert found["o"] > 0.6, "the spacing of P is not known"
    assert found["lse"] > 0.2


@pytest.mark.parametrize(
    ("dtype", "beyond", "exp2_ulps", "seen_in"),
    [
        ("float16", {"P": "bfloat16"}, 5.0, ("o", "dv")),
        ("float16", {"dS": "bfloat16"}, 5.0, ("dq", "dk")),
        ("float16", {"acc": "float16"}, 5.0, ("o",)),
        ("bfloat16", {"acc": "bfloat16"}, 5.0, ("o",)),
        ("float16", {"l": "float16"}, 5.0, ("lse",)),
        ("bfloat16", {"q": "bfloat16"}, 5.0, ("lse",)),
        ("float16", {"q": "float16"}, 5.0, ("lse",)),
        ("float16", {"delta": "float16"}, 5.0, ("dq", "dk")),
        ("bfloat16", {"delta": "bfloat16"}, 5.0, ("dq", "dk")),
        ("float32", {"product": "tf32"}, 5.0, ("o", "lse", "dq", "dk", "dv")),
        ("float16", {}, 1472.0, ("lse",)),
        ("float32", {}, 1472.0, ("o", "lse", "dq", "dk", "dv")),
    ],
)
def test_roundings_that_are_not_declared_may_leave_det(dtype, beyond, exp2_ulps, seen_in):
    problem, arithmetic, casts = declared(dtype)
    found = ratios(problem, arithmetic, casts | beyond, seed=1, exp2_ulps=exp2_ulps)
    assert {name for name, ratio in found.items() if ratio > 1} >= set(seen_in)
