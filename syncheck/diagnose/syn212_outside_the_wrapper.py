"""Only a part of the model differs, together with its optimizer state, because it is outside the parallel wrapper.

Signature: all differing parameters are in a few modules, or share a name component (for example lora_A), and each
differs together with its optimizer state. All other trained parameters agree: their gradients are averaged, and the
gradients of the differing part are not. Without saved first moments, the difference must grow over the steps, or the
part must be an adapter by its name, because different initial values look the same at a single step.

With SGD, different initial values (SYN210) also change the momentum through weight decay: by at most wd / (1 -
momentum) times the difference of the parameters. Unreduced gradients cause much larger differences: at least 45 times
as large in measurements. The finding is only "consistent": a part that some ranks did not update (SYN225), exchanged
tensors (SYN224), and adapters after a single step without an average (SYN211) may look the same.

Cause: DDP averages only the gradients of parameters that exist when it is constructed. The part is trained on each
rank's own data if it was added or unfrozen later, if the forward pass of a LoRA layer replaces the wrapped layer, or if
a submodule is called outside the wrapper. The checkpoint of rank 0 is then one of N different models.

Fix: change the model first, wrap it last, and create the optimizer from the wrapped model. Or average the gradients of
the part before `optimizer.step()`: `dist.all_reduce(p.grad.div_(dist.get_world_size()))` for each parameter.

Incidents: hao-ai-lab/FastVideo#1666, huggingface/transformers#48873, kohya-ss/sd-scripts#989,
huggingface/diffusers#4046, moojink/openvla-oft#160 (only the action head).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match, is_adapter
from syncheck.diagnose.measures import TOUCHED, cosines, is_share_below
from syncheck.diagnose.moments import COMMON_START, mean_cosine, only_decay
from syncheck.diagnose.statements import follower_facts, largest_difference
from syncheck.messages import Sentence
from syncheck.tensors.kinds import BN_STATISTICS

if TYPE_CHECKING:
    from collections.abc import Collection

    from syncheck.records import TensorDiff

CODE = "SYN212"
SLUG = "outside-the-wrapper"
SEVERITY = "error"
CERTAINTY = "consistent"


class Text(Sentence):
    """The sentences of this finding."""

    CAUSE = "The gradients of one part of the model are not averaged over the ranks, because it is not wrapped."
    FIX = (
        "Add layers and adapters, and unfreeze parameters, before wrapping: model.head = ...; model = "
        "DistributedDataParallel(model). Or average the gradients of the part before optimizer.step(): `for p in "
        "model.head.parameters(): dist.all_reduce(p.grad.div_(dist.get_world_size()))`. If the first and last pipeline "
        "stage have copies of an embedding, add the gradients of both. Then restart from a checkpoint in which the "
        "ranks agree."
    )
    FIX_SHARDED = (
        "Add layers and adapters before `fully_shard(model, mesh=mesh)`, with the whole mesh and not only its "
        "dimension of shards, and create the optimizer after it. Or average the gradients of a part without shards "
        "before optimizer.step(): `for p in model.head.parameters(): "
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


def apply(case: Case) -> Match | None:
    """Match a part of the model whose parameters and moments differ, while the rest agrees."""
    parameters, moments = case.differing_parameters(), case.differing_moments()
    model = case.trained_parameters()
    named = set(moments) <= set(case.group.evidence.names)
    names = set(parameters) | (set(moments) if named else set())
    modules = _find_modules(case, names)
    if not parameters or not modules or not names <= model or not case.in_step():
        return None
    is_whole = case.optimized is not None and not case.optimized - names
    is_whole = is_whole or (not named and len(moments) == len(case.with_moment()))
    if is_whole or is_share_below(parameters.values(), TOUCHED) or not _holds_all_states(case, names):
        return None
    trend, since = case.trend_facts("parameter")
    has_moments = bool(case.with_moment())
    if has_moments:
        if not _has_own_gradients(case, list(moments.values()), len(parameters)):
            return None
    elif not _moves_apart(case, parameters, modules, trend):
        return None
    differing = list(parameters.values())
    covered = tuple(
        diff
        for diff in case.tensors
        if diff.name in parameters
        or (diff.kind == "optimizer" and (not named or case.owner_of(diff.name) in names))
        or diff.kind in (*BN_STATISTICS, "ema", "buffer")
        or diff.name in case.untrained
    )
    rest = len(model - names)
    size = largest_difference(differing)
    facts = [
        (Text.NOT_AVERAGED if has_moments else Text.CONSISTENT)(modules=tuple(modules)),
        Text.PARAMETERS(count=len(differing), total=len(model), size=size),
        *((Text.WITH_STATE(count=len(differing)),) if has_moments else ()),
        Text.REST_AGREES(count=rest) if rest else Text.OTHERS_AGREE(),
        *since,
        *follower_facts(covered, "optimizer"),
    ]
    match = case.make_match(differing, facts, covered)
    if not has_moments:
        return replace(match, certainty="consistent", alternatives=("SYN211", "SYN225"))
    # In the trials, the same part differed after a single step without an average, and after a part of an update.
    alternatives = ("SYN225", "SYN224") if len(differing) <= PAIR else ("SYN211", "SYN225")
    return replace(match, certainty="consistent", alternatives=alternatives)


def _holds_all_states(case: Case, names: set[str]) -> bool:
    """Whether no optimizer state outside the part differs; if names are unknown, no more states than parameters.

    If the states of all parameters differ, all gradients did. Adafactor and RMSprop have no first moments to show it.
    """
    owners = {case.owner_of(diff.name) for diff in case.differing("optimizer")}
    if owners <= set(case.group.evidence.names):
        return owners <= names
    return len(owners) <= len(names)


def _moves_apart(case: Case, parameters: dict[str, TensorDiff], modules: list[str], trend: str | None) -> bool:
    """Whether the part differs more and more, or at a single step is an adapter or has a common start."""
    if trend is not None:
        return trend == "growing"
    return all(map(is_adapter, modules)) or _has_common_start(case, parameters)


def _has_common_start(case: Case, parameters: dict[str, TensorDiff]) -> bool:
    """Whether all of three or more ranks differ, but not as much as different initial values."""
    ranks = len(case.group.replicas)
    cosine = mean_cosine(parameters.values())
    differ = all(len(diff.clusters) == ranks > 2 for diff in parameters.values())
    return differ and cosine is not None and cosine >= COMMON_START


def _find_modules(case: Case, differing: set[str]) -> list[str]:
    """Return a few modules or name components with all differing names and no agreeing name, or []."""
    others = case.names_of("parameter") - differing - case.loose
    if not others:
        return []
    modules = _modules(differing, others)
    return modules if len(modules) <= FEW else [f"*.{part}.*" for part in _common_parts(differing, others)]


def _modules(names: Collection[str], others: Collection[str]) -> list[str]:
    """Return the fewest modules with all names and no other name; a name itself if there is no module."""
    used = {"", *(module for other in others for module in _prefixes(other))}
    return sorted({next((module for module in _prefixes(name) if module not in used), name) for name in names})


def _prefixes(name: str) -> list[str]:
    """Return the enclosing modules of a parameter, and its name: layer1, layer1.0, layer1.0.weight."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _common_parts(names: Collection[str], others: Collection[str]) -> list[str]:
    """Return name components (lora_A, lora_B): each name has at least one, and no other name has any.

    The most frequent component comes first. Empty if there are none, or more than FEW.
    """
    foreign = {part for other in others for part in other.split(".")}
    remaining = set(names)
    parts: list[str] = []
    while remaining:
        counts = Counter(
            part for name in remaining for part in set(name.split(".")) if part not in foreign and not part.isdigit()
        )
        if not counts or len(parts) == FEW:
            return []
        best = min(counts, key=lambda part: (-counts[part], part))
        parts.append(best)
        remaining = {name for name in remaining if best not in name.split(".")}
    return parts


def _has_own_gradients(case: Case, moments: list[TensorDiff], parameters: int) -> bool:
    """Whether the first moments show unreduced gradients."""
    if len(moments) < parameters or only_decay(case):
        return False
    if case.counts_steps():
        return True
    # Without step counts, a skipped step or an unequal start may look the same.
    measured = cosines(moments)
    return bool(measured) and median(measured) < ALIKE and not case.just_began()
