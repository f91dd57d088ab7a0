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

import re
from collections import defaultdict
from dataclasses import field
from itertools import cycle
from typing import TYPE_CHECKING

from syncheck.frozen import mutable_record, record
from syncheck.tensors.names import normalize

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.snapshots import Snapshot

    Ranks = frozenset[int]
    States = frozenset[str]

_MEMBERS = r"(optimizer(?:\.\w+)*)\.param_groups\.\d+\.(?:params|\(positions\))"


@record
class LostState:
    """State that no file contains, although its owner is known."""

    rank: int
    parameter: str
    states: States


@mutable_record
class Owners:
    """The optimizer state that each rank must hold. Parameters have the names of tensors: `optimizer.<parameter>`.

    by_rank: the parameters whose state a rank must hold.
    owned: parameters whose state is on some ranks by design.
    lost: state that an owner lost, and no other rank has.
    """

    by_rank: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    owned: set[str] = field(default_factory=set)
    lost: list[LostState] = field(default_factory=list)

    def add(self, parameter: str, expected: Ranks, ranks: Ranks) -> None:
        """Add a parameter.

        parameter: the name of the parameter.
        expected: the ranks that must hold its state.
        ranks: all ranks.
        """
        for rank in expected:
            self.by_rank[rank].add(parameter)

        if expected != ranks:
            self.owned.add(parameter)

    def has_state(self, parameter: str) -> bool:
        """Whether any rank holds state of a parameter."""
        return any(parameter in parameters for parameters in self.by_rank.values())


@mutable_record
class _Class:
    """Parameters of one parameter group whose states have equal names.

    states: the names of the tensors of a state.
    holders: the ranks with state, by parameter.
    """

    states: States
    holders: dict[str, Ranks] = field(default_factory=dict)


def find_owners(snapshots: Mapping[int, Snapshot]) -> Owners | None:
    """Return the owners of optimizer state; None if each state is on all ranks, or lost."""
    # The common case, also for a thousand ranks: replicas have the same tensors.
    contents = {frozenset(snapshot.tensors) for snapshot in snapshots.values()}
    if len(contents) < 2:
        return None

    ranks = frozenset(snapshots)
    states = _list_states(snapshots)
    groups = _list_groups(snapshots)
    # Without groups on all ranks, a state may belong to an optimizer in another part of a checkpoint.
    if not _are_of_optimizers(states, groups):
        return None

    # Layers with a learning rate of their own have a group each, so groups matter only if classes are mixed.
    classes = _sort_into_classes(states, {})
    owners = _assign_owners(classes, ranks)
    if not owners.owned:
        classes = _sort_into_classes(states, groups)
        owners = _assign_owners(classes, ranks)

    if not owners.owned:
        return None

    for of_class in classes:
        owners.lost += _find_lost_turns(
            of_class,
            groups.values(),
            owners=owners,
            ranks=sorted(ranks),
        )

    return owners


def _are_of_optimizers(parameters: Iterable[str], groups: Iterable[str]) -> bool:
    """Whether all parameters with state belong to the optimizers of some parameter groups."""
    optimizers = tuple({group.partition("param_groups.")[0] for group in groups})
    # The dot, because state directly below a named optimizer has the name of the optimizer for its parameter.
    return all(f"{parameter}.".startswith(optimizers) for parameter in parameters)


@mutable_record
class _State:
    """The state of one parameter.

    ranks: the ranks that hold it.
    names: the names of its tensors.
    """

    ranks: set[int] = field(default_factory=set)
    names: set[str] = field(default_factory=set)


def _list_states(snapshots: Mapping[int, Snapshot]) -> dict[str, _State]:
    """Return the state of each parameter. Shards have no owner."""
    states: dict[str, _State] = defaultdict(_State)
    for rank, snapshot in snapshots.items():
        for name, plain in normalize(snapshot.tensors).items():
            parameter, _, state = plain.rpartition(".")
            is_whole = snapshot.tensors[name].sharding is None
            if is_whole and parameter.startswith("optimizer."):
                states[parameter].ranks.add(rank)
                states[parameter].names.add(state)

    return states


