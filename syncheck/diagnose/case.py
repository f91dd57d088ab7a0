"""Input and output of a rule: queries on a group, and statements of evidence shared by several rules."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from syncheck.diagnose.history import difference_ratios, suspects, trend_of
from syncheck.messages import Message, Sentence
from syncheck.records import FIRST_MOMENTS, Evidence, sets_within
from syncheck.tensors.kinds import BN_STATISTICS, OPTIMIZER

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

    from syncheck.findings import Certainty, RelationKind
    from syncheck.records import Comparison, Severity, TensorDiff, Trend, ValueDiff

# Kinds of tensors affected by differing parameters, without a cause of their own.
_FOLLOWERS = ("optimizer", *BN_STATISTICS, "buffer", "ema")
_ADAPTERS = ("lora", "adapter", "dora", "loha", "lokr", "prompt_encoder", "ia3")
# Share of elements. Gradients of different batches change every element of a parameter; damage changes few elements.
TOUCHED = 0.1


@dataclass(frozen=True, slots=True)
class Averaging:
    """A step of local SGD. last: the last step after which parameters were averaged; 0 before the first."""

    period: int
    warmup: int
    last: int
    step: int

    @property
    def just_averaged(self) -> bool:
        """Whether the ranks averaged their parameters right after this step."""
        return self.step == self.last

    @property
    def own_steps(self) -> int:
        """The number of separate steps of each rank since the parameters were equal."""
        return self.step - max(self.last, self.warmup)


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

    def differing(self, *kinds: str) -> tuple[TensorDiff, ...]:
        """Return the uncovered tensors of these kinds with different values."""
        return tuple(diff for diff in self.of_kind(*kinds) if diff.status == "different")

    def related(self, kind: RelationKind) -> tuple[TensorDiff, ...]:
        """Return the uncovered tensors of two models with this relation."""
        return tuple(diff for diff in self.tensors if relation_of(diff) is kind)

    def related_by(self, keys: str | tuple[str, ...], kind: RelationKind) -> dict[Any, list[TensorDiff]]:
        """Return the uncovered tensors with this relation by the values of its parameters."""
        found: dict[Any, list[TensorDiff]] = {}
        for diff in self.related(kind):
            own = parameters_of(diff)
            value = own[keys] if isinstance(keys, str) else tuple(own[key] for key in keys)
            found.setdefault(value, []).append(diff)
        return found

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
        return frozenset().union(*map(self.names_of, kinds)) - differing

    def make_match(
        self, differing: Sequence[TensorDiff], facts: Iterable[Message], covered: Sequence[TensorDiff] = ()
    ) -> Match:
        """Return a match with the suspects of the differing tensors, and state which ranks agree in them.

        covered: the covered tensors, by default the differing tensors.
        """
        agreement = self.agreement_facts(differing)
        return Match(tuple(covered or differing), suspects(differing, self.group), (*facts, *agreement))

    def names_of(self, kind: str) -> frozenset[str]:
        """Return the names of all tensors of a kind, including identical tensors."""
        return frozenset(name for name, own_kind in self.group.evidence.names.items() if own_kind == kind)

    @property
    def frozen(self) -> frozenset[str]:
        """The frozen parameters of the metadata; empty without metadata."""
        return frozenset(self.group.evidence.metadata.frozen)

    @property
    def optimized(self) -> frozenset[str] | None:
        """The names of the parameters of the optimizer; None if some state has no known parameter."""
        names, metadata = self.group.evidence.names, self.group.evidence.metadata
        if metadata.optimizer_sharded:
            return None
        if metadata.optimizer_parameters:
            return frozenset(metadata.optimizer_parameters)
        states = [name for name, kind in names.items() if kind in OPTIMIZER and ".param_groups." not in name]
        owners = frozenset(self.owner_of(name) for name in states)
        return owners if owners and owners <= names.keys() else None

    @property
    def untrained(self) -> frozenset[str]:
        """The frozen parameters, and the buffers classified as parameters.

        Only the frozen parameters of the metadata if the optimizer's parameters are unknown.
        """
        optimized = self.optimized
        return self.frozen if optimized is None else self.frozen | (self.names_of("parameter") - optimized)

    @property
    def loose(self) -> frozenset[str]:
        """The untrained tensors that may be buffers, judged by the metadata and by their names."""
        if self.group.evidence.metadata.buffers is not None:
            return frozenset()
        return frozenset(name for name in self.untrained - self.frozen if not is_weight(name))

    def compared(self, *kinds: str) -> int:
        """Return the number of compared tensors of these kinds."""
        return sum(counts.compared for kind, counts in self.group.kinds.items() if kind in kinds)

    def owner_of(self, name: str) -> str:
        """Return the parameter of an optimizer tensor, without the index of the optimizer if there are several."""
        parameter = parameter_of(name)
        head, _, rest = parameter.partition(".")
        return rest if head.isdigit() and rest in self.group.evidence.names else parameter

    def coordinates(self, dimensions: Collection[str]) -> dict[int, int]:
        """Return each rank's coordinate in the mesh along a dimension of this name; empty if a rank lacks it."""
        coordinates = {}
        for replica in self.group.replicas:
            index = next((index for name, index in replica.mesh.items() if name.lower() in dimensions), None)
            if index is None:
                return {}
            coordinates[replica.rank] = index
        return coordinates

    def in_step(self) -> bool:
        """Whether the ranks took the same number of steps, as far as known.

        False for local SGD, which differs by design, and for different loss scales, which skip different steps.
        """
        evidence = self.group.evidence
        is_stale = evidence.stale and self.differing_parameters()
        if is_stale or evidence.metadata.averaging or not self.agrees("optimizer_step"):
            return False
        return not any(diff.counts and diff.kind in ("counter", "scaler") for diff in self.group.values)

    def counts_steps(self) -> bool:
        """Whether the optimizer counts its steps, as Adam does. `in_step` is then a fact instead of an assumption."""
        is_adam = any(name.endswith(".exp_avg") for name in self._compared_names("optimizer"))
        return is_adam or self.compared("optimizer_step") > 0

    def just_began(self) -> bool:
        """Whether the parameters agreed at all earlier steps, so there is no trend yet.

        A single event, such as a skipped step, then looks like the start of a permanent fault.
        """
        earlier = self.steps()[:-1]
        return bool(earlier) and not any(diff.kind == "parameter" for group in earlier for diff in group.tensors)

    def agreed_before(self) -> bool:
        """Whether the parameters agreed at some earlier step, so the run started in sync."""
        return any(all(diff.kind != "parameter" for diff in group.tensors) for group in self.steps()[:-1])

    def steps(self) -> tuple[Comparison, ...]:
        """Return the groups of the run up to this group, by step, without files of unknown step."""
        if self.group.step is None:
            return (self.group,)
        return tuple(group for group in self.series if group.step is not None and group.step <= self.group.step)

    def with_moment(self) -> frozenset[str]:
        """Return the parameters whose first moments were compared, or the optimizer's ids if names are unknown."""
        moments = (name for name in self._compared_names("optimizer") if self._is_first_moment(name))
        return frozenset(self.owner_of(name) for name in moments)

    def _is_first_moment(self, name: str) -> bool:
        """Whether an optimizer tensor is a running average of gradients.

        RMSprop's momentum is not: it averages gradients divided by their own size. The momentum of clipped gradients
        was 1.4 times longer in measurements, with cosines of 0.91 to 0.97.
        """
        parameter, _, state = name.rpartition(".")
        is_rmsprop = state == "momentum_buffer" and f"{parameter}.square_avg" in self.group.evidence.names
        return state in FIRST_MOMENTS and not is_rmsprop

    def trained_parameters(self) -> frozenset[str]:
        """Return the parameters with a first moment, or without optimizer state all possibly trained parameters.

        If the optimizer's parameters are unknown and most tensors are named weight or bias, a tensor with another name
        counts only if it differs.
        """
        parameters = self._compared_names("parameter")
        if optimized := self.with_moment() & parameters:
            return optimized
        candidates = parameters - self.untrained
        weights = frozenset(name for name in candidates if is_weight(name))
        known = self.optimized is not None or 2 * len(weights) <= len(candidates)
        return candidates if known else weights | (candidates & self.differing_parameters().keys())

    def differing_parameters(self) -> dict[str, TensorDiff]:
        """Return the differing, unexplained trained parameters by name."""
        untrained = self.untrained
        return {diff.name: diff for diff in self.differing("parameter") if diff.name not in untrained}

    def differing_moments(self) -> dict[str, TensorDiff]:
        """Return the differing, unexplained first moments by parameter."""
        moments = (diff for diff in self.differing("optimizer") if self._is_first_moment(diff.name))
        return {self.owner_of(diff.name): diff for diff in moments}

    def trend_facts(self, *kinds: str, names: Collection[str] = ()) -> tuple[Trend | None, tuple[Message, ...]]:
        """Return and state how the difference of tensors developed since the first step at which they differed.

        kinds, names: which tensors. Returns (None, ()) without a series.
        """
        groups = self.steps()
        steps = [[d for d in g.tensors if d.out_of_sync and (d.kind in kinds or d.name in names)] for g in groups]
        first = next((i for i, differing in enumerate(steps) if differing), len(steps))
        trend = trend_of(steps[first:])
        if trend is None:
            return None, ()
        step, ratio = groups[first].step, median(difference_ratios(steps[first], steps[-1]))
        if trend == "constant":
            return trend, (Course.UNCHANGED(step=step),)
        sentence = Course.GREW if trend == "growing" else Course.CHANGED
        return trend, (sentence(step=step, ratio=ratio),)

    def with_followers(self, differing: Iterable[TensorDiff]) -> tuple[TensorDiff, ...]:
        """Add the affected optimizer state, running statistics, buffers and averaged copies to the differences."""
        names = {diff.name for diff in differing} | self.untrained
        return tuple(diff for diff in self.tensors if diff.name in names or diff.kind in _FOLLOWERS)

    def _compared_names(self, kind: str) -> frozenset[str]:
        return self.names_of(kind) - {diff.name for diff in self.group.tensors if diff.status == "not_compared"}

    def averaging(self) -> Averaging | None:
        """Return the position of the group in local SGD, or None if its metadata does not mention averaging.

        Also None during warm-up, when gradients are averaged at every step, and when an averaging step is overdue: the
        method does not explain differences then.
        """
        metadata = self.group.evidence.metadata
        settings, step = metadata.averaging, self.group.step if metadata.step is None else metadata.step
        if not {"period", "warmup_steps", "last_step"} <= set(settings) or step is None:
            return None
        averaging = Averaging(settings["period"], settings["warmup_steps"], settings["last_step"], step)
        if step <= averaging.warmup or averaging.last > step or averaging.own_steps >= averaging.period:
            return None
        return averaging

    def parameter_facts(self, tensors: Iterable[TensorDiff]) -> tuple[Message, ...]:
        """State how many of the tensors are parameters and by how much they differ; empty without parameters."""
        parameters = [diff for diff in tensors if diff.kind == "parameter"]
        if not parameters:
            return ()
        total = max(self.compared("parameter"), len(parameters))  # other shapes are not compared
        size = largest_difference(parameters)
        return (Common.PARAMETERS(count=len(parameters), total=total, size=size),)

    def agreement_facts(self, tensors: Sequence[TensorDiff]) -> tuple[Message, ...]:
        """State which ranks agree and which differ, or that there is no majority. Empty for two replicas."""
        if len(self.group.replicas) < 3:
            return ()
        partitioned = [diff for diff in tensors if len(diff.replica_groups) > 1]
        odd = tuple(sorted({rank for diff in partitioned for rank in suspects([diff], self.group)}))
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
            return (Common.NO_TWO_AGREE(ranks=self.group.ranks),)
        facts = [Common.AGREE(ranks=ranks) for ranks in agreeing]
        if alone:
            facts.append(Common.DIFFERS(ranks=alone))
        if len(common[0]) == len(common[1]):
            facts.append(Common.NO_MAJORITY())
        return tuple(facts)


