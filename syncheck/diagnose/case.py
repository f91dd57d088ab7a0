"""Input and output of a rule: queries on a group, and the match of a rule."""

from __future__ import annotations

from dataclasses import replace
from itertools import filterfalse
from typing import TYPE_CHECKING

from syncheck.diagnose.history import count_agreeing, difference_ratios, suspects, trend_of
from syncheck.diagnose.measures import median, most_common, relation_of
from syncheck.diagnose.optimizer_names import (
    is_gradient_average,
    is_rmsprop_momentum,
    is_setting,
    is_square,
    parameter_of,
    split_number,
)
from syncheck.diagnose.selection import (
    exclude_names,
    has_kind,
    index_by_name,
    last_part,
    list_names,
    out_of_sync,
    select_counting,
    select_kinds,
    select_names,
    with_status,
    with_step,
)
from syncheck.diagnose.series import step_order
from syncheck.diagnose.statements import Common, Course, describe_clusters, largest_difference
from syncheck.frozen import record
from syncheck.tensors.kinds import BN_STATISTICS, OPTIMIZER

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from syncheck.findings import Certainty, RelationKind
    from syncheck.messages import Message, Sentence
    from syncheck.records import Comparison, TensorDiff, Trend, ValueDiff


# Kinds of tensors affected by differing parameters, without a cause of their own.
_FOLLOWERS = ("optimizer", *BN_STATISTICS, "buffer", "ema")
_ADAPTERS = ("lora", "adapter", "dora", "loha", "lokr", "prompt_encoder", "ia3")


