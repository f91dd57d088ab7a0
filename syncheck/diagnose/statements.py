"""Statements of evidence that several rules share: sizes, trends, agreeing ranks, and tensors that follow."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from syncheck.diagnose.measures import is_partly_nonfinite
from syncheck.diagnose.selection import exclude_kinds, find_largest
from syncheck.messages import Message, Sentence

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncheck.records import TensorDiff


class Common(Sentence):
    """Statements of evidence in several rules."""

    PARAMETERS = "{count} of {total:count parameter} {count:verb differs|differ}, {size}"
    LARGEST = "largest difference {difference:number 3} in {element:name}"
    SIZE_UNKNOWN = "by an unknown amount"
    NOT_FINITE = "no finite difference"
    NOT_FINITE_IN = "{element:name} is NaN or infinite in some of them only"
    AGREE = "{ranks:ranks} agree"
    DIFFERS = "{ranks:ranks} {ranks:verb differs|differ} from all other ranks"
    NO_MAJORITY = "there is no majority"
    NO_TWO_AGREE = "no two of {ranks:ranks} agree, so there is no majority"
    WITHIN_GROUPS = "compared within the replica groups of {groups:sets}; suspected: {ranks:ranks}"


class OtherCode(Sentence):
    """Cause and fix if constants of traced code differ, between replicas (SYN299) or models (SYN399)."""

    CAUSE = (
        "Possible causes: the models were traced or scripted from other code, with other inputs or attributes, or "
        "frozen with other weights. The code of a TorchScript archive holds these values as constants."
    )
    FIX = (
        "Trace or script the models from one version of the code, with the same inputs and attributes. Register values "
        "that belong to the model as buffers. Compare models before torch.jit.freeze(), which turns weights into "
        "constants."
    )


class Course(Sentence):
    """How a difference developed over the steps, and which other tensors differ because of it."""

    UNCHANGED = "the difference has not changed since step {step}"
    GREW = "the difference grew {ratio:.1f} times since step {step}"
    CHANGED = "the difference is {ratio:.3g} times as large as at step {step}"
    STATISTICS_TOO = "{count:count running statistic} {count:verb differs|differ} too"
    BUFFERS_TOO = "{count:count buffer} {count:verb differs|differ} too"
    AVERAGES_TOO = "{count:count tensor} of the averaged copy {count:verb differs|differ} too"
    OPTIMIZER_TOO = "{count:count optimizer tensor} {count:verb differs|differ} too"


# The statement about tensors of a kind that differ because of other tensors.
_FOLLOWERS = {
    "bn_mean": Course.STATISTICS_TOO,
    "bn_var": Course.STATISTICS_TOO,
    "buffer": Course.BUFFERS_TOO,
    "ema": Course.AVERAGES_TOO,
    "optimizer": Course.OPTIMIZER_TOO,
}


def largest_difference(tensors: Iterable[TensorDiff]) -> Message:
    """State the largest difference and its element, if the differences were measured."""
    tensors = tuple(tensors)
    # Digests show no size.
    are_all_measured = all(diff.mismatched is not None for diff in tensors)
    if not are_all_measured:
        return Common.SIZE_UNKNOWN()
    first_not_finite = next(filter(is_partly_nonfinite, tensors), None)
    # An element that is finite in one replica only counts more than any number.
    if first_not_finite is not None and first_not_finite.index:
        element = element_name(first_not_finite)
        return Common.NOT_FINITE_IN(element=element)
    largest = find_largest(tensors)
    if largest is None:
        return Common.NOT_FINITE()
    return Common.LARGEST(
        difference=largest.max_abs,
        element=element_name(largest),
    )


def element_name(diff: TensorDiff) -> str:
    """Return the element with the largest difference: 'fc.weight[3, 1]', or the name of a tensor of one element."""
    return f"{diff.name}{index_text(diff.index)}" if diff.index else diff.name


def index_text(index: Iterable[int]) -> str:
    """Return the index of an element as Python writes it: '[3, 1]'."""
    positions = ", ".join(map(str, index))
    return f"[{positions}]"


def limit_facts(facts: Sequence[Message], most: int, more: Sentence, sizes: Sequence[int] = ()) -> list[Message]:
    """Return the first facts, and a statement of the number of further facts.

    sizes: the number of tensors of each fact, if a fact may be about several tensors and `more` states tensors.
    """
    limited = list(facts[:most])
    further = sum(sizes[most:]) if sizes else len(facts) - most
    if further > 0:
        limited.append(more(count=further))
    return limited


def describe_clusters(clusters: Sequence[Sequence[int]], ranks: tuple[int, ...]) -> tuple[Message, ...]:
    """State which ranks agree and which differ from all others. clusters: the largest first. ranks: of the group."""
    facts = []
    single_ranks: list[int] = []
    for cluster in clusters:
        if len(cluster) > 1:
            facts.append(Common.AGREE(ranks=cluster))
        else:
            single_ranks += cluster
    if not facts:
        return (Common.NO_TWO_AGREE(ranks=ranks),)

    if single_ranks:
        single_ranks.sort()
        facts.append(Common.DIFFERS(ranks=tuple(single_ranks)))
    # The sets are sorted by size, so the first two show a tie.
    if len(clusters[0]) == len(clusters[1]):
        facts.append(Common.NO_MAJORITY())
    return tuple(facts)


def follower_facts(covered: Iterable[TensorDiff], *reported: str) -> tuple[Message, ...]:
    """State how many other tensors a finding covers. reported: kinds already in the evidence."""
    counts: Counter[Course] = Counter()
    for diff in exclude_kinds(covered, *reported):
        if diff.kind in _FOLLOWERS:
            sentence = _FOLLOWERS[diff.kind]
            counts[sentence] += 1
    facts = []
    for sentence, count in counts.items():
        fact = sentence(count=count)
        facts.append(fact)
    return tuple(facts)
