"""When to save, and what goes into the file: the engine calls it after every step."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from syncheck import metadata
from train.checkpoint import (
    FORMATS,
    Snapshot,
    best_path,
    check_writable,
    final_path,
    remove_run,
    step_path,
    write_atomic,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from train.launch import RankContext
    from train.recorders.base import Plan
    from train.settings import Settings
    from train.step import Step


class Saver:
    """Writes this rank's checkpoints, if the settings ask for any, and knows those of all ranks.

    Building it is a collective: the ranks agree on the run's random id. Files of an earlier run of the same name are
    removed when this one saves first, and before any rank writes: a run that never comes so far costs nothing.
    replaced: how many there were. Raises UserError on all ranks when one of them cannot write.
    """

    def __init__(self, settings: Settings, ctx: RankContext, plan: Plan, step: Step) -> None:
        self.settings, self.ctx, self.plan, self.trainer = settings, ctx, plan, step
        self.replicas = ctx.world_size * step.method.replicas  # over all ranks
        self.saved: list[Path] = []
        self.replaced = 0
        self.cleared = False  # of files of an earlier run
        self.resumed = False
        self.run_id = ctx.gather(secrets.token_hex(8))[0]
        if settings.save_per_rank:
            with ctx.together():
                check_writable(settings.out)

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
            written += self._save(paths, step, final=False)
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
        return self._save(paths, step, final=False)

    def resume(self, run_id: str, saved: Sequence[str], *, same_ranks: bool) -> None:
        """Go on as the run that it was: its files stay, but for those of steps that are still to come.

        saved: what it had written, below --out. same_ranks: whether there are as many ranks as then; else the final
        files of a run that is made longer are those of other ranks, and go.
        """
        self.run_id, self.resumed = run_id, True
        paths = [self.settings.out / name for name in saved]
        self.saved = [path for path in paths if same_ranks or path.parent != self.settings.out]

    def finish(self, step: int) -> None:
        """Write the final files of a run that had ended when it was resumed, if it has none; a collective then."""
        s = self.settings
        paths = [final_path(s.out, s.run, rank, s.save_format) for rank in range(self.replicas)]
        if s.save_per_rank and not set(paths) <= set(self.saved):
            self._save(paths, step, final=True)

    def _save(self, paths: list[Path], step: int, *, final: bool) -> list[Path]:
        """Write this process's replicas to their `paths`; all ranks hear whether all of them could."""
        epoch = step // self.plan.steps_per_epoch  # epochs done
        config = self.settings.config(self.replicas)
        if self.settings.fault is not None:
            config["fault_step"] = self.trainer.fault.at  # where it was left to the fault itself
        method, scaler = self.trainer.method, self.trainer.scaler
        if not self.cleared:
            self._clear()
        replicas = method.state(self.trainer.optimizer)
        with self.ctx.together():
            for index, replica in enumerate(replicas, self.ctx.rank * method.replicas):
                block = metadata(
                    run=self.settings.run,
                    run_id=self.run_id,
                    rank=index,
                    world_size=self.replicas,
                    step=step,
                    epoch=epoch,
                    model=method.module,
                    optimizer=replica.optimizer,
                    config=config,
                    host=self.trainer.fault.host,
                    **method.facts,
                )
                state = scaler.state_dict() if scaler.is_enabled() else None
                ema = None if self.trainer.average is None else self.trainer.average.parameters
                snapshot = Snapshot(replica.model, replica.optimizer.state_dict(), state, epoch, step, block, ema)
                self._write(paths[index], snapshot, final=final)
        self.saved += [path for path in paths if path not in self.saved]
        first = self.ctx.rank * method.replicas
        return paths[first : first + method.replicas]

    def _clear(self) -> None:
        """Remove what is of an earlier run, or of later steps than that at which this one was resumed."""
        s, removed = self.settings, 0
        with self.ctx.together():
            if self.ctx.local_rank == 0:  # once on each node, for the folder may be local to it
                removed = remove_run(s.out, s.run, keep=self.saved)
        if not self.resumed:
            self.replaced = sum(self.ctx.gather(removed))
        self.cleared = True

    def _write(self, path: Path, snapshot: Snapshot, *, final: bool) -> None:
        """Write one file, or what a planted fault makes of it."""
        fault = self.trainer.fault
        written = fault.saving(snapshot, final=final)
        if written is not None:
            write_atomic(path, FORMATS[self.settings.save_format](written))
            fault.saved(path, final=final)
