"""Local SGD: whether ranks may differ because they train separately between two averaging steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from syncheck.records import Comparison


@dataclass(frozen=True, slots=True)
class Averaging:
    """A step of local SGD. last: the last step after which parameters were averaged; 0 before the first."""

    period: int
    warmup: int
    last: int
    step: int

    @property
    def just_averaged(self) -> bool:
        """Whether the ranks averaged their parameters right after this step."""
        return self.step == self.last

    @property
    def own_steps(self) -> int:
        """The number of separate steps of each rank since the parameters were equal."""
        return self.step - max(self.last, self.warmup)


def averaging_of(group: Comparison) -> Averaging | None:
    """Return the position of a group in local SGD, or None if its metadata does not mention averaging.

    Also None during warm-up, when gradients are averaged at every step, and when an averaging step is overdue: the
    method does not explain differences then.
    """
    metadata = group.evidence.metadata
    settings = {} if metadata is None else metadata.averaging
    step = group.step if metadata is None or metadata.step is None else metadata.step
    if not {"period", "warmup_steps", "last_step"} <= set(settings) or step is None:
        return None
    averaging = Averaging(settings["period"], settings["warmup_steps"], settings["last_step"], step)
    if step <= averaging.warmup or averaging.last > step or averaging.own_steps >= averaging.period:
        return None
    return averaging
