"""Padded batches to packed tokens and back."""

import torch
from torch.nn import functional


def unpad_input(hidden_states, attention_mask):
    """Tokens where the mask is set, their places, cu_seqlens, the longest, and all lengths."""
    lengths = attention_mask.sum(-1, dtype=torch.int32)
    places = attention_mask.flatten().nonzero().flatten()
    starts = functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[places], places, starts, int(lengths.max()), lengths


def pad_input(hidden_states, indices, batch, seqlen):
    """Put tokens back to their places; the others are 0."""
    padded = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:]))
    return padded.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))