def _list_groups(snapshots: Mapping[int, Snapshot]) -> dict[str, list[str]]:
    """Return the parameters of each parameter group in their order, if all ranks list the same parameters."""
    lists: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, snapshot in snapshots.items():
        for name, members in snapshot.values.items():
            if re.fullmatch(_MEMBERS, name):
                lists[name, str(members)].append(rank)

    groups: dict[str, list[str]] = {}
    for (name, members), ranks in lists.items():
        # Ranks with other groups may number other parameters.
        if len(ranks) == len(snapshots):
            optimizer, _, _ = name.partition(".param_groups.")
            groups[name] = [f"{optimizer}.{member}" for member in members.split(", ")]

    return groups


def _sort_into_classes(states: Mapping[str, _State], groups: Mapping[str, Sequence[str]]) -> list[_Class]:
    """Return the classes of the parameters with state.

    states: by parameter.
    groups: the parameters of each group; empty if parameters of several groups may be in one class.
    """
    group_of: dict[str, str] = {}
    for group, parameters in groups.items():
        group_of |= dict.fromkeys(parameters, group)

    classes: dict[tuple[str, States], _Class] = {}
    for parameter, state in states.items():
        # A parameter that has the name of a tensor is not in the lists of numbers.
        names = frozenset(state.names)
        key = group_of.get(parameter, ""), names
        of_class = classes.setdefault(key, _Class(names))
        of_class.holders[parameter] = frozenset(state.ranks)

    return list(classes.values())


def _assign_owners(classes: Sequence[_Class], ranks: Ranks) -> Owners:
    """Return the ranks that must hold each state. Without a set of owners, all ranks must hold it."""
    sets_by_class = [_find_owner_sets(of_class, ranks) for of_class in classes]
    confirmed: set[Ranks] = set().union(*sets_by_class)
    owners = Owners()
    for of_class, owner_sets in zip(classes, sets_by_class, strict=True):
        candidates = owner_sets
        # The only parameter of a class, like a single matrix, has one set of owners. Other classes must confirm it.
        if len(of_class.holders) == 1:
            candidates = confirmed

        for parameter, holders in of_class.holders.items():
            # Without a set that contains all holders, other ranks lost the state.
            expected = next(filter(holders.issubset, candidates), ranks)
            owners.add(parameter, expected, ranks)

    return owners


def _find_owner_sets(of_class: _Class, ranks: Ranks) -> set[Ranks]:
    """Return the sets of ranks that own parameters of a class; empty if its state is replicated or lost."""
    sets = set(of_class.holders.values())
    if ranks in sets:
        return set()

    owner_sets: set[Ranks] = set()
    for holders in sets:
        # A smaller set within another set: some of these owners lost the state.
        is_within_another = any(map(holders.__lt__, sets))
        if not is_within_another:
            owner_sets.add(holders)

    # With a single set, the other ranks may have lost their states.
    if len(owner_sets) < 2:
        return set()

    # Their union is as large as possible only if all sets have the same size and no rank in common.
    all_owners = frozenset[int]().union(*owner_sets)
    largest = max(owner_sets, key=len)
    if len(all_owners) < len(largest) * len(owner_sets):
        return set()

    return owner_sets


def _find_lost_turns(
    of_class: _Class, groups: Iterable[Sequence[str]], owners: Owners, ranks: Sequence[int]
) -> list[LostState]:
    """Return the states of a class that a rank without any of them lost.

    Only the order proves it: parameter i of the group belongs to rank i modulo the number of ranks. Otherwise, the
    parameters may have no state because they never had a gradient, and the rank may own nothing.
    """
    lost: list[LostState] = []
    if not owners.owned.issuperset(of_class.holders):
        return lost

    active_ranks = frozenset[int]().union(*of_class.holders.values())
    for parameters in groups:
        turns = dict(zip(parameters, cycle(ranks), strict=False))
        missing: list[LostState] = []
        parameters_in_turn = 0
        for parameter, rank in turns.items():
            if of_class.holders.get(parameter) == frozenset({rank}):
                parameters_in_turn += 1
            # A parameter with another state is of another class.
            elif rank not in active_ranks and not owners.has_state(parameter):
                missing.append(LostState(rank, parameter, of_class.states))

        # One parameter with an owner out of turn, or with an active owner and no state, disproves the order.
        follows_order = parameters_in_turn + len(missing) == len(turns)
        if follows_order and parameters_in_turn > 0:
            lost += missing

    return lost
