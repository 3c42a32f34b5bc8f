"""What bias, ALiBi, sinks, dropout and fp8 cost: beside plain attention, and beside PyTorch's own.

    PYTHONPATH=. python benchmarks/term_costs.py [--variant dropout] [--head-dim 64]

Batch 4, 16 heads, 4096 queries and keys, no mask, float16. All contestants of a row are timed in
one run, in turns, as CUDA graphs (fa_verify/bench/timing.py). PyTorch's efficient attention takes a
bias (ALiBi as a bias too) and gives its gradient; its FlashAttention-2 takes dropout. Ratios above
1 mean that ours is faster. fp8 is compared with our own float16.
"""

import argparse
import functools

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from fa_verify import Problem
from fa_verify.bench.timing import Stopwatch
from kernels.flash_attention import flash
from kernels.forward_fp8 import attention_forward_fp8

BATCH, HEADS, SEQLEN = 4, 16, 4096
MILLISECONDS, ROUNDS = 30.0, 5
VARIANTS = {
    "plain": {},
    "bias hqk": {"bias": "hqk"},
    "bias k": {"bias": "k"},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "dropout": {"dropout": 0.1},
    "fp8": None,
}


def problem(head_dim, **fields):
    """The problem of a variant."""
    return Problem(
        batch=BATCH, heads_q=HEADS, heads_kv=HEADS, seqlen_q=SEQLEN, seqlen_k=SEQLEN,
        head_dim=head_dim, head_dim_v=head_dim, **fields,
    )  # fmt: skip


def tensors(p, device):
    """q, k, v, do and the terms by name."""
    inputs = [
        torch.randn(shape, dtype=torch.float16, device=device)
        for shape in (p.shape_q, p.shape_k, p.shape_v, p.shape_o)
    ]
    terms = {}
    if p.bias:
        terms["bias"] = torch.randn(p.shape_bias, dtype=torch.float16, device=device)
    if p.alibi:
        terms["alibi_slopes"] = torch.exp2(-8.0 * torch.arange(1, HEADS + 1, device=device) / HEADS)
    if p.sinks:
        terms["sinks"] = torch.randn(HEADS, device=device)
    if p.dropout:
        terms["dropout_seed"] = 7
    return inputs, terms


def ours(p, inputs, terms):
    """Forward and backward as functions without arguments."""
    q, k, v, do = inputs
    outputs = flash.forward(p, q, k, v, **terms)
    return (
        functools.partial(flash.forward, p, q, k, v, **terms),
        functools.partial(flash.backward, p, q, k, v, outputs, do, **terms),
    )


def pytorch(p, inputs, terms):
    """The same by scaled_dot_product_attention; None where it has no such thing."""
    if p.sinks:
        return None
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    bias = terms.get("bias")
    if p.alibi:
        place = torch.arange(SEQLEN, device=q.device)
        distance = (place[:, None] - place).abs()
        bias = (-terms["alibi_slopes"][:, None, None] * distance).half()[None]
    leaves = [q, k, v]
    if p.bias:
        bias = bias.clone().requires_grad_()
        leaves.append(bias)
    backend = SDPBackend.FLASH_ATTENTION if bias is None else SDPBackend.EFFICIENT_ATTENTION

    def forward():
        mask = None if bias is None else bias.expand(BATCH, HEADS, SEQLEN, SEQLEN)
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(q, k, v, mask, p.dropout)

    try:
        o = forward()
    except RuntimeError as error:  # no backend takes it
        print(f"pytorch: {str(error).splitlines()[0]}")
        return None
    return forward, functools.partial(torch.autograd.grad, o, leaves, inputs[3], retain_graph=True)


def measured(functions):
    """Median milliseconds of each, in turns; without a peer that refuses."""
    watches = {}
    for name, function in functions.items():
        try:
            watches[name] = Stopwatch.of([function], MILLISECONDS)
        except Exception as error:
            if name != "pytorch":
                raise
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
    for _ in range(ROUNDS):
        for watch in watches.values():
            watch.turn()
    return {name: watch.median for name, watch in watches.items()}


def row(name, fields, head_dim, plain):
    """Measure and print a variant."""
    p = problem(head_dim, **fields)
    inputs, terms = tensors(p, "cuda")
    theirs = pytorch(p, inputs, terms)
    cells = [f"{name:9}"]
    for index, way in enumerate(("forward", "backward")):
        functions = {"ours": ours(p, inputs, terms)[index]}
        if theirs:
            functions["pytorch"] = theirs[index]
        found = measured(functions)
        plain.setdefault(way, found["ours"])
        peer = f"{found['pytorch'] / found['ours']:.2f} x" if "pytorch" in found else "-"
        cells.append(
            f"{found['ours']:7.3f} ms {found['ours'] / plain[way]:5.2f} of plain {peer:>7}"
        )
    print(" | ".join(cells), flush=True)


def fp8(head_dim):
    """Measure and print the forward pass in fp8."""
    p = problem(head_dim)
    inputs, _ = tensors(p, "cuda")
    small = [x.to(torch.float8_e4m3fn) for x in inputs[:3]]
    scale = torch.ones(BATCH, HEADS, 1, device="cuda")
    functions = {
        "fp8": functools.partial(
            attention_forward_fp8, p, *small, q_scale=scale, k_scale=scale, v_scale=scale
        ),
        "float16": functools.partial(flash.forward, p, *inputs[:3]),
    }
    found = measured(functions)
    print(f"fp8       | {found['fp8']:7.3f} ms, {found['float16'] / found['fp8']:.2f} x of float16")


def main():
    """Print a row for each variant."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--variant", choices=VARIANTS, action="append")
    parser.add_argument("--head-dim", type=int, action="append")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    with torch.cuda.stream(torch.cuda.Stream()):  # graphs are captured on a stream of their own
        for head_dim in options.head_dim or (64, 128):
            print(f"head_dim {head_dim}: ours, over plain, PyTorch over ours; backward alike")
            plain = {}
            for name in dict.fromkeys(("plain", *(options.variant or VARIANTS))):
                if name == "fp8":
                    fp8(head_dim)
                else:
                    row(name, VARIANTS[name], head_dim, plain)


if __name__ == "__main__":
    main()
