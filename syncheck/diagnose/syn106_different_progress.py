"""The files are from different moments of the run.

Signature: a step or epoch counter of the checkpoint is not equal on all ranks. Or BatchNorm's counts and all of the
optimizer's step counters lag on the same ranks, by more than a step or two where the files do name an equal step. Or,
where no step is stored, all of the optimizer's counters differ, and neither a skipped step (SYN214) nor a state that
was not restored (SYN215) fits. Whatever training changes may differ because of that, between ranks of different
progress: not a frozen parameter, not a weight decay, and nothing between two ranks of one step.

Cause: a rank did not save at the last step, an older file was left in the folder, the ranks resumed from checkpoints
of different steps, or one rank stopped earlier than the others.

Fix: compare files of one step. If all files are of the last save, make every rank agree on the step before it saves
or resumes: all-reduce MIN and MAX of the step and stop if they differ.

Incidents: mosaicml/composer#2146 (ranks resumed from different checkpoints), hiyouga/LLaMA-Factory#655,
huggingface/transformers#28270; Megatron-LM warns and takes the larger step.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from syncheck.diagnose.case import Match, counted, differ, ranks_by
from syncheck.diagnose.counters import (
    counted_text,
    counters_of,
    farthest,
    fitting,
    forwards_lag,
    minority_of,
    odd_ranks,
    scaler_explains,
)
from syncheck.errors import brief
from syncheck.evidence.suspects import suspects
from syncheck.messages import ranks_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.diagnose.case import Case
    from syncheck.records import Severity, ValueDiff

# Settings that schedulers of torch move.
_SCHEDULED = re.compile(r"\.(lr|momentum|betas(\.\d+)?)$")
CODE = "SYN106"
SLUG = "different-progress"
SEVERITY: Severity = "error"
CAUSE = "The files are from different moments: a rank saved, resumed or stopped at another step."
FIX = (
    "Compare files of one step. Before saving or resuming, all-reduce MIN and MAX of the step over the ranks "
    "and stop if they differ."
)


def apply(case: Case) -> Match | None:
    """Fit a differing step or epoch, and cover what training moves: between these ranks it tells nothing more."""
    first = next((diff for diff in case.of_values() if diff.kind == "progress" and _unlike(diff)), None)
    if first is None:
        return _by_the_optimizer(case)
    named = _named(first)
    texts = [f"{first.name} {brief(value)} on {ranks_text(ranks)}" for value, ranks in ranks_by(named).items()]
    return _match(case, minority_of(named) or case.group.ranks, "; ".join(texts), named)


def _by_the_optimizer(case: Case) -> Match | None:
    """Fit optimizer counters that all differ, and that no rule on single steps or lost state explains better."""
    known = counters_of(case)
    steps = [diff for diff in case.of_kind("optimizer_step") if diff.status == "different"]
    number = len(steps) + sum(counter.diff is None for counter in known)
    if not number or case.agreeing("optimizer_step"):
        return None
    ranks = odd_ranks(known) or suspects(steps, case.group)
    text = f"{counted(number, 'optimizer step counter')} {differ(number)}"
    if most := farthest(known):
        text += f": {counted_text(most)}"
    stored = case.group.evidence.stores_progress
    if known and forwards_lag(case, known) and (not stored or any(counter.far for counter in known)):
        text += "; num_batches_tracked lags as well" + (", though the files name one step" if stored else "")
        return _match(case, ranks, text, most.by_rank if most else {})
    # Where the files name their step, and it is equal, the optimizer's counters are another matter.
    if stored or fitting(case, far=True) or fitting(case, far=False) or (known and scaler_explains(case, known)):
        return None
    return _match(case, ranks, text, most.by_rank if most else {})


def _match(case: Case, ranks: Sequence[int], text: str, progress: Mapping[int, Any]) -> Match:
    """Cover what training moves, but for differences between ranks of one progress.

    A rank of which the progress is not known may be where the most ranks are.
    """
    tensors = tuple(diff for diff in case.tensors if diff.name not in case.frozen)
    values = tuple(name for name in case.values if ".param_groups." not in name or _SCHEDULED.search(name))
    known = ranks_by({rank: value for rank, value in progress.items() if value is not None})
    first, *others = sorted(known.values(), key=len, reverse=True) or [[]]
    lost = [rank for rank in case.group.ranks if progress.get(rank) is None]
    agree = [[*first, *lost], *others] if progress else None
    return Match(tensors, tuple(ranks), text, values, agree=agree)


def _unlike(diff: ValueDiff) -> bool:
    """Whether two replicas name different ones; that a replica names none tells nothing of its moment."""
    return len({value for value in _named(diff).values() if value is not None}) > 1


def _named(diff: ValueDiff) -> dict[int, Any]:
    """Return what each rank names; NaN, which is not equal to itself, as a text."""
    return {rank: value if value == value else "nan" for rank, value in diff.by_rank.items()}
