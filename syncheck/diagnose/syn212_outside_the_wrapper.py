"""Only a part of the model differs, together with its optimizer state: it was not under the parallel wrapper.

Signature: all parameters that differ are in one module or a few (or bear one mark, such as lora_A and lora_B), each
with its optimizer state; everything else that is trained agrees. Gradients of the rest are averaged; those of the part
are each rank's own. Where no first moments are saved, a gap that grows over the steps must show it, or the mark of an
adapter: a part that merely started unequal looks alike in files of one step.

With SGD the momentum of a part that started unequal (SYN210) differs too, by the weight decay of the gap: at most
wd / (1 - momentum) times the gap of its parameters. A part with gradients of its own is far above that: measured 45
times and more.

Cause: DDP averages the gradients of the parameters that it found when it was built. A layer, adapter or head that was
added or unfrozen later, a LoRA whose forward replaces the wrapped one, or a submodule that is called around the
wrapper is trained on each rank's own data; the file of rank 0 that is kept is one of N different models.

Fix: change the model first, wrap it last, and build the optimizer from the wrapped model; or average by hand before
`optimizer.step()`: `dist.all_reduce(p.grad.div_(dist.get_world_size()))` for each parameter of the part.

Incidents: hao-ai-lab/FastVideo#1666, huggingface/transformers#48873, kohya-ss/sd-scripts#989,
huggingface/diffusers#4046, moojink/openvla-oft#160 (only the action head).
"""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import TYPE_CHECKING

from syncheck.diagnose.case import Match, agreement_text, counted, differ, gap_text, owner
from syncheck.diagnose.gradients import (
    TOUCHED,
    cosines,
    counts_steps,
    course,
    followers_text,
    in_step,
    just_began,
    moments_apart,
    only_decay,
    parameters_apart,
    touched_less,
    trained,
    with_moment,
)
from syncheck.evidence.suspects import suspects
from syncheck.kinds import BN_STATISTICS
from syncheck.messages import names_text

if TYPE_CHECKING:
    from collections.abc import Collection

    from syncheck.diagnose.case import Case
    from syncheck.records import Severity, TensorDiff

CODE = "SYN212"
SLUG = "outside-the-wrapper"
SEVERITY: Severity = "error"
CAUSE = "Only a part of the model differs, with its optimizer state: its gradients are not averaged over the ranks."
FIX = (
    "Add layers and adapters, and unfreeze, before wrapping: model.head = ...; model = DistributedDataParallel(model). "
    "Or average the gradients of that part before optimizer.step(): for p in model.head.parameters(): "
    "dist.all_reduce(p.grad.div_(dist.get_world_size()))."
)

# Modules, or marks, in which all that differs must lie: more are no part of the model.
FEW = 4
# Equal gradients give momenta that are alike but for the decay of an unequal start: 0.97 at the least, measured.
ALIKE = 0.97
_ADAPTERS = ("lora", "adapter", "dora", "loha", "lokr", "prompt_encoder", "ia3")


def apply(case: Case) -> Match | None:
    """Fit a part of what is trained that differs with its moments while the rest agrees with its own."""
    parameters, moments = parameters_apart(case), moments_apart(case)
    model = trained(case)
    named = set(moments) <= set(case.group.evidence.names)
    apart = set(parameters) | (set(moments) if named else set())
    where = _where(case, apart)
    if not parameters or not where or not apart <= model or not in_step(case):
        return None
    whole = not named and len(moments) == len(with_moment(case))
    if whole or touched_less(parameters.values(), TOUCHED):
        return None
    trend, since = course(case, "parameter")
    if with_moment(case):
        if not _own_gradients(case, list(moments.values()), len(parameters)):
            return None
        state = "with its optimizer state" if len(parameters) == 1 else "with their optimizer state"
    elif trend == "growing" or (trend is None and _is_adapter(where)):
        state = "no first moments were compared; consistent with gradients of each rank's own"
    else:
        return None
    rest = len(model - apart)
    all_of = "parameter" if len(parameters) == 1 else "parameters"
    text = (
        f"{len(parameters)} of {counted(len(model), 'trained parameter')} {differ(len(parameters))}, {state}: "
        f"all under {names_text(where, FEW)}, {gap_text(parameters.values())}; the other {rest} {all_of} agree"
        if rest
        else f"all {len(model)} trained parameters differ, {state}: those under {names_text(where, FEW)}, "
        f"{gap_text(parameters.values())}; all others agree"
    )
    covered = tuple(
        diff
        for diff in case.tensors
        if diff.name in parameters
        or (diff.kind == "optimizer" and (not named or owner(case, diff.name) in apart))
        or diff.kind in (*BN_STATISTICS, "ema", "buffer")
        or diff.name in case.untrained
    )
    text += since + followers_text(covered, "parameter", "optimizer")
    found = list(parameters.values())
    return Match(covered, suspects(found, case.group), text + agreement_text(found, case.group))


def _where(case: Case, apart: set[str]) -> list[str]:
    """Name the few modules, or marks, that hold all that differs and nothing that agrees; empty where none do."""
    others = {name for name, kind in case.group.evidence.names.items() if kind == "parameter"} - apart - case.loose
    if not others:
        return []
    found = _modules(apart, others)
    return found if len(found) <= FEW else [f"*.{mark}.*" for mark in _marks(apart, others)]


def _modules(names: Collection[str], others: Collection[str]) -> list[str]:
    """Return the fewest modules that hold all of the names and none of the others; a name where no module does."""
    taken = {"", *(module for other in others for module in _heads(other))}
    return sorted({next((module for module in _heads(name) if module not in taken), name) for name in names})


def _heads(name: str) -> list[str]:
    """'layer1.0.weight' gives layer1, layer1.0 and itself."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _marks(names: Collection[str], others: Collection[str]) -> list[str]:
    """Return few parts of names, as lora_A and lora_B, of which each name has one and no other has any.

    Empty where there are none, or more than FEW. The part that stands in most names comes first.
    """
    foreign = {part for other in others for part in other.split(".")}
    left = set(names)
    found: list[str] = []
    while left:
        numbers = Counter(
            part for name in left for part in set(name.split(".")) if part not in foreign and not part.isdigit()
        )
        if not numbers or len(found) == FEW:
            return []
        best = min(numbers, key=lambda part: (-numbers[part], part))
        found.append(best)
        left = {name for name in left if best not in name.split(".")}
    return found


def _is_adapter(where: list[str]) -> bool:
    return all(any(word in name.lower() for word in _ADAPTERS) for name in where)


def _own_gradients(case: Case, moments: list[TensorDiff], parameters: int) -> bool:
    """Whether the first moments tell of gradients that each rank has for itself."""
    if len(moments) < parameters or only_decay(case):
        return False
    found = cosines(moments)
    if counts_steps(case):
        return True
    # Without a count of steps one that was left out may look alike, and so may an unequal start.
    return bool(found) and median(found) < ALIKE and not just_began(case)
