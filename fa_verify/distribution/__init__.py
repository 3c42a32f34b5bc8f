"""The default distribution of cases: `sample` draws one, `draw` those of a campaign's shard.

`long` has those that take a card, `few` some that stand for many, `forms` what is compiled of many.

No torch, no Triton. The tables are stated in docs/distribution.md.
"""

from fa_verify.distribution.drawing import sample, work
from fa_verify.distribution.few import few
from fa_verify.distribution.forms import forms
from fa_verify.distribution.long import long
from fa_verify.distribution.order import draw
from fa_verify.distribution.space import Space
from fa_verify.distribution.tables import MAX_WORK

__all__ = ["MAX_WORK", "Space", "draw", "few", "forms", "long", "sample", "work"]
