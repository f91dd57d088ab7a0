"""When the states of a run are saved and restored: the engine calls it after every step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from train.errors import UserError
from train.launch.exits import print_once
from train.position import Position
from train.resume.differences import check_same_run, consequences
from train.resume.files import remove_states, state_path, states_folder, visible, write
from train.resume.generators import reseed, restore_generators
from train.resume.search import Found, newest
from train.resume.shards import joined
from train.resume.state import check_fits, collect, restore, restored_position

if TYPE_CHECKING:
    from collections.abc import Mapping

    from train.checkpoints.saver import Saver
    from train.data.dataset import Images
    from train.position import Plan
    from train.step import Step

COMPLETE = 2  # complete states that are kept: should the newest be damaged, there is one more


class Stateful(Protocol):
    """Something else that has to be saved with a run, such as the best score so far."""

    def state(self) -> dict[str, Any]:
        """Give plain values and tensors, which torch.load(weights_only=True) accepts."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""
        ...


class Keeper:
    """Saves what `--resume` needs, as --checkpoint-every says, and restores it.

    Building it is a collective where one of both is asked for. position: where the run begins. resumed: whether it goes
    on from a state. also: what else is saved and restored, by name. samples: to train on. Raises UserError on all ranks
    alike: no place to write, no state that can be used, or one of another run.
    """

    def __init__(self, trainer: Step, plan: Plan, saver: Saver, samples: Images, also: Mapping[str, Stateful]) -> None:
        self.settings, self.ctx = settings, ctx = trainer.settings, trainer.ctx
        self.trainer, self.plan, self.saver, self.also = trainer, plan, saver, also
        self.folder = states_folder(settings.out, settings.run)
        self.position = Position(ctx.device)
        self.resumed = False
        self.complete: list[int] = []  # steps whose states are to stay
        self.saved_at: int | None = None
        self.cleared = False  # of states of an earlier run
        if settings.resume:
            with ctx.together():
                step = saver.lock.owner().get("state")
                if step is not None and not visible(self.folder):
                    raise UserError(
                        f"--resume: {self.folder} holds no state, but one of step {step} was saved there; bring it "
                        "back, or start at step 0 without --resume"
                    )
            facts = trainer.method.facts
            sharded = bool(facts.get("optimizer_sharded") or facts.get("mesh"))
            found = newest(self.folder, settings.run, ctx, sharded=sharded)
            if found is not None:
                self._resume(found, samples)

    def after_step(self, position: Position, *, now: bool = False) -> None:
        """Save if it is due after this step, or if it must be done `now`; a collective then.

        Where a rank cannot write the states of earlier steps stay as they are. One that was due counts as an attempt
        that has failed; `now` raises UserError, on all ranks.
        """
        every, step = self.settings.checkpoint_every, position.step
        due = every is not None and (step % every == 0 or step == self.plan.steps)
        if step == self.saved_at:
            return
        if now:
            self._save(position)
        elif due:
            self.saver.attempts.save(f"the state of step {step}", lambda: self._save(position))

    def _save(self, position: Position) -> None:
        """Save a state, and when it is complete remove older ones."""
        state = collect(self.trainer, self.plan, position, self.saver.run_id)
        state["saved"] = [str(path.relative_to(self.settings.out)) for path in self.saver.saved]
        state["also"] = {name: part.state() for name, part in self.also.items()}
        if not self.cleared:
            # What an earlier run of this name has left, or this one behind the step at which it was resumed. Before any
            # rank writes, so that no mixture of both can look complete.
            self.saver.lock.completed(max(self.complete, default=None))
            self._remove()
            self.cleared = True
        try:
            with self.ctx.together():
                self.saver.lock.check()
                write(state_path(self.folder, position.step, self.ctx.rank), state)
        except UserError:
            self._remove()  # what other ranks have written of it
            raise
        self.saved_at = position.step
        self.complete = [*sorted(self.complete), position.step][-COMPLETE:]
        self.saver.lock.completed(position.step)
        self._remove()

    def _remove(self) -> None:
        with self.ctx.together():
            if self.ctx.local_rank == 0:  # once on each node, for the folder may be local to it
                self.saver.lock.check()
                remove_states(self.folder, self.complete)

    def _resume(self, found: Found, samples: Images) -> None:
        """Restore a state; a collective. Raises UserError where it is not of this run."""
        settings, ctx, trainer = self.settings, self.ctx, self.trainer
        where = str(state_path(self.folder, found.step, 0).parent)
        same = found.world_size == ctx.world_size
        own = ctx.rank if same else min(found.states, key=lambda rank: (rank != ctx.rank % found.world_size, rank))
        state = joined(found.states, own) if not same and len(found.states) > 1 else found.states[own]
        with ctx.together():
            check_same_run(state, settings, ctx, self.plan, where)
            check_fits(state, trainer, where)
        if trainer.method.rebuilds_buckets:
            x, y = samples[0]
            trainer.rehearse(torch.stack([x, x]), torch.stack([y, y]))
        restore(state, trainer)
        for name, part in self.also.items():
            if name in state["also"]:
                part.restore(state["also"][name])
        trainer.fault.resumed(found.step, trainer.method, trainer.optimizer)
        self.position, self.resumed = restored_position(state, ctx), True
        if same:
            # Last, for the rehearsal has drawn. From here to the first step nobody does: each DataLoader, which takes a
            # number when a pass over it begins, has a generator of its own.
            restore_generators(state["rng"], ctx.devices)
        else:
            reseed(settings.seed, found.step, ctx.rank)
        self.complete, self.saved_at = sorted([*found.older, found.step]), found.step
        self.saver.resume(state["run_id"], state["saved"], same_ranks=same)
        epoch = f"epoch {self.position.epoch}/{self.plan.epochs}"
        print_once(ctx, f"resumed {settings.run} at step {found.step}/{self.plan.steps}, {epoch}, from {where}")
        for text in consequences(state, settings, ctx, trainer):
            print_once(ctx, f"resumed: {text}")
        if settings.checkpoint_every is None and found.step < self.plan.steps:
            print_once(ctx, "resumed: no more states are saved, for --checkpoint-every N is not given")
        if found.step == self.plan.steps:
            print_once(ctx, "resumed: the run had already ended, there is nothing left to train")
            self.saver.finish(found.step)
