"""The optimizer's state was loaded, or was lost, on some ranks only.

Signature: the optimizer's step counters are far apart, by more than two steps and at least 5 % of the larger count; or
the optimizer of some ranks holds no state at all while the others' does. At the moment of the resume the
parameters still agree, for DDP broadcasts them; one step later all of them differ. SGD counts no steps: once it has
stepped, only parameters and momentum that differ are left, and this cannot be told from other causes.

Cause: a resume called `optimizer.load_state_dict()` on rank 0 only, a rank did not find its file and went on with an
empty state, or the optimizer was made anew on some ranks. Nobody broadcasts the optimizer's state.

Fix: load the optimizer's state on every rank, before the first step, and check it: all-gather one step counter and stop
if they differ.

Incidents: vllm-project/speculators#926 (only rank 0 loaded), PaddlePaddle/PaddleNLP#7256 (the same).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.case import Match, counted, differ, parameters_text
from syncheck.diagnose.counters import (
    farthest,
    fitting,
    followers,
    lag_text,
    names_of_values,
    odd_ranks,
    other_lag_text,
    trackers,
)
from syncheck.diagnose.empty_state import without_state
from syncheck.kinds import OPTIMIZER
from syncheck.messages import ranks_text

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case
    from syncheck.records import Severity, TensorDiff

CODE = "SYN215"
SLUG = "optimizer-state-not-restored"
SEVERITY: Severity = "error"
CAUSE = "The optimizer's state was loaded, or lost, on some ranks only: their moments and step counts are others."
FIX = (
    "Load it on every rank before the first step: optimizer.load_state_dict(torch.load(path, map_location=device)"
    "['optimizer']), outside any 'if rank == 0'; DDP broadcasts the model, never the optimizer."
)
# The majority may be the ranks that lost their state.
IN_A_JOB = (
    f"{FIX} To go on with this run: syncheck.live.resync(model, optimizer, source=RANK) on all ranks, with a rank "
    "whose optimizer still has its state."
)


def apply(case: Case) -> Match | None:
    """Fit counters that are far apart, and optimizers without any state beside others with theirs."""
    empty, lacking = without_state(case), tuple(diff for diff in case.tensors if _is_lost(diff))
    if empty and lacking:
        return _empty(case, empty, lacking)
    counters = fitting(case, far=True)
    most = farthest(counters)
    if most is None:
        return None
    tensors = followers(case, counters)
    moved = [diff for diff in tensors if diff.kind == "parameter"]
    state = sum(diff.kind == "optimizer" for diff in tensors)
    ranks = odd_ranks(counters)
    scaler = trackers(case, ranks)
    then = other_lag_text(most, case.series)
    texts = [
        lag_text(counters),
        f"{counted(state, 'other optimizer tensor')} {differ(state)} with it" if state else "",
        parameters_text(case, moved) or _still_agree(case),
        "the loss scaler's state differs with it" if scaler else "",
        f"{then}: it happened, or steps were left out, repeatedly" if then else "",
        ""
        if case.group.evidence.stores_progress or case.in_memory
        else "the files do not say that they are of one step",
    ]
    evidence = "; ".join(filter(None, texts))
    fix = IN_A_JOB if case.in_memory else ""
    return Match(tensors, ranks, evidence, (*names_of_values(counters), *scaler), fix=fix)


def _still_agree(case: Case) -> str:
    if case.compared("parameter") and case.agrees("parameter"):
        return "all parameters still agree: no step has been taken since"
    return ""


def _is_lost(diff: TensorDiff) -> bool:
    return diff.reason == "missing" and diff.kind in OPTIMIZER


def _empty(case: Case, ranks: tuple[int, ...], lacking: tuple[TensorDiff, ...]) -> Match:
    """Say whose optimizer has no state; without a majority these are the suspects, else the fewer."""
    having = tuple(rank for rank in case.group.ranks if rank not in ranks)
    agree = case.compared("parameter") and case.agrees("parameter")
    return Match(
        lacking,
        having if len(having) < len(ranks) else ranks,
        f"the optimizer of {ranks_text(ranks)} holds no state at all, that of {ranks_text(having)} has "
        f"{counted(len(lacking), 'tensor')}" + ("; all parameters still agree" if agree else ""),
        fix=IN_A_JOB if case.in_memory else "",
    )
