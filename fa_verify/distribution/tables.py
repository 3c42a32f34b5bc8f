"""The weight tables of the default distribution, frozen here and stated in docs/distribution.md."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")
Table = tuple[tuple[T, float], ...]

MAX_WORK = 6e8
"""Most that a case may cost: batch * heads_q * seqlen_q * seqlen_k * (head_dim + head_dim_v)."""

LARGE = 1024 * 1024  # seqlen_q * seqlen_k of the class "large", at the least
CANDIDATES = 6  # among which each of the first cases is chosen
FIRST = 17  # cases of a sequence, none of which is large
INT32 = 1 << 31  # elements that 32 bits count; a "huge" layout's last element lies past them
MOST_APART = 1024  # of its elements' rows: each takes a page of memory

# Class: queries from..to, keys from..to, most batch * heads_q. "large" is cut from an area.
SHAPES: Table[tuple[str, int, int, int, int, int]] = (
    (("medium", 33, 300, 33, 300, 6), 22.5),
    (("edge", 0, 33, 0, 33, 24), 9),
    (("small", 1, 64, 1, 64, 24), 10),
    (("decode", 1, 16, 64, 4096, 12), 7),
    (("long", 200, 1000, 200, 1000, 3), 23),
    (("tall", 500, 3000, 1, 150, 4), 6),
    (("wide", 1, 150, 500, 3000, 4), 7),
    (("large", 256, 4096, 256, 4096, 3), 14.5),
    # Past 16 bits: keys that short integers cannot count, heads that a grid's axis cannot.
    (("giant", 1, 4, 32_800, 36_000, 1), 0.75),
    (("crowd", 1, 1, 1, 2, 65_600), 0.02),
)
ONE_QUERY = 0.4  # of "decode" has one query, as decoding does
EDGE_LENGTHS: Table[int] = (
    *((1, 20), (0, 16), (2, 15), (3, 8), (5, 5), (7, 5)),
    *((15, 6), (16, 6), (17, 8), (31, 6), (32, 6), (33, 8)),
)
LENGTH_KINDS: Table[str] = (("anything", 40), ("beside a block", 35), ("blocks", 10), ("prime", 15))
BLOCKS: Table[int] = ((16, 1), (32, 1), (64, 2), (128, 2), (256, 1))
SIDES: Table[int] = ((1, 1), (-1, 1))  # a length "beside a block" is this much more
# Coincidence hides bugs, and so does its absence: masks that are dropped when lengths are even.
RELATIONS: Table[str] = (("unequal", 60), ("congruent", 20), ("aligned", 12), ("equal", 8))
# "congruent": seqlen_k - seqlen_q is this much more than a multiple of a block.
NEARNESS: Table[int] = ((0, 1), (1, 1), (-1, 1), (2, 1), (-2, 1))

HEADS: Table[tuple[int, int, int]] = (
    *(((1, 1, 1), 8), ((1, 2, 2), 7), ((2, 1, 1), 7), ((2, 3, 3), 7), ((3, 2, 2), 6)),
    *(((1, 3, 3), 5), ((1, 5, 5), 3), ((3, 4, 4), 3), ((1, 2, 1), 7), ((1, 3, 1), 6)),
    *(((1, 6, 2), 8), ((1, 6, 3), 7), ((2, 4, 1), 4), ((2, 6, 2), 6), ((3, 8, 2), 6)),
    *(((1, 8, 2), 5), ((1, 4, 2), 3), ((5, 4, 2), 3), ((1, 14, 2), 2)),
    # Many of each, where 16 or 8 are a limit.
    *(((1, 12, 12), 2), ((2, 12, 12), 1), ((1, 16, 2), 2), ((1, 20, 1), 1), ((10, 2, 1), 1)),
)
CROWD: Table[tuple[int, int, int]] = (((8200, 8, 2), 1), ((65_600, 1, 1), 1))
HEAD_DIMS: Table[int] = (
    *((80, 24), (96, 16), (64, 12), (128, 8), (32, 6), (16, 5), (256, 2)),
    *((1, 1), (2, 1), (8, 1), (40, 1), (48, 1), (72, 1), (112, 1), (192, 1), (255, 1)),
    (0, 18),  # any of 1 to 256
)
HEAD_DIM_V: Table[str] = (("same", 75), ("other", 25))

DTYPES: Table[Any] = (("float16", 40), ("bfloat16", 40), ("float32", 20))
DOT_PRECISIONS: Table[Any] = (("ieee", 40), ("tf32", 40), ("tf32x3", 20))
BACKWARD = 0.6

# causal, a left window, a right window, alignment
MASKS: Table[tuple[bool, bool, bool, Any]] = (
    ((False, False, False, "bottom-right"), 30),
    ((True, False, False, "bottom-right"), 26),
    ((True, False, False, "top-left"), 10),
    ((False, True, True, "bottom-right"), 8),
    ((True, True, False, "bottom-right"), 9),
    ((False, True, False, "bottom-right"), 4),
    ((False, False, True, "bottom-right"), 3),
    ((False, True, True, "top-left"), 4),
    ((True, True, False, "top-left"), 4),
    ((False, True, False, "top-left"), 2),
)
SMALL_WINDOWS: Table[int] = ((0, 3), (1, 3), (2, 1), (7, 1), (15, 1), (16, 1), (17, 1), (64, 1))
WINDOWS: Table[str] = (("small", 36), ("hides little", 14), ("anything", 50))
# Keys that a window hides of the row that it hides most of.
HIDDEN: Table[int] = ((1, 3), (0, 1), (2, 1))
SOFTCAPS: Table[float] = ((0.0, 86), (50.0, 3), (30.0, 3), (15.0, 3), (5.0, 2), (1.0, 3))
SCALES: Table[float | None] = (
    *((None, 82), (0.125, 3), (0.5, 3), (1.0, 2), (-0.1, 3), (-1.0, 1), (0.0, 2)),
    *((0.01, 2), (1e-4, 0.5), (10.0, 1), (1e4, 0.5)),
)

LAYOUTS: Table[str] = (
    *(("bhsd", 28), ("bshd", 18), ("packed", 14), ("padded rows", 10), ("transposed", 8)),
    *(("shared heads", 6), ("offset", 6), ("padded heads", 4), ("spread", 3), ("sbhd", 3)),
    ("huge", 2),
)
DENSE_LAYOUTS: Table[str] = (("bhsd", 55), ("bshd", 45))
DIFFERENT_LAYOUTS = 0.7  # how often v's kind is drawn again when it is k's

QK: Table[str] = (
    *(("normal", 36), ("uniform-positive", 3), ("constant", 3), ("equal-keys", 3), ("one-hot", 4)),
    *(("dominant-key", 4), ("alternating-signs", 3), ("heavy-tails", 3), ("row-shift", 4)),
    *(("row-shift-far", 2.5), ("near-ties", 2.5), ("subnormal-p", 4), ("near-max", 2.5)),
    *(("zeros", 2.5), ("mixed", 3), ("two-level", 3), ("duplicates", 2.5), ("increasing", 4)),
    *(("drifting-periodic", 2.5), ("decreasing", 3), ("tiny", 2.5), ("huge", 2.5)),
)
V: Table[str] = (
    *(("normal", 42), ("ones", 8), ("zero-mean", 10), ("indicator", 10), ("offset", 8)),
    *(("near-max", 4), ("heavy-tails", 6), ("zeros", 3), ("mixed", 9)),
)
DO: Table[str] = (
    *(("normal", 52), ("ones", 10), ("one-hot-row", 10), ("zeros", 4)),
    *(("mixed", 10), ("small", 8), ("near-max", 6)),
)
LOGITS: Table[float] = ((1.0, 62), (2.0, 8), (4.0, 8), (10.0, 10), (30.0, 6), (100.0, 6))
# Families whose logits are not set to a size of their own.
SCALABLE = frozenset(
    {
        *("normal", "uniform-positive", "constant", "equal-keys", "alternating-signs"),
        *("heavy-tails", "near-ties", "zeros", "mixed", "two-level", "duplicates"),
    }
)

# Of a kernel that declares terms (bias, ALiBi, sinks, dropout, a gradient of lse): how many of its
# cases have each, and how many have none if it declares several.
WITH_TERM = 1 / 3
BARE = 0.4
MOST_TERMS = 1 << 22  # elements of a bias, and of what dropout keeps
BIAS: Table[str] = (("normal", 40), ("large", 15), ("constant", 10), ("mask", 15), ("hides", 20))
SLOPES: Table[str] = (("geometric", 60), ("signed", 25), ("steep", 15))
SINKS: Table[str] = (("normal", 50), ("high", 20), ("low", 15), ("off", 15))
DLSE: Table[str] = (("normal", 60), ("zeros", 10), ("spikes", 30))
DROPOUT: Table[float] = ((0.1, 45), (0.5, 20), (0.2, 15), (0.9, 12), (0.01, 8))
SEEDS: Table[str] = (("wide", 70), ("narrow", 30))
BIAS_LAYOUTS: Table[str] = (
    *(("bhsd", 40), ("padded rows", 15), ("transposed", 10), ("offset", 10)),
    *(("padded heads", 10), ("spread", 5), ("sbhd", 10), ("huge", 2)),
)

# Of a kernel that takes fp8: scales of what, their values, and how many of its cases have fp8 if it
# takes other operands too.
FP8: Table[str] = (
    *(("tensor", 25), ("head", 25), ("block16", 10), ("block32", 8), ("block64", 16)),
    *(("block128", 12), ("block256", 4)),
)
SCALE_VALUES: Table[str] = (
    *(("uneven", 35), ("coarse", 30), ("even", 15), ("powers", 12), ("ones", 8)),
)
WITH_FP8 = 0.4

# Of a kernel that declares packed documents, or masks with gaps: how many of its cases have them,
# and most queries x keys of a mask with gaps, each of which is looked at.
PACKED = 0.2
SPARSE_MASKS = 0.12
MOST_GAPS = 1 << 21
# How the documents' queries and their keys are cut: at random, in equal parts, a block's length or
# one more or less, one each and the rest, as the queries are, not at all.
DOCUMENTS: Table[tuple[str, str]] = (
    *((("cut", "cut"), 40), (("cut", "same"), 15), (("ones", "cut"), 15), (("alike", "alike"), 8)),
    *((("beside", "beside"), 12), (("ones", "ones"), 4), (("one", "one"), 6)),
)
COUNTS: Table[int] = ((2, 20), (3, 25), (4, 15), (7, 20), (16, 12), (41, 6), (130, 2))
EMPTY: Table[str] = (("none", 45), ("first", 12), ("last", 12), ("both ends", 13), ("between", 18))
PATTERNS: Table[str] = (
    *(("block-sparse", 40), ("prefix", 15), ("global-local", 15), ("dilated", 8)),
    *(("scattered", 10), ("predicate", 12)),
)
GAP_SIZES: Table[int] = ((16, 2), (32, 2), (64, 3), (128, 2), (50, 1))
SEEN_PERCENT: Table[int] = ((50, 5), (20, 3), (85, 2))
STEPS: Table[int] = ((2, 4), (3, 3), (8, 2), (64, 1))
WIDTHS: Table[int] = ((0, 1), (1, 2), (15, 2), (64, 2))
GLOBAL: Table[int] = ((0, 1), (1, 3), (4, 2), (70, 1))
