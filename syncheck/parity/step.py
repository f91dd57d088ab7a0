"""The gradient norm, the clipping and the update of a program whose gradients are right."""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from syncheck.parity.causes import Explanation
from syncheck.parity.measurements import CLOSE
from syncheck.parity.patterns import is_near
from syncheck.parity.program import copy_gradient, copy_local
from syncheck.parity.sentences import GradientNorm, UpdateDiffers
from syncheck.parity.weights import drop_dimensions, list_subsets, norm_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from syncheck.messages import Message
    from syncheck.parity.weights import Mechanism

# torch's clip_grad_norm_ adds this to the norm.
_EPSILON = 1e-6
_NUMBERS = 1e-6


@dataclass(slots=True)
class Step:
    """What one rank did in `finish`.

    norm: that `finish` returned, or None.
    scale: of the gradients at the optimizer step, relative to the backward pass; None without a step.
    square: squared norm of this rank's copies.
    coordinate: of the rank in the mesh.
    projections: of each parameter whose update is wrong, see `_project`.
    threshold: the largest error of a right update, relative to the norm of the whole update.
    true_norm: of the gradient of one process.
    settings: of the optimizer of one process.
    """

    norm: float | None = None
    scale: float | None = None
    square: float = 0.0
    coordinate: tuple[int, ...] = ()
    projections: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    threshold: float = 0.0
    true_norm: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)


def take_step(mechanism: Mechanism) -> Step:
    """Run `finish` on this rank, and the step of one process, and compare the parameters. A collective."""
    reference, program = mechanism.reference, mechanism.program
    gradients = {}
    for name in reference.names:
        gradients[name] = mechanism.gather_gradients(name).sum(0)
    step = Step(coordinate=program.coordinate, true_norm=norm_of(gradients))
    for local in program.tensors.values():
        step.square += float(local.gradient.square().sum())
    step.scale, step.norm = _finish(mechanism)
    updates = _step_alone(mechanism, gradients, step)
    if updates is None:
        return step
    # The same step with rounding in the gradients: optimizers like Adam amplify it.
    rounded = _step_alone(mechanism, reference.reorder(mechanism.channel.rank + 1), step)
    assert rounded is not None
    size = norm_of(updates) or 1.0
    rounding = {name: rounded[name] - update for name, update in updates.items()}
    floor = max(mechanism.channel.gather(norm_of(rounding) / size, "floor of the step").values())
    # As many times the measured floor as for gradients.
    step.threshold = max(mechanism.threshold, floor * mechanism.threshold / max(mechanism.floor, 1e-300))
    for name, local in program.tensors.items():
        update = copy_local(local.parameter) - local.before
        expected = local.take(updates[name])
        error = float((update - expected).norm()) / size
        # NaN is never within the threshold.
        if not error <= step.threshold:
            step.projections[name] = _project(update, expected, local.before)
    return step


def _finish(mechanism: Mechanism) -> tuple[float | None, float | None]:
    """Run `finish`. Returns the scale of the gradients at the step, and the reported norm."""
    program = mechanism.program
    products = [0.0, 0.0]

    def measure(*_: Any) -> None:
        # The last step counts, if an optimizer consists of several.
        products[:] = [0.0, 0.0]
        for name, local in program.tensors.items():
            gradient = copy_gradient(local.parameter, local.shape(), program.case.title, name)
            products[0] += float((gradient * local.gradient).sum())
            products[1] += float(local.gradient.square().sum())

    with _hooked(program.optimizer, measure):
        norm = program.case.finish(program.model, program.optimizer)
    if hasattr(norm, "full_tensor"):
        norm = norm.full_tensor()
    scale = products[0] / products[1] if products[1] else None
    return scale, None if norm is None else float(norm)


@contextmanager
def _hooked(optimizer: Any, measure: Any) -> Iterator[None]:
    """Call a function before each step of an optimizer, if it has hooks."""
    if not hasattr(optimizer, "register_step_pre_hook"):
        yield
        return
    hook = optimizer.register_step_pre_hook(measure)
    try:
        yield
    finally:
        hook.remove()


def _step_alone(mechanism: Mechanism, gradients: Mapping[str, Any], step: Step) -> dict[str, Any] | None:
    """Return the update of each parameter by one process, and restore the parameters; None without an optimizer."""
    import torch

    reference = mechanism.reference
    optimizer = reference.case.optimizer(reference.model)
    if optimizer is None:
        return None
    group = optimizer.param_groups[0]
    step.settings = {
        "optimizer": type(optimizer).__name__,
        "lr": float(group["lr"]),
        "weight_decay": float(group.get("weight_decay", 0.0)),
    }
    factor = clip_factor(step.true_norm, reference.case.max_norm)
    parameters = {name: reference.model.get_parameter(name) for name in reference.names}
    before = {}
    for name, parameter in parameters.items():
        before[name] = parameter.detach().clone()
        parameter.grad = (gradients[name] * factor).to(parameter)
    optimizer.step()
    updates = {}
    with torch.no_grad():
        for name, parameter in parameters.items():
            updates[name] = (parameter - before[name]).double()
            parameter.copy_(before[name])
            parameter.grad = None
    return updates


