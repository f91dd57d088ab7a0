"""Two names of a tied weight are one parameter: the rules see it once, and a finding lists both names.

An optimizer lists a tied weight once, so the other name has no state. As a tensor of its own it would look untrained,
and get a finding of its own beside the finding of the weight.

The names share memory on all ranks, which torch.save preserves. In other files, a name without optimizer state is a
copy of a parameter with state if both differ by the same numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from syncheck.diagnose.measures import evidence_of
from syncheck.diagnose.optimizer_names import parameter_of
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
    return Folded(_drop(group, diffs, copies), copies) if copies else Folded(group, {})


def add_copies(names: Iterable[str], copies: Mapping[str, str]) -> tuple[str, ...]:
    """Return names of tensors, each with the second names of its weight behind it."""
    second: dict[str, list[str]] = {}
    for name, source in copies.items():
        second.setdefault(source, []).append(name)
    return tuple(dict.fromkeys(each for name in names for each in (name, *second.get(name, ()))))


def _list_optimized(group: Comparison) -> frozenset[str]:
    """Return the names of parameters with optimizer state, and those that the metadata lists."""
    states = [name for name, kind in group.evidence.names.items() if kind in OPTIMIZER]
    owners = [parameter_of(name) for name in states]
    # The state of one of several optimizers has the number of the optimizer in front.
    numbered = [owner.partition(".")[2] for owner in owners if owner.partition(".")[0].isdigit()]
    return frozenset((*owners, *numbered, *group.evidence.metadata.optimizer_parameters))


def _fold_names(
    names: Sequence[str], group: Comparison, diffs: Mapping[str, TensorDiff], optimized: frozenset[str]
) -> dict[str, str]:
    """Return the kept name by second name, for names in one memory. Empty if the comparison treats them differently."""
    kinds = {group.evidence.names.get(name) for name in names}
    numbers = {_numbers(diffs[name]) if name in diffs else None for name in names}
    with_state = [name for name in names if name in optimized]
    if len(kinds) > 1 or not kinds <= set(_KINDS) or len(numbers) > 1 or len(with_state) > 1:
        return {}
    order = [name for name in group.evidence.names if name in names]
    source = with_state[0] if with_state else order[0]
    return {name: source for name in order if name != source}


def _find_equal_numbers(
    group: Comparison, diffs: Mapping[str, TensorDiff], optimized: frozenset[str], copies: Mapping[str, str]
) -> dict[str, str]:
    """Return the kept name by second name, for parameters without state that differ by the numbers of another."""
    measured: dict[tuple[object, ...], str] = {}
    without_state: list[TensorDiff] = []
    for diff in diffs.values():
        if diff.kind != "parameter" or not diff.max_abs or not evidence_of(diff).norms or diff.name in copies:
            continue
        if diff.name in optimized:
            measured[_numbers(diff)] = diff.name
        else:
            without_state.append(diff)
    frozen = group.evidence.metadata.frozen
    return {
        diff.name: measured[_numbers(diff)]
        for diff in without_state
        if _numbers(diff) in measured and diff.name not in frozen
    }


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
        status = diffs[name].status if name in diffs else "identical"
        if (counts := kinds.get(kind)) is not None:
            kinds[kind] = replace(counts, tensors=counts.tensors - 1, **{status: getattr(counts, status) - 1})
    names = {name: kind for name, kind in group.evidence.names.items() if name not in copies}
    tensors = tuple(diff for diff in group.tensors if diff.name not in copies)
    return replace(group, tensors=tensors, kinds=kinds, evidence=replace(group.evidence, names=names))
