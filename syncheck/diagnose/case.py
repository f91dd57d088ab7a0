"""Input and output of a rule: queries on a group, and the match of a rule."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from syncheck.diagnose.history import count_agreeing, difference_ratios, suspects, trend_of
from syncheck.diagnose.measures import relation_of
from syncheck.diagnose.optimizer_names import (
    is_gradient_average,
    is_rmsprop_momentum,
    is_setting,
    is_square,
    parameter_of,
)
from syncheck.diagnose.selection import has_kind, list_names, out_of_sync, select_kinds, with_status
from syncheck.diagnose.statements import Common, Course, describe_clusters, largest_difference
from syncheck.tensors.kinds import BN_STATISTICS, OPTIMIZER

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from syncheck.findings import Certainty, RelationKind
    from syncheck.messages import Message, Sentence
    from syncheck.records import Comparison, TensorDiff, Trend, ValueDiff


# Kinds of tensors affected by differing parameters, without a cause of their own.
_FOLLOWERS = ("optimizer", *BN_STATISTICS, "buffer", "ema")
_ADAPTERS = ("lora", "adapter", "dora", "loha", "lokr", "prompt_encoder", "ia3")


@dataclass(frozen=True, slots=True)
class Case:
    """A group, its differences not covered by an earlier rule, and the groups of the same run."""

    group: Comparison
    tensors: tuple[TensorDiff, ...]
    """The uncovered differences of tensors."""
    values: tuple[str, ...]
    """The names of the uncovered, differing Python values."""
    series: tuple[Comparison, ...]
    """The groups in the order of their steps, including this group; only this group without history."""

    # The replicas.

    @property
    def in_memory(self) -> bool:
        """Whether the replicas are ranks of a running job, without files.

        Objects compared by one process are in memory too, but have no host.
        """
        return all(replica.format == "memory" and replica.host is not None for replica in self.group.replicas)

    @property
    def number_of_ranks(self) -> int:
        """The number of replicas."""
        return len(self.group.replicas)

    def are_all_ranks(self, ranks: Collection[int]) -> bool:
        """Whether these are all ranks of the group, so that no rank deviates from the others."""
        return set(ranks) == set(self.group.ranks)

    def ranks_differ(self, diffs: Iterable[TensorDiff]) -> bool:
        """Whether no two ranks hold equal bytes of any of these tensors."""
        return all(len(diff.clusters) == self.number_of_ranks for diff in diffs)

    def coordinates(self, dimensions: Collection[str]) -> dict[int, int]:
        """Return each rank's coordinate in the mesh along a dimension of this name; empty if a rank lacks it."""
        coordinates: dict[int, int] = {}
        for replica in self.group.replicas:
            for name, index in replica.mesh.items():
                if name.lower() in dimensions:
                    coordinates.setdefault(replica.rank, index)
        # Without the coordinate of a rank, nothing shows where the rank is.
        return coordinates if len(coordinates) == self.number_of_ranks else {}

    # The uncovered differences.

    def of_kind(self, *kinds: str) -> tuple[TensorDiff, ...]:
        """Return the uncovered differences of the kinds."""
        return tuple(select_kinds(self.tensors, *kinds))

    def differing(self, *kinds: str) -> tuple[TensorDiff, ...]:
        """Return the uncovered tensors of the kinds with different values."""
        return tuple(with_status(self.of_kind(*kinds), "different"))

    def related(self, kind: RelationKind) -> tuple[TensorDiff, ...]:
        """Return the uncovered tensors of two models with this relation."""
        return tuple(diff for diff in self.tensors if relation_of(diff) is kind)

    def of_values(self, *kinds: str) -> tuple[ValueDiff, ...]:
        """Return the uncovered, differing Python values of the kinds; without kinds, all."""
        uncovered = frozenset(self.values)
        values = tuple(value for value in self.group.values if value.name in uncovered)
        if kinds:
            return tuple(value for value in values if value.kind in kinds)
        return values

    # All tensors of the group, covered or not.

    def names_of(self, *kinds: str) -> frozenset[str]:
        """Return the names of all tensors of the kinds, including identical tensors."""
        return frozenset(name for name, kind in self.group.evidence.names.items() if kind in kinds)

    def compared(self, *kinds: str) -> int:
        """Return the number of compared tensors of the kinds."""
        return sum(counts.compared for kind, counts in self.group.kinds.items() if kind in kinds)

    def agrees(self, *kinds: str) -> bool:
        """Whether all tensors of the kinds are in sync. Differences covered by an earlier rule count too."""
        return not out_of_sync(self.group, *kinds)

    def is_in_sync(self, *kinds: str) -> bool:
        """Whether tensors of the kinds were compared, and all of them are in sync."""
        return self.compared(*kinds) > 0 and self.agrees(*kinds)

    def agreeing(self, kind: str) -> frozenset[str]:
        """Return the names of tensors of a kind if they are in sync or were not compared."""
        return self.names_of(kind).difference(list_names(out_of_sync(self.group)))

    def _compared_names(self, kind: str) -> frozenset[str]:
        uncompared = with_status(self.group.tensors, "not_compared")
        return self.names_of(kind).difference(list_names(uncompared))

    # The optimizer: which parameters it trains, and the averages of their gradients.

    @property
    def frozen(self) -> frozenset[str]:
        """The frozen parameters of the metadata; empty without metadata."""
        return frozenset(self.group.evidence.metadata.frozen)

    @property
    def optimized(self) -> frozenset[str] | None:
        """The names of the parameters of the optimizer; None if some state has no known parameter."""
        metadata = self.group.evidence.metadata
        # Each rank has the state of a part of the parameters.
        if metadata.optimizer_sharded:
            return None
        if metadata.optimizer_parameters:
            return frozenset(metadata.optimizer_parameters)
        owners = self.state_owners()
        are_named = owners <= self.group.evidence.names.keys()
        return owners if owners and are_named else None

    def state_owners(self) -> frozenset[str]:
        """Return the parameters with optimizer state, or the optimizer's ids if their names are unknown."""
        owners = set()
        for name, kind in self.group.evidence.names.items():
            if kind in OPTIMIZER and not is_setting(name):
                owners.add(self.owner_of(name))
        return frozenset(owners)

    @property
    def untrained(self) -> frozenset[str]:
        """The frozen parameters, and the buffers classified as parameters.

        Only the frozen parameters of the metadata if the optimizer's parameters are unknown.
        """
        optimized = self.optimized
        # Without the names of the optimizer's parameters, any parameter may be trained.
        if optimized is None:
            return self.frozen
        return self.frozen | (self.names_of("parameter") - optimized)

    @property
    def loose(self) -> frozenset[str]:
        """The untrained tensors that may be buffers, judged by the metadata and by their names."""
        if self.group.evidence.metadata.buffers is not None:
            return frozenset()
        return frozenset(name for name in self.untrained - self.frozen if not is_weight(name))

    def owner_of(self, name: str) -> str:
        """Return the parameter of an optimizer tensor, without the index of the optimizer if there are several."""
        parameter = parameter_of(name)
        number, _, remainder = parameter.partition(".")
        is_numbered = number.isdigit() and remainder in self.group.evidence.names
        return remainder if is_numbered else parameter

    def owners_of(self, diffs: Iterable[TensorDiff]) -> frozenset[str]:
        """Return the parameters of optimizer tensors."""
        return frozenset(self.owner_of(diff.name) for diff in diffs)

    def with_moment(self) -> frozenset[str]:
        """Return the parameters whose first moments were compared, or the optimizer's ids if names are unknown."""
        moments = [name for name in self._compared_names("optimizer") if self._is_first_moment(name)]
        return frozenset(map(self.owner_of, moments))

    def _is_first_moment(self, name: str) -> bool:
        """Whether an optimizer tensor is a running average of gradients.

        RMSprop's momentum is not: it averages gradients divided by their own size. The momentum of clipped gradients
        was 1.4 times longer in measurements, with cosines of 0.91 to 0.97.
        """
        return is_gradient_average(name) and not is_rmsprop_momentum(name, self.group.evidence.names)

    def trained_parameters(self) -> frozenset[str]:
        """Return the parameters with a first moment, or without optimizer state all possibly trained parameters.

        If the optimizer's parameters are unknown and most tensors are named weight or bias, a tensor with another name
        counts only if it differs.
        """
        parameters = self._compared_names("parameter")
        with_moment = self.with_moment() & parameters
        if with_moment:
            return with_moment
        candidates = parameters - self.untrained
        weights = frozenset(filter(is_weight, candidates))
        if self.optimized is not None or 2 * len(weights) <= len(candidates):
            return candidates
        return weights | (candidates & self.differing_parameters().keys())

    def differing_parameters(self) -> dict[str, TensorDiff]:
        """Return the differing, unexplained trained parameters by name."""
        untrained = self.untrained
        return {diff.name: diff for diff in self.differing("parameter") if diff.name not in untrained}

    def differing_moments(self) -> dict[str, TensorDiff]:
        """Return the differing, unexplained first moments by parameter."""
        moments = {}
        for diff in self.differing("optimizer"):
            if self._is_first_moment(diff.name):
                moments[self.owner_of(diff.name)] = diff
        return moments

    def differing_squares(self) -> list[TensorDiff]:
        """Return the differing, unexplained second moments."""
        return [diff for diff in self.differing("optimizer") if is_square(diff.name)]

    # The steps of the run.

    def steps(self) -> tuple[Comparison, ...]:
        """Return the groups of the run up to this group, by step, without files of unknown step."""
        last = self.group.step
        if last is None:
            return (self.group,)
        return tuple(group for group in self.series if group.step is not None and group.step <= last)

    def in_step(self) -> bool:
        """Whether the ranks took the same number of steps, as far as known.

        False for local SGD, which differs by design, and for different loss scales, which skip different steps.
        """
        evidence = self.group.evidence
        if evidence.stale and self.differing_parameters():
            return False
        if evidence.metadata.averaging or not self.agrees("optimizer_step"):
            return False
        # A scaler skips the steps with an overflow, so another scale shows skipped steps.
        counters = [value for value in self.group.values if value.kind in ("counter", "scaler")]
        return not any(value.counts for value in counters)

    def counts_steps(self) -> bool:
        """Whether the optimizer counts its steps, as Adam does. `in_step` is then a fact instead of an assumption."""
        if self.compared("optimizer_step"):
            return True
        return any(name.endswith(".exp_avg") for name in self._compared_names("optimizer"))

    def just_began(self) -> bool:
        """Whether the parameters agreed at all earlier steps, so there is no trend yet.

        A single event, for example a skipped step, then looks like the start of a permanent fault.
        """
        earlier = self.steps()[:-1]
        return bool(earlier) and not any(has_kind(group.tensors, "parameter") for group in earlier)

    def agreed_before(self) -> bool:
        """Whether the parameters agreed at some earlier step, so the run started in sync."""
        earlier = self.steps()[:-1]
        return not all(has_kind(group.tensors, "parameter") for group in earlier)

    def trend_facts(self, *kinds: str, names: Collection[str] = ()) -> tuple[Trend | None, tuple[Message, ...]]:
        """Return and state how the difference of tensors developed since the first step at which they differed.

        kinds, names: which tensors. Returns (None, ()) without a series.
        """
        groups = self.steps()
        steps = []
        for group in groups:
            followed = [diff for diff in out_of_sync(group) if diff.kind in kinds or diff.name in names]
            steps.append(followed)
        first = count_agreeing(steps)
        trend = trend_of(steps[first:])
        if trend is None:
            return None, ()
        since = groups[first].step
        if trend == "constant":
            return trend, (Course.UNCHANGED(step=since),)
        sentence = Course.GREW if trend == "growing" else Course.CHANGED
        ratio = median(difference_ratios(steps[first], steps[-1]))
        return trend, (sentence(step=since, ratio=ratio),)

    # The match.

    def with_followers(self, differing: Iterable[TensorDiff]) -> tuple[TensorDiff, ...]:
        """Add the affected optimizer state, running statistics, buffers and averaged copies to the differences."""
        names = self.untrained.union(list_names(differing))
        return tuple(diff for diff in self.tensors if diff.name in names or diff.kind in _FOLLOWERS)

    def make_match(
        self, differing: Sequence[TensorDiff], facts: Iterable[Message], covered: Sequence[TensorDiff] = ()
    ) -> Match:
        """Return a match with the suspects of the differing tensors, and state which ranks agree in them.

        covered: the covered tensors, by default the differing tensors.
        """
        agreement = self.agreement_facts(differing)
        return Match(tuple(covered or differing), suspects(differing, self.group), (*facts, *agreement))

    def parameter_facts(self, tensors: Iterable[TensorDiff]) -> tuple[Message, ...]:
        """State how many of the tensors are parameters and by how much they differ; empty without parameters."""
        parameters = select_kinds(tensors, "parameter")
        if not parameters:
            return ()
        total = max(self.compared("parameter"), len(parameters))  # other shapes are not compared
        size = largest_difference(parameters)
        return (Common.PARAMETERS(count=len(parameters), total=total, size=size),)

    def agreement_facts(self, tensors: Sequence[TensorDiff]) -> tuple[Message, ...]:
        """State which ranks agree and which differ, or that there is no majority. Empty for two replicas."""
        # Two replicas differ from each other, which the first statement of a finding says.
        if self.number_of_ranks < 3:
            return ()
        partitioned = [diff for diff in tensors if len(diff.replica_groups) > 1]
        suspected: set[int] = set()
        for diff in partitioned:
            suspected.update(suspects([diff], self.group))
        if suspected:
            groups = tuple(ranks for ranks in partitioned[0].replica_groups if len(ranks) > 1)
            return (Common.WITHIN_GROUPS(groups=groups, ranks=tuple(sorted(suspected))),)
        # A tensor may have only one set of ranks, because other ranks lack it.
        counts = Counter(diff.clusters for diff in tensors if len(diff.clusters) != 1)
        if not counts:
            if tensors:
                return ()
            return describe_clusters((), self.group.ranks)
        most_common, _ = counts.most_common(1)[0]
        return describe_clusters(most_common, self.group.ranks)