@dataclass(frozen=True, slots=True)
class Match:
    """The result of a rule: covered tensors and values, suspects, and evidence.

    facts: first the event, then the numbers. cause, fix: replace CAUSE and FIX of the rule. agree: sets of ranks; the
    rule explains no difference within a set. None stands for one set, all ranks except the suspects. only_warns: the
    finding is a warning that does not make the group out of sync. certainty: replaces CERTAINTY of the rule.
    alternatives: codes of other causes that fit as well.
    """

    tensors: tuple[TensorDiff, ...]
    ranks: Collection[int]
    facts: Sequence[Message]
    values: tuple[str, ...] = ()
    cause: Sentence | None = None
    fix: Sentence | None = None
    agree: Sequence[Sequence[int]] | None = None
    only_warns: bool = False
    certainty: Certainty | None = None
    alternatives: tuple[str, ...] = ()


class Rule(Protocol):
    """A module of this package. `syncheck explain` prints its docstring.

    Text contains the sentences of the finding. CAUSE and FIX are one or two sentences each, and part of every finding.
    IN_A_JOB, if present, replaces FIX for the ranks of a running job.
    """

    CODE: str
    SLUG: str
    SEVERITY: Severity
    CERTAINTY: Certainty
    Text: type[Sentence]
    __doc__: str | None

    def apply(self, case: Case) -> Match | None:
        """Return the explained differences, or None if the signature does not match."""


