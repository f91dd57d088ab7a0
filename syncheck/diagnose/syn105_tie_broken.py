"""Two names are one tensor on some ranks and two tensors on others.

Signature: in some files the names share memory (the same storage, offset, shape and strides), in others each has its
own. Only torch.save keeps this. This is information and never fails a run.

Cause: weights that are to be tied, such as an input embedding and the output layer of a language model, were not tied
on every rank: the model was built along another path, cast or loaded on one rank, a new embedding was put in without
tying again, or a library saved a copy of one of them. As long as the copies hold equal values nothing differs; from
the next step on each gets its own gradient and they drift apart.

Fix: tie the weights on every rank after building, loading and resizing (`model.tie_weights()` in transformers), before
the model is wrapped.

Incidents: NVIDIA/Megatron-LM#4641, NVIDIA/Megatron-LM#844 and NVIDIA/Megatron-LM#656 (embedding and output layer, tied
across pipeline stages, drifted apart).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.case import Match, counted, fewer
from syncheck.messages import ranks_text

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case
    from syncheck.records import Severity

CODE = "SYN105"
SLUG = "tie-broken"
SEVERITY: Severity = "info"
CAUSE = "Weights that share memory on some ranks are separate tensors on others, where each gets its own gradient."
FIX = "Tie the weights on every rank after building, loading or resizing the model, and before wrapping it."
_MOST = 3  # ties that are named


def apply(case: Case) -> Match | None:
    """Tell which names are tied where; cover nothing. The suspects are the fewer ranks, all where neither are."""
    ties = case.group.ties
    if not ties:
        return None
    together = set(ties[0].ranks)
    odd = fewer(together, set(case.group.ranks) - together)
    texts = [f"{' and '.join(tie.names[:_MOST])} share memory on {ranks_text(tie.ranks)} only" for tie in ties[:_MOST]]
    more = f"; and {counted(len(ties) - _MOST, 'more tie')}" if len(ties) > _MOST else ""
    return Match((), tuple(sorted(odd)), "; ".join(texts) + more)