@dataclass(frozen=True, slots=True)
class Match:
    """The result of a rule: covered tensors and values, suspects, and evidence."""

    tensors: tuple[TensorDiff, ...]
    """The covered tensors."""
    ranks: Collection[int]
    """The suspects."""
    facts: Sequence[Message]
    """First the event, then the numbers."""
    values: tuple[str, ...] = ()
    """The names of the covered values."""
    cause: Sentence | None = None
    """Replaces CAUSE of the rule."""
    fix: Sentence | None = None
    """Replaces FIX of the rule."""
    agree: Sequence[Sequence[int]] | None = None
    """Sets of ranks; the rule explains no difference within a set. None: one set, all ranks except the suspects."""
    only_warns: bool = False
    """Whether the finding is a warning that does not make the group out of sync."""
    certainty: Certainty | None = None
    """Replaces CERTAINTY of the rule."""
    alternatives: tuple[str, ...] = ()
    """The codes of other causes that fit as well."""

    def with_cause(self, cause: Sentence | None, fix: Sentence | None) -> Match:
        """Return the match with another cause and fix; None for the cause and fix of the rule."""
        return replace(self, cause=cause, fix=fix)

    def as_consistent(self, *alternatives: str) -> Match:
        """Return the match with evidence that is no more than consistent with the cause.

        alternatives: codes of other causes that fit as well.
        """
        return replace(self, certainty="consistent", alternatives=alternatives)


def is_weight(name: str) -> bool:
    """Whether a tensor is named weight or bias. Buffers are not, except biases for balancing experts."""
    return name.endswith(("weight", "bias")) and not name.endswith(("expert_bias", "correction_bias"))


def is_adapter(name: str) -> bool:
    """Whether a parameter or module is an adapter of a frozen model, by its name."""
    return any(word in name.lower() for word in _ADAPTERS)
