"""What a planted desync may do to a run: nothing, unless it says otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from train.launch import RankContext
    from train.methods.base import Method
    from train.settings import Settings


class Fault:
    """No fault; base of the others, and the places where they strike.

    says: what it does, for --list-faults. code: the finding that `syncheck` should make of it. steps: of the
    whole run. Every hook is called on every rank; one that communicates must do so on all of them, so that no
    rank waits for another. `bad` is the rank that goes wrong where a fault concerns only one: the last, for
    rank 0 is right no more often than any other.
    """

    says: ClassVar[str] = ""
    code: ClassVar[str] = ""

    def __init__(self, settings: Settings, ctx: RankContext, steps: int) -> None:
        self.settings, self.ctx, self.steps = settings, ctx, steps
        self.bad = ctx.rank == ctx.world_size - 1

    def wrapped(self, method: Method, forward: nn.Module) -> nn.Module:  # noqa: ARG002 - for those that override it
        """Act once, between wrapping the model and building its optimizer. Returns what training calls."""
        return forward

    def before_step(self, step: int, method: Method, optimizer: Optimizer, x: Tensor) -> None:
        """Act when the gradients are complete. step: counted from 1. x: [N, ...] this rank's last micro-batch."""

    def after_step(self, step: int, method: Method, optimizer: Optimizer) -> None:
        """Act when the parameters have been updated, before anything is saved."""

    @property
    def host(self) -> str | None:
        """Name of the machine for the metadata block; None for its real one."""
        return None
