"""Only a part of the model differs, together with its optimizer state, because it is outside the parallel wrapper.

Signature: all differing parameters are in a few modules, or share a name component (for example lora_A), and each
differs together with its optimizer state. All other trained parameters agree: their gradients are averaged, and the
gradients of the differing part are not. Without saved first moments, the difference must grow over the steps, or the
part must be an adapter by its name, because different initial values look the same at a single step.

With SGD, different initial values (SYN210) also change the momentum through weight decay: by at most wd / (1 -
momentum) times the difference of the parameters. Unreduced gradients cause much larger differences: at least 45 times
as large in measurements. The finding is only "consistent": a part that some ranks did not update (SYN225), exchanged
tensors (SYN224), adapters after a single step without an average, and averaged gradients that a rank changed afterwards
(SYN211) may look the same. If one set of three or more ranks agrees and the other ranks differ from all ranks, the
gradients were averaged, and the finding is SYN211: ranks that are never averaged are never equal.

Cause: DDP averages only the gradients of parameters that exist when it is constructed. The part is trained on each
rank's own data if it was added or unfrozen later, if the forward pass of a LoRA layer replaces the wrapped layer, or if
a submodule is called outside the wrapper. The checkpoint of rank 0 is then one of N different models.

BatchNorm's running statistics belong to the part if their layer does. Other layers have different statistics under
default DDP, whatever happens to the part, so SYN201 or SYN202 explains them.

Fix: change the model first, wrap it last, and create the optimizer from the wrapped model. Or broadcast the part once
when it is added, and average its gradients before each `optimizer.step()`: `dist.broadcast(tensor, 0)` for each tensor
of its state dict, and `dist.all_reduce(p.grad.div_(dist.get_world_size()))` for each parameter. The average alone keeps
different initial values different (SYN210). The ranks of a part that was added late never agreed, so no earlier
checkpoint of each rank helps: load the checkpoint of one rank on all ranks, or train again.

Incidents: hao-ai-lab/FastVideo#1666, huggingface/transformers#48873, kohya-ss/sd-scripts#989,
huggingface/diffusers#4046, moojink/openvla-oft#160 (only the action head).
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, chain, filterfalse
from typing import TYPE_CHECKING

from syncheck.diagnose.bn import is_statistic
from syncheck.diagnose.case import Case, Match, is_adapter
from syncheck.diagnose.conditions import requires, state_if
from syncheck.diagnose.features import change_whole_parameters, single_out_ranks, states_of_parameters
from syncheck.diagnose.measures import is_at_least, is_below, median_cosine
from syncheck.diagnose.moments import COMMON_START, mean_cosine, only_decay
from syncheck.diagnose.selection import list_names, select_names, union_of
from syncheck.diagnose.statements import follower_facts, largest_difference
from syncheck.frozen import record
from syncheck.messages import Message, Sentence
from syncheck.tensors.kinds import BN_STATISTICS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from syncheck.records import TensorDiff

CODE = "SYN212"
SLUG = "outside-the-wrapper"
SEVERITY = "error"
CERTAINTY = "consistent"


class Text(Sentence, topic=CODE):
    """The sentences of this finding."""

    CAUSE = (
        "The gradients of one part of the model are not averaged over the ranks, because it is not wrapped. Or the "
        "ranks change its gradients after the average (noise, a mask, a clip)."
    )
    CAUSE_OUTSIDE = (
        "The gradients of one part of the model are not averaged over the ranks, because the part is not wrapped."
    )
    FIX = (
        "Add layers and adapters, and unfreeze parameters, before wrapping: `model.head = ...; model = "
        "DistributedDataParallel(model)`. Or broadcast the part once: `for tensor in "
        "model.module.head.state_dict().values(): dist.broadcast(tensor, 0)`. Then average its gradients before each "
        "`optimizer.step()`: `for p in model.module.head.parameters(): "
        "dist.all_reduce(p.grad.div_(dist.get_world_size()))`. If the first and last pipeline stage have copies of an "
        "embedding, add the gradients of both. Then train from the start, or load the checkpoint of one rank on all "
        "ranks."
    )
    FIX_OUTSIDE = FIX
    FIX_SHARDED = (
        "Add layers and adapters before `fully_shard(model, mesh=mesh)`, with the whole mesh and not only its "
        "dimension of shards, and create the optimizer after it. Or broadcast a part without shards once: `for "
        "tensor in model.head.state_dict().values(): dist.broadcast(tensor, 0)`. Then average its gradients before "
        "each `optimizer.step()`: `for p in model.head.parameters(): "
        "dist.all_reduce(p.grad.div_(dist.get_world_size()))`."
    )
    NOT_AVERAGED = "Consistent with gradients of {modules:names 4} that are not averaged over the ranks"
    CONSISTENT = "Consistent with unreduced gradients of {modules:names 4}: no first moments were compared"
    PARAMETERS = "{count} of {total:count trained parameter} {count:verb differs|differ}, {size}"
    WITH_STATE = "{count:verb its|their} optimizer state differs too"
    REST_AGREES = "the other {count:count trained parameter} {count:verb agrees|agree}"
    OTHERS_AGREE = "all other parameters agree"


# Tensors that may hold the values of each other.
PAIR = 2
# Largest number of modules or name components in one part of the model.
FEW = 4
# With equal gradients, momenta differ only by the weight decay of an unequal start: cosines of at least 0.97, measured.
ALIKE = 0.97


@record
class _Part:
    """A part of the model that differs."""

    parameters: list[TensorDiff]
    moments: list[TensorDiff]
    """The differing first moments."""
    names: frozenset[str]
    """The names of the differing parameters, and of those whose moments differ."""
    are_named: bool
    """Whether the names of the optimizer's ids are known."""
    modules: list[str]
    """The modules or name components with all of the names, and no other name."""


