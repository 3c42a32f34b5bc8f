"""What pages cost: decoding from a paged cache against a contiguous one, side by side on a card.

    python benchmarks/paged_decoding.py

One query a sequence, 8 query heads to each of 4 key heads, 128 columns, float16. CUDA graphs of
launches in turns, over inputs that exceed the L2; medians.
"""

import argparse
import functools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the kernels are not installed

from fa_verify.bench.timing import Stopwatch
from kernels.cached_attention import attention_with_cache

HEADS, HEADS_KV, HEAD_DIM = 32, 4, 128
POINTS = ((1, 8192), (1, 131072), (16, 8192), (64, 1024), (64, 8192))
PAGE_SIZES = (1, 16, 64, 256)
ROUNDS, MILLISECONDS, L2 = 5, 4.0, 150 << 20


def tensor(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.float16)


def paged(batch, keys, page_size):
    """Arguments of one launch; the pages of a sequence lie anywhere."""
    pages = batch * keys // page_size
    table = torch.randperm(pages, device="cuda").to(torch.int32).view(batch, -1)
    lengths = torch.full((batch,), keys, device="cuda", dtype=torch.int32)
    pools = (tensor(pages, page_size, HEADS_KV, HEAD_DIM) for _ in range(2))
    options = {"block_table": table, "cache_lengths": lengths}
    return (tensor(batch, HEADS, 1, HEAD_DIM), *pools), options


def contiguous(batch, keys):
    caches = (tensor(batch, HEADS_KV, keys, HEAD_DIM) for _ in range(2))
    return (tensor(batch, HEADS, 1, HEAD_DIM), *caches), {}


def main():
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    print("batch    keys  contiguous us  " + "  ".join(f"page {size:4}" for size in PAGE_SIZES))
    with torch.cuda.stream(torch.cuda.Stream()):
        for batch, keys in POINTS:
            count = max(1, -(-L2 // (4 * batch * HEADS_KV * keys * HEAD_DIM)))
            makers = [functools.partial(contiguous, batch, keys)]
            makers += [functools.partial(paged, batch, keys, size) for size in PAGE_SIZES]
            watches = []
            for make in makers:
                given = [make() for _ in range(count)]
                launches = [functools.partial(attention_with_cache, *x, **o) for x, o in given]
                watches.append(Stopwatch.of(launches, MILLISECONDS))
            for _ in range(ROUNDS):
                for watch in watches:
                    watch.turn()
            plain, *others = (1e3 * watch.median for watch in watches)
            print(
                f"{batch:5} {keys:7}  {plain:13.1f}  "
                + "  ".join(f"{x / plain:9.2f}" for x in others)
            )


if __name__ == "__main__":
    main()
