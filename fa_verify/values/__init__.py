"""Value families: what the elements of each tensor look like, and which bugs each one sees.

NumPy only; float64 out, rounded to the storage dtype later. Same stream and shapes, same values.
Shapes are (batch, heads, seqlen, head_dim); query head h reads key head ``h // group``.
"""

from fa_verify.values.facts import Facts, stream
from fa_verify.values.queries_keys import QK_FAMILIES
from fa_verify.values.terms import SEED_BITS, TERM_FAMILIES
from fa_verify.values.values_gradients import DO_FAMILIES, V_FAMILIES

__all__ = [
    "DO_FAMILIES",
    "QK_FAMILIES",
    "SEED_BITS",
    "TERM_FAMILIES",
    "V_FAMILIES",
    "Facts",
    "stream",
]