def is_weight(name: str) -> bool:
    """Whether a tensor is named weight or bias. Buffers are not, except biases for balancing experts."""
    return name.endswith(("weight", "bias")) and not name.endswith(("expert_bias", "correction_bias"))


def is_adapter(name: str) -> bool:
    """Whether a parameter or module is an adapter of a frozen model, by its name."""
    return any(word in name.lower() for word in _ADAPTERS)


def parameter_of(name: str) -> str:
    """Return the parameter of an optimizer tensor: 'fc.weight' for 'optimizer.fc.weight.exp_avg'."""
    return name.removeprefix("optimizer.").rpartition(".")[0]


class Common(Sentence):
    """Statements of evidence in several rules."""

    PARAMETERS = "{count} of {total:count parameter} {count:verb differs|differ}, {size}"
    LARGEST = "largest difference {difference:number 3} in {element:name}"
    SIZE_UNKNOWN = "by an unknown amount"
    NOT_FINITE = "no finite difference"
    NOT_FINITE_IN = "{element:name} is NaN or infinite in some of them only"
    AGREE = "{ranks:ranks} agree"
    DIFFERS = "{ranks:ranks} {ranks:verb differs|differ} from all other ranks"
    NO_MAJORITY = "there is no majority"
    NO_TWO_AGREE = "no two of {ranks:ranks} agree, so there is no majority"
    WITHIN_GROUPS = "compared within the replica groups of {groups:sets}; suspected: {ranks:ranks}"


