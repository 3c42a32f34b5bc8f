"""`torch.library` operators over the kernels: what autograd, torch.compile and fake tensors see."""

import dataclasses
import re

import torch
import triton
from torch.autograd import forward_ad

from fa_verify import Outputs

from .arguments import empty_as
from .flash_attention import attention_backward, attention_backward_atomic, attention_forward
from .inputs import Inputs, Options, problem_of
from .replay import Replayed

__all__ = [
    "NAMESPACE",
    "attention_forward_op",
    "differentiable_attention",
    "eager",
    "on_device",
    "triton_runs_on",
]

# fa_verify loads this package by path, under a private name: each loaded copy registers its own
# operators, so that none runs, or replaces, another's.
NAMESPACE = "fa_verify_" + re.sub(r"\W", "_", __package__)
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, "
    "Tensor? dropout_seed, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor[]? block_mask, "
    "float? softmax_scale, bool causal, int window_left, int window_right, float softcap, "
    "float dropout_p, str alignment, str dot_precision, bool deterministic"
)
_INPUTS = len(Inputs._fields)
_BIAS, _SINKS = map(Inputs._fields.index, ("bias", "sinks"))
_PLAIN = torch.Tensor, torch.nn.Parameter


def triton_runs_on(device_type):
    """Whether Triton's active driver runs kernels there: on CUDA, or on fa_verify's CPU."""
    if torch.compiler.is_compiling():  # no driver can be asked then
        return device_type == "cuda"
    try:
        device = triton.runtime.driver.active.get_active_torch_device()
    except RuntimeError:  # no driver at all
        return False
    return device.type == device_type


def on_device(tensor):
    """Where Triton's launches go, the current device, is the tensor's.

    Raises:
        ValueError: Triton has no driver for it.
    """
    if not triton_runs_on(tensor.device.type):
        msg = (
            f"q.device={tensor.device}: Triton runs no kernel there; move all tensors to a GPU, or "
            "run the script on the CPU: python -m fa_verify.ttir SCRIPT, or inside "
            "`with fa_verify.ttir.execute():`"
        )
        raise ValueError(msg)
    return torch.cuda.device_of(tensor)


def _parse(arguments, *, symbolic=False):
    """`Inputs`, and the problem that they and the options after them pose."""
    inputs, options = Inputs(*arguments[:_INPUTS]), Options(*arguments[_INPUTS:])
    return inputs, problem_of(inputs, options, symbolic=symbolic)


@Replayed
def _forward_pass(*arguments):  # noqa: ANN002
    """The forward pass of inputs and options: o and lse."""
    *inputs, options = arguments
    inputs = Inputs(*inputs)
    problem = problem_of(inputs, options)
    q, k, v = inputs[:3]
    with on_device(q):
        outputs = attention_forward(problem, q, k, v, **inputs.terms())
    return outputs.o, outputs.lse


def _forward(*arguments):  # noqa: ANN002
    return _forward_pass(*arguments[:_INPUTS], Options(*arguments[_INPUTS:]))


attention_forward_op = torch.library.custom_op(
    f"{NAMESPACE}::attention_forward",
    _forward,
    mutates_args=(),
    schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)",
)


@attention_forward_op.register_fake
def _forward_fake(*arguments):  # noqa: ANN002
    inputs, problem = _parse(arguments, symbolic=True)
    q = inputs.q
    return empty_as(q, problem.shape_o), q.new_empty(problem.shape_lse, dtype=torch.float32)


@Replayed
def _backward_pass(o, lse, do, dlse, needs_dbias, *arguments):  # noqa: ANN002
    """The backward pass: dq, dk, dv, and those of dbias and dsinks that there are."""
    *inputs, options = arguments
    inputs = Inputs(*inputs)
    problem = problem_of(inputs, options)
    q, k, v = inputs[:3]
    terms = inputs.terms()
    if dlse is not None:
        problem = dataclasses.replace(problem, lse_grad=True)
        terms["dlse"] = dlse
    gradients = attention_backward if options.deterministic else attention_backward_atomic
    with on_device(q):
        grads = gradients(problem, q, k, v, Outputs(o, lse), do, needs_dbias=needs_dbias, **terms)
    return tuple(grads.named().values())


def _five(passed, sinks):
    """Gradients of q, k, v, bias and sinks; None for what is not there."""
    dq, dk, dv, *further = passed
    dsinks = None if sinks is None else further.pop()
    return dq, dk, dv, further.pop() if further else None, dsinks


def _backward(o, lse, do, dlse, needs_dbias, *arguments):  # noqa: ANN002
    """The gradients as the operator gives them; empty for what is not there."""
    inputs, options = arguments[:_INPUTS], Options(*arguments[_INPUTS:])
    passed = _backward_pass(o, lse, do, dlse, needs_dbias, *inputs, options)
    grads = _five(passed, inputs[_SINKS])
    return tuple(o.new_empty(0) if grad is None else grad for grad in grads)


