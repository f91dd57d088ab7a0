"""The base class of faults: a run without a fault."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from benchmarks.trials.simulation import Gradients, Rank, Run, Setup

LAGS = (0, 1, 2, 5, 10, 30, 100)


class Fault:
    """A run without a fault, and the base class of faults. Hooks run in each step, also before the onset.

    name: of the fault in the table. codes: the findings that name the cause; SYN299 alone if no finding does. lags: the
    steps between the onset and the checkpoints.
    """

    name: ClassVar[str] = "none"
    codes: ClassVar[frozenset[str]] = frozenset()
    lags: ClassVar[tuple[int, ...]] = LAGS
    from_start: ClassVar[bool] = False
    """Whether the fault begins with the run, whatever its onset."""
    needs_steps: ClassVar[bool] = False
    """Whether only checkpoints of several steps can show the cause."""
    needs_optimizer: ClassVar[bool] = False
    """Whether only the optimizer state can show the cause."""
    needs_metadata: ClassVar[bool] = False
    """Whether only the metadata can show the cause."""
    fallback: ClassVar[frozenset[str]] = frozenset()
    """Findings that are right if the saved content cannot show the cause: what is visible, said without the cause."""
    background: ClassVar[frozenset[str]] = frozenset()
    """Findings that are true beside the fault and do not name it."""
    saves_average: ClassVar[bool] = False
    saves_scaler: ClassVar[bool] = False
    local_buffers: ClassVar[frozenset[str]] = frozenset()
    """Buffers that are not copied from rank 0."""

    def fits(self, setup: Setup) -> bool:  # noqa: ARG002
        """Whether the fault has an effect with these settings."""
        return True

    def start(self, run: Run) -> None:
        """Change the ranks before the first step."""

    def see_batch(self, run: Run, rank: Rank, x: Tensor) -> None:
        """Run after the forward pass of a rank."""

    def averages(self, run: Run) -> bool:  # noqa: ARG002
        """Whether the gradients are averaged over all ranks in this step."""
        return True

    def change_gradients(self, run: Run, local: Sequence[Gradients]) -> None:
        """Change the averaged gradients. local: the gradients of each rank before the average."""

    def takes_step(self, run: Run, rank: Rank) -> bool:  # noqa: ARG002
        """Whether the rank updates its parameters."""
        return True

    def updates_average(self, run: Run, rank: Rank) -> bool:  # noqa: ARG002
        """Whether the rank updates its averaged copy."""
        return True

    def finish_step(self, run: Run) -> None:
        """Change the ranks after the update."""

    def change_content(self, run: Run, rank: Rank, content: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """Return the content of the rank's checkpoint."""
        return content

    def name_step(self, run: Run, rank: Rank) -> int:  # noqa: ARG002
        """Return the step in the metadata."""
        return run.step

    def name_host(self, rank: Rank) -> str:  # noqa: ARG002
        """Return the host in the metadata."""
        return "node0"

    def describe_averaging(self, run: Run) -> dict[str, int] | None:  # noqa: ARG002
        """Return the averaging of local SGD in the metadata."""
        return None