class OtherCode(Sentence):
    """Cause and fix if constants of traced code differ, between replicas (SYN299) or models (SYN399)."""

    CAUSE = (
        "Possible causes: the models were traced or scripted from other code, with other inputs or attributes, or "
        "frozen with other weights. The code of a TorchScript archive holds these values as constants."
    )
    FIX = (
        "Trace or script the models from one version of the code, with the same inputs and attributes. Register values "
        "that belong to the model as buffers. Compare models before torch.jit.freeze(), which turns weights into "
        "constants."
    )


class Course(Sentence):
    """How a difference developed over the steps, and which other tensors differ because of it."""

    UNCHANGED = "the difference has not changed since step {step}"
    GREW = "the difference grew {ratio:.1f} times since step {step}"
    CHANGED = "the difference is {ratio:.3g} times as large as at step {step}"
    STATISTICS_TOO = "{count:count running statistic} {count:verb differs|differ} too"
    BUFFERS_TOO = "{count:count buffer} {count:verb differs|differ} too"
    AVERAGES_TOO = "{count:count tensor} of the averaged copy {count:verb differs|differ} too"
    OPTIMIZER_TOO = "{count:count optimizer tensor} {count:verb differs|differ} too"


def largest_difference(tensors: Iterable[TensorDiff]) -> Message:
    """State the largest difference and its element, if the differences were measured."""
    tensors = tuple(tensors)
    if any(diff.mismatched is None for diff in tensors):
        return Common.SIZE_UNKNOWN()
    # An element that is finite in one replica only counts more than any number.
    not_finite = [diff for diff in tensors if len(set(diff.nonfinite.values())) > 1]
    if not_finite and not_finite[0].index:
        return Common.NOT_FINITE_IN(element=element_name(not_finite[0]))
    measured = [(diff.max_abs, diff) for diff in tensors if diff.max_abs is not None]
    if not measured:
        return Common.NOT_FINITE()
    difference, diff = max(measured, key=lambda item: item[0])
    return Common.LARGEST(difference=difference, element=element_name(diff))