_attention_backward_op = torch.library.custom_op(
    f"{NAMESPACE}::attention_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor o, Tensor lse, Tensor do, Tensor? dlse, bool needs_dbias, "
    f"{_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@_attention_backward_op.register_fake
def _backward_fake(_o, _lse, _do, _dlse, needs_dbias, *arguments):  # noqa: ANN002
    inputs, _ = _parse(arguments, symbolic=True)
    given = *inputs[:3], inputs.bias if needs_dbias else None, inputs.sinks
    return tuple(inputs.q.new_empty(0) if x is None else x.new_empty(x.shape) for x in given)


def _refuse(*_grads):  # noqa: ANN002
    msg = "attention: its gradients have no gradients; use PyTorch's math backend for second ones"
    raise NotImplementedError(msg)


_attention_backward_op.register_autograd(_refuse)


def _refuse_tangents(*_arguments):  # noqa: ANN002
    msg = "attention: has no forward-mode gradients; use PyTorch's math backend for them"
    raise NotImplementedError(msg)


def _save(ctx, inputs, options, output):
    """Keep what the backward pass reads: q, k, v, o and lse, and the terms beside them."""
    ctx.set_materialize_grads(False)
    *tensors, block_mask = inputs
    ctx.save_for_backward(*output, *tensors, *(block_mask or ()))
    ctx.options = options


def _set_up(ctx, inputs, output):
    _save(ctx, inputs[:_INPUTS], inputs[_INPUTS:], output)


def _saved(ctx, do):
    """What the backward pass takes: o, lse, do, the inputs, a list of a block mask's the last.

    The saved tensors are asked for once only, since `torch.utils.checkpoint` computes them then.
    """
    o, lse, *saved = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    return o, lse, do, [*saved[: _INPUTS - 1], saved[_INPUTS - 1 :] or None]


def _differentiate(ctx, do, dlse, backward=_attention_backward_op):
    """Gradients of all arguments of the operator."""
    o, lse, do, inputs = _saved(ctx, do)
    needs_dbias, needs_dsinks = (ctx.needs_input_grad[at] for at in (_BIAS, _SINKS))
    dq, dk, dv, dbias, dsinks = backward(o, lse, do, dlse, needs_dbias, *inputs, *ctx.options)
    grads = dict.fromkeys(Inputs._fields) | {"q": dq, "k": dk, "v": dv}
    grads |= {"bias": dbias if needs_dbias else None, "sinks": dsinks if needs_dsinks else None}
    grads["block_mask"] = inputs[-1] and [None] * len(inputs[-1])
    return *grads.values(), *(None,) * len(ctx.options)


attention_forward_op.register_autograd(_differentiate, setup_context=_set_up)


class _Attention(torch.autograd.Function):
    """The same without torch.library, whose wrappers take half of the host's time for a call.

    Autograd is given what may have a gradient: it takes its time over each argument. Nor is
    `setup_context` used: then torch binds all arguments to the signature, each time.
    """

    @staticmethod
    def forward(ctx, _q, _k, _v, _bias, _sinks, inputs, options):  # noqa: ANN205
        output = _forward_pass(*inputs, options)
        _save(ctx, inputs, options, output)
        return output

    @staticmethod
    def backward(ctx, do, dlse):  # noqa: ANN205
        given = [grad for grad in (do, dlse) if grad is not None]
        o, lse, do, inputs = _saved(ctx, do)
        needs_dbias, needs_dsinks = ctx.needs_input_grad[3:5]
        taken = o, lse, do, dlse, needs_dbias, *inputs
        if torch.is_grad_enabled() or not eager(*given) or _many(*given):
            # With create_graph it is the operator that says that a gradient has no gradient.
            grads = _attention_backward_op(*taken, *ctx.options)
        else:
            grads = _five(_backward_pass(*taken, ctx.options), inputs[_SINKS])
        dq, dk, dv, dbias, dsinks = grads
        dbias, dsinks = dbias if needs_dbias else None, dsinks if needs_dsinks else None
        return dq, dk, dv, dbias, dsinks, None, None

    jvp = staticmethod(_refuse_tangents)


class _Transformed(torch.autograd.Function):
    """The operator under `torch.func`'s transforms, which those of torch.library do not take."""

    generate_vmap_rule = True
    setup_context = staticmethod(_set_up)
    jvp = staticmethod(_refuse_tangents)

    @staticmethod
    def forward(*arguments):  # noqa: ANN002, ANN205
        return attention_forward_op(*arguments)

    @staticmethod
    def backward(ctx, do, dlse):  # noqa: ANN205
        return _differentiate(ctx, do, dlse, _TransformedBackward.apply)


class _TransformedBackward(torch.autograd.Function):
    """Likewise, the operator of gradients."""

    generate_vmap_rule = True
    setup_context = staticmethod(lambda _ctx, _inputs, _output: None)
    backward = staticmethod(_refuse)
    jvp = staticmethod(_refuse_tangents)

    @staticmethod
    def forward(*arguments):  # noqa: ANN002, ANN205
        return _attention_backward_op(*arguments)


def eager(*tensors):  # noqa: ANN002
    """Whether nothing looks at operators: no mode, no transform, no tensor of another kind."""
    if (
        torch._C._len_torch_dispatch_stack()  # noqa: SLF001
        or torch._C._are_functorch_transforms_active()  # noqa: SLF001
        or tensors[0].is_meta
    ):
        return False
    return all(x is None or type(x) in _PLAIN for x in tensors)


def _many(*grads):  # noqa: ANN002
    """Whether these are gradients of many, of `is_grads_batched`."""
    return any(map(torch._C._functorch.is_legacy_batchedtensor, grads))  # noqa: SLF001


def differentiable_attention(inputs, options):
    """Return o and lse."""
    q, k, v, bias, _, sinks, *_ = inputs
    differentiable = q, k, v, bias, sinks
    if torch.compiler.is_compiling():
        return attention_forward_op(*inputs, *options)
    if eager(*differentiable):
        return _Attention.apply(*differentiable, inputs, options)
    if torch._C._are_functorch_transforms_active():  # noqa: SLF001
        return _Transformed.apply(*inputs, *options)
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in differentiable):
        _refuse_tangents()  # the operator would lose them
    return attention_forward_op(*inputs, *options)
