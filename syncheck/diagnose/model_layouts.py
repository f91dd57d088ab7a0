"""SYN304 to SYN306, SYN309, SYN310, SYN313, SYN314 and SYN317: B holds values of A at other positions."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.measures import parameters_of
from syncheck.diagnose.rule import MOST_FACTS, group_by_parameters, other_model, state_tensors
from syncheck.diagnose.statements import limit_facts
from syncheck.findings import RelationKind
from syncheck.messages import Message, Sentence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import TensorDiff

# Orders of the parts of a fused tensor. All other orders are of the rows or channels of any tensor.
_OF_PARTS = frozenset({"parts", "other-part", "boxes"})
# A tensor of an expert: the text before and after the number of the expert.
_EXPERT = re.compile(r"(.*\bexperts?\.(?:local_experts\.)?)\d+(\..*)")


class Transposed(Sentence, topic="SYN304"):
    """Tensors of B are tensors of A with two dimensions exchanged.

    Signature: B equals A after two dimensions are exchanged, bit by bit (after a conversion to the dtype of B, if the
    dtypes differ).

    Cause: the libraries store linear layers in different orientations: GPT-2's Conv1D stores (inputs, outputs),
    torch.nn.Linear (outputs, inputs), and stacked experts exist in both. The conversion forgot to transpose, or
    transposed twice.

    Fix: transpose the tensors in the conversion. Square matrices load without an error, so test the conversion with
    data. If B is meant for a library that stores them this way, pass a map with `--map`.

    Incidents: huggingface/transformers#47031 (experts silently transposed).
    """

    CAUSE = (
        "The conversion exchanged two dimensions of these tensors, or did not exchange them where the layout requires"
        " it."
    )
    FIX = (
        "Transpose these tensors in the conversion. If the layout of B requires this orientation, pass a map with "
        "{map:option NAME|FILE}."
    )
    TRANSPOSED = (
        "{count:count tensor} of B {count:verb is|are} transposed: dimensions {first} and {second} of {names:names}"
    )
    SQUARE = "{count:count tensor} {count:verb has|have} equal dimensions, so loading reports no error"


def state_transposed(tensors: Sequence[TensorDiff]) -> Message:
    """State which dimensions of the tensors are exchanged."""
    first, second = parameters_of(tensors[0])["dims"]
    return state_tensors(Transposed.TRANSPOSED, tensors, first=first, second=second)


def count_square(match: Match) -> Match:
    """Add the number of tensors whose shape does not show that they are transposed."""
    square = sum(diff.reason is None for diff in match.tensors)
    if not square:
        return match
    return replace(match, facts=[*match.facts, Transposed.SQUARE(count=square)])


class FusedOrder(Sentence, topic="SYN305"):
    """Rows, columns, channels or the parts of a fused tensor are in another order.

    Signature: B has the rows of A in another order, bit by bit: parts of a fused tensor (query, key and value; gate and
    up) are exchanged, joined one after the other instead of in groups of heads, or divided between ranks before they
    were joined. Rows of other tensors, and the input channels of a convolution, may be in another order as well: red,
    green and blue for a network of Caffe or OpenCV, which reads blue first. The evidence states the order.

    Cause: the conversion joined or divided the parts in another order than the library that loads them, or permuted
    rows. Shapes are equal, so loading reports no error.

    Fix: join the parts in the order of the target library. Megatron-Core interleaves query, key and value by group of
    heads and stores gate before up on each rank; vLLM and Hugging Face store the parts one after the other.

    Incidents: NVIDIA/Megatron-LM#2769 (halves of SwiGLU swapped at load), sgl-project/sglang#40158 (the order of query,
    key and value was guessed from the quantization format).
    """

    CAUSE = "The parts of fused tensors are in another order than the layout requires."
    FIX = "Join or divide the parts in the order of the library that loads them. The evidence states the order in B."
    CAUSE_ROWS = "The rows, columns or channels of these tensors of B are in another order than in A."
    FIX_ROWS = (
        "Keep the order of A in the conversion, or permute the tensors that depend on this order as well. "
        "The evidence states the order in B."
    )
    CHANNELS = "{count:count tensor} of B {count:verb has|have} the input channels {channels:list} of A: {names:names}"
    JOINED = "{count:count fused tensor} of {side} {count:verb has|have} {parts} one after the other: {names:names}"
    GROUPED = "{count:count fused tensor} of {side} {count:verb has|have} {parts} in {groups} groups: {names:names}"
    OTHER = "{name} of B is {other} of A"
    BOXES = "{boxes} of {of} shards of {name} hold rows of other parts of the fused tensor, in {files}"
    BLOCKS = "{name} of B has blocks of rows of A in the order {blocks:list}"
    ROWS = "rows {first} to {last}"
    INTERLEAVED = "{name} of B has one row of each of {size} blocks of A in turn"
    WITHIN = "{name} of B has another order of rows within each block of {size} rows"
    PERMUTED = "{name} of B has the rows of A in another order"
    COLUMNS = "{name} of B has the columns of A in another order"
    MORE = "{count:count more tensor}"


def match_fused_order(case: Case) -> Match | None:
    """Match the tensors with another order of rows or parts."""
    reordered = case.related(RelationKind.FUSED_ORDER)
    if not reordered:
        return None
    tensors_by_pattern: dict[str, list[TensorDiff]] = defaultdict(list)
    for diff in reordered:
        tensors_by_pattern[parameters_of(diff)["pattern"]].append(diff)
    parts, channels = tensors_by_pattern.pop("parts", []), tensors_by_pattern.pop("channels", [])
    facts = []
    # Orders of parts explain most, so they come before the first of many other facts.
    for tensors in group_by_parameters(parts, ("side", "parts", "groups")):
        facts.append(_state_joined(tensors))
    for diff in reordered:
        if parameters_of(diff)["pattern"] in tensors_by_pattern:
            facts.append(_state_order(diff))
    for tensors in group_by_parameters(channels, ("channels",)):
        facts.append(state_tensors(FusedOrder.CHANNELS, tensors, channels=parameters_of(tensors[0])["channels"]))
    match = Match(reordered, case.group.ranks, limit_facts(facts, MOST_FACTS, FusedOrder.MORE))
    if parts or not _OF_PARTS.isdisjoint(tensors_by_pattern):
        return match
    return replace(match, cause=FusedOrder.CAUSE_ROWS, fix=FusedOrder.FIX_ROWS)


def _state_joined(tensors: Sequence[TensorDiff]) -> Message:
    """State in which order the parts of fused tensors are joined. Several tensors may be parts of one fused tensor."""
    parameters = parameters_of(tensors[0])
    fused = tuple(dict.fromkeys(parameters_of(diff)["stored"] for diff in tensors))
    groups = parameters["groups"]
    sentence = FusedOrder.JOINED if groups == 1 else FusedOrder.GROUPED
    return sentence(side=parameters["side"], parts=parameters["parts"], groups=groups, count=len(fused), names=fused)


def _state_order(diff: TensorDiff) -> Message:
    """State the order of the parts or rows of a tensor of B."""
    parameters = parameters_of(diff)
    pattern = parameters["pattern"]
    if parameters.get("dim"):
        return FusedOrder.COLUMNS(name=diff.name)
    if pattern == "other-part":
        return FusedOrder.OTHER(name=diff.name, other=parameters["other"])
    if pattern == "boxes":
        counts = {"boxes": parameters["boxes"], "of": parameters["of"]}
        return FusedOrder.BOXES(name=diff.name, files=parameters["files"], **counts)
    if pattern == "blocks":
        return FusedOrder.BLOCKS(name=diff.name, blocks=_list_blocks(parameters["runs"]))
    if pattern == "other":
        return FusedOrder.PERMUTED(name=diff.name)
    sentence = FusedOrder.INTERLEAVED if pattern == "interleaved" else FusedOrder.WITHIN
    return sentence(name=diff.name, size=parameters["size"])


def _list_blocks(runs: Sequence[int]) -> tuple[Message, ...]:
    """Return the blocks of rows. runs: the first row and the number of rows of each block."""
    blocks = []
    for start, size in zip(runs[::2], runs[1::2], strict=True):
        blocks.append(FusedOrder.ROWS(first=start, last=start + size - 1))
    return tuple(blocks)


class RotaryPermuted(Sentence, topic="SYN306"):
    """The rows of query or key follow the other convention for rotary embeddings.

    Signature: the rows of each head of B are those of A in the other order of rotary position embeddings, bit by bit:
    the two halves of a head one after the other (Hugging Face, Megatron-Core), or interleaved row by row (Meta's code,
    torchtitan). Or they were permuted with heads of one size and back with heads of another size.

    Cause: the conversion did not permute the rows of query and key, permuted them twice, or used another size of a
    head. The model loads and generates text that is almost right at short distances.

    Fix: permute the rows of query and key, and only these, when you convert between the two conventions. Biases of
    query and key need the same permutation.

    Incidents: none with a public thread that names it. Transformers' `convert_llama_weights_to_hf.py` and torchtitan's
    `state_dict_adapter.py` have this permutation, and a conversion without it is the typical mistake.
    """

    CAUSE = (
        "Query or key rows follow the other convention for rotary embeddings than A, or were permuted with a wrong "
        "size of a head."
    )
    FIX = (
        "Permute the rows of query and key of each head in the conversion, with the number of heads of each of them, "
        "or remove a second permutation."
    )
    ROTARY = "{count:count tensor} of B {count:verb has|have} {order} for heads of {head_dim} rows: {names:names}"
    BACK = (
        "{count:count tensor} of B {count:verb was|were} permuted for heads of {head_dim} rows, and back for heads of "
        "{back} rows: {names:names}"
    )
    HALF = "the halves of each head one after the other"
    INTERLEAVED = "the halves of each head interleaved"


def state_rotary(tensors: Sequence[TensorDiff]) -> Message:
    """State the order of the rows of each head."""
    parameters = parameters_of(tensors[0])
    head_dim = parameters["head_dim"]
    # Two permutations with different sizes of a head.
    if back := parameters.get("back"):
        return state_tensors(RotaryPermuted.BACK, tensors, head_dim=head_dim, back=back)
    order = RotaryPermuted.HALF() if parameters["to"] == "half" else RotaryPermuted.INTERLEAVED()
    return state_tensors(RotaryPermuted.ROTARY, tensors, order=order, head_dim=head_dim)


class Padded(Sentence, topic="SYN309"):
    """Rows or columns were added or removed; all others are equal.

    Signature: the shapes differ in one dimension, and the common part is equal, bit by bit.

    Cause: one library pads the vocabulary to a multiple of 64 or 128 times the tensor-parallel size, a tokenizer got
    new tokens, or a conversion cut the padding off.

    Fix: if the padding is intended, compare with a map that states its multiple (the built-in maps do for
    vocabularies), or pass `--allow SYN309`. Otherwise resize the embedding and the output layer together.

    Incidents: none with a public thread. Megatron-LM pads vocabularies by `--make-vocab-size-divisible-by` times the
    tensor-parallel size, so checkpoints of other sizes have other paddings.
    """

    CAUSE = "One model has additional rows or columns, such as the padding of a vocabulary; the common part is equal."
    CAUSE_OTHER = "One model has additional elements in these tensors; the common part is equal."
    FIX = (
        "If the padding is intended, pass {allow:option=SYN309} or a map that allows it. Otherwise resize the "
        "embedding and output layers together."
    )
    FIX_OTHER = (
        "If the additional elements are intended, pass {allow:option=SYN309}. Otherwise build both models from one "
        "configuration, and save the whole tensors."
    )
    LONGER = "B has {count:count more index|more indices} of dimension {dim} in {names:names}"
    SHORTER = "B lacks the last {count:count index|indices} of dimension {dim} in {names:names}"


def state_padded(tensors: Sequence[TensorDiff]) -> Message:
    """State how many indices one model has in addition."""
    parameters = parameters_of(tensors[0])
    names = tuple(diff.name for diff in tensors)
    added = parameters["added"]
    sentence = Padded.LONGER if added > 0 else Padded.SHORTER
    return sentence(count=abs(added), dim=parameters["dim"], names=names)


def explain_padded_vectors(match: Match) -> Match:
    """Replace cause and fix if no tensor is a matrix: only matrices have a row for each token of a vocabulary."""
    dimensions = max(len(diff.shape) for diff in match.tensors)
    if dimensions > 1:
        return match
    return replace(match, cause=Padded.CAUSE_OTHER, fix=Padded.FIX_OTHER)


class ExpertMisplaced(Sentence, topic="SYN310"):
    """Experts of B are exchanged, duplicated or lost.

    Signature: the tensor of an expert of B equals another expert of A, bit by bit, or B lacks some of the experts of a
    layer.

    Cause: expert-parallel ranks number their experts from 0, and a conversion used these numbers for the whole model,
    saved the experts of one rank only, or ordered the ranks wrongly.

    Fix: use the number of the expert in the whole model: rank times experts per rank plus the local number. Check the
    number of experts after the conversion.

    Incidents: KempnerInstitute/KempnerForge#202 (expert parallelism saves the experts of one rank, and resuming is
    silent).
    """

    CAUSE = "Experts of B are at the wrong place or missing: the conversion numbered or collected them wrongly."
    FIX = "Number experts by rank times experts per rank plus the local number, and save the experts of all ranks."
    OTHER = "{name} of B is {other} of A"
    STACK = "{name} of B has the experts {experts:list} of A"
    TWICE = "{count:count expert tensor} of A {count:verb is|are} in B more than once"
    LOST = "B lacks {count:count expert tensor} of A: {names:names}"
    MORE = "{count:count more tensor}"


def match_misplaced_experts(case: Case) -> Match | None:
    """Match tensors of experts that B holds at another position, and tensors of experts that B lacks."""
    misplaced = case.related(RelationKind.EXPERT)
    lost = _find_lost_experts(case)
    if not misplaced and not lost:
        return None
    facts: list[Message] = []
    experts_of_a: list[str] = []
    for diff in misplaced:
        parameters = parameters_of(diff)
        if "experts" in parameters:
            facts.append(ExpertMisplaced.STACK(name=diff.name, experts=parameters["experts"]))
        else:
            facts.append(ExpertMisplaced.OTHER(name=diff.name, other=parameters["other"]))
            experts_of_a.append(parameters["other"])
    facts = limit_facts(facts, MOST_FACTS, ExpertMisplaced.MORE)
    # An expert that B also holds at its own position does not differ there.
    differing = {diff.name for diff in misplaced}
    twice = sum(count > 1 or name not in differing for name, count in Counter(experts_of_a).items())
    if twice:
        facts.append(ExpertMisplaced.TWICE(count=twice))
    if lost:
        facts.append(state_tensors(ExpertMisplaced.LOST, lost))
    return Match((*misplaced, *lost), case.group.ranks, facts)


def _find_lost_experts(case: Case) -> tuple[TensorDiff, ...]:
    """Return the tensors of experts that only A has, if both models have the same tensor of another expert."""
    absent = {diff.name for diff in case.group.tensors if diff.reason == "missing"}
    present = set()
    for name in case.group.evidence.names.keys() - absent:
        if match := _EXPERT.fullmatch(name):
            present.add(match.groups())
    lost = []
    for diff in case.tensors:
        match = _EXPERT.fullmatch(diff.name)
        only_in_a = diff.reason == "missing" and diff.clusters == ((0,),)
        if only_in_a and match is not None and match.groups() in present:
            lost.append(diff)
    return tuple(lost)


class WrongShard(Sentence, topic="SYN313"):
    """A rank or stage of B holds the shard or layer of another one.

    Signature: shards of B equal other shards of A, bit by bit, or a tensor of B equals the tensor of another layer or
    module of A.

    Cause: files of ranks were copied or renamed wrongly, ranks were sorted as text (10 before 2), pipeline stages
    number their layers from 0, or a conversion assembled shards in the wrong order.

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
    OTHER = "{name} of B is {other} of A"
    TRANSPOSED = "{name} of B is {other} of A, transposed"
    BOXES = "{boxes} of {of} shards of {name} belong to other ranks, in {files}"
    MORE = "{count:count more tensor}"


