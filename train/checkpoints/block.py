"""The metadata block of a file: what the tensors do not tell, and syncheck wants to know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncheck import metadata

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from train.position import Plan
    from train.step import Step


def metadata_block(
    trainer: Step, optimizer: Optimizer, plan: Plan, run_id: str, step: int, rank: int, world_size: int
) -> dict[str, Any]:
    """Describe one replica of a run after an optimizer step, counted from 1.

    rank, world_size: of the replicas that the files of the run hold; those of the processes, but for dp, one process
    of which saves several. Its `epoch` counts the epochs that are done, in every file of the trainer.
    """
    config = trainer.settings.config(world_size)
    if trainer.settings.fault is not None:
        config["fault_step"] = trainer.fault.at  # where it was left to the fault itself
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
        **trainer.method.facts,
    )
