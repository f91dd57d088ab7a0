"""Tensors of B that have the values of other tensors of A: single tensors, exchanged pairs, and cycles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.measures import parameters_of
from syncheck.diagnose.rule import MOST_FACTS
from syncheck.diagnose.selection import index_by_name, list_names
from syncheck.diagnose.statements import limit_facts
from syncheck.messages import Message, Sentence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from syncheck.records import TensorDiff


class Exchanged(Sentence):
    """Statements about tensors that hold each other's values."""

    PAIR = "{first} and {second} are exchanged in B: each tensor has the values of the other tensor in A"
    CYCLE = (
        "{count} tensors are exchanged in B in a cycle: each tensor has the values of the next tensor in A, and "
        "the last tensor has the values of the first tensor: {names:names 6}"
    )


def group_exchanged(tensors: Iterable[TensorDiff]) -> list[list[TensorDiff]]:
    """Return the cycles of tensors, each with the values of the next tensor, and all other tensors alone."""
    by_name = index_by_name(tensors)
    sources: dict[str, str] = {}
    for name, diff in by_name.items():
        parameters = parameters_of(diff)
        # A transposed copy is more than an exchange.
        if "dims" not in parameters:
            sources[name] = parameters.get("other", "")
    groups = []
    visited_names: set[str] = set()
    for name in by_name:
        if name in visited_names:
            continue
        cycle = _find_cycle(name, sources) or [name]
        visited_names.update(cycle)
        groups.append([by_name[member] for member in cycle])
    return groups


def _find_cycle(name: str, sources: Mapping[str, str]) -> list[str]:
    """Return the names of a cycle from a name on; empty if the sources do not lead back to it.

    sources: for each tensor of B, the tensor of A with its values.
    """
    cycle = {name: None}
    source = sources.get(name, "")
    while source in sources and source not in cycle:
        cycle[source] = None
        source = sources[source]
    return list(cycle) if source == name else []


def state_exchanged(group: Sequence[TensorDiff], state_single: Callable[[TensorDiff], Message]) -> Message:
    """State which tensors are exchanged. group: of `group_exchanged`. state_single: for a tensor that is alone."""
    names = list_names(group)
    if len(group) == 1:
        return state_single(group[0])
    if len(group) == 2:
        first, second = names
        return Exchanged.PAIR(first=first, second=second)
    return Exchanged.CYCLE(count=len(group), names=names)


def state_positions(
    tensors: Iterable[TensorDiff], state_single: Callable[[TensorDiff], Message], more: Sentence
) -> list[Message]:
    """State where the tensors are, up to a limit of statements. more: the number of further tensors."""
    facts = []
    sizes = []
    for group in group_exchanged(tensors):
        fact = state_exchanged(group, state_single)
        facts.append(fact)
        sizes.append(len(group))
    return limit_facts(facts, MOST_FACTS, more, sizes)
