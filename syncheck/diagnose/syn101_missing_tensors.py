"""Some tensors are missing from the checkpoints of some ranks.

Signature: a tensor name is present in some files of the group and missing in others, or all values of an optimizer, a
scheduler or a loss scaler are missing in some files. Or a value is a number or text in some files, and a dict or list
with the same name in others.

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
from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.conditions import requires
from syncheck.diagnose.features import groups_of, lost_values, with_reason
from syncheck.diagnose.history import smaller_set
from syncheck.diagnose.lost_state import ranks_without_state
from syncheck.diagnose.rank_values import are_unequal
from syncheck.diagnose.selection import (
    exclude_kinds,
    exclude_names,
    has_kind,
    holders_of,
    join_ranks,
    list_names,
)
from syncheck.diagnose.stored_forms import list_parts
from syncheck.messages import Message, Sentence
from syncheck.tensors.kinds import OPTIMIZER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import TensorDiff, ValueDiff

CODE = "SYN101"
SLUG = "missing-tensors"
SEVERITY = "error"
CERTAINTY = "proved"


class Text(Sentence, topic=CODE):
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


def _lacks_any(case: Case) -> bool:
    """Whether some replica lacks tensors or values."""
    return any(_find_missing(case))


@requires(_lacks_any)
def apply(case: Case) -> Match | None:
    """Match every tensor and value that some replica lacks."""
    tensors, values = _find_missing(case)
    all_ranks = case.group.ranks
    expected: set[int] = set()
    lacking = []
    for diff in tensors:
        expected.update(_expected_ranks(diff, all_ranks))
        lacking.append(_lacking_ranks(diff, all_ranks))
    # Every rank should have the same Python values, whatever its mesh.
    for value in values:
        expected.update(all_ranks)
        lacking.append(frozenset(value.lost))
    without = join_ranks(lacking)
    # The smaller set of ranks is suspect, whether it lacks a tensor or has it alone. If only one rank should have a
    # tensor, no other rank has it, and this rank is the suspect.
    suspects = smaller_set(without, expected - without) or expected

    value_names = list_names(values)
    sentence = Text.PARTLY_MISSING if are_unequal(lacking) else Text.MISSING
    fact = sentence(
        ranks=tuple(sorted(without)),
        missing=_count_missing(len(tensors), len(values)),
        names=(*list_names(tensors), *value_names),
    )
    members = _find_members(case, tensors)
    covered_values = tuple(dict.fromkeys((*value_names, *members)))
    match = Match(
        tensors=tensors,
        ranks=suspects,
        facts=[fact],
        values=covered_values,
    )

    is_state_alone = bool(tensors) and not exclude_kinds(tensors, *OPTIMIZER)
    if is_state_alone:
        # The optimizer of a rank has no state of a parameter that it never updated.
        return match.as_consistent("SYN225", "SYN215")
    if case.group.is_pair and _may_be_renamed(tensors, all_ranks):
        return match.as_consistent("SYN305").with_cause(Text.DIFF_CAUSE_RENAMED, Text.DIFF_FIX_RENAMED)
    return match


def _find_missing(case: Case) -> tuple[tuple[TensorDiff, ...], tuple[ValueDiff, ...]]:
    """Return the tensors and values that some replica lacks, without those of other findings."""
    # The parts of a quantized or sparse tensor belong to SYN102.
    parts, part_values = list_parts(case)
    missing = exclude_names(with_reason(case.tensors, "missing"), list_names(parts))
    if ranks_without_state(case):  # SYN215
        missing = exclude_kinds(missing, *OPTIMIZER)
    values = lost_values(case.of_values())
    return tuple(missing), tuple(value for value in values if value.name not in part_values)


def _find_members(case: Case, tensors: Sequence[TensorDiff]) -> list[str]:
    """Return the members of parameter groups, which differ if one of the missing tensors is a parameter."""
    if not has_kind(tensors, "parameter"):
        return []
    names = list_names(case.of_values())
    return [name for name in names if name.endswith((".params", ".(positions)"))]


def _may_be_renamed(tensors: Sequence[TensorDiff], sides: tuple[int, ...]) -> bool:
    """Whether each tensor that one model lacks has a counterpart with as many elements that the other model lacks."""
    sizes: dict[frozenset[int], list[int]] = defaultdict(list)
    for diff in tensors:
        sizes[_lacking_ranks(diff, sides)].append(diff.numel)
    # Renamed tensors are missing on both sides, each under its own names.
    if len(sizes) != 2:
        return False
    first, second = sizes.values()
    return sorted(first) == sorted(second)


def _count_missing(tensors: int, values: int) -> Message:
    """State how many tensors and values are missing."""
    if tensors and values:
        return Text.TENSORS_AND_VALUES(tensors=tensors, values=values)
    if tensors:
        return Text.TENSORS(tensors=tensors)
    return Text.VALUES(values=values)


def _expected_ranks(diff: TensorDiff, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks that should have a tensor: all ranks of its pipeline stage and mesh."""
    return groups_of(diff, ranks)[0]


def _lacking_ranks(diff: TensorDiff, ranks: tuple[int, ...]) -> frozenset[int]:
    """Return the ranks that should have a tensor and lack it."""
    return frozenset(_expected_ranks(diff, ranks)) - holders_of([diff])
