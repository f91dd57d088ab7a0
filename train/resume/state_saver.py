"""Save and restore the states of a run: the engine calls `StateSaver` after every step.

A changed option of the training is refused, and a change that only affects rounding is reported.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch

from train.errors import UserError
from train.launch.signals import print_once
from train.metrics import MetricSums
from train.option import spell
from train.resume.sharded_state import is_sharded, load_shards, save_shards
from train.resume.state import (
    check_shapes,
    collect_state,
    reseed_generators,
    restore_position,
    restore_rng_states,
    restore_state,
)
from train.resume.state_files import (
    FoundState,
    find_newest_state,
    list_visible_ranks,
    read_newest_step,
    record_newest_step,
    remove_states,
    state_path,
    states_folder,
    write_state,
)
from train.schedule import Position, is_due

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from train.checkpoints.saver import Saver
    from train.data.dataset import Images
    from train.launch import RankContext
    from train.metrics import Best
    from train.schedule import Plan
    from train.settings import Settings
    from train.trainer import Trainer

# Complete states to keep: a second one, in case the newest is damaged.
COMPLETE = 2
# May change, like the number of ranks; the changes are reported.
LENGTH = ("epochs", "max_steps")
# May change if the mesh stays equal; dp has none.
MESH = ("parallel_degree", "replicas")


class StateSaver:
    """Saves states for --checkpoint-every, and restores the newest state for --resume.

    best: the best epoch so far, saved and restored too. resumed: whether a state was restored.
    """

    def __init__(self, trainer: Trainer, plan: Plan, saver: Saver, best: Best) -> None:
        self.settings, self.ctx = trainer.settings, trainer.ctx
        self.trainer, self.plan, self.saver, self.best = trainer, plan, saver, best
        self.folder = states_folder(self.settings.out, self.settings.run)
        self.resumed = False
        self.complete: list[int] = []  # steps whose states are kept
        self.saved_at: int | None = None
        # Whether the states of an earlier run have been removed.
        self.cleared = False

    def restore(self, dataset: Images) -> Position:
        """Restore the newest state, and return its position in the run; without a state, the start. A collective.

        Call it with --resume. dataset: of training. Raises UserError on all ranks if the folder is not readable or
        writable, or if the state is unusable or belongs to another run.
        """
        settings, ctx = self.settings, self.ctx
        with ctx.share_errors():
            step = read_newest_step(settings.out, settings.run)
            if step is not None and not list_visible_ranks(self.folder):
                raise UserError(
                    f"--resume: {self.folder} contains no state, but a state of step {step} was saved there; "
                    "restore it, or start at step 0 without --resume"
                )
        newest = find_newest_state(self.folder, settings.run, ctx, sharded=is_sharded(self.trainer))
        if newest is None:
            return Position(ctx.device, self.trainer.task)
        return self._restore(newest, dataset)

    def after_step(self, position: Position) -> None:
        """Save a state if it is due after this step, and after the last step; a collective if due.

        Call it with --checkpoint-every. If a rank cannot write, the states of earlier steps stay, and the save counts
        as a failed attempt.
        """
        step = position.step
        is_needed = step == self.plan.steps or is_due(step, self.settings.checkpoint_every)
        if is_needed and step != self.saved_at:
            self.saver.attempt(f"the state of step {step}", lambda: self._save(position))

    def save_now(self, position: Position) -> None:
        """Save a state, unless the one of this step is saved already; a collective. Raises UserError on all ranks."""
        if position.step != self.saved_at:
            self._save(position)

    def _save(self, position: Position) -> None:
        """Save a state. Remove older states when it is complete."""
        state = collect_state(self.trainer, self.plan, position, self.saver.run_id)
        state["saved"] = [str(path.relative_to(self.settings.out)) for path in self.saver.saved]
        state["also"] = {"best": vars(self.best).copy()}
        if not self.cleared:
            # Remove states of an earlier run, or of steps after the resumed step, before any rank writes: a mixture of
            # both must not look complete.
            self._record_newest(max(self.complete, default=None))
            self._remove()
            self.cleared = True
        try:
            with self.ctx.share_errors():
                self.saver.lock.check()
            if is_sharded(self.trainer):
                save_shards(self.folder / f"step_{position.step}", self.trainer)
            with self.ctx.share_errors():
                write_state(state_path(self.folder, position.step, self.ctx.rank), state)
        except UserError:
            self._remove()  # the files written by other ranks
            raise
        self.saved_at = position.step
        self.complete = [*sorted(self.complete), position.step][-COMPLETE:]
        self._record_newest(position.step)
        self._remove()

    def _record_newest(self, step: int | None) -> None:
        if self.saver.lock.created:  # once per folder
            record_newest_step(self.settings.out, self.settings.run, step)

    def _remove(self) -> None:
        with self.ctx.share_errors():
            if self.ctx.local_rank == 0:  # once per node, because the folder may be local
                self.saver.lock.check()
                remove_states(self.folder, self.complete)

    def _restore(self, newest: FoundState, dataset: Images) -> Position:
        """Restore a state, and return its position; a collective. Raises UserError if it belongs to another run."""
        settings, ctx, trainer = self.settings, self.ctx, self.trainer
        where = str(state_path(self.folder, newest.step, 0).parent)
        same_ranks = newest.world_size == ctx.world_size
        state = newest.state
        if not same_ranks and is_sharded(trainer):
            state = load_shards(self.folder / f"step_{newest.step}", trainer, state)
        with ctx.share_errors():
            check_same_run(state, trainer, self.plan, where)
            check_shapes(state, trainer, where)
        if trainer.method.rebuilds_buckets:
            # A list of indices returns a batch like in training: the labels of a user's data set may be plain numbers.
            x, y = dataset[[0, 0]]
            warm_up_buckets(trainer, x, y)
        restore_state(state, trainer)
        vars(self.best).update(state["also"]["best"])
        trainer.fault.after_resume(newest.step, trainer.method, trainer.optimizer)
        position = restore_position(state, ctx, trainer.task)
        self.resumed = True
        if same_ranks:
            # Restore RNG states last, because the warm-up draws random numbers. No code draws from here to the first
            # step: each DataLoader has its own generator.
            restore_rng_states(state["rng"], ctx.devices)
        else:
            reseed_generators(settings.seed, newest.step, ctx.mesh.stream)
        self.complete, self.saved_at = sorted([*newest.older, newest.step]), newest.step
        self.saver.resume(state["run_id"], state["saved"], same_ranks=same_ranks)
        epoch = f"epoch {position.epoch}/{self.plan.epochs}"
        print_once(ctx, f"resumed {settings.run} at step {newest.step}/{self.plan.steps}, {epoch}, from {where}")
        for text in describe_changes(state, settings, ctx, trainer):
            print_once(ctx, f"resumed: {text}")
        if settings.checkpoint_every is None and newest.step < self.plan.steps:
            print_once(ctx, "resumed: without --checkpoint-every N, no further states are saved")
        if newest.step == self.plan.steps:
            print_once(ctx, "resumed: the run had already ended, nothing is left to train")
            if settings.save_per_rank:
                self.saver.save_missing_final(newest.step)
        return position


def warm_up_buckets(trainer: Trainer, x: Tensor, y: Tensor) -> None:
    """Run forward and backward once without a step, before a state is restored; a collective.

    DDP first fills its buckets in the order of the parameters. After the first backward it rebuilds them in the
    order in which gradients became ready (torch/nn/parallel/distributed.py, _rebuild_buckets). With three or more
    ranks, the position in a bucket determines the order in which gloo and NCCL add the ranks' values, and so the
    rounding. A resumed run must therefore start with rebuilt buckets.

    x, y: a batch. The caller restores everything that this changes: buffers, RNG states and counters.
    """
    metric_sums = MetricSums(trainer.ctx.device, trainer.task)
    trainer.accumulate(x.to(trainer.ctx.device), y.to(trainer.ctx.device), len(x), metric_sums)
    trainer.optimizer.zero_grad()


def check_same_run(state: Mapping[str, Any], trainer: Trainer, plan: Plan, where: str) -> None:
    """Raise UserError if the data or any option that affects training has changed.

    where: the state as named in the message.
    """
    settings, ranks, shape = trainer.settings, trainer.ctx.world_size, trainer.method.mesh_shape
    now, then, mesh = settings.config(ranks), state["config"], MESH if state["world_size"] == ranks else ()
    # A field added after the state was saved had its default value then.
    defaults = {field.name: field.default for field in fields(settings)}
    spellings = {field.name: spell(field) for field in fields(settings)}
    for name, value in now.items():
        before = then.get(name, defaults.get(name))
        allowed = before == value or name in (*LENGTH, "world_size")
        if allowed or (name in mesh and shape(replace(settings, **{name: before}), ranks) == shape(settings, ranks)):
            continue
        raise UserError(
            f"--resume: {spellings[name]}: {before} when {where} was saved, {value} now; use the original options, or "
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


def describe_changes(state: Mapping[str, Any], settings: Settings, ctx: RankContext, trainer: Trainer) -> list[str]:
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
    lengths = []
    for name in LENGTH:
        if then.get(name) != now[name]:
            lengths.append(f"--{name.replace('_', '-')} {now[name] or 'none'} (was {then.get(name) or 'none'})")
    if lengths:
        changes.append(
            f"{' and '.join(lengths)}: the learning rate follows the schedule of the new length from here; not bitwise "
            "equal to an uninterrupted run of that length"
        )
    before, torch_now = (state["syncheck"].get("versions") or {}).get("torch"), torch.__version__
    if before != torch_now:
        changes.append(f"saved with torch {before}, now {torch_now}: kernels may round differently")
    return changes


def _other_ranks(trainer: Trainer, old: int, new: int) -> str:
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
