"""What may have changed since a state was saved: what is refused, and what makes the run another one bit by bit."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from train.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from train.launch import RankContext
    from train.position import Plan
    from train.settings import Settings
    from train.step import Step

# How long a run is may change, and how many ranks it is on; both are said.
LENGTH = ("epochs", "max_steps")
# Options that are not named like their field.
OPTIONS = {"buffer_sync": "--no-buffer-sync", "shuffle": "--no-shuffle"}
KEPT = {"dp": "replicas"}  # a method's own number of replicas, which is said too


def check_same_run(state: Mapping[str, Any], settings: Settings, ctx: RankContext, plan: Plan, where: str) -> None:
    """Refuse to go on with other options that decide what is trained, or other data. where: names the state.

    Raises UserError with the option, then and now.
    """
    now, then = settings.config(ctx.world_size), state["config"]
    # A field that is newer than the state had its default then.
    defaults = {field.name: field.default for field in fields(settings)}
    for name, value in now.items():
        before = then.get(name, defaults.get(name))
        if name in (*LENGTH, "world_size", KEPT.get(settings.method)) or before == value:
            continue
        option = OPTIONS.get(name, f"--{name.replace('_', '-')}")
        raise UserError(
            f"--resume: {option}: {before} when {where} was saved, and {value} now; start with the options of then, or "
            "with another --out"
        )
    if state["steps_per_epoch"] != plan.steps_per_epoch:
        raise UserError(
            f"--resume: an epoch had {state['steps_per_epoch']} steps when {where} was saved, and has "
            f"{plan.steps_per_epoch} now: the data is not the same"
        )
    if state["step"] > plan.steps:
        raise UserError(
            f"--resume: {where} is of step {state['step']}, and the run ends after {plan.steps}; give more --epochs or "
            "--max-steps"
        )


def consequences(state: Mapping[str, Any], settings: Settings, ctx: RankContext, trainer: Step) -> list[str]:
    """Say what keeps the run from ending with the bits that it would have had without the interruption."""
    said = []
    old, new = state["world_size"], ctx.world_size
    if old != new:
        said.append(_other_ranks(trainer, old, new))
    elif state["replicas"] != trainer.method.replicas:
        said.append(
            f"saved with {state['replicas']} replicas, now {trainer.method.replicas}: not bitwise from here: gradients "
            "are summed in another order, BatchNorm statistics come from other shares"
        )
    then, now = state["config"], settings.config(new)
    changed = [name for name in LENGTH if then.get(name) != now[name]]
    if changed:
        what = " and ".join(
            f"--{name.replace('_', '-')} {_number(now[name])} ({_number(then.get(name))} then)" for name in changed
        )
        said.append(
            f"{what}: the learning rate follows the schedule of the new length from here; not bitwise what one run of "
            "that length would be"
        )
    before, torch_now = (state["syncheck"].get("versions") or {}).get("torch"), torch.__version__
    if before != torch_now:
        said.append(f"saved with torch {before}, now {torch_now}: its kernels may round otherwise")
    return said


def _other_ranks(trainer: Step, old: int, new: int) -> str:
    """Say what goes on exactly with another number of ranks, and what does not."""
    exact = "parameters, optimizer state and the order of samples go on exactly"
    changes = ["gradients are summed in another order"]
    if "averaging" in trainer.method.facts:
        exact = "the order of samples goes on exactly"
        changes.append(f"parameters and optimizer state of rank r start as those of rank r modulo {old}, not averaged")
    if any(True for _ in trainer.method.module.buffers()):
        changes.append(f"buffers (BatchNorm statistics) of rank r start as those of rank r modulo {old}")
    changes.append("random streams are new")
    return f"saved by {_ranks(old)}, now {_ranks(new)}: {exact}; not bitwise from here: {', '.join(changes)}"


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _number(value: int | None) -> str:
    return "none" if value is None else str(value)
