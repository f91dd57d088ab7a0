"""Rows, columns, channels or the parts of a fused tensor are in another order.

Signature: B has the rows of A in another order, bit by bit: parts of a fused tensor (query, key and value; gate and up)
are exchanged, joined one after the other instead of in groups of heads, or divided between ranks before they were
joined. Rows of other tensors, and the input channels of a convolution, may be in another order as well: red, green and
blue for a network of Caffe or OpenCV, which reads blue first. The evidence states the order.

Cause: the conversion joined or divided the parts in another order than the library that loads them, or permuted rows.
Shapes are equal, so loading reports no error.

Fix: join the parts in the order of the target library. Megatron-Core interleaves query, key and value by group of heads
and stores gate before up on each rank; vLLM and Hugging Face store the parts one after the other.

Incidents: NVIDIA/Megatron-LM#2769 (halves of SwiGLU swapped at load), sgl-project/sglang#40158 (the order of query, key
and value was guessed from the quantization format).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match, limit_facts, parameters_of
from syncheck.findings import RelationKind
from syncheck.messages import Message, Sentence

if TYPE_CHECKING:
    from syncheck.records import TensorDiff

CODE = "SYN305"
SLUG = "fused-order"
SEVERITY = "error"
CERTAINTY = "proved"
# Orders of the parts of a fused tensor. All other orders are of the rows or channels of any tensor.
_OF_PARTS = frozenset({"parts", "other-part", "boxes"})


class Text(Sentence):
    """The sentences of this finding."""

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


def apply(case: Case) -> Match | None:
    """Match the tensors with another order of rows or parts."""
    found = case.related(RelationKind.FUSED_ORDER)
    if not found:
        return None
    facts: list[Message] = []
    fused: dict[tuple[str, str, int], dict[str, None]] = {}
    names_by_channels: dict[tuple[int, ...], list[str]] = {}
    for diff in found:
        own = parameters_of(diff)
        if own["pattern"] == "parts":
            fused.setdefault((own["side"], own["parts"], own["groups"]), {})[own["stored"]] = None
        elif own["pattern"] == "channels":
            names_by_channels.setdefault(own["channels"], []).append(diff.name)
        else:
            facts.append(_state_order(diff))
    for channels, tensors in names_by_channels.items():
        facts.append(Text.CHANNELS(count=len(tensors), channels=channels, names=tuple(tensors)))
    joined = [
        (Text.JOINED if groups == 1 else Text.GROUPED)(
            side=side, parts=parts, groups=groups, count=len(names), names=tuple(names)
        )
        for (side, parts, groups), names in fused.items()
    ]
    is_fused = any(parameters_of(diff)["pattern"] in _OF_PARTS for diff in found)
    cause, fix = (None, None) if is_fused else (Text.CAUSE_ROWS, Text.FIX_ROWS)
    return Match(found, case.group.ranks, limit_facts([*joined, *facts], 4, Text.MORE), cause=cause, fix=fix)


def _state_order(diff: TensorDiff) -> Message:
    """State the order of the parts or rows of a tensor of B."""
    own = parameters_of(diff)
    pattern = own["pattern"]
    if own.get("dim"):
        return Text.COLUMNS(name=diff.name)
    if pattern == "other-part":
        return Text.OTHER(name=diff.name, other=own["other"])
    if pattern == "boxes":
        return Text.BOXES(name=diff.name, **{key: own[key] for key in ("boxes", "of", "files")})
    if pattern == "blocks":
        runs = own["runs"]
        blocks = tuple(Text.ROWS(first=at, last=at + n - 1) for at, n in zip(runs[::2], runs[1::2], strict=True))
        return Text.BLOCKS(name=diff.name, blocks=blocks)
    if pattern == "other":
        return Text.PERMUTED(name=diff.name)
    return (Text.INTERLEAVED if pattern == "interleaved" else Text.WITHIN)(name=diff.name, size=own["size"])
