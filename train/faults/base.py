"""What a planted desync may do to a run: nothing, unless it says otherwise."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, NoReturn

import torch
from torch import nn

from train.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from train.checkpoints.formats import Snapshot
    from train.launch import RankContext
    from train.methods.base import Method
    from train.settings import Settings


class Fault:
    """No fault; base of the others, and the places where they strike.

    says: what it does, for --list-faults. code: the finding that `syncheck` should make of it. when: the step
    at which it strikes without --fault-step: "half" of the run, or the "last"; "always" for one that is there
    all the time. at: that step, counted from 1; 0 for "always". steps: of the whole run. early: a step after which
    the final files are written too, to be replaced at the end.

    Every hook is called on every rank; one that communicates must do so on all of them, so that no rank waits
    for another. `bad` is the rank that goes wrong where a fault concerns only one: the last, for rank 0 is
    right no more often than any other.

    Raises UserError, on all ranks alike, where the settings leave it nothing to show.
    """

    says: ClassVar[str] = ""
    code: ClassVar[str] = ""
    when: ClassVar[str] = "always"
    scaler: GradScaler  # of the run; set by Step
    early: int | None = None

    def __init__(self, settings: Settings, ctx: RankContext, steps: int) -> None:
        self.settings, self.ctx, self.steps = settings, ctx, steps
        self.bad = ctx.rank == ctx.world_size - 1
        default = {"half": max(1, steps // 2), "last": steps, "always": 0}[self.when]
        self.at = settings.fault_step or default

    def wrapped(self, method: Method, forward: nn.Module) -> nn.Module:  # noqa: ARG002 - for those that override it
        """Act once, between wrapping the model and building its optimizer. Returns what training calls."""
        return forward

    def before_step(self, step: int, method: Method, optimizer: Optimizer, x: Tensor) -> None:
        """Act when the gradients are complete. step: counted from 1. x: [N, ...] this rank's last micro-batch."""

    def averages(self, step: int) -> bool:  # noqa: ARG002 - for those that override it
        """Whether the average of --ema is updated after this step, on this rank."""
        return True

    def after_step(self, step: int, method: Method, optimizer: Optimizer) -> None:
        """Act when the parameters have been updated, before anything is saved."""

    def resumed(self, step: int, method: Method, optimizer: Optimizer) -> None:
        """Act when a resumed run is again as it was after this step."""

    def saving(self, snapshot: Snapshot, *, final: bool) -> Snapshot | None:  # noqa: ARG002 - for those that override it
        """Act before this rank's file is written. final: not one of the history. Returns what to write, or None."""
        return snapshot

    def saved(self, path: Path, *, final: bool) -> None:
        """Act when this rank's file has reached the disk. final: not one of the history."""

    @property
    def host(self) -> str | None:
        """Name of the machine for the metadata block; None for its real one."""
        return None

    def refuse(self, reason: str) -> NoReturn:
        """Raise UserError. reason: why it cannot show, and what to do, in one line."""
        raise UserError(f"--fault {self.settings.fault}: {reason}")

    def refuse_overflow(self, method: Method) -> None:
        """Refuse to strike at a step that every rank leaves out, because a gradient overflowed in float16.

        The gradients are averaged, so all ranks find the same, and raise together.
        """
        gradients = [p.grad for p in method.module.parameters() if p.grad is not None]
        if self.scaler.is_enabled() and not all(gradient.isfinite().all() for gradient in gradients):
            self.refuse(
                f"with --amp fp16 all ranks leave step {self.at} out: a gradient overflowed; use a later --fault-step"
            )

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Draw random numbers from `seed` in the block; those drawn after it are as without the block."""
        with torch.random.fork_rng(devices=[self.ctx.device] if self.ctx.device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield


def classifier(module: nn.Module) -> tuple[str, nn.Linear]:
    """Find the last linear layer: its name and the layer."""
    return [(name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Linear)][-1]
