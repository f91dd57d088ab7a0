"""The interface of injected faults, and a fault without effect."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, ClassVar, NoReturn

import torch
from torch import nn

from train.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import Tensor
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from train.checkpoints.checkpoint_files import Checkpoint
    from train.data import DistributedBatchSampler, OwnSharesSampler
    from train.launch import RankContext
    from train.methods.single import Method
    from train.settings import Settings

    TrainingSampler = DistributedBatchSampler | OwnSharesSampler


class Fault:
    """A fault without effect, and the base class of all faults.

    summary: description for --list-faults. code: the finding that syncheck should report. in_files: whether the ranks'
    files show it; otherwise `syncheck watch` does, while the run goes on. when: the default step: at "half" of the run,
    at the "last" step, or "always". fault_step: the step at which the fault occurs, counted from 1; 0 for
    "always". steps: of the whole run. early_save_step: a step after which the final files are written once before the
    end. methods: the methods in which the fault has an effect. needs: options without which it has no effect. refuses:
    options that prevent the effect. Both have a reason with the option to change; braces contain names of settings.

    Every hook is called on every rank. A hook that communicates must do so on all ranks, so that no rank waits forever.
    `is_faulty` marks the last rank, on which faults of a single rank occur.

    Raises UserError on all ranks if the fault cannot have an effect with these settings.
    """

    summary: ClassVar[str] = ""
    code: ClassVar[str] = ""
    in_files: ClassVar[bool] = True
    when: ClassVar[str] = "always"
    methods: ClassVar[tuple[str, ...]] = ("ddp",)
    needs: ClassVar[Mapping[str, str]] = {}
    refuses: ClassVar[Mapping[str, str]] = {}
    scaler: GradScaler  # set by FaultyTrainer
    # Builds the model of the run from torch's seed; set by the engine.
    build_model: Callable[[], nn.Module]
    early_save_step: int | None = None

    def __init__(self, settings: Settings, ctx: RankContext, steps: int) -> None:
        self.settings, self.ctx, self.steps = settings, ctx, steps
        self.is_faulty = ctx.rank == ctx.world_size - 1
        default = {"half": max(1, steps // 2), "last": steps, "always": 0}[self.when]
        self.fault_step = settings.fault_step or default
        self._check_options()
        self._check()

    def _check_options(self) -> None:
        for option_text, reason in self.needs.items():
            if not self.settings.uses(option_text):
                self.refuse(reason.format(**vars(self.settings)))
        for option_text in self.settings.list_used(self.refuses):
            self.refuse(self.refuses[option_text].format(**vars(self.settings)))

    def _check(self) -> None:
        """Call `refuse` if the fault cannot have an effect for another reason than the tables of options."""

    def changes_step(self, step: int) -> bool:
        """Return whether the fault occurs on this rank at this step."""
        return self.is_faulty and step == self.fault_step

    def change_sampler(self, sampler: TrainingSampler) -> TrainingSampler:
        """Return the sampler, changed so that this rank trains on other samples."""
        return sampler

    def after_wrap(self, method: Method, wrapped: nn.Module) -> nn.Module:  # noqa: ARG002 - for subclasses
        """Run once, after wrapping and before building the optimizer. Returns the module that training calls."""
        return wrapped

    def before_training(self, method: Method) -> None:
        """Run once, when each rank has its own stream of random numbers."""

    def around_step(self, step: int, method: Method) -> AbstractContextManager[None]:  # noqa: ARG002 - for subclasses
        """Return a context for the forward and backward passes and the update of a step. step: counted from 1."""
        return nullcontext()

    def before_step(self, step: int, method: Method, optimizer: Optimizer, x: Tensor) -> None:
        """Run when the gradients are complete. step: counted from 1. x: [N, ...] this rank's last micro-batch."""

    def should_update_average(self, step: int) -> bool:  # noqa: ARG002 - for subclasses
        """Return whether this rank updates the average of --ema after this step."""
        return True

    def after_step(self, step: int, method: Method, optimizer: Optimizer) -> None:
        """Run after the parameters have been updated and before anything is saved."""

    def after_resume(self, step: int, method: Method, optimizer: Optimizer) -> None:
        """Run after a state of this step has been restored."""

    def before_save(self, checkpoint: Checkpoint, *, final: bool) -> Checkpoint | None:  # noqa: ARG002 - for subclasses
        """Run before this rank's file is written. final: not a history file. Returns the content; None for no file."""
        return checkpoint

    def after_save(self, path: Path, *, final: bool) -> None:
        """Run after this rank's file is on disk. final: not in the history."""

    @property
    def host(self) -> str | None:
        """Return the host name for the metadata block, or None for the real host name."""
        return None

    def refuse(self, reason: str) -> NoReturn:
        """Raise UserError. reason: why the fault cannot have an effect, and what to change, in one line."""
        raise UserError(f"--fault {self.settings.fault}: {reason}")

    def refuse_overflow(self, method: Method) -> None:
        """Raise UserError, on all ranks, if every rank skips this step because a gradient overflowed in float16."""
        gradients = [p.grad for p in method.module.parameters() if p.grad is not None]
        if self.scaler.is_enabled() and not all(gradient.isfinite().all() for gradient in gradients):
            self.refuse(
                f"with --amp fp16 all ranks skip step {self.fault_step}, because a gradient overflowed; "
                "use a later --fault-step"
            )

    @contextmanager
    def fork_rng(self, seed: int) -> Iterator[None]:
        """Use `seed` for random numbers within the context, without affecting later random numbers."""
        with torch.random.fork_rng(devices=[self.ctx.device] if self.ctx.device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield


def find_classifier(module: nn.Module) -> tuple[str, nn.Linear]:
    """Return the name of the last linear layer, and the layer."""
    return [(name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Linear)][-1]
