"""A transformer's training step with standard attention and with ours: memory, and tokens a second.

    PYTHONPATH=. python benchmarks/training_step.py [--lengths 1024,2048] [--tokens 0] [--steps 15]

12 layers, 768 wide, 12 heads, causal, 256 token kinds (so that no logits hide attention's memory);
float32 weights under bfloat16 autocast, AdamW. Standard attention is softmax(QK^T)V with the matrix
kept for the backward pass, as autocast runs it (softmax in float32); FlashAttention-2 is PyTorch's.
A step has one sequence, or as many as give `--tokens` tokens. Medians of steps, which the
implementations take in turns, after two each that compile and tune. Peak: allocated memory, weights
and optimizer included, of an implementation alone.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import time

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.attention import attention

LAYERS, WIDTH, HEADS, KINDS = 12, 768, 12, 256


def standard(q, k, v):
    seqlen = q.shape[2]
    hidden = torch.ones(seqlen, seqlen, dtype=torch.bool, device=q.device).triu_(1)
    logits = (q @ k.mT).mul_(q.shape[3] ** -0.5).masked_fill_(hidden, float("-inf"))
    return logits.softmax(-1) @ v


def flash_attention_2(q, k, v):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


IMPLEMENTATIONS = {
    "standard": standard,
    "FlashAttention-2": flash_attention_2,
    "ours": functools.partial(attention, causal=True),
    "ours (atomics)": functools.partial(attention, causal=True, deterministic=False),
}


class Layer(nn.Module):
    """Attention and a perceptron, each normalised before."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x, attend):
        """The layer's output; ``attend(q, k, v)`` is the attention."""
        batch, seqlen, _ = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, seqlen, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        x = x + self.out(attend(q, k, v).transpose(1, 2).reshape(batch, seqlen, WIDTH))
        return x + self.perceptron(self.norms[1](x))


class Transformer(nn.Module):
    """Tokens to logits."""

    def __init__(self, longest) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(KINDS, WIDTH), nn.Embedding(longest, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, KINDS)

    def forward(self, tokens, attend):
        """Logits of the next token."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, attend)
        return self.head(self.norm(x))


class Trained:
    """A model with one attention, and its steps on the same tokens."""

    def __init__(self, attend, shape, longest, device) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            self._model, self._tokens = Transformer(longest), torch.randint(KINDS, shape)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._attend = attend

    def step(self):
        """Seconds of a step."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.autocast(self._tokens.device.type, torch.bfloat16):
            logits = self._model(self._tokens, self._attend)
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), self._tokens.flatten())
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        return time.perf_counter() - begin


def gigabytes(make):
    """The peak of a model's third step; None where memory ran out."""
    try:
        model = make()
        for step in range(3):
            if step == 2:
                torch.cuda.reset_peak_memory_stats()
            model.step()
        return torch.cuda.max_memory_allocated() / 1e9
    except torch.cuda.OutOfMemoryError:
        return None
    finally:
        model = None  # also where it failed
        gc.collect()
        torch.cuda.empty_cache()


def seconds(makers, steps):
    """Each one's median seconds a step; the models take turns, a step each."""
    models = {name: make() for name, make in makers.items()}
    times = {name: [] for name in models}
    for step in range(2 + steps):
        for name, model in models.items():
            took = model.step()
            if step > 1:
                times[name].append(took)
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", default="1024,2048,4096,8192,16384,32768")
    parser.add_argument("--tokens", type=int, default=0, help="of a step; 0: one sequence")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default=",".join(IMPLEMENTATIONS))
    options = parser.parse_args()
    lengths = [int(x) for x in options.lengths.split(",")]
    print(torch.cuda.get_device_name(), torch.__version__)
    chosen = options.only.split(",")
    print(f"| N | sequences | {' | '.join(f'{x}: GB | tokens/s' for x in chosen)} |")
    print("|---|---|" + "---|" * (2 * len(chosen)))
    for seqlen in lengths:
        shape = max(1, options.tokens // seqlen), seqlen
        makers = {
            name: functools.partial(
                Trained, IMPLEMENTATIONS[name], shape, max(lengths), options.device
            )
            for name in chosen
        }
        peaks = {name: gigabytes(make) for name, make in makers.items()}
        found = seconds(
            {name: make for name, make in makers.items() if peaks[name] is not None}, options.steps
        )
        cells = [
            f"{peaks[name]:.2f} | {shape[0] * seqlen / found[name]:,.0f}"
            if name in found
            else "out of memory | "
            for name in chosen
        ]
        print(f"| {seqlen} | {shape[0]} | {' | '.join(cells)} |", flush=True)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
