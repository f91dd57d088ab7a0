"""SYN304 to SYN306, SYN309 and SYN318: tensors of B have the values of A in another order or shape."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.conventions import weigh_exceptions
from syncheck.diagnose.exchanges import group_exchanged, state_exchanged
from syncheck.diagnose.measures import list_parameter, parameters_of
from syncheck.diagnose.rule import MOST_FACTS, group_by_parameters, state_tensors
from syncheck.diagnose.selection import exclude_names, list_names
from syncheck.diagnose.statements import limit_facts
from syncheck.findings import RelationKind
from syncheck.messages import Message, Sentence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import TensorDiff

# Orders of the parts of a fused tensor. All other orders are of the rows or channels of any tensor.
_OF_PARTS = frozenset({"parts", "other-part", "boxes"})
# Orders without a statement in the evidence.
_UNSTATED = frozenset({"other", "within"})
_UNSTATED_COLUMNS = _UNSTATED | {"interleaved"}


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
    return state_tensors(
        Transposed.TRANSPOSED,
        tensors,
        first=first,
        second=second,
    )


def count_square(match: Match) -> Match:
    """Add the number of tensors whose shape does not show that they are transposed."""
    square = sum(diff.reason is None for diff in match.tensors)
    if not square:
        return match
    fact = Transposed.SQUARE(count=square)
    return replace(match, facts=[*match.facts, fact])


class FusedOrder(Sentence, topic="SYN305"):
    """Rows, columns, channels or the parts of a fused tensor are in another order.

    Signature: B has the rows of A in another order, bit by bit: parts of a fused tensor (query, key and value; gate and
    up) are exchanged, joined one after the other instead of in groups of heads, or divided between ranks before they
    were joined. Rows of other tensors, and the input channels of a convolution, may be in another order as well: red,
    green and blue for a network of Caffe or OpenCV, which reads blue first. Rows of a shifted fused tensor may be in
    another part. Separate parts, such as gate and up, may hold each other's values. The evidence states the order of
    parts, and of rows and columns if it has few blocks or is regular.

    Cause: the conversion joined or divided the parts in another order than the library that loads them, or permuted
    rows. Shapes are equal, so loading reports no error.

    Fix: join the parts in the order of the target library. Megatron-Core interleaves query, key and value by group of
    heads and stores gate before up on each rank; vLLM and Hugging Face store the parts one after the other.

    Incidents: NVIDIA/Megatron-LM#2769 (halves of SwiGLU swapped at load), sgl-project/sglang#40158 (the order of query,
    key and value was guessed from the quantization format).
    """

    CAUSE = "The parts of fused tensors are in another order than the layout requires."
    FIX = "Join or divide the parts in the order of the library that loads them. The evidence states the actual order."
    CAUSE_ROWS = "The rows, columns or channels of these tensors of B are in another order than in A."
    FIX_ROWS = (
        "Keep the order of A in the conversion, or permute the tensors that depend on this order as well. "
        "The evidence states the order in B."
    )
    FIX_UNSTATED = (
        "Keep the order of A in the conversion, or permute all dependent tensors as well. The order in "
        "B has no simple description: compare the rows or columns of both tensors."
    )
    CAUSE_SEPARATE = (
        "Tensors of B hold the values of other tensors of A that libraries often fuse with them, such as gate and up."
    )
    FIX_SEPARATE = (
        "Pair the names by their meaning in the conversion. If it divides a fused tensor, divide it in the order in "
        "which this tensor was joined."
    )
    CHANNELS = "{count:count tensor} of B {count:verb has|have} the input channels {channels:list} of A: {names:names}"
    JOINED = "{count:count fused tensor} of {side} {count:verb has|have} {parts} one after the other: {names:names}"
    GROUPED = "{count:count fused tensor} of {side} {count:verb has|have} {parts} in {groups} groups: {names:names}"
    # A is the source, so the parts of B are wrong, although the fused tensors are those of A.
    EXCHANGED = (
        "{parts} of B hold the rows of {expected} of A, in this order, from {count:count fused tensor}: {names:names}"
    )
    DIVIDED = "B has {parts} as if {count:count fused tensor} of A had {order}: {names:names}"
    ONE_AFTER_THE_OTHER = "them one after the other"
    IN_GROUPS = "them in {groups} groups"
    OTHER = "{name} of B has the values of {other} of A"
    BOXES = "{boxes} of {of} shards of {name} hold rows of other parts of the fused tensor, in {files}"
    BLOCKS = "{name} of B has blocks of rows of A in the order {blocks:list}"
    BLOCKS_INSIDE = "{name} of B has, in index {index} of dimension 0, blocks of rows of A in the order {blocks:list}"
    ROWS = "rows {first} to {last}"
    ROW = "row {first}"
    COLUMN_BLOCKS = "{name} of B has blocks of columns of A in the order {blocks:list}"
    COLUMN_RANGE = "columns {first} to {last}"
    COLUMN = "column {first}"
    REVERSED = "{name} of B has the rows of A in reverse order"
    SHIFTED = (
        "{name} of B has {shift:count more row} at row {row}: the rows of A from {row} on are {shift:count row} later"
    )
    ACROSS = (
        "the rows of {name} of A from {row} on are {shift:count row} {direction:words} in B, where {parts:names} "
        "{parts:verb has|have} {moved:count row} of it"
    )
    INTERLEAVED = "{name} of B has one row of each of {size} blocks of A in turn"
    WITHIN = "{name} of B has another order of rows within each block of {size} rows"
    PERMUTED = "{name} of B has the rows of A in another order"
    COLUMNS = "{name} of B has the columns of A in another order"
    COLUMNS_REVERSED = "{name} of B has the columns of A in reverse order"
    MORE = "{count:count more tensor}"


def match_fused_order(case: Case) -> Match | None:
    """Match the tensors with another order of rows or parts."""
    reordered = case.related(RelationKind.FUSED_ORDER)
    if not reordered:
        return None
    tensors_by_pattern: dict[str, list[TensorDiff]] = defaultdict(list)
    for diff in reordered:
        pattern = parameters_of(diff)["pattern"]
        tensors_by_pattern[pattern].append(diff)
    are_of_parts = not _OF_PARTS.isdisjoint(tensors_by_pattern)
    parts = tensors_by_pattern.pop("parts", [])
    channels = tensors_by_pattern.pop("channels", [])

    facts = []
    # Orders of parts explain most, so they come before the first of many other facts.
    for tensors in group_by_parameters(parts, ("side", "parts", "expected", "groups")):
        facts.append(_state_joined(tensors))
    sizes = [1] * len(facts)
    rows = exclude_names(reordered, list_names((*parts, *channels)))
    for tensors in group_exchanged(rows):
        facts.append(state_exchanged(tensors, _state_order))
        sizes.append(len(tensors))
    for tensors in group_by_parameters(channels, ("channels",)):
        order = parameters_of(tensors[0])["channels"]
        facts.append(state_tensors(FusedOrder.CHANNELS, tensors, channels=order))
        sizes.append(1)
    match = Match(
        tensors=reordered,
        ranks=case.group.ranks,
        facts=limit_facts(facts, MOST_FACTS, FusedOrder.MORE, sizes),
    )
    if not are_of_parts:
        fix = FusedOrder.FIX_ROWS
        if any(map(_has_unstated_order, reordered)):
            fix = FusedOrder.FIX_UNSTATED
        match = match.with_cause(FusedOrder.CAUSE_ROWS, fix)
    elif not parts and all(list_parameter(reordered, "separate")):
        match = match.with_cause(FusedOrder.CAUSE_SEPARATE, FusedOrder.FIX_SEPARATE)
    return weigh_exceptions(match, case)


def _state_joined(tensors: Sequence[TensorDiff]) -> Message:
    """State in which order the parts of fused tensors are joined. Several tensors may be parts of one fused tensor."""
    parameters = parameters_of(tensors[0])
    groups, parts, expected = parameters["groups"], parameters["parts"], parameters["expected"]
    details: dict[str, Any] = {"parts": parts}
    if parameters["side"] == "B":
        sentence = FusedOrder.JOINED if groups == 1 else FusedOrder.GROUPED
        details |= {"side": "B", "groups": groups}
    elif parts != expected and not parameters["regrouped"]:
        sentence = FusedOrder.EXCHANGED
        details["expected"] = expected
    else:
        sentence = FusedOrder.DIVIDED
        details["order"] = FusedOrder.ONE_AFTER_THE_OTHER() if groups == 1 else FusedOrder.IN_GROUPS(groups=groups)
    fused = tuple(dict.fromkeys(list_parameter(tensors, "stored")))
    return sentence(count=len(fused), names=fused, **details)


class _Order(NamedTuple):
    """The sentence about an order, and the parameters of the relation that it has."""

    sentence: FusedOrder
    parameters: tuple[str, ...] = ()


# By the pattern of the relation. Blocks of rows and orders of columns have parameters of their own.
_ORDERS = {
    "other-part": _Order(FusedOrder.OTHER, ("other",)),
    "boxes": _Order(FusedOrder.BOXES, ("files", "boxes", "of")),
    "interleaved": _Order(FusedOrder.INTERLEAVED, ("size",)),
    "within": _Order(FusedOrder.WITHIN, ("size",)),
    "other": _Order(FusedOrder.PERMUTED),
    "reversed": _Order(FusedOrder.REVERSED),
    "shifted": _Order(FusedOrder.SHIFTED, ("row", "shift")),
    "across": _Order(FusedOrder.ACROSS, ("row", "shift", "direction", "parts", "moved")),
}


def _state_order(diff: TensorDiff) -> Message:
    """State the order of the parts or rows of a tensor of B."""
    parameters = parameters_of(diff)
    pattern = parameters["pattern"]
    if parameters.get("dim"):
        return _state_columns(diff)
    if pattern == "blocks":
        return _state_blocks(diff)
    order = _ORDERS[pattern]
    details = {name: parameters[name] for name in order.parameters}
    return order.sentence(name=diff.name, **details)


def _has_unstated_order(diff: TensorDiff) -> bool:
    """Whether the evidence states another order of rows or columns without its details."""
    parameters = parameters_of(diff)
    unstated = _UNSTATED_COLUMNS if parameters.get("dim") else _UNSTATED
    return parameters["pattern"] in unstated


def _state_columns(diff: TensorDiff) -> Message:
    """State the order of the columns of a matrix of B."""
    parameters = parameters_of(diff)
    if parameters["pattern"] == "blocks":
        blocks = _list_blocks(parameters["runs"], FusedOrder.COLUMN_RANGE, FusedOrder.COLUMN)
        return FusedOrder.COLUMN_BLOCKS(name=diff.name, blocks=blocks)
    if parameters["pattern"] == "reversed":
        return FusedOrder.COLUMNS_REVERSED(name=diff.name)
    return FusedOrder.COLUMNS(name=diff.name)


def _state_blocks(diff: TensorDiff) -> Message:
    """State the order of the blocks of rows, or of the blocks within one index of the first dimension."""
    runs = parameters_of(diff)["runs"]
    # Rows may be those of the first two dimensions together: the rows of all experts of a stack.
    rows_of_index = max(1, sum(runs[1::2]) // diff.shape[0])
    moved_runs: dict[int, list[int]] = defaultdict(list)
    position = 0
    for start, size in zip(runs[::2], runs[1::2], strict=True):
        if start != position:
            moved_runs[position // rows_of_index] += (start % rows_of_index, size)
        position += size
    first_index = min(moved_runs, default=0)
    is_inside = sum(moved_runs[first_index][1::2]) <= rows_of_index
    exceptions = (rows_of_index == 1, len(moved_runs) != 1, not is_inside)
    if any(exceptions):
        return FusedOrder.BLOCKS(name=diff.name, blocks=_list_blocks(runs))
    return FusedOrder.BLOCKS_INSIDE(
        name=diff.name,
        index=first_index,
        blocks=_list_blocks(moved_runs[first_index]),
    )


def _list_blocks(
    runs: Sequence[int], several: FusedOrder = FusedOrder.ROWS, single: FusedOrder = FusedOrder.ROW
) -> tuple[Message, ...]:
    """Return the blocks of rows or columns.

    runs: the first row and the number of rows of each block.
    several: the sentence about a block of several rows.
    single: the sentence about one row.
    """
    blocks = []
    for start, size in zip(runs[::2], runs[1::2], strict=True):
        last = start + size - 1
        sentence = single if size == 1 else several
        blocks.append(sentence(first=start, last=last))
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
        return state_tensors(
            RotaryPermuted.BACK,
            tensors,
            head_dim=head_dim,
            back=back,
        )
    order = RotaryPermuted.HALF() if parameters["to"] == "half" else RotaryPermuted.INTERLEAVED()
    return state_tensors(
        RotaryPermuted.ROTARY,
        tensors,
        order=order,
        head_dim=head_dim,
    )


class Padded(Sentence, topic="SYN309"):
    """Padding was added or removed; the common part is equal.

    Signature: the shapes differ in one dimension, and the common part is equal, bit by bit. The further part of the
    larger tensor is zeros, or equal rows of a vocabulary; further rows and columns with data are SYN318.

    Cause: one library pads the vocabulary to a multiple of 64 or 128 times the tensor-parallel size, or a conversion
    cut the padding off.

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
    added = parameters["added"]
    sentence = Padded.LONGER if added > 0 else Padded.SHORTER
    return sentence(
        count=abs(added),
        dim=parameters["dim"],
        names=list_names(tensors),
    )


