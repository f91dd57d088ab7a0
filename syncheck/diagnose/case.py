"""What a rule sees, and what the rules have in common."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from syncheck.errors import brief
from syncheck.evidence.suspects import suspects
from syncheck.kinds import OPTIMIZER
from syncheck.messages import Message, Sentence, ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.records import Comparison, Severity, TensorDiff, ValueDiff

_Value = TypeVar("_Value")
_MOST_WHOLE = 2**53  # a larger floating-point number is whole, but stands for several
_MOST_SETS = 4  # replica groups that are named; HSDP has as many as a replica has shards


@dataclass(frozen=True, slots=True)
class Case:
    """One group with the differences that no earlier rule covers, and the same run's groups by step.

    series: in the order of their steps, this group among them; a single one where there is no history.
    """

    group: Comparison
    tensors: tuple[TensorDiff, ...]
    values: tuple[str, ...]
    series: tuple[Comparison, ...]

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
        return frozenset(
            name for name, kind in self.group.evidence.names.items() if kind in kinds and name not in apart
        )

    @property
    def frozen(self) -> frozenset[str]:
        """The parameters that the metadata calls frozen; empty where there is none."""
        return frozenset(self.group.evidence.metadata.frozen if self.group.evidence.metadata is not None else ())

    @property
    def optimized(self) -> frozenset[str] | None:
        """The names of the parameters that the optimizer updates; None if not every state has a known parameter."""
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
        """The tensors of the model that no optimizer updates: frozen parameters, and buffers that count as parameters.

        Only those in the metadata if the optimizer's parameters are not known.
        """
        optimized = self.optimized
        parameters = frozenset(name for name, kind in self.group.evidence.names.items() if kind == "parameter")
        return self.frozen if optimized is None else self.frozen | (parameters - optimized)

    @property
    def loose(self) -> frozenset[str]:
        """The untrained tensors that may be buffers, by the metadata and by their names."""
        metadata = self.group.evidence.metadata
        if metadata is not None and metadata.buffers is not None:
            return frozenset()
        return frozenset(name for name in self.untrained - self.frozen if not is_weight(name))

    def compared(self, *kinds: str) -> int:
        """How many tensors of these kinds were compared."""
        return sum(counts.compared for kind, counts in self.group.kinds.items() if kind in kinds)


@dataclass(frozen=True, slots=True)
class Match:
    """What a rule found: the tensors and values it covers, its suspects, and the evidence in numbers.

    cause, fix: in place of the rule's own, where the evidence says more than that. agree: sets of ranks among which the
    rule explains no difference; None for a single set, of the ranks that are no suspects.
    """

    tensors: tuple[TensorDiff, ...]
    ranks: tuple[int, ...]
    evidence: str | tuple[Message, ...]
    values: tuple[str, ...] = ()
    cause: str | Message = ""
    fix: str | Message = ""
    agree: Sequence[Sequence[int]] | None = None


class Rule(Protocol):
    """A module of this package. Its docstring is what `syncheck explain` prints.

    CAUSE and FIX are one or two sentences each, put into every finding.
    """

    CODE: str
    SLUG: str
    SEVERITY: Severity
    CAUSE: str | Sentence
    FIX: str | Sentence
    __doc__: str | None

    def apply(self, case: Case) -> Match | None:
        """Return what the rule covers, or None where it does not fit."""


def owner(case: Case, name: str) -> str:
    """Return the parameter that an optimizer's tensor is of, without the number of one of several optimizers."""
    parameter = parameter_of(name)
    head, _, rest = parameter.partition(".")
    return rest if head.isdigit() and rest in case.group.evidence.names else parameter


def is_weight(name: str) -> bool:
    """Whether a tensor is called weight or bias, which buffers are not, except those that balance experts."""
    return name.endswith(("weight", "bias")) and not name.endswith(("expert_bias", "correction_bias"))


def parameter_of(name: str) -> str:
    """Return the parameter that an optimizer's tensor belongs to: optimizer.fc.weight.exp_avg gives fc.weight."""
    return name.removeprefix("optimizer.").rpartition(".")[0]


def gap_text(tensors: Iterable[TensorDiff]) -> str:
    """Name the largest gap of any of these: 'largest gap 0.092 in bn1.running_mean[17]'."""
    tensors = tuple(tensors)
    if any(diff.mismatched is None for diff in tensors):
        return "by how much is not known"
    measured = [(diff.max_abs, diff) for diff in tensors if diff.max_abs is not None]
    if not measured:
        return "no finite gap"
    gap, diff = max(measured, key=lambda found: found[0])
    return f"largest gap {number_text(gap, 3)} in {place_text(diff)}"


def number_text(number: float, digits: int = 6) -> str:
    """Return a whole number with all of its digits, any other one with so many: '1000001', '0.0925'."""
    whole = isinstance(number, int) or (abs(number) < _MOST_WHOLE and number == int(number))
    return str(int(number)) if whole else f"{number:.{digits}g}"


def place_text(diff: TensorDiff) -> str:
    """Name the element of a tensor that is most apart: 'fc.weight[3, 1]'; a tensor of one number by its name."""
    return f"{diff.name}[{', '.join(map(str, diff.index))}]" if diff.index else diff.name


def parameters_text(case: Case, apart: Sequence[TensorDiff]) -> str:
    """Say how many parameters differ, and by how much; '' where none does."""
    if not apart:
        return ""
    return f"{len(apart)} of {case.compared('parameter')} parameters differ, {gap_text(apart)}"


def agreement_text(tensors: Sequence[TensorDiff], group: Comparison) -> str:
    """Say who agrees with whom: '; ranks 0, 2, 3 agree; rank 1 apart', or that there is no majority.

    Empty for two replicas: that they differ has been said.
    """
    if len(group.replicas) < 3:
        return ""
    divided = [diff for diff in tensors if len(diff.replica_groups) > 1]
    odd = sorted({rank for diff in divided for rank in suspects([diff], group)})
    if odd:
        sets = [found for found in divided[0].replica_groups if len(found) > 1]
        compared = " and of ".join(map(ranks_text, sets[:_MOST_SETS]))
        more = f" and of {len(sets) - _MOST_SETS} more" if len(sets) > _MOST_SETS else ""
        return f"; compared within the replica groups of {compared}{more}, suspect {ranks_text(odd)}"
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


def differ(number: int) -> str:
    """'differs' of one, 'differ' of several."""
    return "differs" if number == 1 else "differ"


def ranks_by(by_rank: Mapping[int, _Value]) -> dict[_Value, list[int]]:
    """Return the ranks that hold each value, in the order in which the values first come."""
    found: dict[_Value, list[int]] = {}
    for rank, value in by_rank.items():
        found.setdefault(value, []).append(rank)
    return found


def by_value_text(by_rank: Mapping[int, object]) -> str:
    """'65536.0 on ranks 0, 1, 2 and 32768.0 on rank 3'; four values at most."""
    sets = ranks_by({rank: "missing" if value is None else brief(value) for rank, value in by_rank.items()})
    return " and ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in list(sets.items())[:4])


def fewer(some: set[int], others: set[int]) -> set[int]:
    """Return the smaller set of ranks, which is the suspect one; of two equally large ones both."""
    return some | others if len(some) == len(others) else min(some, others, key=len)
