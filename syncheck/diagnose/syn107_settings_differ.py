"""Settings of the optimizer or the learning-rate scheduler are not the same on all ranks.

Signature: a value of the optimizer's parameter groups (learning rate, weight decay, betas, momentum, members of the
groups) or of a scheduler's state differs. The finding covers the parameters and the optimizer state as well, if ranks
with equal settings hold equal bytes of them and the first moments still point the same way (median cosine of 0.9 or
more): averaged gradients, unequal steps. It covers the values alone if only a scheduler's state differs, which has not
changed a learning rate yet, or if other evidence says that gradients are not averaged (SYN211, SYN212).

Cause: each rank decides from its own numbers. ReduceLROnPlateau is stepped with the loss of a rank's own batches, a
schedule counts a rank's own batches or overflows, a configuration differs between ranks or hosts, or the scheduler's
state was restored on some ranks only. DDP averages gradients and never compares settings.

Fix: build optimizer and scheduler from one configuration on every rank, and step the scheduler with a number that all
ranks have: `dist.all_reduce(loss); scheduler.step(loss / dist.get_world_size())`. Then resume from a checkpoint in
which the ranks agree.

Incidents: lucidrains/DALLE-pytorch#268 and PaddlePaddle/Paddle#50589 (ReduceLROnPlateau on a rank's own loss),
karpathy/nanochat#857 (the schedule follows each rank's own progress through the data), rwth-i6/returnn#1493.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from syncheck.diagnose.case import Match, agreement_text, by_value_text, parameters_text, ranks_by
from syncheck.diagnose.counters import minority_of
from syncheck.diagnose.gradients import cosines, course, differing_moments, followers_text, only_decay, with_moment
from syncheck.messages import names_text
from syncheck.value_kinds import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.diagnose.case import Case
    from syncheck.records import Severity, TensorDiff, ValueDiff

CODE = "SYN107"
SLUG = "settings-differ"
SEVERITY: Severity = "error"
CAUSE = (
    "The settings of the optimizer or its scheduler are not the same on all ranks: equal gradients make unequal steps."
)
FIX = (
    "Build optimizer and scheduler from one configuration on every rank, and step ReduceLROnPlateau and the like with "
    "one number: dist.all_reduce(loss); scheduler.step(loss / dist.get_world_size()). Then resume from a checkpoint in "
    "which the ranks agree."
)

# Median cosine of first moments from which the gradients count as averaged, as in SYN211.
ALIKE = 0.9
# Settings that change the direction of the first moments.
_OF_MOMENTS = frozenset("betas momentum dampening nesterov weight_decay alpha params (positions)".split())


def apply(case: Case) -> Match | None:
    """Fit settings that differ, and cover the tensors that differ between ranks of other settings only."""
    settings = [diff for diff in case.of_values() if diff.kind == "setting"]
    if not settings:
        return None
    # What takes steps comes first; a scheduler's counters and best loss change them later.
    settings.sort(key=lambda diff: not _acts(diff))
    acting = [diff for diff in settings if _acts(diff)]
    covered = _explained(case, acting) if acting else ()
    texts = [_text(diff) for diff in settings[:3]]
    texts += [f"and {len(settings) - 3} more"] if len(settings) > 3 else []
    moved = [diff for diff in covered if diff.kind == "parameter"]
    if moved:
        unknown = "" if with_moment(case) else ", and no first moments were compared, which would tell of the gradients"
        texts.append(f"{parameters_text(case, moved)}, only between ranks of unequal settings{unknown}")
    text = "; ".join(texts) + (course(case, "parameter")[1] if moved else "") + followers_text(covered, "parameter")
    by_text = ({rank: str(value) for rank, value in diff.by_rank.items()} for diff in settings)
    odd = next(filter(None, map(minority_of, by_text)), case.group.ranks)
    values = tuple(diff.name for diff in settings)
    return Match(covered, odd, text + agreement_text(covered, case.group), values)


def _acts(diff: ValueDiff) -> bool:
    """Whether a setting changes the next step: it is in a parameter group, or is a learning rate or the like."""
    parts = diff.name.split(".")
    return "param_groups" in parts or "_last_lr" in parts or parts[-1] in SETTINGS


def _text(diff: ValueDiff) -> str:
    """'optimizer.param_groups.0.lr is 0.1 on ranks 0, 1 and 0.05 on rank 2'; of members, those that not all list."""
    if not diff.name.endswith((".params", ".(positions)")):
        return f"{diff.name} is {by_value_text(diff.by_rank)}"
    members = [set(str(value).split(", ")) for value in diff.by_rank.values() if value is not None]
    moved = sorted({name for of in members for name in of if not all(name in other for other in members)})
    return f"{diff.name} has {names_text(moved)} on some ranks only" if moved else f"{diff.name} has another order"


def _explained(case: Case, acting: Sequence[ValueDiff]) -> tuple[TensorDiff, ...]:
    """Return the trained tensors that differ, none of them between ranks of equal settings."""
    moments = cosines(differing_moments(case).values())
    turned = only_decay(case) or any(diff.name.rpartition(".")[2] in _OF_MOMENTS for diff in acting)
    if moments and median(moments) < ALIKE and not turned:
        return ()
    of_rank = {rank: tuple(str(diff.by_rank.get(rank)) for diff in acting) for rank in case.group.ranks}
    equals = [set(ranks) for ranks in ranks_by(of_rank).values()]
    trained = [diff for diff in case.of_kind("parameter", "optimizer", "ema") if diff.status == "different"]
    return tuple(diff for diff in trained if not any(_splits(diff, ranks) for ranks in equals))


def _splits(diff: TensorDiff, ranks: set[int]) -> bool:
    """Whether some of these ranks hold unequal bytes, of those that ought to hold the same."""
    groups = diff.replica_groups or (tuple(rank for found in diff.clusters for rank in found),)
    return any(sum(bool(ranks & set(group) & set(found)) for found in diff.clusters) > 1 for group in groups)
