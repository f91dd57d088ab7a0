"""Named desyncs to plant, by the name that --fault takes: for teaching, and for the tests of the diagnosis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.errors import UserError
from train.faults.base import Fault

if TYPE_CHECKING:
    from train.launch import RankContext
    from train.settings import Settings

__all__ = ["FAULTS", "Fault", "list_faults", "make_fault"]

FAULTS: dict[str, type[Fault]] = {}


def make_fault(settings: Settings, ctx: RankContext, steps: int) -> Fault:
    """Build the fault that the settings ask for, or the one that does nothing. steps: of the whole run.

    Raises UserError where it cannot show: another method than ddp, one rank only, a step that never comes.
    """
    if settings.fault is None:
        return Fault(settings, ctx, steps)
    if settings.fault not in FAULTS:
        raise UserError(f"--fault {settings.fault}: unknown; there are {', '.join(FAULTS)}")
    if settings.method != "ddp":
        raise UserError(f"--fault {settings.fault}: planted in --method ddp only, not in {settings.method}")
    if ctx.world_size < 2:
        raise UserError(f"--fault {settings.fault}: one rank has no other to differ from; start two or more")
    if settings.fault_step is not None and settings.fault_step > steps:
        raise UserError(f"--fault-step {settings.fault_step}: the run ends after {steps} steps")
    return FAULTS[settings.fault](settings, ctx, steps)


def list_faults() -> str:
    """Write a line for each fault: its name, the finding it leads to, what it does."""
    width = max(map(len, FAULTS), default=0)
    return "".join(f"{name:{width}}  {fault.code}  {fault.says}\n" for name, fault in FAULTS.items())
