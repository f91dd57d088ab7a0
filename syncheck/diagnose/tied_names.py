"""Two names of a tied weight are one parameter: the rules see it once, and a finding lists both names.

An optimizer lists a tied weight once, so the other name has no state. As a tensor of its own it would look untrained,
and get a finding of its own beside the finding of the weight.

The names share memory on all ranks, which torch.save preserves. In other files, a name without optimizer state is a
copy of a parameter with state if both differ by the same numbers.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from syncheck.diagnose.measures import evidence_of
from syncheck.diagnose.optimizer_names import parameter_of, split_number
from syncheck.diagnose.selection import exclude_names, index_by_name, size_of
from syncheck.tensors.kinds import OPTIMIZER

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from syncheck.records import Comparison, TensorDiff

# Buffers in one memory may belong to several modules, which update them in turn.
_KINDS = ("parameter", "ema")


class Folded(NamedTuple):
    """A group without the second names of tied weights. copies: the kept name by each second name."""

    group: Comparison
    copies: Mapping[str, str]


def fold_ties(group: Comparison) -> Folded:
    """Return the group with each tied weight under a single name: the name with optimizer state, else the first."""
    diffs = index_by_name(group.tensors)
    optimized = _list_optimized(group)
    copies: dict[str, str] = {}
    for names in group.evidence.tied:
        copies |= _fold_names(
            names,
            group,
            diffs,
            optimized,
        )
    copies |= _find_equal_numbers(group, copies, optimized)
    if not copies:
        return Folded(group, {})
    return Folded(_drop(group, diffs, copies), copies)


def add_copies(names: Iterable[str], copies: Mapping[str, str]) -> tuple[str, ...]:
    """Return names of tensors, each with the second names of its weight behind it."""
    # A weight may have more than two names.
    second_names: dict[str, list[str]] = defaultdict(list)
    for copy, kept_name in copies.items():
        second_names[kept_name].append(copy)
    all_names: list[str] = []
    for name in names:
        all_names.append(name)
        all_names += second_names.get(name, ())
    # A finding may list a name more than once.
    return tuple(dict.fromkeys(all_names))


def _list_optimized(group: Comparison) -> frozenset[str]:
    """Return the names of parameters with optimizer state, and those that the metadata lists."""
    optimized = set(group.evidence.metadata.optimizer_parameters)
    for name, kind in group.evidence.names.items():
        if kind in OPTIMIZER:
            owner = parameter_of(name)
            # The state of one of several optimizers has the number of the optimizer in front.
            _, without_number = split_number(owner)
            optimized |= {owner, without_number}
    return frozenset(optimized)


def _fold_names(
    names: Sequence[str], group: Comparison, diffs: Mapping[str, TensorDiff], optimized: frozenset[str]
) -> dict[str, str]:
    """Return the kept name by second name, for names in one memory. Empty if the comparison treats them differently."""
    if not _are_compared_alike(names, group, diffs):
        return {}
    with_state = optimized.intersection(names)
    # Two states belong to two parameters.
    if len(with_state) > 1:
        return {}
    (kept_name,) = with_state or names[:1]
    second_names = dict.fromkeys(names, kept_name)
    del second_names[kept_name]
    return second_names


def _are_compared_alike(names: Sequence[str], group: Comparison, diffs: Mapping[str, TensorDiff]) -> bool:
    """Whether all names have one kind, which two names may share, and differ by the same numbers."""
    kinds = set(map(group.evidence.names.get, names))
    numbers = set()
    for name in names:
        diff = diffs.get(name)
        numbers.add(None if diff is None else _numbers(diff))
    # The names differ by other numbers if they are tied on some ranks only.
    is_one_tensor = len(kinds) == len(numbers) == 1
    return is_one_tensor and kinds.issubset(_KINDS)


def _find_equal_numbers(group: Comparison, copies: Collection[str], optimized: frozenset[str]) -> dict[str, str]:
    """Return the kept name by second name, for parameters without state that differ by the numbers of another.

    copies: second names that are known already.
    """
    candidates = filter(_is_measured_parameter, exclude_names(group.tensors, copies))
    with_state: dict[tuple[object, ...], str] = {}
    without_state: list[TensorDiff] = []
    for diff in candidates:
        if diff.name in optimized:
            with_state[_numbers(diff)] = diff.name
        else:
            without_state.append(diff)

    kept_names = {}
    # A frozen parameter has no state, but is no copy.
    for diff in exclude_names(without_state, group.evidence.metadata.frozen):
        kept_name = with_state.get(_numbers(diff))
        if kept_name is not None:
            kept_names[diff.name] = kept_name
    return kept_names


def _is_measured_parameter(diff: TensorDiff) -> bool:
    """Whether the difference of a parameter has numbers, which tell it from other parameters."""
    if diff.kind != "parameter":
        return False
    has_norms = bool(evidence_of(diff).norms)
    # All equal parameters have the same numbers.
    is_different = size_of(diff) > 0
    return has_norms and is_different


def _numbers(diff: TensorDiff) -> tuple[object, ...]:
    """Return the numbers of a difference, which are equal for two names of one tensor."""
    return (
        diff.status,
        diff.reason,
        diff.shape,
        diff.dtype,
        diff.clusters,
        len(diff.facts),
        diff.mismatched,
        diff.max_abs,
        diff.max_rel,
        diff.index,
        tuple(evidence_of(diff).norms.items()),
    )


def _drop(group: Comparison, diffs: Mapping[str, TensorDiff], copies: Mapping[str, str]) -> Comparison:
    """Return the group without some names, and without them in the counts by kind."""
    names = dict(group.evidence.names)
    kinds = dict(group.kinds)
    for name in copies:
        kind = names.pop(name)
        counts = kinds.get(kind)
        if counts is not None:
            status = diffs[name].status if name in diffs else "identical"
            fewer = {"tensors": counts.tensors - 1, status: getattr(counts, status) - 1}
            kinds[kind] = replace(counts, **fewer)
    return replace(
        group,
        tensors=tuple(exclude_names(group.tensors, copies)),
        kinds=kinds,
        evidence=replace(group.evidence, names=names),
    )
