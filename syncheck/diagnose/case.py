"""What a rule sees, and what the rules have in common."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from syncheck.evidence.suspects import suspects
from syncheck.records import ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncheck.records import Group, Severity, TensorDiff, ValueDiff


@dataclass(frozen=True, slots=True)
class Case:
    """One group with the differences that no earlier rule covers, and the same run's groups by step.

    series: in the order of their steps, this group among them; a single one where there is no history.
    """

    group: Group
    tensors: tuple[TensorDiff, ...]
    values: tuple[str, ...]
    series: tuple[Group, ...]

    @property
    def in_memory(self) -> bool:
        """Whether the replicas are those of the ranks of a running job, of which there are no files.

        Things that one process compares with each other are in memory too, but have no host.
        """
        return all(replica.format == "memory" and replica.host is not None for replica in self.group.replicas)

    def of_kind(self, *kinds: str) -> tuple[TensorDiff, ...]:
        """Return the uncovered differences of these kinds."""
        return tuple(diff for diff in self.tensors if diff.kind in kinds)

    def of_values(self) -> tuple[ValueDiff, ...]:
        """Return the uncovered Python values that differ."""
        uncovered = frozenset(self.values)
        return tuple(diff for diff in self.group.values if diff.name in uncovered)

    def agrees(self, *kinds: str) -> bool:
        """Whether no tensor of these kinds is out of sync in the group, covered or not."""
        return not any(diff.out_of_sync and diff.kind in kinds for diff in self.group.tensors)

    def agreeing(self, *kinds: str) -> frozenset[str]:
        """Return the names of the tensors of these kinds that are not out of sync, those that were not compared too."""
        apart = {diff.name for diff in self.group.tensors if diff.out_of_sync}
        return frozenset(name for name, kind in self.group.names.items() if kind in kinds and name not in apart)

    @property
    def trained(self) -> frozenset[str]:
        """The parameters of which the optimizer holds state; empty where there is no optimizer, or one without."""
        return frozenset(parameter_of(name) for name, kind in self.group.names.items() if kind == "optimizer")

    def compared(self, *kinds: str) -> int:
        """How many tensors of these kinds were compared."""
        return sum(counts.compared for kind, counts in self.group.kinds.items() if kind in kinds)


@dataclass(frozen=True, slots=True)
class Match:
    """What a rule found: the tensors and values it covers, its suspects, and the evidence in numbers.

    cause, fix: in place of the rule's own, where the evidence says more than that.
    """

    tensors: tuple[TensorDiff, ...]
    ranks: tuple[int, ...]
    evidence: str
    values: tuple[str, ...] = ()
    cause: str = ""
    fix: str = ""


class Rule(Protocol):
    """A module of this package. Its docstring is what `syncheck explain` prints.

    CAUSE and FIX are one or two sentences each, put into every finding.
    """

    CODE: str
    SLUG: str
    SEVERITY: Severity
    CAUSE: str
    FIX: str
    __doc__: str | None

    def apply(self, case: Case) -> Match | None:
        """Return what the rule covers, or None where it does not fit."""


def parameter_of(name: str) -> str:
    """Return the parameter that an optimizer's tensor belongs to: optimizer.fc.weight.exp_avg gives fc.weight."""
    return name.removeprefix("optimizer.").rpartition(".")[0]


def worst(tensors: Iterable[TensorDiff]) -> TensorDiff | None:
    """Return the tensor with the largest absolute gap; of any whose gap is not known, the first."""
    tensors = tuple(tensors)
    measured = [diff for diff in tensors if diff.max_abs is not None]
    unknown = next((diff for diff in tensors if diff.mismatched is None), None)
    return unknown or max(measured, key=lambda diff: diff.max_abs or 0, default=None)


def gap_text(diff: TensorDiff | None) -> str:
    """Name a tensor's largest gap: 'largest gap 0.092 in bn1.running_mean[17]'."""
    if diff is not None and diff.mismatched is None:
        return "by how much is not known"
    if diff is None or diff.max_abs is None:
        return "no finite gap"
    where = f"[{', '.join(map(str, diff.index))}]" if diff.index else ""
    return f"largest gap {diff.max_abs:.3g} in {diff.name}{where}"


def agreement_text(tensors: Sequence[TensorDiff], group: Group) -> str:
    """Say who agrees with whom: '; ranks 0, 2, 3 agree; rank 1 apart', or that there is no majority.

    Empty for two replicas: that they differ has been said.
    """
    if len(group.replicas) < 3:
        return ""
    divided = sorted({rank for diff in tensors if len(diff.replica_groups) > 1 for rank in suspects([diff], group)})
    if divided:
        sets = next(diff.replica_groups for diff in tensors if len(diff.replica_groups) > 1)
        compared = " and of ".join(ranks_text(found) for found in sets if len(found) > 1)
        return f"; compared within the replica groups of {compared}, suspect {ranks_text(divided)}"
    # Of what some ranks lack altogether only one set may be told.
    counts = Counter(diff.clusters for diff in tensors if len(diff.clusters) != 1)
    if not counts and tensors:
        return ""
    common, times = counts.most_common(1)[0] if counts else ((), 0)
    together = [found for found in common if len(found) > 1]
    apart = sorted(rank for found in common for rank in found if len(found) == 1)
    if not times or not together:
        return f"; no two of {ranks_text(group.ranks)} agree, so there is no majority"
    text = "; " + "; ".join(f"{ranks_text(found)} agree" for found in together)
    if apart:
        text += f"; {ranks_text(apart)} apart"
    return text if len(common[0]) > len(common[1]) else f"{text}; there is no majority"


def counted(number: int, one: str, many: str = "") -> str:
    """'1 tensor', '2 tensors'."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def names_text(names: Sequence[str], most: int = 3) -> str:
    """Return the first few names and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