def state_wrong_shard(tensors: Sequence[TensorDiff]) -> Message:
    """State which shards or which other tensor a tensor of B holds."""
    (diff,) = tensors
    parameters = parameters_of(diff)
    # Shards at wrong positions within one tensor, or a tensor under another name.
    if "other" not in parameters:
        counts = {"boxes": parameters["boxes"], "of": parameters["of"]}
        return WrongShard.BOXES(name=diff.name, files=parameters["files"], **counts)
    sentence = WrongShard.TRANSPOSED if "dims" in parameters else WrongShard.OTHER
    return sentence(name=diff.name, other=parameters["other"])


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
        "Compare tie_word_embeddings of both models. Tie the weights after loading (model.tie_weights() in "
        "transformers), or save and load both tensors."
    )
    TIED = "{name} equals {other} in {tied}, and they differ in {separate}"
    MORE = "{count:count more tensor}"


def state_tied(tensors: Sequence[TensorDiff]) -> Message:
    """State in which model two names are one weight."""
    (diff,) = tensors
    parameters = parameters_of(diff)
    tied = parameters["tied"]
    return TieChanged.TIED(name=diff.name, other=parameters["other"], tied=tied, separate=other_model(tied))


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


def state_repeated(tensors: Sequence[TensorDiff]) -> Message:
    """State which part of a tensor one model holds several times."""
    (diff,) = tensors
    parameters = dict(parameters_of(diff))
    # The sentences name the remaining parameters.
    pattern, start, is_whole = parameters.pop("pattern"), parameters.pop("start", 0), parameters.pop("whole", 0)
    parameters |= {"name": diff.name, "other": other_model(parameters["side"])}
    if pattern == "other":
        return Repeated.OTHER(**parameters)
    if pattern == "each":
        return Repeated.EACH(**parameters)
    if is_whole:
        return Repeated.WHOLE(**parameters)
    return Repeated.PART(first=start, last=start + parameters["size"] - 1, **parameters)


def explain_longer(match: Match) -> Match:
    """Replace the fix if every tensor has more rows than in the other model: then nothing is lost."""
    if all(diff.reason == "shape" for diff in match.tensors):
        return replace(match, fix=Repeated.FIX_LONGER)
    return match
