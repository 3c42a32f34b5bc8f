"""Turns a plain attention function into a `Kernel`, by the names of its parameters.

Known signatures: torch.nn.functional.scaled_dot_product_attention (heads before seqlen, top-left
causal), flash_attn_func (seqlen before heads, bottom-right causal), and any function or
``torch.autograd.Function.apply`` whose parameters bear the field's names. What the parameters
cannot express raises `UnsupportedProblemError`.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from fa_verify.capabilities import Capabilities
from fa_verify.errors import InvalidInputError, UnsupportedProblemError
from fa_verify.kernel import Kernel, Outputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from fa_verify.masks import Alignment
    from fa_verify.problem import Problem

__all__ = ["as_kernel", "looks_like_attention"]

_NAMES = {
    "q": ("q", "query", "Q"),
    "k": ("k", "key", "K"),
    "v": ("v", "value", "V"),
    "causal": ("causal", "is_causal"),
    "scale": ("softmax_scale", "sm_scale", "scale"),
    "window": ("window_size",),
    "softcap": ("softcap",),
    "gqa": ("enable_gqa",),
    "dropout": ("dropout_p",),
}
# Parameters for what attention has beside q, k and v: the field of Capabilities that asks for it.
_TERMS = {
    "alibi_slopes": "alibi=True",
    "attn_bias": 'bias=("hqk",)',
    "attn_mask": 'bias=("hqk",)',
    "bias": 'bias=("hqk",)',
    "cu_seqlens": "documents=True",
    "cu_seqlens_k": "documents=True",
    "cu_seqlens_q": "documents=True",
    "dlse": "lse_grad=True",
    "dropout_seed": "dropout=True",
    "sinks": "sinks=True",
}


def looks_like_attention(value: object) -> bool:
    """Whether it is a Python function or ``Function.apply`` that `as_kernel` can wrap."""
    if not inspect.isroutine(value):
        return False
    parameters = _parameters(value)
    fits = all(set(_NAMES[role]) & set(parameters) for role in ("q", "k", "v"))
    return fits and not _unfilled(value)


def as_kernel(function: Callable[..., Any], name: str) -> Kernel:
    """Wrap a function; gradients come from autograd, when its result has a grad_fn.

    Raises:
        InvalidInputError: It is not callable, has no parameters for q, k and v, or wants more than
            a case without bias, ALiBi and the like can give it.
    """
    if not callable(function):
        msg = f"{name}={function!r}: neither a Kernel nor a function"
        raise InvalidInputError(msg)
    parameters = _parameters(function)
    if parameters[:4] == ["problem", "q", "k", "v"]:
        return Kernel(name=name, forward=function, backward="autograd")
    named = {
        role: next((p for p in parameters if p in known), None) for role, known in _NAMES.items()
    }
    if not (named["q"] and named["k"] and named["v"]):
        msg = (
            f"{name}({', '.join(parameters)}): needs parameters q, k, v (or query, key, value); "
            "wrap it: Kernel(name=..., forward=lambda problem, q, k, v: Outputs(o))"
        )
        raise InvalidInputError(msg)
    unfilled = _unfilled(function)
    if unfilled:
        msg = (
            f"{name}({', '.join(parameters)}): a plain function is not handed {_listed(unfilled)}; "
            f"give {'it a default' if len(unfilled) == 1 else 'them defaults'}, or "
            f"{_wrap(unfilled)}"
        )
        raise InvalidInputError(msg)
    by_keyword = _keyword_only(function)
    flash_attn = "dropout_p" in set(parameters) - by_keyword and named["q"] == "q"
    diagonal: Alignment = "top-left" if named["causal"] == "is_causal" else "bottom-right"

    def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, **terms: object) -> Outputs:
        if terms:
            msg = f"{_listed(terms)}: a plain function is handed q, k and v only; {_wrap(terms)}"
            raise UnsupportedProblemError(msg)
        wanted = _wanted(problem, equal_diagonals=problem.seqlen_q == problem.seqlen_k)
        alignment = wanted.pop("alignment", diagonal)
        if wanted["causal"] and alignment != diagonal:
            msg = f"alignment={alignment}: this function's causal mask is {diagonal}"
            raise UnsupportedProblemError(msg)
        arguments: dict[str, Any] = {named["q"]: q, named["k"]: k, named["v"]: v}  # type: ignore[dict-item]
        for role, value in wanted.items():
            parameter = named[role]
            if parameter is None:
                if value == _NEUTRAL[role] or (role == "scale" and problem.softmax_scale is None):
                    continue
                if role == "gqa":  # no switch: the function must see it from the shapes
                    continue
                msg = f"{role}={value}: {name}({', '.join(parameters)}) has no parameter for it"
                raise UnsupportedProblemError(msg)
            arguments[parameter] = value
        ordered = [arguments.pop(p) for p in _leading(parameters, arguments.keys() - by_keyword)]
        result = function(*ordered, **arguments)
        return Outputs(result[0] if isinstance(result, tuple | list) and result else result)

    return Kernel(
        name=name,
        forward=forward,
        backward="autograd",
        layout="bshd" if flash_attn else "bhsd",
        expressible=Capabilities(
            head_dims_v=range(1, 257),
            alignments=(diagonal,) if named["causal"] else (),
            window=named["window"] is not None,
            softcap=named["softcap"] is not None,
        ),
    )


_NEUTRAL = {
    "causal": False,
    "scale": None,
    "window": (-1, -1),
    "softcap": 0.0,
    "gqa": False,
    "dropout": 0.0,
}


def _wanted(problem: Problem, *, equal_diagonals: bool) -> dict[str, Any]:
    mask = problem.mask
    window = (
        -1 if mask.window_left is None else mask.window_left,
        -1 if mask.window_right is None else mask.window_right,
    )
    if problem.dot_precision != "ieee":
        msg = f"dot_precision={problem.dot_precision}: a plain function cannot be asked for it"
        raise UnsupportedProblemError(msg)
    if mask.documents or mask.pattern:
        what = f"documents={mask.documents}" if mask.documents else f"pattern={mask.pattern}"
        msg = f"{what}: a plain function cannot be asked for it"
        raise UnsupportedProblemError(msg)
    wanted: dict[str, Any] = {
        "causal": mask.causal,
        "scale": problem.scale,
        "window": window,
        "softcap": problem.softcap,
        "gqa": problem.group > 1,
        "dropout": 0.0,
    }
    if mask.hides_anything and not equal_diagonals:
        wanted["alignment"] = mask.alignment
    return wanted


def _parameters(function: Callable[..., Any]) -> list[str]:
    """Parameter names in order; of ``Function.apply`` those of its forward, without ctx."""
    rule = getattr(getattr(function, "__self__", None), "forward", None)
    if getattr(function, "__name__", "") == "apply" and rule is not None:
        return list(inspect.signature(rule).parameters)[1:]
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin such as scaled_dot_product_attention
        documented = (getattr(function, "__doc__", None) or "").partition("(")[2].partition(")")[0]
        return [part.split("=")[0].split(":")[0].strip() for part in documented.split(",")]


def _unfilled(function: Callable[..., Any]) -> list[str]:
    """Parameters without a default that no case fills."""
    named = getattr(getattr(function, "__self__", None), "forward", None)
    rule = named if getattr(function, "__name__", "") == "apply" and named else function
    try:
        parameters = list(inspect.signature(rule).parameters.values())
    except (TypeError, ValueError):  # a builtin
        return []
    known = {name for names in _NAMES.values() for name in names}
    return [
        one.name
        for one in parameters[1 if rule is named else 0 :]
        if one.default is one.empty
        and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        and one.name not in known
    ]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _wrap(names: Iterable[str]) -> str:
    """How to ask for parameters of these names."""
    fields = dict.fromkeys(_TERMS[name] for name in names if name in _TERMS)
    return (
        "wrap it: Kernel(name=..., forward=..., "
        f"capabilities=Capabilities({_listed(fields) or '...'})), where forward(problem, q, k, v, "
        '...) calls the function; README.md, "Your kernel", has an example'
    )


def _keyword_only(function: Callable[..., Any]) -> set[str]:
    """Parameters that are passed by name alone."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin
        return set()
    return {name for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY}


def _leading(parameters: list[str], given: set[str]) -> list[str]:
    """The leading parameters that are given: passed by position, as ``Function.apply`` demands."""
    leading = []
    for parameter in parameters:
        if parameter not in given:
            break
        leading.append(parameter)
    return leading
