"""Names had a wrapper's prefix, which was taken off before comparing.

Signature: names begin with `module.` (DDP, DataParallel), or hold `_orig_mod.` (torch.compile) or
`_fsdp_wrapped_module.` (FSDP1). This is information and never fails a run.

Cause: the wrapped module's state dict was saved rather than the inner one's. That is harmless, but such a file does
not load into an unwrapped model, and a group where only some files have the prefix was saved by two versions of the
code.

Fix: save `model.module.state_dict()` (DDP, DataParallel) or `model._orig_mod.state_dict()` (torch.compile).

Incidents: none known beyond everyday loading errors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.case import Match
from syncheck.messages import ranks_text

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case
    from syncheck.records import Severity

CODE = "SYN103"
SLUG = "prefix-normalized"
SEVERITY: Severity = "info"
CAUSE = "The wrapped module's state dict was saved, so names carry the wrapper's prefix."
FIX = "Nothing has to change to compare. To load into an unwrapped model, save model.module.state_dict()."


def apply(case: Case) -> Match | None:
    """Tell which ranks' names were changed; cover nothing."""
    ranks = tuple(sorted(case.group.evidence.normalized))
    if not ranks:
        return None
    return Match(
        (),
        ranks,
        f"{max(case.group.evidence.normalized.values())} names on {ranks_text(ranks)} were compared without a "
        "wrapper's prefix (module., _orig_mod. or the like)",
    )
