"""The gradient norm, the clipping and the update of a program whose gradients are right."""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncheck.parity.measurements import CLOSE
from syncheck.parity.patterns import is_near
from syncheck.parity.program import copy_gradient, copy_local
from syncheck.parity.sentences import GradientNorm, UpdateDiffers
from syncheck.parity.settings import Difference, compare_settings, list_compared, list_settings
from syncheck.parity.trained import Explanation
from syncheck.parity.validation import check_norm
from syncheck.parity.weights import drop_dimensions, list_subsets, norm_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from syncheck.messages import Message
    from syncheck.parity.weights import Mechanism

# torch's clip_grad_norm_ adds this to the norm.
_EPSILON = 1e-6
_NUMBERS = 1e-6


class Projection(NamedTuple):
    """A wrong update of one parameter on one rank.

    multiples: of the parameter in the difference to the right update: of its values before the step, and after it. A
        decay acts on either, and a tensor with one element fits both.
    residuals: relative parts of the difference that the multiples do not explain.
    ratio: of the update to the right update; NaN if it is no multiple.
    """

    multiples: tuple[float, float]
    residuals: tuple[float, float]
    ratio: float


@dataclass(slots=True)
class Step:
    """What one rank did in `finish`.

    norm: that `finish` returned, or None.
    scale: of the gradients at the optimizer step, relative to the backward pass; None without a step.
    square: squared norm of this rank's copies.
    coordinate: of the rank in the mesh.
    projections: of each parameter whose update is wrong.
    errors: of each parameter whose update is wrong: number of differing elements, and the largest error.
    threshold: the largest error of a right update, relative to the norm of the whole update.
    true_norm: of the gradient of one process.
    largest: absolute value of its elements.
    settings: of the optimizer of one process.
    is_scaled: whether the step had a multiple of the gradients of the backward pass.
    expected_settings, found_settings: of the optimizers of one process and of the program, by parameter.
    differences: names of parameters by each difference of their settings.
    """

    norm: float | None = None
    scale: float | None = None
    square: float = 0.0
    coordinate: tuple[int, ...] = ()
    projections: dict[str, Projection] = field(default_factory=dict)
    errors: dict[str, tuple[int, float]] = field(default_factory=dict)
    threshold: float = 0.0
    true_norm: float = 0.0
    largest: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    is_scaled: bool = True
    expected_settings: dict[str, dict[str, str]] = field(default_factory=dict)
    found_settings: dict[str, dict[str, str]] = field(default_factory=dict)
    differences: dict[Difference, list[str]] = field(default_factory=dict)

    @property
    def compared_settings(self) -> tuple[str, ...]:
        """The settings of the optimizer that were compared beside the update."""
        return list_compared(self.expected_settings, self.found_settings)


def take_step(mechanism: Mechanism) -> Step:
    """Run `finish` on this rank, and the step of one process, and compare the parameters. A collective."""
    reference, program = mechanism.reference, mechanism.program
    gradients = {}
    for name in reference.names:
        gradients[name] = mechanism.gather_gradients(name).sum(0)
    step = Step(coordinate=program.coordinate, true_norm=norm_of(gradients))
    for gradient in gradients.values():
        step.largest = max(step.largest, float(gradient.abs().max()))
    for local in program.tensors.values():
        step.square += float(local.gradient.square().sum())
    _finish(mechanism, step)
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
            step.errors[name] = _measure_errors(update - expected, step.threshold * size)
    step.differences = compare_settings(step.expected_settings, step.found_settings, program.tensors, step.errors)
    return step


def _measure_errors(difference: Any, largest_rounding: float) -> tuple[int, float]:
    """Return the number of elements beyond rounding, and the largest error of a finite element."""
    errors = difference.abs()
    finite_errors = errors[errors.isfinite()]
    largest = float(finite_errors.max()) if finite_errors.numel() else 0.0
    # A NaN is never within rounding.
    return int((~(errors <= largest_rounding)).sum()), largest


def _finish(mechanism: Mechanism, step: Step) -> None:
    """Run `finish`, and add the scale of the gradients at the optimizer step, and the reported norm, to a step."""
    program = mechanism.program
    products = [0.0, 0.0, 0.0]
    parameters = {name: local.parameter for name, local in program.tensors.items()}
    step.found_settings = list_settings(program.optimizer, parameters)

    def measure(*_: Any) -> None:
        # The last step counts, if an optimizer consists of several.
        products[:] = [0.0, 0.0, 0.0]
        # A scheduler may have changed them since, and changes them again after the step.
        step.found_settings = list_settings(program.optimizer, parameters)
        for name, local in program.tensors.items():
            gradient = copy_gradient(local.parameter, local.shape(), program.case.title, name)
            expected = clip_elements(local.gradient, program.case.clip_value)
            products[0] += float((gradient * expected).sum())
            products[1] += float(expected.square().sum())
            products[2] += float(gradient.square().sum())

    with _hooked(program.optimizer, measure):
        norm = program.case.finish(program.model, program.optimizer)
    step.norm = check_norm(program.case, norm)
    product, square, square_at_step = products
    if square:
        step.scale = product / square
        # Equal vectors up to a factor reach the bound of Cauchy and Schwarz.
        step.is_scaled = product**2 >= (1 - _NUMBERS) * square * square_at_step


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
    step.expected_settings = list_settings(optimizer, dict(reference.model.named_parameters()))
    parameters = {name: reference.model.get_parameter(name) for name in reference.names}
    before = {}
    for name, parameter in parameters.items():
        before[name] = parameter.detach().clone()
        # An optimizer skips a frozen parameter, and would decay one with a gradient of zero.
        if name in reference.extra:
            continue
        parameter.grad = (clip_elements(gradients[name], reference.case.clip_value) * factor).to(parameter)
    optimizer.step()
    updates = {}
    with torch.no_grad():
        for name, parameter in parameters.items():
            updates[name] = (parameter - before[name]).double()
            parameter.copy_(before[name])
            parameter.grad = None
    return updates


