"""Names carry the prefix of a wrapper, which syncheck removed before comparing.

Signature: names begin with `module.` (DDP, DataParallel), or contain `_orig_mod.` (torch.compile) or
`_fsdp_wrapped_module.` (FSDP1). This is information and never fails a run.

Cause: the state dict of the wrapped module was saved instead of the inner module's. This does no harm to a comparison,
but the file does not load into an unwrapped model. If only some files of a group have the prefix, different versions of
the code saved them.

Fix: save `model.module.state_dict()` (DDP, DataParallel) or `model._orig_mod.state_dict()` (torch.compile).

Incidents: only everyday loading errors are known.
"""

from __future__ import annotations

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.conditions import requires
from syncheck.messages import Sentence

CODE = "SYN103"
SLUG = "prefix-normalized"
SEVERITY = "info"
CERTAINTY = "proved"


class Text(Sentence, topic=CODE):
    """The sentences of this finding."""

    CAUSE = "The state dict of the wrapped module was saved, so its names carry the wrapper's prefix."
    FIX = (
        "No change is needed for a comparison. To load the file into an unwrapped model, save "
        "`model.module.state_dict()`."
    )
    PREFIX = (
        "{ranks:Ranks} saved {names:count name} with a wrapper's prefix (module., `_orig_mod`. or similar), which "
        "syncheck ignored"
    )


def _has_prefixes(case: Case) -> bool:
    """Whether names carry the prefix of a wrapper."""
    return bool(case.group.evidence.normalized)


@requires(_has_prefixes)
def apply(case: Case) -> Match | None:
    """Report the ranks whose names were normalized; cover no tensor."""
    normalized = case.group.evidence.normalized
    ranks = tuple(sorted(normalized))
    return Match((), ranks, [Text.PREFIX(ranks=ranks, names=max(normalized.values()))])
