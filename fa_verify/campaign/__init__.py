"""A budgeted run over many cases: which cases, in which processes, until when.

The parent draws cases and writes records; worker processes run kernels, one case at a time, and are
killed and replaced when a case hangs or dies. The campaign prints nothing: it calls a `Listener`.
"""

from fa_verify.campaign.cases import drawn, further
from fa_verify.campaign.plan import Listener, Plan
from fa_verify.campaign.running import replay, run

__all__ = ["Listener", "Plan", "drawn", "further", "replay", "run"]