@record
class Case:
    """A group, its differences not covered by an earlier rule, and the groups of the same run."""

    group: Comparison
    tensors: tuple[TensorDiff, ...]
    """The uncovered differences of tensors."""
    values: tuple[str, ...]
    """The names of the uncovered, differing Python values."""
    series: tuple[Comparison, ...]
    """The groups in the order of their steps, including this group; only this group without history."""
    impossible: frozenset[str] = frozenset()
    """The codes of causes that a watched run excludes: it would have seen them."""

    # The replicas.

    @property
    def in_running_job(self) -> bool:
        """Whether the replicas are ranks of a running job, without files.

        Objects compared by one process are in memory too, but have no host.
        """
        formats = {replica.format for replica in self.group.replicas}
        hosts = {replica.host for replica in self.group.replicas}
        return formats <= {"memory"} and None not in hosts

    @property
    def number_of_ranks(self) -> int:
        """The number of replicas."""
        return len(self.group.replicas)

    def are_all_ranks(self, ranks: Collection[int]) -> bool:
        """Whether the ranks are all ranks of the group, so that no rank deviates."""
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
        values = select_names(self.group.values, frozenset(self.values))
        if kinds:
            values = select_kinds(values, *kinds)
        return tuple(values)

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
        are_compared = self.compared(*kinds) > 0
        return are_compared and self.agrees(*kinds)

    def agreeing(self, kind: str) -> frozenset[str]:
        """Return the names of tensors of a kind if they are in sync or were not compared."""
        differing = list_names(out_of_sync(self.group))
        return self.names_of(kind).difference(differing)

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
        # Without names in the file, the optimizer has ids.
        are_names = owners <= self.group.evidence.names.keys()
        return owners if owners and are_names else None

    def state_owners(self) -> frozenset[str]:
        """Return the parameters with optimizer state, or the optimizer's ids if their names are unknown."""
        owners = set()
        for name in self.names_of(*OPTIMIZER):
            # The settings of a parameter group belong to many parameters.
            if not is_setting(name):
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
        not_optimized = self.names_of("parameter") - optimized
        return self.frozen | not_optimized

    @property
    def loose(self) -> frozenset[str]:
        """The untrained tensors that may be buffers, judged by the metadata and by their names."""
        metadata = self.group.evidence.metadata
        # The metadata lists all buffers.
        if metadata.buffers is not None:
            return frozenset()
        candidates = self.untrained - self.frozen
        return frozenset(filterfalse(is_weight, candidates))

    def owner_of(self, name: str) -> str:
        """Return the parameter of an optimizer tensor, without the index of the optimizer if there are several."""
        parameter = parameter_of(name)
        _, without_number = split_number(parameter)
        is_known = without_number in self.group.evidence.names
        return without_number if is_known else parameter

    def owners_of(self, diffs: Iterable[TensorDiff]) -> frozenset[str]:
        """Return the parameters of optimizer tensors."""
        return frozenset(self.owner_of(diff.name) for diff in diffs)

    def with_moment(self) -> frozenset[str]:
        """Return the parameters whose first moments were compared, or the optimizer's ids if names are unknown."""
        owners = set()
        for name in self._compared_names("optimizer"):
            if self._is_first_moment(name):
                owner = self.owner_of(name)
                owners.add(owner)
        return frozenset(owners)

    def _is_first_moment(self, name: str) -> bool:
        """Whether an optimizer tensor is a running average of gradients.

        RMSprop's momentum is not: it averages gradients divided by their own size. The momentum of clipped gradients
        was 1.4 times longer in measurements, with cosines of 0.91 to 0.97.
        """
        names = self.group.evidence.names
        averages_steps = is_rmsprop_momentum(name, names)
        return is_gradient_average(name) and not averages_steps

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
        are_most_weights = 2 * len(weights) > len(candidates)
        if self.optimized is not None or not are_most_weights:
            return candidates
        differing = self.differing_parameters().keys()
        return weights | (candidates & differing)

    def differing_parameters(self) -> dict[str, TensorDiff]:
        """Return the differing, unexplained trained parameters by name."""
        trained = exclude_names(self.differing("parameter"), self.untrained)
        return index_by_name(trained)

    def differing_moments(self) -> dict[str, TensorDiff]:
        """Return the differing, unexplained first moments by parameter."""
        moments = {}
        for diff in self.differing("optimizer"):
            if self._is_first_moment(diff.name):
                parameter = self.owner_of(diff.name)
                moments[parameter] = diff
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
        groups = []
        for group in with_step(self.series):
            # Later steps do not matter: a report of an earlier step never refers to the future.
            if step_order(group) <= last:
                groups.append(group)
        return tuple(groups)

    def in_step(self) -> bool:
        """Whether the ranks took the same number of steps, as far as known.

        False for local SGD, which differs by design, and for different loss scales, which skip different steps.
        """
        evidence = self.group.evidence
        are_some_stale = bool(evidence.stale and self.differing_parameters())
        # A scaler skips the steps with an overflow, so another scale shows skipped steps.
        counters = select_kinds(self.group.values, "counter", "scaler")
        count_differently = bool(select_counting(counters))
        reasons = (
            are_some_stale,
            bool(evidence.metadata.averaging),
            not self.agrees("optimizer_step"),
            count_differently,
        )
        return not any(reasons)

    def counts_steps(self) -> bool:
        """Whether the optimizer counts its steps, as Adam does. `in_step` is then a fact instead of an assumption."""
        if self.compared("optimizer_step"):
            return True
        states = self._compared_names("optimizer")
        # Adam always counts, even if its counters are Python numbers.
        return "exp_avg" in map(last_part, states)

    def just_began(self) -> bool:
        """Whether the parameters agreed at all earlier steps, so there is no trend yet.

        A single event, for example a skipped step, then looks like the start of a permanent fault.
        """
        agreements = self._earlier_agreements()
        return bool(agreements) and all(agreements)

    def agreed_before(self) -> bool:
        """Whether the parameters agreed at some earlier step, so the run started in sync."""
        return any(self._earlier_agreements())

    def _earlier_agreements(self) -> list[bool]:
        """Return whether the parameters agreed at each earlier step."""
        agreements = []
        for group in self.steps()[:-1]:
            differs = has_kind(group.tensors, "parameter")
            agreements.append(not differs)
        return agreements

    def trend_facts(self, *kinds: str, names: Collection[str] = ()) -> tuple[Trend | None, tuple[Message, ...]]:
        """Return and state how the difference of tensors developed since the first step at which they differed.

        kinds, names: which tensors. Returns (None, ()) without a series.
        """
        groups = self.steps()
        steps = []
        for group in groups:
            differing = out_of_sync(group)
            followed = [diff for diff in differing if diff.kind in kinds or diff.name in names]
            steps.append(followed)
        first = count_agreeing(steps)
        trend = trend_of(steps[first:])
        if trend is None:
            return None, ()

        since = groups[first].step
        if trend == "constant":
            unchanged = Course.UNCHANGED(step=since)
            return trend, (unchanged,)
        sentence = Course.GREW if trend == "growing" else Course.CHANGED
        ratios = difference_ratios(steps[first], steps[-1])
        changed = sentence(
            step=since,
            ratio=median(ratios),
        )
        return trend, (changed,)

    # The match.

    def with_followers(self, differing: Iterable[TensorDiff]) -> tuple[TensorDiff, ...]:
        """Add the affected optimizer state, running statistics, buffers and averaged copies to the differences."""
        followers = list_names(self.of_kind(*_FOLLOWERS))
        names = self.untrained.union(list_names(differing), followers)
        return tuple(select_names(self.tensors, names))

    def make_match(
        self, differing: Sequence[TensorDiff], facts: Iterable[Message], covered: Sequence[TensorDiff] = ()
    ) -> Match:
        """Return a match with the suspects of the differing tensors, and state which ranks agree in them.

        covered: the covered tensors, by default the differing tensors.
        """
        agreement = self.agreement_facts(differing)
        return Match(
            tensors=tuple(covered or differing),
            ranks=suspects(differing, self.group),
            facts=(*facts, *agreement),
        )

    def parameter_facts(self, tensors: Iterable[TensorDiff]) -> tuple[Message, ...]:
        """State how many of the tensors are parameters and by how much they differ; empty without parameters."""
        parameters = select_kinds(tensors, "parameter")
        if not parameters:
            return ()
        compared = self.compared("parameter")
        fact = Common.PARAMETERS(
            count=len(parameters),
            # Parameters of different shapes are not compared.
            total=max(compared, len(parameters)),
            size=largest_difference(parameters),
        )
        return (fact,)

    def agreement_facts(self, tensors: Sequence[TensorDiff]) -> tuple[Message, ...]:
        """State which ranks agree and which differ, or that there is no majority. Empty for two replicas."""
        # Two replicas differ from each other, which the first statement of a finding says.
        if self.number_of_ranks < 3:
            return ()
        if not tensors:
            return describe_clusters((), self.group.ranks)
        partitioned = [diff for diff in tensors if len(diff.replica_groups) > 1]
        if partitioned:
            return self._facts_within_groups(partitioned)
        return self._facts_of_most(tensors)

    def _facts_of_most(self, tensors: Sequence[TensorDiff]) -> tuple[Message, ...]:
        """State which ranks agree in most of the tensors; empty if all tensors have a single set of ranks."""
        clusters_of_tensors = []
        for diff in tensors:
            # A tensor may have only one set of ranks, because other ranks lack it.
            if len(diff.clusters) != 1:
                clusters_of_tensors.append(diff.clusters)
        if not clusters_of_tensors:
            return ()
        clusters = most_common(clusters_of_tensors)
        return describe_clusters(clusters, self.group.ranks)

    def _facts_within_groups(self, partitioned: Sequence[TensorDiff]) -> tuple[Message, ...]:
        """State the suspects of tensors with several replica groups, between which tensors differ by design."""
        suspected: set[int] = set()
        for diff in partitioned:
            suspected.update(suspects([diff], self.group))
        fact = Common.WITHIN_GROUPS(
            groups=tuple(ranks for ranks in partitioned[0].replica_groups if len(ranks) > 1),
            ranks=tuple(sorted(suspected)),
        )
        return (fact,)


@record
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
    has_name_of_parameter = name.endswith(("weight", "bias"))
    balances_experts = name.endswith(("expert_bias", "correction_bias"))
    return has_name_of_parameter and not balances_experts


def is_adapter(name: str) -> bool:
    """Whether a parameter or module is an adapter of a frozen model, by its name."""
    lower_name = name.lower()
    return any(word in lower_name for word in _ADAPTERS)
