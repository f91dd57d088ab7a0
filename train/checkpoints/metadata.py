"""The metadata block of a checkpoint: facts about the run that syncheck cannot read from tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncheck import metadata

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from train.position import Plan
    from train.step import Step


def build_metadata_block(
    trainer: Step, optimizer: Optimizer, plan: Plan, run_id: str, step: int, rank: int, world_size: int
) -> dict[str, Any]:
    """Describe one replica after an optimizer step, counted from 1.

    rank and world_size count replicas. They equal the process's rank and the number of processes, except under dp,
    where one process saves several replicas. `epoch` is the number of completed epochs.
    """
    config = trainer.settings.config(world_size)
    if trainer.settings.fault is not None:
        config["fault_step"] = trainer.fault.fault_step  # the default, if --fault-step was not given
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
