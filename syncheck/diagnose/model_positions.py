"""SYN310, SYN313, SYN314 and SYN317: tensors or shards of B are those of A at another position, or several times."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.exchanges import state_positions
from syncheck.diagnose.measures import list_parameter, parameters_of
from syncheck.diagnose.ranges import list_ranges
from syncheck.diagnose.renumbered_experts import find_routers
from syncheck.diagnose.rule import group_by_parameters, other_model, state_tensors
from syncheck.diagnose.selection import exclude_names, list_names, select_missing, select_names
from syncheck.findings import RelationKind
from syncheck.messages import Message, Sentence

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from syncheck.records import TensorDiff

# A tensor of an expert: the text before and after the number of the expert.
_EXPERT = re.compile(r"(.*\bexperts?\.(?:local_experts\.)?)\d+(\..*)")


class ExpertMisplaced(Sentence, topic="SYN310"):
    """Experts of B are exchanged, duplicated or lost.

    Signature: the tensor of an expert of B equals another expert of A, bit by bit, or B lacks some of the experts of a
    layer.

    Cause: expert-parallel ranks number their experts from 0, and a conversion used these numbers for the whole model,
    saved the experts of one rank only, or ordered the ranks wrongly.

    Fix: use the number of the expert in the whole model: rank times experts per rank plus the local number. Check the
    number of experts after the conversion. If the rows of the router have the order of the experts, the experts were
    renumbered as a whole; accept this with `--allow SYN310`.

    Incidents: KempnerInstitute/KempnerForge#202 (expert parallelism saves the experts of one rank, and resuming is
    silent).
    """

    CAUSE = "Experts of B are at the wrong place or missing: the conversion numbered or collected them wrongly."
    FIX = "Number experts by rank times experts per rank plus the local number, and save the experts of all ranks."
    CAUSE_RENUMBERED = (
        "Experts of B have other numbers than in A, and the rows of their routers have the same order: each row "
        "selects the expert of before."
    )
    FIX_RENUMBERED = (
        "If the order is intended, verify that all values of the router, also its bias, have it as well, and "
        "pass {allow:option=SYN310}. Otherwise keep the numbers of A in the conversion."
    )
    ROUTERS = "{count:count router} of B {count:verb has|have} the rows of A in the order of the experts: {names:names}"
    OTHER = "{name} of B has the values of {other} of A"
    STACK = "{name} of B has the experts {experts:list} of A"
    TWICE = "{count:count expert tensor} of A {count:verb is|are} in B more than once"
    LOST = "B lacks {count:count expert tensor} of A: {names:names}"
    MORE = "{count:count more tensor}"


def match_misplaced_experts(case: Case) -> Match | None:
    """Match tensors of experts that B holds at another position, and tensors of experts that B lacks."""
    misplaced = case.related(RelationKind.EXPERT)
    lost = _find_lost_experts(case)
    routers = find_routers(case.group.evidence.names, misplaced, case.related(RelationKind.FUSED_ORDER))
    covered = (*misplaced, *lost, *routers)
    if not covered:
        return None
    facts = state_positions(misplaced, _state_expert, ExpertMisplaced.MORE)
    twice = _count_repeated_experts(misplaced)
    if twice:
        facts.append(ExpertMisplaced.TWICE(count=twice))
    if lost:
        facts.append(state_tensors(ExpertMisplaced.LOST, lost))
    match = Match(covered, case.group.ranks, facts)
    if not routers:
        return match
    facts.insert(0, state_tensors(ExpertMisplaced.ROUTERS, routers))
    return match.with_cause(ExpertMisplaced.CAUSE_RENUMBERED, ExpertMisplaced.FIX_RENUMBERED)


def _state_expert(diff: TensorDiff) -> Message:
    """State which experts of A a tensor of B holds."""
    parameters = parameters_of(diff)
    if "experts" in parameters:
        return ExpertMisplaced.STACK(name=diff.name, experts=parameters["experts"])
    return ExpertMisplaced.OTHER(name=diff.name, other=parameters["other"])


def _count_repeated_experts(misplaced: Sequence[TensorDiff]) -> int:
    """Return how many experts of A are in B more than once. Stacks of experts do not count."""
    positions: Counter[str] = Counter()
    for diff in misplaced:
        parameters = parameters_of(diff)
        if "experts" not in parameters:
            positions[parameters["other"]] += 1
    # An expert that B also holds at its own position does not differ there.
    positions.update(positions.keys() - list_names(misplaced))
    return len(positions - Counter(dict.fromkeys(positions, 1)))


def _find_lost_experts(case: Case) -> tuple[TensorDiff, ...]:
    """Return the tensors of experts that only A has, if both models have the same tensor of another expert."""
    absent = list_names(select_missing(case.group.tensors))
    present_names = case.group.evidence.names.keys() - absent
    present_experts = set(map(_split_expert, present_names))
    # Other tensors have no expert.
    present_experts.discard(())
    lost = []
    for diff in select_missing(case.tensors):
        is_only_in_a = diff.clusters == ((0,),)
        conditions = (is_only_in_a, _split_expert(diff.name) in present_experts)
        if all(conditions):
            lost.append(diff)
    return tuple(lost)


def _split_expert(name: str) -> tuple[str, ...]:
    """Return the name of a tensor of an expert before and after the number of the expert; empty for other tensors."""
    match = _EXPERT.match(name)
    return match.groups() if match is not None else ()


class WrongShard(Sentence, topic="SYN313"):
    """A rank or stage of B holds the shard or layer of another one.

    Signature: shards of B equal other shards of A, bit by bit, or a tensor of B equals the tensor of another layer or
    module of A. The evidence states the range of a shard of another tensor, the copy of the model in A that B was made
    from (an average of the weights, for example), and the tensors of A whose values are lost.

    Cause: files of ranks were copied or renamed wrongly, ranks were sorted as text (10 before 2), pipeline stages
    number their layers from 0, a layer was lost and the next layers were renumbered, or a conversion assembled shards
    in the wrong order.

    Fix: assemble shards by the rank inside the files, not by the order of file names, and add the offset of the stage
    to the numbers of layers.

    Incidents: KempnerInstitute/KempnerForge#202 (the experts of one rank were saved for all ranks). Sorting `rank_10`
    before `rank_2` is the most common form.
    """

    CAUSE = (
        "Shards, layers or other tensors of B are at the wrong place: they are those of another rank, layer or module "
        "of A."
    )
    FIX = (
        "Assemble shards by their rank and layer, not by the order of file names, and check the names of modules in "
        "the conversion."
    )
    OTHER = "{name} of B has the values of {other} of A"
    TRANSPOSED = "{name} of B has the values of {other} of A, transposed"
    BOXES = "{boxes} of {of} shards of {name} belong to other ranks, in {files}"
    FOREIGN = "{ranges:list} of {name} in {side} have the values of {source} of {other}: {count:count shard} in {files}"
    COPY = "{count:count tensor} of B {count:verb has|have} the values of {copy}* of A: {names:names}"
    LOST = "no tensor of B that differs has the values of {count:count tensor} of A: {names:names}"
    MOVED = "B lacks {count:count name}, and has {count:verb its|their} values under other names: {names:names}"
    MORE = "{count:count more tensor}"
    CAUSE_COPY = (
        "B was made from another copy of the model in A, for example an average of the weights (EMA), and not from the "
        "model that the training updates."
    )
    FIX_COPY = (
        "Export the weights that you mean. If B is meant to be this copy, compare B with a file that has only the copy."
    )
    CAUSE_LOST = (
        "B lacks layers or modules of A, and the next layers were renumbered, so that all of them are at the wrong "
        "place."
    )
    FIX_LOST = (
        "Convert or save the lost tensors as well, and give every layer the number that it has in A. If the layers "
        "were dropped on purpose, drop them in A as well."
    )


def match_wrong_shards(case: Case) -> Match | None:
    """Match tensors of B that hold other shards, or another tensor, of A."""
    tensors = case.related(RelationKind.SHARD)
    if not tensors:
        return None
    copied = [diff for diff in tensors if "copy" in parameters_of(diff)]
    alone = exclude_names(tensors, list_names(copied))
    sources = set(list_parameter(tensors, "other"))
    facts = _state_copies(copied)
    lost = _list_lost(case, alone, sources)
    if lost:
        facts.append(WrongShard.LOST(count=len(lost), names=lost))
    moved = _find_moved(case, sources)
    if moved:
        facts.append(state_tensors(WrongShard.MOVED, moved))
    facts += state_positions(alone, _state_wrong_shard, WrongShard.MORE)
    match = Match((*tensors, *moved), case.group.ranks, facts)
    if not alone:
        return match.with_cause(WrongShard.CAUSE_COPY, WrongShard.FIX_COPY)
    if moved and lost:
        return match.with_cause(WrongShard.CAUSE_LOST, WrongShard.FIX_LOST)
    return match


def _state_copies(copied: Sequence[TensorDiff]) -> list[Message]:
    """State which tensors of B have the values of a copy of the model in A."""
    facts = []
    for similar in group_by_parameters(copied, ("copy",)):
        copy = parameters_of(similar[0])["copy"]
        facts.append(state_tensors(WrongShard.COPY, similar, copy=copy))
    return facts


def _find_moved(case: Case, sources: Collection[str]) -> list[TensorDiff]:
    """Return the names that B lacks although other tensors of B have their values. sources: the names in A."""
    moved = []
    for diff in select_names(select_missing(case.tensors), sources):
        # The only model with the tensor is A.
        if diff.clusters == ((0,),):
            moved.append(diff)
    return moved


def _list_lost(case: Case, alone: Sequence[TensorDiff], sources: Collection[str]) -> tuple[str, ...]:
    """Return the tensors of A whose place in B other tensors have taken, and that no differing tensor of B has."""
    added = [diff for diff in select_missing(case.group.tensors) if diff.clusters == ((1,),)]
    # A name that only B has may have their values.
    if added:
        return ()
    lost = []
    for diff in exclude_names(alone, sources):
        if "other" in parameters_of(diff):
            lost.append(diff)
    return list_names(lost)


def _state_wrong_shard(diff: TensorDiff) -> Message:
    """State which shards or which other tensor a tensor of B holds."""
    parameters = parameters_of(diff)
    if "source" in parameters:
        return _state_foreign(diff)
    # Shards at wrong positions within one tensor, or a tensor under another name.
    if "other" not in parameters:
        return WrongShard.BOXES(
            name=diff.name,
            files=parameters["files"],
            boxes=parameters["boxes"],
            of=parameters["of"],
        )
    sentence = WrongShard.TRANSPOSED if "dims" in parameters else WrongShard.OTHER
    return sentence(name=diff.name, other=parameters["other"])


def _state_foreign(diff: TensorDiff) -> Message:
    """State which range of a tensor consists of shards of another tensor."""
    parameters = parameters_of(diff)
    return WrongShard.FOREIGN(
        ranges=list_ranges(diff),
        name=diff.name,
        side=parameters["side"],
        source=parameters["source"],
        other=other_model(parameters["side"]),
        count=len(parameters["runs"]) // 2,
        files=parameters["files"],
    )


class TieChanged(Sentence, topic="SYN314"):
    """Two names are one weight in one model, and two different weights in the other model.

    Signature: in one model, two tensors with the names of an embedding and its output layer, or with shared memory,
    hold equal values. In the other model they differ, and one of the two tensors agrees between A and B.

    Cause: the loader or the conversion of one model did not tie its weights, so that the output layer kept its initial
    values or was trained alone. Or the loader tied separate weights and lost the output layer: the configuration states
    `tie_word_embeddings`, or the file has no output layer.

    Fix: compare `tie_word_embeddings` of both configurations. Tie the weights after building and loading the model
    (`model.tie_weights()` in transformers), or save both tensors and load them untied.

    Incidents: huggingface/transformers#46650 (names corrupted on save, so that loading initializes the tensors).
    NVIDIA/Megatron-LM#4641, NVIDIA/Megatron-LM#844 and NVIDIA/Megatron-LM#656 (embedding and output layer drifted
    apart).
    """

    CAUSE = "One model has one weight under two names, and the other model has two different weights there."
    FIX = (
        "Compare tie_word_embeddings of both models. Tie the weights after loading (`model.tie_weights()` in "
        "transformers), or save and load both tensors."
    )
    TIED = "{name} equals {other} in {tied}, and they differ in {separate}"
    MORE = "{count:count more tensor}"


def state_tied(tensors: Sequence[TensorDiff]) -> Message:
    """State in which model two names are one weight."""
    (diff,) = tensors
    parameters = parameters_of(diff)
    tied = parameters["tied"]
    return TieChanged.TIED(
        name=diff.name,
        other=parameters["other"],
        tied=tied,
        separate=other_model(tied),
    )


class Repeated(Sentence, topic="SYN317"):
    """One model holds a part of the other model several times.

    Signature: all rows of B are rows of A, bit by bit, but some rows occur several times: the whole tensor or a part is
    repeated, or each block of rows, so that B has more rows, or that other rows of A are missing. Or the reverse.

    Cause: a merge joined copies that every rank holds as if they were shards, a conversion repeated the key and value
    heads of grouped-query attention for a library without it, or each rank saved the part of the first rank.

    Fix: keep one copy of tensors that every rank holds, and join only shards. If B is meant for a library that needs
    repeated heads, pass `--allow SYN317`.

    Incidents: verl-project/verl#7612 (replicated buffers were concatenated by the merge).
    """

    CAUSE = "One model holds tensors, or parts of tensors, of the other model several times."
    FIX = "Save and join the shards of all ranks: copies have taken the place of other rows of A, which are lost."
    FIX_LONGER = (
        "Join only shards, and keep one copy of what every rank holds. If repeated heads are intended, pass "
        "{allow:option=SYN317}."
    )
    WHOLE = "{side} has {times} copies of {name} of {other}, along dimension {dim}"
    PART = "{side} has {times} copies of indices {first} to {last} of dimension {dim} of {name} of {other}"
    EACH = "{side} has each block of {size:count index|indices} of dimension {dim} of {name} of {other} {times} times"
    OTHER = "{side} has rows of {name} of {other} several times, and lacks {missing:count row} with other values"
    MORE = "{count:count more tensor}"


# By the pattern of the relation, and whether the whole tensor is repeated.
_REPETITIONS = {
    ("tile", True): Repeated.WHOLE,
    ("tile", False): Repeated.PART,
    ("each", False): Repeated.EACH,
    ("other", False): Repeated.OTHER,
}


def state_repeated(tensors: Sequence[TensorDiff]) -> Message:
    """State which part of a tensor one model holds several times."""
    (diff,) = tensors
    parameters = dict(parameters_of(diff))
    # The sentences name the remaining parameters.
    pattern = parameters.pop("pattern")
    start = parameters.pop("start", 0)
    is_whole = bool(parameters.pop("whole", 0))
    parameters["name"] = diff.name
    parameters["other"] = other_model(parameters["side"])
    sentence = _REPETITIONS[pattern, is_whole]
    if sentence is Repeated.PART:
        last = start + parameters["size"] - 1
        return sentence(
            first=start,
            last=last,
            **parameters,
        )
    return sentence(**parameters)


def explain_longer(match: Match) -> Match:
    """Replace the fix if every tensor has more rows than in the other model: then nothing is lost."""
    reasons = {diff.reason for diff in match.tensors}
    return replace(match, fix=Repeated.FIX_LONGER) if reasons == {"shape"} else match