def _project(update: Any, expected: Any, before: Any) -> Projection:
    """Return how a wrong update depends on the parameter and on the right update."""
    difference = (update - expected).flatten()
    multiples, residuals = [], []
    for values in (before.flatten(), (before + expected).flatten()):
        multiple = float(difference @ values) / max(float(values @ values), 1e-300)
        multiples.append(multiple)
        residuals.append(float((difference - multiple * values).norm() / difference.norm()))
    right = expected.flatten()
    ratio = float(update.flatten() @ right) / max(float(right @ right), 1e-300)
    ratio_residual = float((update.flatten() - ratio * right).norm() / difference.norm())
    if ratio_residual > CLOSE:
        # The update is no multiple of the right update.
        ratio = float("nan")
    return Projection((multiples[0], multiples[1]), (residuals[0], residuals[1]), ratio)


def clip_elements(gradient: Any, clip_value: float | None) -> Any:
    """Return a gradient after clipping by value, as `clip_grad_value_` does; unchanged without a limit."""
    return gradient if clip_value is None else gradient.clamp(-clip_value, clip_value)


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
        is_scaled = all(step.is_scaled for step in steps.values())
        # A right program may clip without saying so.
        if not is_scaled:
            facts.append(GradientNorm.CLIP_VALUE())
        elif max_norm is None:
            facts.append(GradientNorm.MAX_NORM())
    wrong_ranks = tuple(sorted(wrong_norms.keys() | wrong_scales.keys()))
    if not facts:
        return None
    # Clipping that the case does not declare is no fault of the program.
    is_declared = max_norm is not None or not wrong_scales
    return Explanation(facts, "proved" if is_declared else "consistent", ranks=wrong_ranks)


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


def find_other_settings(steps: Mapping[int, Step]) -> list[str]:
    """Return the names of the parameters with other settings of the optimizer on some rank."""
    names: dict[str, None] = {}
    for step in steps.values():
        for parameters in step.differences.values():
            names.update(dict.fromkeys(parameters))
    return list(names)


def _find_decay(projections: Sequence[Projection], decay: float) -> float | None:
    """Return by how many decays all wrong updates differ from the right ones; None without a common number."""
    if not decay:
        return None
    multiples = np.array([projection.multiples for projection in projections]).T / decay
    residuals = np.array([projection.residuals for projection in projections]).T
    # Of the values before the step, then after it.
    for times, unexplained in zip(multiples, residuals, strict=True):
        if unexplained.max() < CLOSE and np.ptp(times) < CLOSE:
            return float(times[0])
    return None


def explain_update(steps: Mapping[int, Step]) -> Explanation | None:
    """Return how the parameters after the step differ; None if they are right."""
    names = find_wrong_updates(steps)
    if not names:
        return _explain_settings(steps)
    projections: list[Projection] = []
    wrong_ranks = []
    for rank, step in steps.items():
        projections += step.projections.values()
        if step.projections:
            wrong_ranks.append(rank)
    settings = next(iter(steps.values())).settings
    facts: list[Message] = [
        UpdateDiffers.DIFFERS(count=len(names), names=names, optimizer=settings["optimizer"]),
        UpdateDiffers.SETTINGS(lr=settings["lr"], weight_decay=settings["weight_decay"]),
    ]
    ratios = np.array([projection.ratio for projection in projections])
    times = _find_decay(projections, -settings["lr"] * settings["weight_decay"])
    # All tensors agree on one multiple. NaN agrees with nothing.
    if times is not None:
        facts.append(UpdateDiffers.DECAY(times=times))
    elif np.ptp(ratios) < CLOSE and is_near(ratios[0], 0):
        facts.append(UpdateDiffers.MISSING())
    elif np.ptp(ratios) < CLOSE:
        facts.append(UpdateDiffers.RATIO(ratio=float(ratios[0])))
    return Explanation([*facts, *_list_differences(steps)], ranks=tuple(wrong_ranks))


def _explain_settings(steps: Mapping[int, Step]) -> Explanation | None:
    """Return how the settings differ of optimizers that made the same first step; None if they are equal."""
    wrong_ranks = [rank for rank, step in steps.items() if step.differences]
    if not wrong_ranks:
        return None
    facts = [*_list_differences(steps), UpdateDiffers.LATER()]
    return Explanation(facts, ranks=tuple(wrong_ranks), variant="_SETTINGS")


def _list_differences(steps: Mapping[int, Step]) -> list[Message]:
    """Return one fact for each difference of settings on any rank."""
    facts: dict[Difference, Message] = {}
    for step in steps.values():
        for difference, names in step.differences.items():
            facts[difference] = UpdateDiffers.SETTING(count=len(names), names=names, **difference._asdict())
    return list(facts.values())
