"""What is easily got wrong about the terms, planted in the kernels: the suite sees each of it.

A defect is an edit of a copy of the kernels; the same kernels without it pass the same case.
"""

import shutil

import pytest

from fa_verify import loader
from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.case import Case
from fa_verify.verify import verify

from .conftest import FOLDER

BIAS = "pass=bwd b=2 h=4/2 s=40x70 d=16 dtype=float32 mask=causal bias=hqk seed=1"
BATCHES = "pass=bwd b=3 h=2/1 s=20x30 d=16 dtype=float32 bias=k seed=1"
HIDES = BIAS.replace("seed=1", "bias.values=hides seed=1")
CAPPED = BIAS.replace("bias=hqk", "cap=2.0 bias=hqk")
VECTORS = BIAS.replace("70", "76")  # a multiple of 4, not of 8
ALIBI = "pass=bwd b=2 h=4/2 s=40x70 d=16 dtype=float32 alibi=1 seed=1"
SINKS = "pass=bwd b=2 h=4/2 s=40x70 d=16 dtype=float32 mask=causal sinks=1 seed=1"
# Rows of one key, whose logits are far below the sink.
HIGH = SINKS.replace("40x70", "70x40").replace("seed=1", "sinks.values=high logits=100.0 seed=1")
OFF = SINKS.replace("s=40x70", "s=70x40").replace("seed=1", "sinks.values=off seed=1")
DROPOUT = "pass=bwd b=2 h=4/2 s=40x70 d=16 dtype=float32 mask=causal dropout=0.3 seed=1"
DROPPED_BIAS = DROPOUT.replace("dropout", "bias=hqk dropout")
LSE = "pass=bwd b=2 h=2/2 s=40x70 d=16 dtype=float32 dlse=1 seed=1"
DOCUMENTS = (
    "pass=bwd h=2/1 s=80x110 d=16 dtype=float32 mask=causal.docs5x70-75x40 bias=hqk alibi=1 "
    "dropout=0.3 seed=1"
)

