"""Save this rank's checkpoints: the engine calls `Saver` after every step."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, TypeVar

from train.checkpoints.checkpoint_files import (
    FORMATS,
    Checkpoint,
    remove_run,
    remove_temporary,
    rename_into_place,
    temporary_path,
    write_temporary,
)
from train.errors import UserError
from train.launch.signals import print_once
from train.optional import metadata
from train.schedule import is_due

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch.optim import Optimizer

    from train.checkpoints.lock import RunLock
    from train.methods.base import Replica
    from train.schedule import Plan
    from train.trainer import Trainer

T = TypeVar("T")


class Saver:
    """Writes this rank's checkpoints, and records the paths of all ranks.

    Each rank writes temporary files. They are renamed only after all ranks have succeeded, so a rank that cannot write
    leaves no new file on any rank. If the run is killed between two renames, files of two saves may remain, each
    complete. The files of an earlier run with the same name are removed just before the first rename: a run that fails
    earlier deletes nothing.

    The constructor is a collective: ranks agree on a random run id. lock: this run's lock on --out. replaced: number of
    removed checkpoints of an earlier run. attempts: number of periodic saves. If the final save fails on any rank, all
    ranks raise UserError.
    """

    def __init__(self, trainer: Trainer, plan: Plan, lock: RunLock) -> None:
        self.settings, self.ctx = trainer.settings, trainer.ctx
        self.trainer, self.plan, self.lock = trainer, plan, lock
        self.replicas = self.ctx.world_size * trainer.method.replicas  # over all ranks
        self.saved: list[Path] = []
        self.replaced = 0
        # Whether the files of an earlier run have been removed.
        self.cleared = False
        self.resumed = False
        self.attempts = 0
        self.errors: list[str] = []  # of periodic saves
        self.run_id = self.ctx.gather(secrets.token_hex(8))[0]

    def after_step(self, step: int) -> list[Path]:
        """Write the checkpoints due after this optimizer step, counted from 1; a collective if any is due.

        Call it with --save-per-rank. Returns the files written by this process.
        """
        s = self.settings
        written: list[Path] = []
        if is_due(step, s.save_every):
            paths = self._paths(f"history/{s.run}/step_{step}/rank_")
            written += self.attempt(f"step {step}", lambda: self._save(paths, step)) or []
        if step in (self.plan.steps, self.trainer.fault.early_save_step):
            written += self._save(self._paths(f"{s.run}_rank"), step, final=True)
        return written

    def save_best(self, step: int) -> list[Path]:
        """Replace the best checkpoint after an epoch, with --save-best; a collective. Returns this process's files."""
        paths = self._paths(f"best/{self.settings.run}/rank_")
        return self.attempt(f"the best checkpoint so far, of step {step},", lambda: self._save(paths, step)) or []

    def attempt(self, description: str, write: Callable[[], T]) -> T | None:
        """Call `write` for a periodic save and return its result, or None if it fails.

        A temporarily full disk must not end a training that takes days. Rank 0 reports a failure at once, the next save
        tries again, and the run ends with exit code 2, so that its files are not mistaken for complete.

        description: the saved object, as named in the message. write: raises UserError on all ranks or on none.
        """
        self.attempts += 1
        try:
            return write()
        except UserError as error:
            self.errors.append(f"{description} is not saved: {error}")
            print_once(self.ctx, f"warning: {self.errors[-1]}; training continues, and the next save tries again")
            return None

    @property
    def failed(self) -> str:
        """Return the number of failed periodic saves and the last error as a sentence, or an empty string."""
        if not self.errors:
            return ""
        return f"{len(self.errors)} of {self.attempts} periodic saves failed, the last: {self.errors[-1]}"

    def resume(self, run_id: str, saved: Sequence[str], *, same_ranks: bool) -> None:
        """Continue the recorded run: keep its files up to the resumed step.

        saved: paths written so far, relative to --out. same_ranks: whether the number of ranks is unchanged. If it
        changed, the final files come from other ranks and will be removed.
        """
        self.run_id, self.resumed = run_id, True
        paths = [self.settings.out / name for name in saved]
        self.saved = [path for path in paths if same_ranks or path.parent != self.settings.out]

    def save_missing_final(self, step: int) -> None:
        """Write the final checkpoints of a resumed run that had already ended, if any is missing; a collective."""
        paths = self._paths(f"{self.settings.run}_rank")
        # Files may have been removed or moved since.
        exist = set(paths) <= set(self.saved) and all(paths[index].exists() for index in self._own_indices)
        if not all(self.ctx.gather(exist)):
            self._save(paths, step, final=True)

    def _paths(self, name: str) -> list[Path]:
        """Return the paths of all replicas. name: relative to --out, up to the rank."""
        return [self.settings.out / f"{name}{rank}.{self.settings.save_format}" for rank in range(self.replicas)]

    def _save(self, paths: list[Path], step: int, *, final: bool = False) -> list[Path]:
        """Write this process's replicas to `paths` and return their paths; a collective.

        Raises UserError on all ranks. If the disk is full, existing files stay.
        """
        written: list[Path] = []
        try:
            self._write_temporary_files(paths, step, written, final=final)
            if not self.cleared:
                self._remove_old_files(paths)
            self._rename_into_place(written, final=final)
        finally:
            # None is left after the renames.
            for path in written:
                remove_temporary(path)
        self.saved += [path for path in paths if path not in self.saved]
        if self.resumed:
            self._remove_replaced_files(paths)
        return [paths[index] for index in self._own_indices]

    def _write_temporary_files(self, paths: list[Path], step: int, written: list[Path], *, final: bool) -> None:
        """Write a temporary file for each replica of this process; a collective. Adds their final paths to `written`.

        If this raises UserError, `written` has the paths so far, whose temporary files remain.
        """
        replicas = self.trainer.method.list_replicas(self.trainer.optimizer)
        with self.ctx.share_errors():
            self.lock.check()
            for index, replica in zip(self._own_indices, replicas, strict=True):
                payload = self._encode(replica, index, step, final=final)
                if payload is not None:
                    written.append(paths[index])
                    write_temporary(paths[index], payload)

    def _rename_into_place(self, written: list[Path], *, final: bool) -> None:
        """Rename the temporary files, which all ranks have written; a collective."""
        with self.ctx.share_errors():
            for path in written:
                rename_into_place(path)
                self.trainer.fault.after_save(path, final=final)

    def _remove_replaced_files(self, paths: list[Path]) -> None:
        """Remove the files that `paths` replace, of other ranks or in another format; a collective.

        Only a run before --resume has written such files. A mixture of old and new files would be reported as a
        difference between ranks.
        """
        old = [path for path in self.saved if path.parent == paths[0].parent and path not in paths]
        if old:
            self.saved = [path for path in self.saved if path not in old]
            self._remove_old_files(paths)

    @property
    def _own_indices(self) -> range:
        """Return the indices of this process's replicas."""
        replicas = self.trainer.method.replicas
        return range(self.ctx.rank * replicas, (self.ctx.rank + 1) * replicas)

    def _encode(self, replica: Replica, index: int, step: int, *, final: bool) -> bytes | None:
        """Encode one replica, as modified by an injected fault; None means no file. index: of the replica."""
        trainer = self.trainer
        block = build_metadata_block(trainer, replica.optimizer, self.plan, self.run_id, step, index, self.replicas)
        checkpoint = Checkpoint(
            model=replica.model,
            optimizer=replica.optimizer.state_dict(),
            scaler=trainer.scaler_state,
            epoch=block["epoch"],
            step=step,
            block=block,
            ema=trainer.averages,
        )
        written = trainer.fault.before_save(checkpoint, final=final)
        if written is None:
            return None
        return FORMATS[self.settings.save_format](written)

    def _remove_old_files(self, paths: list[Path]) -> None:
        """Remove files of an earlier run, or of steps after the resumed step.

        paths: files about to be renamed into place; their temporary files are kept.
        """
        s, removed = self.settings, 0
        with self.ctx.share_errors():
            if self.ctx.local_rank == 0:  # once per node, because the folder may be local
                removed = remove_run(s.out, s.run, keep=[*self.saved, *map(temporary_path, paths)])
        if not self.resumed:
            self.replaced = sum(self.ctx.gather(removed))
        self.cleared = True


def build_metadata_block(
    trainer: Trainer, optimizer: Optimizer, plan: Plan, run_id: str, step: int, rank: int, world_size: int
) -> dict[str, Any]:
    """Describe one replica after an optimizer step, counted from 1, with facts that syncheck cannot read from tensors.

    rank and world_size count replicas. They equal the process's rank and the number of processes, except under dp,
    where one process saves several replicas. `epoch` is the number of completed epochs.
    """
    config = trainer.settings.config(world_size)
    if trainer.settings.fault is not None:
        # The default, if --fault-step was not given.
        config["fault_step"] = trainer.fault.fault_step
    return metadata(
        run=trainer.settings.run,
        run_id=run_id,
        rank=rank,
        world_size=world_size,
        step=step,
        epoch=step // plan.steps_per_epoch,
        model=trainer.method.module,
        optimizer=optimizer,
        config=config,
        host=trainer.fault.host,
        **trainer.method.metadata_fields,
    )
