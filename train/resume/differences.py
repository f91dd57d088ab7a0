"""Compare a saved state with the current options: reject changes to the training, report changes to rounding."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from train.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from train.launch import RankContext
    from train.schedule import Plan
    from train.settings import Settings
    from train.step import Step

# The length of a run and its number of ranks may change; both changes are reported.
LENGTH = ("epochs", "max_steps")
# Options whose name differs from the field's.
OPTIONS = {"buffer_sync": "--no-buffer-sync", "shuffle": "--no-shuffle"}
MAY_CHANGE = {"dp": "replicas"}  # reported, like the number of ranks


def check_same_run(state: Mapping[str, Any], settings: Settings, ctx: RankContext, plan: Plan, where: str) -> None:
    """Raise UserError if the data or any option that affects training has changed.

    where: the state as named in the message.
    """
    now, then = settings.config(ctx.world_size), state["config"]
    # A field added after the state was saved had its default value then.
    defaults = {field.name: field.default for field in fields(settings)}
    for name, value in now.items():
        before = then.get(name, defaults.get(name))
        if name in (*LENGTH, "world_size", MAY_CHANGE.get(settings.method)) or before == value:
            continue
        option = OPTIONS.get(name, f"--{name.replace('_', '-')}")
        raise UserError(
            f"--resume: {option}: {before} when {where} was saved, {value} now; use the original options, or "
            "another --out"
        )
    if state["steps_per_epoch"] != plan.steps_per_epoch:
        raise UserError(
            f"--resume: an epoch had {state['steps_per_epoch']} steps when {where} was saved, and has "
            f"{plan.steps_per_epoch} now: the data has changed"
        )
    if state["step"] > plan.steps:
        raise UserError(
            f"--resume: {where} was saved after step {state['step']}, but the run ends after {plan.steps}; increase "
            "--epochs or --max-steps"
        )


def describe_changes(state: Mapping[str, Any], settings: Settings, ctx: RankContext, trainer: Step) -> list[str]:
    """List the changes that prevent a bitwise identical continuation."""
    changes = []
    old, new = state["world_size"], ctx.world_size
    if old != new:
        changes.append(_other_ranks(trainer, old, new))
    elif state["replicas"] != trainer.method.replicas:
        changes.append(
            f"saved with {state['replicas']} replicas, now {trainer.method.replicas}: not bitwise from here: gradients "
            "are summed in another order, BatchNorm statistics come from other shares"
        )
    then, now = state["config"], settings.config(new)
    changed = [name for name in LENGTH if then.get(name) != now[name]]
    if changed:
        lengths = " and ".join(
            f"--{name.replace('_', '-')} {now[name] or 'none'} (was {then.get(name) or 'none'})" for name in changed
        )
        changes.append(
            f"{lengths}: the learning rate follows the schedule of the new length from here; not bitwise equal to an "
            "uninterrupted run of that length"
        )
    before, torch_now = (state["syncheck"].get("versions") or {}).get("torch"), torch.__version__
    if before != torch_now:
        changes.append(f"saved with torch {before}, now {torch_now}: kernels may round differently")
    return changes


def _other_ranks(trainer: Step, old: int, new: int) -> str:
    """Describe the effects of another number of ranks."""
    exact = "parameters, optimizer state and the order of samples continue exactly"
    changes = ["gradients are summed in another order"]
    if "averaging" in trainer.method.metadata_fields:
        exact = "the order of samples continues exactly"
        changes.append(f"parameters and optimizer state of rank r start from rank r modulo {old}, not averaged")
    if any(True for _ in trainer.method.module.buffers()):
        changes.append(f"buffers (BatchNorm statistics) of rank r start from rank r modulo {old}")
    changes.append("random streams are new")
    ranks = f"saved by {old} rank{'s' * (old > 1)}, now {new} rank{'s' * (new > 1)}"
    return f"{ranks}: {exact}; not bitwise from here: {', '.join(changes)}"
