"""Local SGD: at which point between two averages of the parameters a step is, by the metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.frozen import record

if TYPE_CHECKING:
    from syncheck.records import Comparison

_SETTINGS = frozenset({"period", "warmup_steps", "last_step"})


@record
class Averaging:
    """A step of local SGD."""

    period: int
    """Number of steps from one average of the parameters to the next."""
    warmup: int
    """Number of first steps with averaged gradients."""
    last: int
    """The last step after which parameters were averaged; 0 before the first average."""
    step: int

    @property
    def just_averaged(self) -> bool:
        """Whether the ranks averaged their parameters right after this step."""
        return self.step == self.last

    @property
    def own_steps(self) -> int:
        """The number of separate steps of each rank since the parameters were equal."""
        return self.step - max(self.last, self.warmup)


def find_averaging(group: Comparison) -> Averaging | None:
    """Return the position of the group in local SGD, or None if its metadata does not mention averaging.

    Also None during warm-up, when gradients are averaged at every step, and when an averaging step is overdue: the
    method does not explain differences then.
    """
    settings = group.evidence.metadata.averaging
    step = recorded_step(group)
    if step is None or not settings.keys() >= _SETTINGS:
        return None
    averaging = Averaging(
        period=settings["period"],
        warmup=settings["warmup_steps"],
        last=settings["last_step"],
        step=step,
    )
    is_overdue = averaging.own_steps >= averaging.period
    exceptions = (
        is_overdue,
        step <= averaging.warmup,
        # The metadata is of another moment than the step.
        averaging.last > step,
    )
    return None if any(exceptions) else averaging


def recorded_step(group: Comparison) -> int | None:
    """Return the step of the metadata or the files, else of the group; None if neither is known."""
    step = group.evidence.metadata.step
    return group.step if step is None else step
