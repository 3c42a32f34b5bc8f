"""A case as tensors that a kernel is handed, poison around them, and changed copies of these."""

from fa_verify.inputs.buffers import SLACK, SPARSE, reserved
from fa_verify.inputs.copies import (
    among_others,
    permute_batch_heads,
    permute_keys,
    perturb_hidden,
    select_sequence,
)
from fa_verify.inputs.numbers import REPEATS, dropout_seed, elements, period
from fa_verify.inputs.tensors import (
    Inputs,
    duplicate,
    fingerprint,
    materialise,
    modified,
    with_slack,
)

__all__ = [
    "REPEATS",
    "SLACK",
    "SPARSE",
    "Inputs",
    "among_others",
    "dropout_seed",
    "duplicate",
    "elements",
    "fingerprint",
    "materialise",
    "modified",
    "period",
    "permute_batch_heads",
    "permute_keys",
    "perturb_hidden",
    "reserved",
    "select_sequence",
    "with_slack",
]