@requires(Case.in_step, Case.differing_parameters, change_whole_parameters)
def apply(case: Case) -> Match | None:
    """Match a part of the model whose parameters and moments differ, while the rest agrees."""
    part = _find_part(case)
    if part is None or not _is_only_difference(case, part):
        return None
    trend, since = case.trend_facts("parameter")
    if not _was_trained_alone(case, part, trend):
        return None

    covered = _select_covered(case, part)
    facts = [
        *_describe_part(case, part),
        *since,
        *follower_facts(covered, "optimizer"),
    ]
    match = case.make_match(part.parameters, facts, covered)
    # In the trials, the same part differed after a single step without an average, and after a part of an update.
    if case.with_moment() and len(part.parameters) <= PAIR:
        return match.as_consistent("SYN211", "SYN225", "SYN224")
    return match.as_consistent("SYN211", "SYN225")


def _find_part(case: Case) -> _Part | None:
    """Return the differing part of the model; None if its names are not those of a part."""
    parameters, moments = case.differing_parameters(), case.differing_moments()
    are_named = moments.keys() <= case.group.evidence.names.keys()
    names = frozenset(parameters)
    if are_named:
        names |= moments.keys()
    modules = _find_modules(case, names)
    # Names outside the trained parameters are not those of a part of the model.
    are_trained = names <= case.trained_parameters()
    if not modules or not are_trained:
        return None
    return _Part(
        parameters=list(parameters.values()),
        moments=list(moments.values()),
        names=names,
        are_named=are_named,
        modules=modules,
    )


def _is_only_difference(case: Case, part: _Part) -> bool:
    """Whether the rest of the model and of the optimizer state agrees, and no ranks agree in the part."""
    # Ranks that agree had averaged gradients.
    if single_out_ranks(case, part.parameters):
        return False
    return _holds_all_states(case, part.names) and not _is_whole_model(case, part)


def _was_trained_alone(case: Case, part: _Part, trend: str | None) -> bool:
    """Whether each rank trained the part with its own gradients, by the moments or else by the parameters alone."""
    if case.with_moment():
        return _has_own_gradients(case, part)
    return _moves_apart(case, part, trend)


def _is_whole_model(case: Case, part: _Part) -> bool:
    """Whether all parameters of the optimizer differ."""
    if case.optimized is not None and case.optimized <= part.names:
        return True
    return not part.are_named and len(part.moments) == len(case.with_moment())


def _select_covered(case: Case, part: _Part) -> tuple[TensorDiff, ...]:
    """Return the differing tensors of the part, and those that follow from it."""
    states: Sequence[str] = list_names(case.of_kind("optimizer"))
    # Without names, any state may be that of a parameter of the part.
    if part.are_named:
        states = states_of_parameters(case, states, part.names)
    followers = list(case.of_kind("buffer"))
    for diff in case.of_kind(*BN_STATISTICS, "ema"):
        # Local batches change the statistics of wrapped layers, also those of an averaged copy.
        is_local = is_statistic(diff) and not _contains(part, diff.name)
        if not is_local:
            followers.append(diff)
    names = case.untrained.union(
        list_names(part.parameters),
        states,
        list_names(followers),
    )
    return tuple(select_names(case.tensors, names))