DEFECTS = {
    "bias subtracted": (BIAS, "terms.py", "logits + bias)", "logits - bias)"),
    "bias before the softcap's scale": (
        CAPPED,
        "scores.py",
        "(softcap * UNIT)",
        "(softcap * LOG2E)",
    ),
    "bias of the key head": (
        BIAS,
        "forward.py",
        "batch, place, head_q,",
        "batch, place, head_kv,",
    ),
    "bias of the first sequence": (
        BIAS.replace("hqk", "bhqk"),
        "arguments.py",
        "0 if size == 1 else stride",
        "0 if size in (1, 2) else stride",
    ),
    "bias by its own columns only": (
        BIAS,
        "terms.py",
        "first_key, stride_query, stride_key",
        "first_key, 0, stride_key",
    ),
    "bias read past its vectors": (
        VECTORS,
        "arguments.py",
        "else vector(bias)",
        "else 2 * vector(bias)",
    ),
    "what a bias hides is seen": (
        HIDES,
        "terms.py",
        'float("-inf"), logits + bias)',
        "0.0, logits)",
    ),
    "bias forgotten for dq": (
        BIAS,
        "backward_dq.py",
        "False, SOFTCAP, BIAS, BIAS_VECTOR",
        'False, SOFTCAP, "", 1',
    ),
    "bias forgotten for dk": (
        BIAS,
        "backward_dkdv.py",
        "True, SOFTCAP, BIAS, BIAS_VECTOR",
        'True, SOFTCAP, "", 1',
    ),
    "dbias under the softcap": (
        CAPPED,
        "backward_terms.py",
        "p * (dp - row_delta[:, None])",
        "p * (dp - row_delta[:, None]) * _slope",
    ),
    "dbias of all but one sequence": (
        BATCHES,
        "backward_terms.py",
        "range(split, sharers, splits)",
        "range(split, sharers - 1, splits)",
    ),
    "dbias of the last split only": (BATCHES, "backward_terms.py", "sums.sum(2)", "sums[:, :, -1]"),
    "dbias of dropped elements": (
        DROPPED_BIAS,
        "backward_terms.py",
        "tl.where(kept, dp * dropout_factor, 0.0)",
        "dp * dropout_factor",
    ),
    "alibi added": (ALIBI, "terms.py", "logits -= slope", "logits += slope"),
    "alibi from the first key": (ALIBI, "terms.py", "queries + diagonal - keys", "queries - keys"),
    "alibi without its sign": (
        ALIBI,
        "terms.py",
        "tl.abs(queries + diagonal - keys)",
        "(queries + diagonal - keys)",
    ),
    "alibi of the key head": (
        ALIBI,
        "backward_dq.py",
        "batch, place, head_q,",
        "batch, place, head_kv,",
    ),
    "sink left out of lse": (
        SINKS,
        "forward.py",
        "m * score_scale + tl.log(l))",
        "m * score_scale + tl.log(l - tl.exp(tl.load(sinks + head_q) - m)))",
    ),
    "sink with a value": (
        SINKS,
        "forward.py",
        "acc / l[:, None], acc_tail",
        "(acc + 0.01) / l[:, None], acc_tail",
    ),
    "sink of the key head": (
        SINKS,
        "forward.py",
        "tl.load(sinks + head_q)",
        "tl.load(sinks + head_kv)",
    ),
    "sink apart from the maximum": (
        HIGH,
        "terms.py",
        "top = tl.maximum(m, sink)",
        'top = tl.where(m == float("-inf"), sink, m)',
    ),
    "sink that is off makes NaN": (
        OFF,
        "terms.py",
        'tl.where(top == float("-inf"), 0.0, top)',
        "top",
    ),
    "dsinks of the first sequence": (
        SINKS,
        "backward_terms.py",
        "for sequence in range(batch)",
        "for sequence in range(1)",
    ),
    "dsinks with the wrong sign": (
        SINKS,
        "backward_terms.py",
        "total -= p * row_delta",
        "total += p * row_delta",
    ),
    "dropout of tiles": (
        DROPOUT.replace("70", "170"),
        "dropout.py",
        "first_key // 16 * 4 + tl.arange",
        "tl.arange",
    ),
    "dropout of heads alike": (
        DROPOUT,
        "dropout.py",
        "rows[:, None], head, batch, _ROUNDS)",
        "rows[:, None], 0, batch, _ROUNDS)",
    ),
    "dropout of batches alike": (
        DROPOUT,
        "dropout.py",
        "rows[:, None], head, batch, _ROUNDS)",
        "rows[:, None], head, 0, _ROUNDS)",
    ),
    "dropout with words in another order": (
        DROPOUT,
        "dropout.py",
        "_bits(words[0], threshold) | _bits(words[1], threshold) << 2",
        "_bits(words[1], threshold) | _bits(words[0], threshold) << 2",
    ),
    "dropout in l": (
        DROPOUT,
        "forward.py",
        "l = l * rescale + tl.sum(p, 1)",
        (
            "l = l * rescale + tl.sum(tl.where(keep_tile(dropout_seed, dropout_threshold, place, "
            "head_q, first_query, first_key, BLOCK_M, BLOCK_N), p, 0.0), 1)"
        ),
    ),
    "dropout not scaled": (DROPOUT, "forward.py", "acc = acc * dropout_factor", "acc = acc * 1.0"),
    "dropout not in dv": (
        DROPOUT,
        "backward_dkdv.py",
        "weights = tl.where(kept, p, 0.0)",
        "weights = p",
    ),
    "dropout not in dp": (
        DROPOUT,
        "backward_dkdv.py",
        "tl.where(kept, dp * dropout_factor, 0.0)",
        "dp",
    ),
    "dropout scaled in dp only": (
        DROPOUT,
        "backward_dq.py",
        "tl.where(kept, dp * dropout_factor, 0.0)",
        "dp * dropout_factor",
    ),
    "dropout of another seed backward": (
        DROPOUT,
        "backward_dq.py",
        "dropout_seed, dropout_threshold, place",
        "dropout_seed + 1, dropout_threshold, place",
    ),
    "dlse added to delta": (
        LSE,
        "backward_dq.py",
        "total -= tl.load(row_dlse",
        "total += tl.load(row_dlse",
    ),
    "dlse of the first head": (
        LSE,
        "backward_dq.py",
        "dlse + tl.cast(sequence, tl.int64)",
        "dlse + 0 * tl.cast(sequence, tl.int64)",
    ),
    "documents: bias of the first one": (
        DOCUMENTS,
        "terms.py",
        "start += tl.cast(start_k, tl.int64) * stride_key",
        "start += 0",
    ),
    "documents: alibi from the whole": (
        DOCUMENTS,
        "terms.py",
        "return along_bias, (along_alibi[0], diagonal)",
        "return along_bias, along_alibi",
    ),
    "documents: dropout alike": (DOCUMENTS, "forward.py", "place = document", "place = batch"),
    "documents: dbias where it is not": (
        DOCUMENTS,
        "backward_terms.py",
        "keys += start_k",
        "keys += 0",
    ),
}


def verdict(folder, case):
    (kernel,) = loader.load(f"{folder / 'flash_attention.py'}:flash")
    return verify(Case.parse(case), kernel, Setup(), CpuBackend())


@pytest.mark.parametrize("case", sorted({case for case, *_ in DEFECTS.values()}))
def test_the_kernels_pass(case):
    record = verdict(FOLDER, case)
    assert record.verdict == "pass", record.failures


@pytest.mark.parametrize(("case", "file", "old", "new"), DEFECTS.values(), ids=DEFECTS)
def test_a_defect_is_caught(tmp_path, case, file, old, new):
    folder = tmp_path / "kernels"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    source = (folder / file).read_text()
    assert source.count(old) == 1, old
    (folder / file).write_text(source.replace(old, new))
    assert verdict(folder, case).verdict == "fail"
