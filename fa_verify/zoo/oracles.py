"""What the rules of other projects say of the same outputs: which would have flagged a case.

Each compares o, dq, dk and dv, as its project does, with the float64 reference; none looks at lse
or at memory, or is asked about gradients of a bias or of sinks. A rule that needs plain PyTorch's
error says nothing where `rule_2x` has none.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from fa_verify.checks.observed import comparisons
from fa_verify.checks.rule_2x import rule_2x

if TYPE_CHECKING:
    from collections.abc import Callable

    from fa_verify.checks.comparison import Comparison
    from fa_verify.trial import Trial

__all__ = ["ORACLES", "flags"]

# rtol of torch.testing.assert_close by dtype; its atol is 1e-5 for all three. FlagGems takes the
# same rtol and an atol of 1e-4 times the length that is reduced (its tests/accuracy_utils.py).
_RTOL = {"float16": 1e-3, "bfloat16": 1.6e-2, "float32": 1.3e-6}
# PyTorch, test/test_transformers.py: errors allowed over those of low-precision math.
_FUDGE = {"o": 4.0, "dq": 180.0, "dk": 16.0, "dv": 4.0}
# flash-attn, tests/test_flash_attn.py: twice plain PyTorch's error, three times for gradients.
_TIMES = {"o": 2.0, "dq": 3.0, "dk": 3.0, "dv": 3.0}
# xformers, tests/test_mem_eff_attention.py: (atol, rtol) of gradients.
_GRADIENTS = {"float16": (0.2, 2e-2), "bfloat16": (0.9, 0.1), "float32": (5e-4, 1e-4)}

ORACLES = (
    "allclose 1e-2",
    "torch.testing.assert_close",
    "flash-attn 2x",
    "PyTorch SDPA fudge",
    "xformers (gradients)",
    "FlagGems",
    "KernelBench",
    "tilelang",
    "fla rms",
)


def flags(trial: Trial) -> dict[str, bool]:
    """Whether each oracle flags what the trial gave; an exception is flagged by all."""
    if trial.execution.error:
        return dict.fromkeys(ORACLES, True)
    problem = trial.case.problem
    parts = {name: part for name, part in comparisons(trial).items() if name in _TIMES}
    over = {name: 2.0 * value for name, value in rule_2x(trial, parts).items()}
    rtol = _RTOL[problem.dtype]
    reduced = max(problem.seqlen_k, problem.head_dim)
    rules: dict[str, Callable[[str, Comparison], bool]] = {
        "allclose 1e-2": lambda _, part: _apart(part, 1e-2, 1e-2) > 0,
        "torch.testing.assert_close": lambda _, part: _apart(part, 1e-5, rtol) > 0,
        "flash-attn 2x": lambda name, _: over.get(name, 0.0) > _TIMES[name],
        "PyTorch SDPA fudge": lambda name, part: (
            over.get(name, 0.0) > _FUDGE[name] and _largest(part) > 1e-5
        ),
        "xformers (gradients)": lambda name, part: (
            name != "o" and _apart(part, *_GRADIENTS[problem.dtype]) > 0
        ),
        "FlagGems": lambda _, part: _apart(part, 1e-4 * reduced, rtol) > 0,
        "KernelBench": lambda name, part: name == "o" and _apart(part, 1e-2, 1e-2) > 0,
        # tilelang's torch_assert_close: 0.1% of the elements may differ, NaN equals NaN.
        "tilelang": lambda _, part: _apart(part, 1e-3, 1e-2) > 1e-3,
        "fla rms": lambda _, part: _rms(part) > 5e-3,
    }
    return {
        name: any(rules[name](tensor, part) for tensor, part in parts.items()) for name in ORACLES
    }


def _apart(part: Comparison, atol: float, rtol: float) -> float:
    """The share of elements that torch.isclose tells apart."""
    if not part.got.numel():
        return 0.0
    return float((~torch.isclose(part.got, part.reference, rtol=rtol, atol=atol)).double().mean())


def _largest(part: Comparison) -> float:
    return float((part.got - part.reference).abs().nan_to_num(nan=math.inf).max())


def _rms(part: Comparison) -> float:
    """The error's root mean square over the reference's; fla leaves NaN to another check."""
    error = (part.got - part.reference).pow(2).mean().sqrt()
    return float(error / (part.reference.pow(2).mean().sqrt() + 1e-8)) if part.got.numel() else 0.0