def explain_padded_vectors(match: Match) -> Match:
    """Replace cause and fix if no tensor is a matrix: only matrices have a row for each token of a vocabulary."""
    dimensions = max(len(diff.shape) for diff in match.tensors)
    return match if dimensions > 1 else match.with_cause(Padded.CAUSE_OTHER, Padded.FIX_OTHER)


class PartLost(Sentence, topic="SYN318"):
    """One model lacks rows or columns of the other one that hold data; the common part is equal.

    Signature: the shapes differ in one dimension, the common part is equal, bit by bit, and the further rows or
    columns of one model are neither zeros nor equal rows of a vocabulary. Or rows are lost or inserted before other
    rows, which are equal, bit by bit, at other positions.

    Cause: the conversion cut a tensor to a size from another configuration or tokenizer, removed padding of a wrong
    multiple, or lost the last shard. If B has more, a tokenizer got new tokens, or a buffer was not cut to its size.

    Fix: build B from the configuration of A, and convert the whole tensor. If the rows are in no vocabulary, as padding
    with random values is, a `config.json` with `vocab_size` beside the files and a map with `pad` prove the padding, or
    pass `--allow SYN318`; `--allow SYN309` accepts no data.

    Incidents: none with a public thread. Models whose embedding has more rows than their tokenizer has tokens
    (Qwen2: 151,936 and 151,665) are cut by scripts that resize the embedding to the tokenizer.
    """

    CAUSE = "B lacks rows or columns of A that hold data: the conversion cut the tensor, or lost a part of it."
    FIX = (
        "Convert the whole tensor, with the sizes of A's configuration. If the lost part is unused, pass "
        "{allow:option=SYN318}."
    )
    CAUSE_ADDED = "B has rows or columns with data that A lacks, such as new tokens; the common part is equal."
    FIX_ADDED = (
        "If the additional part is intended, pass {allow:option=SYN318}. Otherwise build both models from one "
        "configuration, and save the tensors without unused memory."
    )
    ADDED = "B has {count:count more index|more indices} of dimension {dim} in {names:names}, which hold data"
    CUT = "B lacks the last {count:count index|indices} of dimension {dim} in {names:names}, which hold data"
    REMOVED = (
        "B lacks {count:count row} of A from row {row} on in {names:names}: the next rows of A are {shift:count row} "
        "earlier in B"
    )
    INSERTED = (
        "B has {shift:count more row} at row {row} of {names:names}, so the next rows of A are later in B, and the "
        "last {count:count row} of A {count:verb is|are} lost"
    )


def state_part_lost(tensors: Sequence[TensorDiff]) -> Message:
    """State how many indices B lacks, and from which row on the other rows are at other positions."""
    parameters = parameters_of(tensors[0])
    shift = parameters.get("shift")
    if shift:
        sentence = PartLost.INSERTED if shift > 0 else PartLost.REMOVED
        return sentence(
            count=parameters["lost"],
            shift=abs(shift),
            row=parameters["row"],
            names=list_names(tensors),
        )
    added = parameters["added"]
    sentences = {True: PartLost.ADDED, False: PartLost.CUT}
    state = sentences[added > 0]
    return state(
        count=abs(added),
        dim=parameters["dim"],
        names=list_names(tensors),
    )


def explain_added_parts(match: Match) -> Match:
    """Replace cause and fix if B lacks nothing."""
    for diff in match.tensors:
        if parameters_of(diff)["added"] < 0:
            return match

    return match.with_cause(
        PartLost.CAUSE_ADDED,
        PartLost.FIX_ADDED,
    )