def element_name(diff: TensorDiff) -> str:
    """Return the element with the largest difference: 'fc.weight[3, 1]', or the name of a tensor of one element."""
    return f"{diff.name}[{', '.join(map(str, diff.index))}]" if diff.index else diff.name


def limit_facts(facts: Sequence[Message], most: int, more: Sentence) -> list[Message]:
    """Return the first facts, and a statement of the number of further facts."""
    further = [more(count=len(facts) - most)] if len(facts) > most else []
    return [*facts[:most], *further]


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


def evidence_of(diff: TensorDiff) -> Evidence:
    """Return the evidence of a tensor, without any content if it was not collected."""
    return diff.evidence or Evidence()


def relation_of(diff: TensorDiff) -> RelationKind | None:
    """Return how a tensor of model B follows from A; None if no relation was found."""
    relation = evidence_of(diff).relation
    return None if relation is None else relation.kind


def parameters_of(diff: TensorDiff) -> Mapping[str, Any]:
    """Return the parameters of the relation of a tensor, empty without one."""
    relation = evidence_of(diff).relation
    return {} if relation is None else relation.parameters


def differing_share(diffs: Iterable[TensorDiff]) -> float | None:
    """Return the median share of differing elements, or None if only digests were compared."""
    shares = [diff.mismatched / diff.numel for diff in diffs if diff.mismatched is not None and diff.numel]
    return median(shares) if shares else None


def is_share_below(diffs: Iterable[TensorDiff], least: float) -> bool:
    """Whether a smaller share of the elements than `least` differs. False if the share is unknown."""
    share = differing_share(diffs)
    return share is not None and share < least


def cosines(diffs: Iterable[TensorDiff]) -> list[float]:
    """Return the measured cosines between replicas, without tensors of one element."""
    measured = (evidence_of(diff).cosine for diff in diffs if diff.numel > 1)
    return [cosine for cosine in measured if cosine is not None]


def follower_facts(covered: Iterable[TensorDiff], *reported: str) -> tuple[Message, ...]:
    """State how many other tensors a finding covers. reported: kinds already in the evidence."""
    sentences = {
        "bn_mean": Course.STATISTICS_TOO,
        "bn_var": Course.STATISTICS_TOO,
        "buffer": Course.BUFFERS_TOO,
        "ema": Course.AVERAGES_TOO,
        "optimizer": Course.OPTIMIZER_TOO,
    }
    counts = Counter(sentences[diff.kind] for diff in covered if diff.kind in sentences and diff.kind not in reported)
    return tuple(sentence(count=count) for sentence, count in counts.items())
