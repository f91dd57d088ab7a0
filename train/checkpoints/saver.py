"""When to save, and what goes into the file: the engine calls it after every step."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from train.checkpoints.attempts import Attempts
from train.checkpoints.block import metadata_block
from train.checkpoints.files import (
    beside,
    best_path,
    final_path,
    remove_beside,
    remove_run,
    step_path,
    take_name,
    write_beside,
)
from train.checkpoints.formats import FORMATS, Snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from train.checkpoints.lock import RunLock
    from train.methods.base import Replica
    from train.position import Plan
    from train.step import Step


class Saver:
    """Writes this rank's checkpoints, if the settings ask for any, and knows those of all ranks.

    Building it is a collective: the ranks agree on the run's random id. Each rank writes hidden files, and these take
    their names when those of all ranks are whole: a rank that cannot write leaves no rank's file. A kill between two
    renames can leave files of two saves, each of them whole. Between writing and renaming, files of an earlier run of
    the same name are removed when this one saves first: a run that never comes so far costs nothing.
    lock: of this run on --out. replaced: how many files of an earlier run there were. attempts: saves on the way, which
    may fail. Raises UserError on all ranks when one of them cannot write at the end.
    """

    def __init__(self, trainer: Step, plan: Plan, lock: RunLock) -> None:
        self.settings, self.ctx = trainer.settings, trainer.ctx
        self.trainer, self.plan, self.lock = trainer, plan, lock
        self.replicas = self.ctx.world_size * trainer.method.replicas  # over all ranks
        self.saved: list[Path] = []
        self.replaced = 0
        self.cleared = False  # of files of an earlier run
        self.resumed = False
        self.attempts = Attempts(self.ctx)
        self.run_id = self.ctx.gather(secrets.token_hex(8))[0]

    def after_step(self, step: int) -> list[Path]:
        """Save what is due after this optimizer step, counted from 1; a collective if anything is.

        Returns the files that this process has written.
        """
        s, ranks = self.settings, range(self.replicas)
        written: list[Path] = []
        if not s.save_per_rank:
            return written
        if s.save_every is not None and step % s.save_every == 0:
            paths = [step_path(s.out, s.run, step, rank, s.save_format) for rank in ranks]
            written += self.attempts.save(f"step {step}", lambda: self._save(paths, step, final=False)) or []
        if step in (self.plan.steps, self.trainer.fault.early):
            paths = [final_path(s.out, s.run, rank, s.save_format) for rank in ranks]
            written += self._save(paths, step, final=True)
        return written

    def best(self, step: int) -> list[Path]:
        """Replace the best checkpoint by this one, if the settings ask for one; a collective then.

        To be called between the last step of an epoch and the first of the next. Returns the files that this process
        has written.
        """
        s = self.settings
        if not s.save_best:
            return []
        paths = [best_path(s.out, s.run, rank, s.save_format) for rank in range(self.replicas)]
        what = f"the best checkpoint so far, of step {step},"
        return self.attempts.save(what, lambda: self._save(paths, step, final=False)) or []

    def resume(self, run_id: str, saved: Sequence[str], *, same_ranks: bool) -> None:
        """Go on as the run that it was: its files stay, but for those of steps that are still to come.

        saved: what it had written, below --out. same_ranks: whether there are as many ranks as then; else the final
        files of a run that is made longer are those of other ranks, and go.
        """
        self.run_id, self.resumed = run_id, True
        paths = [self.settings.out / name for name in saved]
        self.saved = [path for path in paths if same_ranks or path.parent != self.settings.out]

    def finish(self, step: int) -> None:
        """Write the final files of a run that had ended when it was resumed, if one is not there; a collective."""
        s = self.settings
        paths = [final_path(s.out, s.run, rank, s.save_format) for rank in range(self.replicas)]
        if not s.save_per_rank:
            return
        # Somebody may have removed or moved them since.
        there = set(paths) <= set(self.saved) and all(paths[index].exists() for index in self._own)
        if not all(self.ctx.gather(there)):
            self._save(paths, step, final=True)

    def _save(self, paths: list[Path], step: int, *, final: bool) -> list[Path]:
        """Write this process's replicas to their `paths`; all ranks hear whether all of them could.

        Returns the paths of this process. Raises UserError on all ranks; if the disk is full, files that were there
        before stay.
        """
        written: list[Path] = []
        try:
            replicas = self.trainer.method.state(self.trainer.optimizer)
            with self.ctx.together():
                self.lock.check()
                for index, replica in zip(self._own, replicas, strict=True):
                    payload = self._encoded(replica, index, step, final=final)
                    if payload is not None:
                        written.append(paths[index])
                        write_beside(paths[index], payload)
            if not self.cleared:
                self._clear(paths)
            with self.ctx.together():
                for path in written:
                    take_name(path)
                    self.trainer.fault.saved(path, final=final)
        finally:
            for path in written:
                remove_beside(path)
        # Of other ranks or another format, before the run was resumed: a mixture of old and new would say that ranks
        # differ.
        old = [path for path in self.saved if path.parent == paths[0].parent and path not in paths]
        self.saved = [path for path in self.saved if path not in old]
        self.saved += [path for path in paths if path not in self.saved]
        if old:
            self._clear(paths)
        return [paths[index] for index in self._own]

    @property
    def _own(self) -> range:
        """Number the replicas that this process holds."""
        replicas = self.trainer.method.replicas
        return range(self.ctx.rank * replicas, (self.ctx.rank + 1) * replicas)

    def _encoded(self, replica: Replica, index: int, step: int, *, final: bool) -> bytes | None:
        """Make the bytes of one file, or what a planted fault makes of it; None for no file. index: of the replica."""
        trainer = self.trainer
        block = metadata_block(trainer, replica.optimizer, self.plan, self.run_id, step, index, self.replicas)
        snapshot = Snapshot(
            model=replica.model,
            optimizer=replica.optimizer.state_dict(),
            scaler=trainer.scaler.state_dict() if trainer.scaler.is_enabled() else None,
            epoch=block["epoch"],
            step=step,
            block=block,
            ema=None if trainer.average is None else trainer.average.parameters,
        )
        written = trainer.fault.saving(snapshot, final=final)
        return None if written is None else FORMATS[self.settings.save_format](written)

    def _clear(self, paths: list[Path]) -> None:
        """Remove what is of an earlier run, or of later steps than that at which this one was resumed.

        paths: whose hidden files are written already.
        """
        s, removed = self.settings, 0
        with self.ctx.together():
            if self.ctx.local_rank == 0:  # once on each node, for the folder may be local to it
                removed = remove_run(s.out, s.run, keep=[*self.saved, *map(beside, paths)])
        if not self.resumed:
            self.replaced = sum(self.ctx.gather(removed))
        self.cleared = True
