"""Input and output of a rule, and statements of evidence shared by several rules."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from syncheck.evidence.suspects import sets_within, suspects
from syncheck.kinds import OPTIMIZER
from syncheck.messages import Message, Sentence

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from syncheck.records import Comparison, Severity, TensorDiff, ValueDiff

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Case:
    """A group, its differences not covered by an earlier rule, and the groups of the same run.

    series: the groups in the order of their steps, including this group; only this group without history.
    """

    group: Comparison
    tensors: tuple[TensorDiff, ...]
    values: tuple[str, ...]
    series: tuple[Comparison, ...]

    @property
    def in_memory(self) -> bool:
        """Whether the replicas are ranks of a running job, without files.

        Objects compared by one process are in memory too, but have no host.
        """
        return all(replica.format == "memory" and replica.host is not None for replica in self.group.replicas)

    def of_kind(self, *kinds: str) -> tuple[TensorDiff, ...]:
        """Return the uncovered differences of these kinds."""
        return tuple(diff for diff in self.tensors if diff.kind in kinds)

    def of_values(self) -> tuple[ValueDiff, ...]:
        """Return the uncovered, differing Python values."""
        uncovered = frozenset(self.values)
        return tuple(diff for diff in self.group.values if diff.name in uncovered)

    def agrees(self, *kinds: str) -> bool:
        """Whether all tensors of these kinds are in sync. Differences covered by an earlier rule count too."""
        return not any(diff.out_of_sync and diff.kind in kinds for diff in self.group.tensors)

    def agreeing(self, *kinds: str) -> frozenset[str]:
        """Return the names of tensors of these kinds if they are in sync or were not compared."""
        differing = {diff.name for diff in self.group.tensors if diff.out_of_sync}
        return frozenset(
            name for name, kind in self.group.evidence.names.items() if kind in kinds and name not in differing
        )

    @property
    def frozen(self) -> frozenset[str]:
        """The frozen parameters of the metadata; empty without metadata."""
        return frozenset(self.group.evidence.metadata.frozen if self.group.evidence.metadata is not None else ())

    @property
    def optimized(self) -> frozenset[str] | None:
        """The names of the parameters of the optimizer; None if some state has no known parameter."""
        names, metadata = self.group.evidence.names, self.group.evidence.metadata
        if metadata is not None and metadata.optimizer_sharded:
            return None
        if metadata is not None and metadata.optimizer_parameters:
            return frozenset(metadata.optimizer_parameters)
        states = [name for name, kind in names.items() if kind in OPTIMIZER and ".param_groups." not in name]
        owners = frozenset(owner(self, name) for name in states)
        return owners if owners and owners <= names.keys() else None

    @property
    def untrained(self) -> frozenset[str]:
        """The frozen parameters, and the buffers classified as parameters.

        Only the frozen parameters of the metadata if the optimizer's parameters are unknown.
        """
        optimized = self.optimized
        parameters = frozenset(name for name, kind in self.group.evidence.names.items() if kind == "parameter")
        return self.frozen if optimized is None else self.frozen | (parameters - optimized)

    @property
    def loose(self) -> frozenset[str]:
        """The untrained tensors that may be buffers, judged by the metadata and by their names."""
        metadata = self.group.evidence.metadata
        if metadata is not None and metadata.buffers is not None:
            return frozenset()
        return frozenset(name for name in self.untrained - self.frozen if not is_weight(name))

    def compared(self, *kinds: str) -> int:
        """Return the number of compared tensors of these kinds."""
        return sum(counts.compared for kind, counts in self.group.kinds.items() if kind in kinds)


@dataclass(frozen=True, slots=True)
class Match:
    """The result of a rule: covered tensors and values, suspects, and evidence.

    evidence: first the event, then the numbers. cause, fix: replace CAUSE and FIX of the rule.
    agree: sets of ranks; the rule explains no difference within a set. None stands for one set, all ranks except
    the suspects.
    """

    tensors: tuple[TensorDiff, ...]
    ranks: tuple[int, ...]
    evidence: str | tuple[Message, ...]
    values: tuple[str, ...] = ()
    cause: str | Message = ""
    fix: str | Message = ""
    agree: Sequence[Sequence[int]] | None = None


class Rule(Protocol):
    """A module of this package. `syncheck explain` prints its docstring.

    CAUSE and FIX are one or two sentences each, and part of every finding.
    """

    CODE: str
    SLUG: str
    SEVERITY: Severity
    CAUSE: str | Sentence
    FIX: str | Sentence
    __doc__: str | None

    def apply(self, case: Case) -> Match | None:
        """Return the explained differences, or None if the signature does not match."""


def owner(case: Case, name: str) -> str:
    """Return the parameter of an optimizer tensor, without the index of the optimizer if there are several."""
    parameter = parameter_of(name)
    head, _, rest = parameter.partition(".")
    return rest if head.isdigit() and rest in case.group.evidence.names else parameter


def is_weight(name: str) -> bool:
    """Whether a tensor is named weight or bias. Buffers are not, except biases for balancing experts."""
    return name.endswith(("weight", "bias")) and not name.endswith(("expert_bias", "correction_bias"))


def parameter_of(name: str) -> str:
    """Return the parameter of an optimizer tensor: 'fc.weight' for 'optimizer.fc.weight.exp_avg'."""
    return name.removeprefix("optimizer.").rpartition(".")[0]


class Common(Sentence):
    """Statements of evidence in several rules."""

    PARAMETERS = "{count} of {total:count parameter} {count:verb differs|differ}, {size}"
    LARGEST = "largest difference {difference:number 3} in {element}"
    SIZE_UNKNOWN = "by an unknown amount"
    NOT_FINITE = "no finite difference"
    AGREE = "{ranks:ranks} agree"
    DIFFERS = "{ranks:ranks} {ranks:verb differs|differ} from all other ranks"
    NO_MAJORITY = "there is no majority"
    NO_TWO_AGREE = "no two of {ranks:ranks} agree, so there is no majority"
    WITHIN_GROUPS = "compared within the replica groups of {groups:sets}; suspected: {ranks:ranks}"


def largest_difference(tensors: Iterable[TensorDiff]) -> Message:
    """State the largest difference and its element, if the differences were measured."""
    tensors = tuple(tensors)
    if any(diff.mismatched is None for diff in tensors):
        return Common.SIZE_UNKNOWN()
    measured = [(diff.max_abs, diff) for diff in tensors if diff.max_abs is not None]
    if not measured:
        return Common.NOT_FINITE()
    difference, diff = max(measured, key=lambda item: item[0])
    return Common.LARGEST(difference=difference, element=element_name(diff))


def element_name(diff: TensorDiff) -> str:
    """Return the element with the largest difference: 'fc.weight[3, 1]', or the name of a tensor of one element."""
    return f"{diff.name}[{', '.join(map(str, diff.index))}]" if diff.index else diff.name


def parameter_facts(case: Case, differing: Sequence[TensorDiff]) -> tuple[Message, ...]:
    """State how many parameters differ and by how much; empty if there are none."""
    if not differing:
        return ()
    total, size = case.compared("parameter"), largest_difference(differing)
    return (Common.PARAMETERS(count=len(differing), total=total, size=size),)


def agreement_facts(tensors: Sequence[TensorDiff], group: Comparison) -> tuple[Message, ...]:
    """State which ranks agree and which differ, or that there is no majority. Empty for two replicas."""
    if len(group.replicas) < 3:
        return ()
    partitioned = [diff for diff in tensors if len(diff.replica_groups) > 1]
    odd = tuple(sorted({rank for diff in partitioned for rank in suspects([diff], group)}))
    if odd:
        groups = tuple(ranks for ranks in partitioned[0].replica_groups if len(ranks) > 1)
        return (Common.WITHIN_GROUPS(groups=groups, ranks=odd),)
    # A tensor may have only one set of ranks, because other ranks lack it.
    counts = Counter(diff.clusters for diff in tensors if len(diff.clusters) != 1)
    if not counts and tensors:
        return ()
    common = counts.most_common(1)[0][0] if counts else ()
    agreeing = [ranks for ranks in common if len(ranks) > 1]
    alone = tuple(sorted(rank for ranks in common for rank in ranks if len(ranks) == 1))
    if not agreeing:
        return (Common.NO_TWO_AGREE(ranks=group.ranks),)
    facts = [Common.AGREE(ranks=ranks) for ranks in agreeing]
    if alone:
        facts.append(Common.DIFFERS(ranks=alone))
    if len(common[0]) == len(common[1]):
        facts.append(Common.NO_MAJORITY())
    return tuple(facts)


def ranks_by(by_rank: Mapping[int, _Value]) -> dict[_Value, list[int]]:
    """Return the ranks of each value, in the order of the first occurrence of the values."""
    ranks: dict[_Value, list[int]] = {}
    for rank, value in by_rank.items():
        ranks.setdefault(value, []).append(rank)
    return ranks


def fewer(some: set[int], others: set[int]) -> set[int]:
    """Return the smaller set of ranks, which is suspect, or both sets if they are equally large."""
    return some | others if len(some) == len(others) else min(some, others, key=len)


def agrees_within(diff: TensorDiff, locations: Mapping[int, Hashable]) -> bool:
    """Whether ranks of one location hold the same bytes of a differing tensor, within each replica group.

    locations: by rank, a host or a mesh coordinate.
    """
    groups = sets_within(diff)
    for sets in groups:
        set_of: dict[Hashable, int] = {}
        for i, ranks in enumerate(sets):
            if any(set_of.setdefault(locations[rank], i) != i for rank in ranks):
                return False
    return bool(groups)
