"""Find optimizer state that only the owner of each parameter holds, as in Muon and other layer-wise optimizers.

The parameter groups of all ranks list all parameters there, and most ranks lack most states by design. The evidence:

- Parameters of one parameter group with equal names of states form a class. If one state of the class is on all ranks,
  the class is replicated, and a missing state was lost.
- The ranks with the state of a parameter are its owners. The sets of owners in a class are equally large and disjoint,
  and there are at least two sets: every rank lacks states of other ranks. Lost state leaves sets within other sets.
- A state that only some of these owners hold was lost by the other owners.
- If the ranks own parameters in turn, a rank without any state of the class lost the states of its turns.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from syncheck.names import normalize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.snapshots import Snapshot

    Ranks = frozenset[int]
    States = frozenset[str]


@dataclass(frozen=True, slots=True)
class LostState:
    """State that no file contains, although its owner is known."""

    rank: int
    parameter: str
    states: States


@dataclass(slots=True)
class Owners:
    """The optimizer state that each rank must hold. Parameters have the names of tensors: `optimizer.<parameter>`."""

    by_rank: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    owned: set[str] = field(default_factory=set)
    """Parameters whose state is on some ranks by design."""
    lost: list[LostState] = field(default_factory=list)


@dataclass(slots=True)
class _Class:
    """Parameters of one parameter group whose states have equal names. holders: ranks with state, by parameter."""

    states: States
    holders: dict[str, Ranks] = field(default_factory=dict)


def find_owners(snapshots: Mapping[int, Snapshot]) -> Owners | None:
    """Return the owners of optimizer state; None if each state is on all ranks, or lost."""
    ranks = frozenset(snapshots)
    holders, states = _list_states(snapshots)
    if all(holder == ranks for holder in holders.values()):
        return None
    members = _list_groups(snapshots)
    group_of: dict[str, str] = {}
    # Layers with a learning rate of their own have a group each, so groups matter only if classes are mixed.
    for groups in ({}, members):
        for group, parameters in groups.items():
            group_of |= dict.fromkeys(parameters, group)
        classes: dict[tuple[str, States], _Class] = {}
        for parameter, holder in holders.items():
            key = group_of.get(parameter, ""), states[parameter]
            classes.setdefault(key, _Class(states[parameter])).holders[parameter] = holder
        owners = _assign_owners([*classes.values()], ranks)
        if owners.owned:
            for of_class in classes.values():
                owners.lost += _find_lost_turns(of_class, [*members.values()], owners, sorted(ranks))
            return owners
    return None


def _list_states(snapshots: Mapping[int, Snapshot]) -> tuple[dict[str, Ranks], dict[str, States]]:
    """Return the ranks with state, and the names of the states, by parameter. Shards have no owner."""
    holders: dict[str, set[int]] = defaultdict(set)
    states: dict[str, set[str]] = defaultdict(set)
    for rank, snapshot in snapshots.items():
        for name, plain in normalize(snapshot.tensors).items():
            parameter, _, state = plain.rpartition(".")
            if parameter.startswith("optimizer.") and snapshot.tensors[name].sharding is None:
                holders[parameter].add(rank)
                states[parameter].add(state)
    return {name: frozenset(holders[name]) for name in holders}, {name: frozenset(states[name]) for name in states}


def _list_groups(snapshots: Mapping[int, Snapshot]) -> dict[str, list[str]]:
    """Return the parameters of each parameter group in their order, if all ranks list the same parameters."""
    texts: dict[str, set[str]] = defaultdict(set)
    for snapshot in snapshots.values():
        for name, value in snapshot.values.items():
            if name.startswith("optimizer.param_groups.") and name.endswith((".params", ".(positions)")):
                texts[name].add(str(value))
    groups = {}
    for name, distinct in texts.items():
        if len(distinct) == 1:
            groups[name] = [f"optimizer.{member.strip()}" for member in distinct.pop().split(",")]
    return groups


def _assign_owners(classes: Sequence[_Class], ranks: Ranks) -> Owners:
    """Return the ranks that must hold each state. Without a set of owners, all ranks must hold it."""
    confirmed: set[Ranks] = set()
    for of_class in classes:
        confirmed |= _find_owner_sets(of_class, ranks)
    owners = Owners()
    for of_class in classes:
        owner_sets = _find_owner_sets(of_class, ranks)
        # The only parameter of a class, such as a single matrix, has one set of owners. Other classes must confirm it.
        if len(of_class.holders) == 1:
            owner_sets = confirmed
        for parameter, holder in of_class.holders.items():
            expected = next((owner_set for owner_set in owner_sets if holder <= owner_set), ranks)
            for rank in expected:
                owners.by_rank[rank].add(parameter)
            if expected != ranks:
                owners.owned.add(parameter)
    return owners


def _find_owner_sets(of_class: _Class, ranks: Ranks) -> set[Ranks]:
    """Return the sets of ranks that own parameters of a class; empty if its state is replicated or lost."""
    holders = set(of_class.holders.values())
    if ranks in holders:
        return set()
    largest: set[Ranks] = set()
    for holder in holders:
        # A smaller set within another set: some of these owners lost the state.
        if not any(map(holder.__lt__, holders)):
            largest.add(holder)
    sizes = [len(owner_set) for owner_set in largest]
    are_disjoint = sum(sizes) == len(frozenset[int]().union(*largest))
    are_owners = len(sizes) > 1 and len(set(sizes)) == 1
    return largest if are_owners and are_disjoint else set()


def _find_lost_turns(
    of_class: _Class, groups: Sequence[Sequence[str]], owners: Owners, ranks: Sequence[int]
) -> list[LostState]:
    """Return the states of a class that a rank without any of them lost.

    Only the order proves it: parameter i of the group belongs to rank i modulo the number of ranks. Otherwise, the
    parameters may have no state because they never had a gradient, and the rank may own nothing.
    """
    if not owners.owned.issuperset(of_class.holders):
        return []
    with_state = set[str]().union(*owners.by_rank.values())
    active_ranks = frozenset[int]().union(*of_class.holders.values())
    lost: list[LostState] = []
    for parameters in groups:
        turns = {parameter: ranks[i % len(ranks)] for i, parameter in enumerate(parameters)}
        in_class = of_class.holders.keys() & turns.keys()
        # Each rank of a larger set of owners holds a copy, so an owner without state shows in the comparison.
        in_turn = all(of_class.holders[parameter] == {turns[parameter]} for parameter in in_class)
        if not in_class or not in_turn:
            continue
        stateless = [parameter for parameter in parameters if parameter not in with_state]
        if active_ranks.isdisjoint(turns[parameter] for parameter in stateless):
            lost += [LostState(turns[parameter], parameter, of_class.states) for parameter in stateless]
    return lost