def _project(update: Any, expected: Any, before: Any) -> tuple[float, float, float]:
    """Return the multiple of the parameter in the difference, its relative residual, and the multiple of the update."""
    difference = (update - expected).flatten()
    # A decay acts on the parameter before or after the update.
    fits = []
    for values in (before.flatten(), (before + expected).flatten()):
        multiple = float(difference @ values) / max(float(values @ values), 1e-300)
        residual = float((difference - multiple * values).norm() / difference.norm())
        fits.append((residual, multiple))
    residual, multiple = min(fits)
    right = expected.flatten()
    ratio = float(update.flatten() @ right) / max(float(right @ right), 1e-300)
    ratio_residual = float((update.flatten() - ratio * right).norm() / difference.norm())
    if ratio_residual > CLOSE:
        # The update is no multiple of the right update.
        ratio = float("nan")
    return multiple, residual, ratio


def explain_norm(steps: Mapping[int, Step], mesh: Mapping[str, int], max_norm: float | None) -> Explanation | None:
    """Return why the norm or the clipping is wrong; None if both are right or unknown."""
    first = next(iter(steps.values()))
    tolerance = max(_NUMBERS, first.threshold)
    wrong_norms: dict[int, float] = {}
    wrong_scales: dict[int, float] = {}
    expected = clip_factor(first.true_norm, max_norm)
    for rank, step in steps.items():
        if step.norm is not None and not is_near(step.norm, first.true_norm, tolerance * first.true_norm):
            wrong_norms[rank] = float(f"{step.norm:.6g}")
        # Rounding of the clipping itself.
        if step.scale is not None and not is_near(step.scale, expected, tolerance):
            wrong_scales[rank] = float(f"{step.scale:.6g}")
    facts: list[Message] = []
    if wrong_norms:
        norm = steps[min(wrong_norms)].norm
        assert norm is not None
        ratio = norm / first.true_norm
        facts.append(GradientNorm.NORM(values=wrong_norms, norm=first.true_norm, ratio=ratio))
        facts += _name_norm(steps, tuple(mesh))
    if wrong_scales:
        facts.append(GradientNorm.CLIP(values=wrong_scales, expected=expected))
    return Explanation(facts) if facts else None


def clip_factor(norm: float, max_norm: float | None) -> float:
    """Return the factor of gradients after clipping, as torch computes it; 1 without clipping."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + _EPSILON))


def _name_norm(steps: Mapping[int, Step], names: tuple[str, ...]) -> list[Message]:
    """Return which norm all ranks have computed, if it is a known norm. names: of the mesh dimensions."""
    # The fewest dimensions suffice: no dimension is the norm of the rank's own copies.
    for chosen in ((), *list_subsets(names)):
        sums: dict[tuple[int, ...], float] = defaultdict(float)
        for step in steps.values():
            sums[drop_dimensions(step.coordinate, names, chosen)] += step.square
        errors = []
        for step in steps.values():
            norm = sums[drop_dimensions(step.coordinate, names, chosen)] ** 0.5
            errors.append(abs((step.norm or 0.0) - norm) / norm)
        if max(errors) <= _NUMBERS:
            fact = GradientNorm.COPIES(dimensions=chosen, norm=next(iter(steps.values())).norm)
            return [fact if chosen else GradientNorm.SHARD()]
    return []


def find_wrong_updates(steps: Mapping[int, Step]) -> list[str]:
    """Return the names of the parameters whose update is wrong on some rank."""
    names: dict[str, None] = {}
    for step in steps.values():
        names.update(dict.fromkeys(step.projections))
    return list(names)


def explain_update(steps: Mapping[int, Step]) -> Explanation | None:
    """Return how the parameters after the step differ; None if they are right."""
    names = find_wrong_updates(steps)
    if not names:
        return None
    projections: list[tuple[float, float, float]] = []
    for step in steps.values():
        projections += step.projections.values()
    settings = next(iter(steps.values())).settings
    facts: list[Message] = [
        UpdateDiffers.DIFFERS(count=len(names), names=names, optimizer=settings["optimizer"]),
        UpdateDiffers.SETTINGS(lr=settings["lr"], weight_decay=settings["weight_decay"]),
    ]
    multiples, residuals, ratios = np.array(projections).T
    decay = -settings["lr"] * settings["weight_decay"]
    # All tensors agree on one multiple. NaN agrees with nothing.
    if decay and residuals.max() < CLOSE and np.ptp(multiples / decay) < CLOSE:
        facts.append(UpdateDiffers.DECAY(times=float(multiples[0] / decay)))
    elif np.ptp(ratios) < CLOSE and is_near(ratios[0], 0):
        facts.append(UpdateDiffers.MISSING())
    elif np.ptp(ratios) < CLOSE:
        facts.append(UpdateDiffers.RATIO(ratio=float(ratios[0])))
    return Explanation(facts)