def _contains(part: _Part, name: str) -> bool:
    """Whether a tensor, or the model's tensor that it is an average of, belongs to a module of the part."""
    for module in part.modules:
        # Name components have the form *.lora_A.*
        path = module.strip("*.")
        if f".{path}." in f".{name}":
            return True
    return False


def _describe_part(case: Case, part: _Part) -> list[Message]:
    """State which part differs, by how much, and what agrees."""
    trained = case.trained_parameters()
    has_moments = bool(case.with_moment())
    summary = Text.NOT_AVERAGED if has_moments else Text.CONSISTENT
    number = len(part.parameters)
    agreeing = trained - part.names
    # Without agreeing parameters with a moment, the other parameters have no optimizer state.
    rest = Text.REST_AGREES(count=len(agreeing)) if agreeing else Text.OTHERS_AGREE()
    return [
        summary(modules=tuple(part.modules)),
        Text.PARAMETERS(
            count=number,
            total=len(trained),
            size=largest_difference(part.parameters),
        ),
        *state_if(has_moments, Text.WITH_STATE(count=number)),
        rest,
    ]


def _holds_all_states(case: Case, names: frozenset[str]) -> bool:
    """Whether no optimizer state outside the part differs; if names are unknown, no more states than parameters.

    If the states of all parameters differ, all gradients did. Adafactor and RMSprop have no first moments to show it.
    """
    owners = case.owners_of(case.differing("optimizer"))
    if owners <= case.group.evidence.names.keys():
        return owners <= names
    return len(owners) <= len(names)


def _moves_apart(case: Case, part: _Part, trend: str | None) -> bool:
    """Whether the part differs more and more, or at a single step is an adapter or has a common start."""
    if trend is not None:
        return trend == "growing"
    return all(map(is_adapter, part.modules)) or _has_common_start(case, part)


def _has_common_start(case: Case, part: _Part) -> bool:
    """Whether all of three or more ranks differ, but not as much as different initial values."""
    are_two_ranks = case.number_of_ranks < 3
    if are_two_ranks or not case.ranks_differ(part.parameters):
        return False
    cosine = mean_cosine(part.parameters)
    return is_at_least(cosine, COMMON_START)


def _find_modules(case: Case, differing: frozenset[str]) -> list[str]:
    """Return a few modules or name components with all differing names and no agreeing name, or []."""
    agreeing = case.names_of("parameter") - differing - case.loose
    if not agreeing:
        return []
    modules = _modules(differing, agreeing)
    if len(modules) <= FEW:
        return modules
    globs = []
    for component in _common_components(differing, agreeing):
        globs.append(f"*.{component}.*")
    return globs


def _modules(differing: Collection[str], agreeing: Collection[str]) -> list[str]:
    """Return the fewest modules with all differing names and no agreeing name; a name itself if there is no module."""
    used = union_of(map(_prefixes, agreeing))
    modules = set()
    for name in differing:
        unused = list(filterfalse(used.__contains__, _prefixes(name)))
        # The first prefix is the largest module.
        modules.add(unused[0] if unused else name)
    return sorted(modules)


def _prefixes(name: str) -> list[str]:
    """Return the enclosing modules of a parameter, and its name: layer1, layer1.0, layer1.0.weight."""
    return list(accumulate(name.split("."), "{}.{}".format))


def _components(name: str) -> set[str]:
    """Return the parts of a name without numbers of layers."""
    return {part for part in name.split(".") if not part.isdigit()}


def _common_components(differing: Collection[str], agreeing: Collection[str]) -> list[str]:
    """Return name components (lora_A, lora_B): each differing name has at least one, and no agreeing name has any.

    The most frequent component comes first. Empty if there are none, or more than FEW.
    """
    foreign = union_of(map(_components, agreeing))
    remaining = {name: _components(name) - foreign for name in differing}
    components: list[str] = []
    while remaining:
        # Of equally frequent components, the first by name.
        counts = Counter(sorted(chain(*remaining.values())))
        if not counts or len(components) == FEW:
            return []
        ((best, _),) = counts.most_common(1)
        components.append(best)
        remaining = {name: parts for name, parts in remaining.items() if best not in parts}
    return components


def _has_own_gradients(case: Case, part: _Part) -> bool:
    """Whether the first moments show unreduced gradients."""
    some_moments_agree = len(part.moments) < len(part.parameters)
    if some_moments_agree or only_decay(case):
        return False
    if case.counts_steps():
        return True
    # Without step counts, a skipped step or an unequal start may look the same.
    cosine = median_cosine(part.moments)
    return is_below(cosine, ALIKE) and not case.just_began()
