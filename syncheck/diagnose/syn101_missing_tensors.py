"""Some tensors are missing from the checkpoints of some ranks.

Signature: a tensor name is present in some files of the group and missing in others, or all values of an optimizer, a
scheduler or a loss scaler are missing in some files.

If only the state of a saved optimizer is missing on some ranks, the finding is SYN215.

Cause: the ranks did not build or save the same model. A layer was added or an adapter attached on some ranks only, one
rank filtered its state dict, a file comes from another version of the code, or `load_state_dict(strict=False)` ignored
a mismatch.

Fix: build the model from one configuration on all ranks before wrapping it, and save the same state dict on every rank.
Load once with `strict=True` to list the missing names.

Incidents: huggingface/transformers#48873 (adapter attached after the wrap), hao-ai-lab/FastVideo#1666 (the same).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.counters import without_state
from syncheck.diagnose.history import fewer
from syncheck.diagnose.stored_forms import list_parts
from syncheck.messages import Message, Sentence
from syncheck.tensors.kinds import OPTIMIZER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import TensorDiff

CODE = "SYN101"
SLUG = "missing-tensors"
SEVERITY = "error"
CERTAINTY = "proved"


class Text(Sentence):
    """The sentences of this finding."""

    CAUSE = "The ranks did not build or save the same model: some tensors are present on some ranks only."
    DIFF_CAUSE = "One model has tensors that the other model lacks: they were not converted, or not saved."
    DIFF_FIX = (
        "Save or convert the missing tensors. If one model lacks the optimizer state on purpose, pass it as B with "
        "{subset:option}. If it lacks other tensors on purpose, skip them with {exclude:option GLOB}."
    )
    DIFF_CAUSE_RENAMED = (
        "One model has tensors that the other model lacks. Either they were not converted, or they have other names "
        "and the order of their parts differs: there are as many tensors of the same sizes on the other side."
    )
    DIFF_FIX_RENAMED = (
        "If they are the same tensors, pair their names in a map, {map:option FILE}, which then shows the order of "
        "their parts. Otherwise save or convert the missing tensors."
    )
    FIX = (
        "Build the model from one configuration on all ranks before wrapping it, save the same state dict on every "
        "rank, and load it with strict=True. If a file holds only the model on purpose, skip the optimizer: "
        "{exclude:option=optimizer.*}."
    )
    MISSING = "{ranks:Ranks} {ranks:verb lacks|lack} {missing}: {names:names}"
    PARTLY_MISSING = "{ranks:Ranks} each lack some of {missing}: {names:names}"
    TENSORS = "{tensors:count tensor}"
    VALUES = "{values:count value}"
    TENSORS_AND_VALUES = "{tensors:count tensor} and {values:count value}"


def apply(case: Case) -> Match | None:
    """Match every tensor and value that some replica lacks."""
    other_finding = OPTIMIZER if without_state(case) else ()
    # The parts of a quantized or sparse tensor belong to SYN102.
    parts, part_values = list_parts(case)
    covered_names = frozenset((*(diff.name for diff in parts), *part_values))
    missing = (diff for diff in case.tensors if diff.reason == "missing" and diff.kind not in other_finding)
    tensors = tuple(diff for diff in missing if diff.name not in covered_names)
    values = tuple(diff for diff in case.of_values() if diff.lost and diff.name not in covered_names)
    if not tensors and not values:
        return None
    expected = {rank for diff in tensors for rank in _expected_ranks(diff, case.group.ranks)}
    expected |= set(case.group.ranks if values else ())
    lacking = [_lacking_ranks(diff, case.group.ranks) for diff in tensors] + [frozenset(diff.lost) for diff in values]
    without = set().union(*lacking)
    # The smaller set of ranks is suspect, whether it lacks a tensor or has it alone. If only one rank should have a
    # tensor, no other rank has it, and this rank is the suspect.
    odd = fewer(without, expected - without)
    sentence = Text.MISSING if len(set(lacking)) == 1 else Text.PARTLY_MISSING
    names = (*(diff.name for diff in tensors), *(value.name for value in values))
    fact = sentence(ranks=tuple(sorted(without)), missing=_numbers(len(tensors), len(values)), names=names)
    # The parameter groups of an optimizer have other members if a parameter is missing.
    regrouped = any(diff.kind == "parameter" for diff in tensors)
    members = [diff for diff in case.of_values() if regrouped and diff.name.endswith((".params", ".(positions)"))]
    covered = dict.fromkeys(diff.name for diff in (*values, *members))
    match = Match(tensors, odd or expected, [fact], tuple(covered))
    if tensors and all(diff.kind in OPTIMIZER for diff in tensors):
        # The optimizer of a rank has no state of a parameter that it never updated.
        return replace(match, certainty="consistent", alternatives=("SYN225", "SYN215"))
    if case.group.is_pair and _may_be_renamed(tensors, case.group.ranks):
        return replace(
            match,
            certainty="consistent",
            alternatives=("SYN305",),
            cause=Text.DIFF_CAUSE_RENAMED,
            fix=Text.DIFF_FIX_RENAMED,
        )
    return match


def _may_be_renamed(tensors: Sequence[TensorDiff], sides: tuple[int, ...]) -> bool:
    """Whether each tensor that one model lacks has a counterpart with as many elements that the other model lacks."""
    sizes: dict[frozenset[int], list[int]] = defaultdict(list)
    for diff in tensors:
        sizes[_lacking_ranks(diff, sides)].append(diff.numel)
    if len(sizes) != 2:
        return False
    first, second = sizes.values()
    return sorted(first) == sorted(second)


def _numbers(tensors: int, values: int) -> Message:
    if tensors and values:
        return Text.TENSORS_AND_VALUES(tensors=tensors, values=values)
    return Text.TENSORS(tensors=tensors) if tensors else Text.VALUES(values=values)


def _expected_ranks(diff: TensorDiff, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks that should have a tensor: all ranks of its pipeline stage and mesh."""
    return diff.replica_groups[0] if diff.replica_groups else ranks


def _lacking_ranks(diff: TensorDiff, ranks: tuple[int, ...]) -> frozenset[int]:
    holders = {rank for cluster in diff.clusters for rank in cluster}
    return frozenset(_expected_ranks(diff, ranks)) - holders
