"""Whether ranks may differ because they train on their own between two averages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from syncheck.records import Comparison


@dataclass(frozen=True, slots=True)
class Averaging:
    """Where a step of local SGD stands. last: the step after which models were averaged last, 0 for none yet."""

    period: int
    warmup: int
    last: int
    step: int

    @property
    def just_averaged(self) -> bool:
        """Whether the ranks averaged their parameters after this very step."""
        return self.step == self.last

    @property
    def own_steps(self) -> int:
        """How many steps each rank has taken on its own since the parameters were equal."""
        return self.step - max(self.last, self.warmup)


def averaging_of(group: Comparison) -> Averaging | None:
    """Say where a group stands in local SGD, if its metadata tells of averaging; else None.

    Also None in the warm-up, where gradients are averaged at each step, and where an average is overdue: what differs
    then does so against the method.
    """
    told = {} if group.evidence.metadata is None else group.evidence.metadata.averaging
    step = (
        group.step
        if group.evidence.metadata is None or group.evidence.metadata.step is None
        else group.evidence.metadata.step
    )
    if not {"period", "warmup_steps", "last_step"} <= set(told) or step is None:
        return None
    found = Averaging(told["period"], told["warmup_steps"], told["last_step"], step)
    if step <= found.warmup or found.last > step or found.own_steps >= found.period:
        return None
    return found
