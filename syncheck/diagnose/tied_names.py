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
from syncheck.diagnose.optimizer_names import parameter_of
from syncheck.diagnose.selection import exclude_names
from syncheck.tensors.kinds import OPTIMIZER

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.records import Comparison, TensorDiff

# Buffers in one memory may belong to several modules, which update them in turn.
_KINDS = ("parameter", "ema")


class Folded(NamedTuple):
    """A group without the second names of tied weights. copies: the kept name by each second name."""

    group: Comparison
    copies: Mapping[str, str]


def fold_ties(group: Comparison) -> Folded:
    """Return the group with each tied weight under a single name: the name with optimizer state, else the first."""
    diffs = {diff.name: diff for diff in group.tensors}
    optimized = _list_optimized(group)
    copies: dict[str, str] = {}
    for names in group.evidence.tied:
        copies |= _fold_names(names, group, diffs, optimized)
    copies |= _find_equal_numbers(group, diffs, optimized, copies)
    if copies:
        return Folded(_drop(group, diffs, copies), copies)
    return Folded(group, {})


def add_copies(names: Iterable[str], copies: Mapping[str, str]) -> tuple[str, ...]:
    """Return names of tensors, each with the second names of its weight behind it."""
    # A weight may have more than two names.
    second_names: dict[str, list[str]] = defaultdict(list)
    for copy, kept_name in copies.items():
        second_names[kept_name].append(copy)
    all_names: list[str] = []
    for name in names:
        all_names += [name, *second_names.get(name, ())]
    return tuple(dict.fromkeys(all_names))


def _list_optimized(group: Comparison) -> frozenset[str]:
    """Return the names of parameters with optimizer state, and those that the metadata lists."""
    optimized = set(group.evidence.metadata.optimizer_parameters)
    for name, kind in group.evidence.names.items():
        if kind not in OPTIMIZER:
            continue
        owner = parameter_of(name)
        optimized.add(owner)
        # The state of one of several optimizers has the number of the optimizer in front.
        number, _, remainder = owner.partition(".")
        if number.isdigit():
            optimized.add(remainder)
    return frozenset(optimized)


def _fold_names(
    names: Sequence[str], group: Comparison, diffs: Mapping[str, TensorDiff], optimized: frozenset[str]
) -> dict[str, str]:
    """Return the kept name by second name, for names in one memory. Empty if the comparison treats them differently."""
    kinds = set()
    numbers = set()
    for name in names:
        kinds.add(group.evidence.names.get(name))
        numbers.add(_numbers(diffs[name]) if name in diffs else None)
    if len(kinds) > 1 or not kinds.issubset(_KINDS):
        return {}
    # The names differ by other numbers if they are tied on some ranks only.
    if len(numbers) > 1:
        return {}

    with_state = [name for name in names if name in optimized]
    # Two states belong to two parameters.
    if len(with_state) > 1:
        return {}
    kept_name = with_state[0] if with_state else names[0]
    return {name: kept_name for name in names if name != kept_name}


def _find_equal_numbers(
    group: Comparison, diffs: Mapping[str, TensorDiff], optimized: frozenset[str], copies: Mapping[str, str]
) -> dict[str, str]:
    """Return the kept name by second name, for parameters without state that differ by the numbers of another."""
    with_state: dict[tuple[object, ...], str] = {}
    without_state: list[TensorDiff] = []
    for diff in diffs.values():
        if diff.name in copies or not _is_measured_parameter(diff):
            continue
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
    if diff.kind != "parameter" or not diff.max_abs:
        return False
    return bool(evidence_of(diff).norms)


def _numbers(diff: TensorDiff) -> tuple[object, ...]:
    """Return the numbers of a difference, which are equal for two names of one tensor."""
    norms = tuple(evidence_of(diff).norms.items())
    sizes = (diff.mismatched, diff.max_abs, diff.max_rel, diff.index)
    return diff.status, diff.reason, diff.shape, diff.dtype, diff.clusters, len(diff.facts), *sizes, norms


def _drop(group: Comparison, diffs: Mapping[str, TensorDiff], copies: Mapping[str, str]) -> Comparison:
    """Return the group without some names, and without them in the counts by kind."""
    kinds = dict(group.kinds)
    for name in copies:
        kind = group.evidence.names[name]
        counts = kinds.get(kind)
        if counts is not None:
            status = diffs[name].status if name in diffs else "identical"
            fewer = {"tensors": counts.tensors - 1, status: getattr(counts, status) - 1}
            kinds[kind] = replace(counts, **fewer)
    names = {name: kind for name, kind in group.evidence.names.items() if name not in copies}
    evidence = replace(group.evidence, names=names)
    return replace(group, tensors=tuple(exclude_names(group.tensors, copies)), kinds=kinds, evidence=evidence)
