"""Key sets differ: some tensors are not in every replica's file.

Signature: a tensor name is present in some files of the group and absent from others, or all values of an optimizer, a
scheduler or a loss scaler are.

Where all that is missing of some ranks is the state of an optimizer that they did save, that is SYN215.

Cause: the ranks did not build or save the same model. A layer was added or an adapter attached on some ranks only, a
state dict was filtered on one rank, a file is of another version of the code, or `load_state_dict(strict=False)`
swept a mismatch under the carpet.

Fix: build the model from one configuration on all ranks before wrapping it, and save the same state dict everywhere;
load with `strict=True` once to see what is missing where.

Incidents: huggingface/transformers#48873 (adapter attached after the wrap), hao-ai-lab/FastVideo#1666 (the same).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.case import Match, counted, fewer
from syncheck.diagnose.empty_state import without_state
from syncheck.kinds import OPTIMIZER
from syncheck.messages import Sentence, names_text, ranks_text

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case
    from syncheck.records import Severity, TensorDiff

CODE = "SYN101"
SLUG = "missing-tensors"
SEVERITY: Severity = "error"
CAUSE = "The ranks did not build or save the same model: some tensors are in some files only."


class Text(Sentence):
    """The sentences of this finding."""

    FIX = (
        "Build the model from one configuration on all ranks before wrapping it, save the same state dict on every "
        "rank, and load it with strict=True. If a file holds only the model on purpose, skip the optimizer: "
        "{exclude:option=optimizer.*}."
    )


FIX = Text.FIX


def apply(case: Case) -> Match | None:
    """Fit every tensor that some replica lacks."""
    lost = OPTIMIZER if without_state(case) else ()
    lacking = tuple(diff for diff in case.tensors if diff.reason == "missing" and diff.kind not in lost)
    values = tuple(diff for diff in case.of_values() if diff.lost)
    if not lacking and not values:
        return None
    everyone = {rank for diff in lacking for rank in _expected(diff, case.group.ranks)}
    everyone |= set(case.group.ranks if values else ())
    without = {rank for value in values for rank in value.lost}
    for diff in lacking:
        without |= set(_expected(diff, case.group.ranks)) - {r for found in diff.clusters for r in found}
    # The fewer are the suspects, whether they lack something or have it alone. Of what only one rank ought to have, no
    # other rank has anything, and that one is the suspect.
    odd = fewer(without, everyone - without)
    numbers = [counted(len(found), what) for found, what in ((lacking, "tensor"), (values, "value")) if found]
    names = names_text([*(diff.name for diff in lacking), *(value.name for value in values)])
    text = f"{' and '.join(numbers)} not on {ranks_text(sorted(without))}: {names}"
    # Groups of an optimizer list other members where a parameter is missing.
    follow = any(diff.kind == "parameter" for diff in lacking)
    members = [diff for diff in case.of_values() if follow and diff.name.endswith((".params", ".(positions)"))]
    covered = dict.fromkeys(diff.name for diff in (*values, *members))
    return Match(lacking, tuple(sorted(odd or everyone)), text, tuple(covered))


def _expected(diff: TensorDiff, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks that ought to have a tensor: all but those of another pipeline stage or mesh."""
    return diff.replica_groups[0] if diff.replica_groups else ranks
