"""Some tensors are missing from the checkpoints of some ranks.

Signature: a tensor name is present in some files of the group and missing in others, or all values of an optimizer, a
scheduler or a loss scaler are missing in some files. Or a value is a number or text in some files, and a dict or list
with the same name in other files.

Between two models, names without a partner are no evidence if one model is in plain tensors of tensor-parallel ranks:
its parts may hold the tensors under other names. They are evidence if these parts have too few elements.

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
from dataclasses import field, replace
from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.conditions import requires
from syncheck.diagnose.features import groups_of, lost_values, with_reason
from syncheck.diagnose.history import smaller_set
from syncheck.diagnose.lost_state import ranks_without_state
from syncheck.diagnose.optimizer_classes import has_other_classes
from syncheck.diagnose.selection import (
    exclude_kinds,
    exclude_names,
    has_kind,
    holders_of,
    join_ranks,
    list_names,
)
from syncheck.diagnose.stored_forms import list_parts
from syncheck.frozen import mutable_record
from syncheck.messages import Detail, Message, Sentence
from syncheck.tensors.kinds import OPTIMIZER

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

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
        "One model has tensors that the other model lacks. Either they were not converted, or the other model has them "
        "under other names, with another order of their parts or with other rows: both models have tensors without a "
        "counterpart, and their sizes fit."
    )
    DIFF_FIX_RENAMED = (
        "If they are the same tensors, pair their names in a map, {map:option FILE}, which then shows the order of "
        "their parts. Otherwise save or convert the missing tensors."
    )
    DIFF_CAUSE_PARTS = (
        "One model is in parts whose positions its files do not show, and these parts have too few elements, or too "
        "many, for the tensors without a partner: at least one tensor, or a part of it, was not converted or not saved."
    )
    DIFF_FIX_PARTS = (
        "Compare one file with all parts joined, or save DTensors or a torch.distributed.checkpoint: then the missing "
        "tensors have names. Check that the files of all ranks are there."
    )
    FIX = (
        "Build the model from one configuration on all ranks before wrapping it, save the same state dict on every "
        "rank, and load it with `strict=True`. If a file holds only the model on purpose, skip the optimizer: "
        "{exclude:option=optimizer.*}."
    )
    MISSING = "{ranks:Ranks} {ranks:verb lacks|lack} {missing}: {names:names}"
    ALSO_MISSING = "{ranks:ranks} {ranks:verb lacks|lack} {missing}: {names:names}"
    PARTLY_MISSING = "{ranks:Ranks} each lack some of {missing}: {names:names}"
    TENSORS = "{tensors:count tensor}"
    VALUES = "{values:count value}"
    TENSORS_AND_VALUES = "{tensors:count tensor} and {values:count value}"


# Statements about different ranks.
_MOST = 4
# By whether tensors and values are missing: the sentence about their numbers, and its parameters.
_COUNTS = {
    (True, True): (Text.TENSORS_AND_VALUES, ("tensors", "values")),
    (True, False): (Text.TENSORS, ("tensors",)),
    (False, True): (Text.VALUES, ("values",)),
}


@mutable_record
class _Loss:
    """What some ranks lack."""

    tensors: list[str] = field(default_factory=list)
    """Names of tensors."""
    values: list[str] = field(default_factory=list)
    """Names of Python values."""
    expected: set[int] = field(default_factory=set)
    """The ranks that should have the tensors and values."""


def _lacks_any(case: Case) -> bool:
    """Whether some replica lacks tensors or values."""
    return any(_find_missing(case))


@requires(_lacks_any)
def apply(case: Case) -> Match | None:
    """Match every tensor and value that some replica lacks."""
    tensors, values = _find_missing(case)
    all_ranks = case.group.ranks
    losses: dict[frozenset[int], _Loss] = {}
    for diff in tensors:
        loss = losses.setdefault(_lacking_ranks(diff, all_ranks), _Loss())
        loss.tensors.append(diff.name)
        loss.expected.update(_expected_ranks(diff, all_ranks))
    # Every rank should have the same Python values, whatever its mesh.
    for value in values:
        loss = losses.setdefault(frozenset(value.lost), _Loss())
        loss.values.append(value.name)
        loss.expected.update(all_ranks)

    members = _find_members(case, tensors)
    covered_values = tuple(dict.fromkeys((*list_names(values), *members)))
    match = Match(
        tensors=tensors,
        ranks=_find_suspects(losses),
        facts=_state_losses(losses),
        values=covered_values,
    )

    is_state_alone = bool(tensors) and not exclude_kinds(tensors, *OPTIMIZER)
    if is_state_alone:
        # The optimizer of a rank has no state of a parameter that it never updated.
        return match.as_consistent("SYN225", "SYN215")
    if case.group.is_pair:
        return _weigh_renamed(match, all_ranks)
    # Without any tensor in common, the files may be parts of one model, like pipeline stages.
    conditions = (set[int]().union(*losses) == set(all_ranks), not case.group.counts.compared)
    if all(conditions):
        return match.as_consistent("SYN104")
    return match


def _weigh_renamed(match: Match, sides: tuple[int, ...]) -> Match:
    """Return the match as consistent if the tensors that one model lacks may be those that the other model lacks."""
    # Parts have too few elements for all tensors without a partner, and nothing shows which of them they hold.
    unheld = _list_unheld(match.tensors)
    if unheld:
        consistent = replace(match.as_consistent("SYN318"), facts=[*match.facts, unheld[0]])
        return consistent.with_cause(Text.DIFF_CAUSE_PARTS, Text.DIFF_FIX_PARTS)
    renamed = _list_causes_if_renamed(match.tensors, sides)
    if renamed:
        return match.as_consistent(*renamed).with_cause(Text.DIFF_CAUSE_RENAMED, Text.DIFF_FIX_RENAMED)
    return match


def _list_unheld(diffs: Sequence[TensorDiff]) -> list[Message]:
    """Return the statements that parts have too few or too many elements for the tensors without a partner."""
    statements: list[Message] = []
    for diff in diffs:
        if diff.detail is not None and diff.detail.code is Detail.UNHELD:
            statements.append(diff.detail)
    return statements


def _find_suspects(losses: Mapping[frozenset[int], _Loss]) -> frozenset[int]:
    """Return the suspects of all missing tensors and values. losses: by the ranks that lack them."""
    suspected: set[int] = set()
    for without, loss in losses.items():
        # The smaller set of ranks is suspect, whether it lacks a tensor or has it alone. If only one rank should have
        # a tensor, no other rank has it, and this rank is the suspect.
        suspected |= smaller_set(set(without), loss.expected - without) or loss.expected
    return frozenset(suspected)


def _state_losses(losses: Mapping[frozenset[int], _Loss]) -> list[Message]:
    """State which ranks lack which tensors and values, for many sets of ranks in one statement."""
    if len(losses) > _MOST:
        joined = _Loss()
        for loss in losses.values():
            joined.tensors += loss.tensors
            joined.values += loss.values
        return [_state_loss(Text.PARTLY_MISSING, join_ranks(losses), joined)]
    sentence = Text.MISSING
    facts: list[Message] = []
    for without, loss in losses.items():
        facts.append(_state_loss(sentence, without, loss))
        sentence = Text.ALSO_MISSING
    return facts


def _state_loss(sentence: Sentence, ranks: Collection[int], loss: _Loss) -> Message:
    """State which ranks lack which tensors and values."""
    return sentence(
        ranks=tuple(sorted(ranks)),
        missing=_count_missing(len(loss.tensors), len(loss.values)),
        names=(*loss.tensors, *loss.values),
    )


def _find_missing(case: Case) -> tuple[tuple[TensorDiff, ...], tuple[ValueDiff, ...]]:
    """Return the tensors and values that some replica lacks, without the tensors of other findings."""
    # The parts of a quantized or sparse tensor belong to SYN102.
    parts, part_values = list_parts(case)
    missing = exclude_names(with_reason(case.tensors, "missing"), list_names(parts))
    if ranks_without_state(case) or has_other_classes(case):  # SYN215, SYN107
        missing = exclude_kinds(missing, *OPTIMIZER)
    values = lost_values(case.of_values())
    return tuple(missing), tuple(value for value in values if value.name not in part_values)


def _find_members(case: Case, tensors: Sequence[TensorDiff]) -> list[str]:
    """Return the members of parameter groups, which differ if one of the missing tensors is a parameter."""
    if not has_kind(tensors, "parameter"):
        return []
    names = list_names(case.of_values())
    return [name for name in names if name.endswith((".params", ".(positions)"))]


def _list_causes_if_renamed(tensors: Sequence[TensorDiff], sides: tuple[int, ...]) -> tuple[str, ...]:
    """Return the codes that fit if the tensors that one model lacks are those that the other model lacks.

    Empty if their sizes exclude it. Both models lack as many elements, because a tensor may be fused or divided. Or
    each tensor of the smaller side has rows as long as those of a tensor of the larger side, which then lost rows.
    """
    lacking: dict[frozenset[int], list[TensorDiff]] = defaultdict(list)
    for diff in tensors:
        lacking[_lacking_ranks(diff, sides)].append(diff)
    # Renamed tensors are missing on both sides, each under its own names.
    if len(lacking) != 2:
        return ()
    smaller, larger = sorted(lacking.values(), key=_count_elements)
    if _count_elements(smaller) == _count_elements(larger):
        return ("SYN305", "SYN306")
    have_equal_rows = _list_row_shapes(smaller) <= _list_row_shapes(larger)
    return ("SYN318", "SYN309") if have_equal_rows else ()


def _count_elements(diffs: Sequence[TensorDiff]) -> int:
    """Return the number of elements of all tensors."""
    return sum(diff.numel for diff in diffs)


def _list_row_shapes(diffs: Sequence[TensorDiff]) -> set[tuple[int, ...]]:
    """Return the shapes of the rows of matrices, and of whole vectors, whose rows of one number show nothing."""
    shapes = set()
    for diff in diffs:
        row_shape = diff.shape[1:] or diff.shape
        shapes.add(tuple(row_shape))
    return shapes


def _count_missing(tensors: int, values: int) -> Message:
    """State how many tensors and values are missing."""
    sentence, counted = _COUNTS[bool(tensors), bool(values)]
    numbers = {"tensors": tensors, "values": values}
    return sentence(**{name: numbers[name] for name in counted})


def _expected_ranks(diff: TensorDiff, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks that should have a tensor: all ranks of its pipeline stage and mesh."""
    return groups_of(diff, ranks)[0]


def _lacking_ranks(diff: TensorDiff, ranks: tuple[int, ...]) -> frozenset[int]:
    """Return the ranks that should have a tensor and lack it."""
    return frozenset(_expected_ranks(diff, ranks)) - holders_of([diff])
