"""What one run is asked to do: a frozen record, and the checks that need neither data nor model."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from train.errors import UserError

# Used where --lr is not given. Found on digits with resnet8 at a global batch of 32.
LEARNING_RATES = {"sgd": 0.1, "adamw": 0.005}
LARGEST = 3.4e38  # of float32, to which torch's optimizers convert rates
MOST_WORKERS = 1024  # per rank; each takes memory, so more is a slip of the finger that stops the machine
# Fields that do not decide what is trained: where files lie, what is written and what is checked.
NOT_TRAINING = frozenset(
    {"data_dir", "download", "out", "save_per_rank", "save_every", "save_format", "save_best", "monitor", "on_desync"}
    | {"workers", "eval_every", "log_dir", "log_interval", "tensorboard", "checkpoint_every", "resume"}
)
# Fields that are numbers of something, of which there must be 1 at least.
COUNTS = (
    *("epochs", "batch_size", "width", "depth", "alpha", "image_size", "channels", "classes", "train_samples"),
    *("limit_train", "max_steps", "save_every", "checkpoint_every", "accumulate", "replicas", "average_every"),
    *("fault_step", "eval_every", "log_interval", "powersgd_rank"),
)


@dataclass(frozen=True)
class Settings:
    """All that decides a run, one field for each option; the defaults are those of the command line.

    A field of which None is allowed and nothing else is said leaves the choice to whoever it concerns.
    """

    # The parallel method.
    method: str = "single"
    replicas: int | None = None  # of dp, and along the replicate dimension of hsdp
    average_every: int | None = None  # steps between two averages of localsgd
    # What changes it.
    sync_bn: bool = False
    buffer_sync: bool = True
    amp: str = "off"  # or bf16, fp16
    accumulate: int = 1  # micro-batches per optimizer step
    grad_clip: float | None = None  # largest norm of the whole gradient; None for no clipping
    find_unused: bool = False
    join: bool = False  # let ranks have unequal numbers of batches
    compile: bool = False  # generate code for what training calls
    channels_last: bool = False  # keep a pixel's channels beside each other in memory (NHWC)
    comm_hook: str = "none"  # what DDP sends of a gradient: all of it, or fp16, bf16, powersgd
    powersgd_rank: int | None = None  # columns of its matrices
    powersgd_start: int | None = None  # steps before it begins
    ema: float | None = None  # decay of the weights' average; None for no average
    # A planted desync.
    fault: str | None = None  # its name
    fault_step: int | None = None  # the optimizer step, counted from 1, at which it strikes
    # The network. width, depth and alpha: None for the network's own.
    model: str = "resnet8"
    width: int | None = None  # channels of the first layer
    depth: int | None = None  # layers or blocks
    alpha: int | None = None  # channels that a PyramidNet adds over all its blocks
    # The data. image_size, channels, classes and train_samples: of synthetic data.
    data: str = "digits"
    data_dir: Path | None = None
    download: bool = False  # fetch the data if it is not there
    augment: str = "none"  # how training images are changed at random: basic, strong
    image_size: int | None = None
    channels: int | None = None
    classes: int | None = None
    train_samples: int | None = None
    limit_train: int | None = None  # keep this many training samples only; None for all
    shuffle: bool = True
    keep_last: bool = False  # train on the last, smaller global batch of an epoch too
    # The optimization.
    epochs: int = 10
    max_steps: int | None = None  # optimizer steps after which the run ends, if the epochs have more
    batch_size: int = 32  # samples per optimizer step, over all ranks and micro-batches together: the global batch
    optimizer: str = "sgd"
    lr: float = LEARNING_RATES["sgd"]  # peak of the schedule
    momentum: float = 0.9
    weight_decay: float = 5e-4
    lr_scale: str = "none"  # or linear, sqrt: in the number of shares of the global batch
    warmup_steps: int | None = None  # of the learning rate's rise; None here and below for a tenth of the run
    warmup_epochs: float | None = None
    schedule: str = "cosine"  # after the rise; or constant
    seed: int = 0
    workers: int = 0  # processes of each rank that load data
    # What is measured and saved.
    eval_every: int = 1  # epochs between two evaluations
    out: Path = Path("ckpts")
    save_per_rank: bool = False
    save_every: int | None = None  # optimizer steps between two checkpoints on the way; None for none
    save_format: str = "pth"
    save_best: bool = False  # keep a checkpoint of the epoch that was best on the test set
    # What is logged. log_interval: optimizer steps between two records; None: the default, and none on the terminal.
    log_dir: Path | None = None  # folder of logs and metrics; None for none
    log_interval: int | None = None
    tensorboard: bool = False  # write the records for TensorBoard too
    # Going on after an interruption.
    checkpoint_every: int | None = None  # optimizer steps between two states that --resume can go on from
    resume: bool = False  # go on from the newest of them
    # Checks that all ranks hold the same model.
    monitor: int = 0  # optimizer steps between two checks; 0 for none
    on_desync: Literal["raise", "warn", "resync"] | None = None  # where they do not; None for warn

    @property
    def run(self) -> str:
        """The method with its modifiers: names files, and the run in the metadata block."""
        parts = [self.method]
        if self.sync_bn:
            parts.append("syncbn")
        if not self.buffer_sync:
            parts.append("nobufsync")
        if self.amp != "off":
            parts.append(f"amp-{self.amp}")
        if self.accumulate > 1:
            parts.append(f"accum{self.accumulate}")
        if self.grad_clip is not None:
            parts.append(f"clip{self.grad_clip:g}")
        if self.find_unused:
            parts.append("unused")
        if self.join:
            parts.append("join")
        if self.compile:
            parts.append("compile")
        if self.channels_last:
            parts.append("channels-last")
        if self.comm_hook != "none":
            rank = self.powersgd_rank if self.comm_hook == "powersgd" else None
            parts.append(f"hook-{self.comm_hook}{rank or ''}")
        if self.ema is not None:
            parts.append(f"ema{self.ema:g}")
        if self.fault is not None:
            parts.append(f"fault-{self.fault}")
        return "-".join(parts)

    def config(self, world_size: int) -> dict[str, Any]:
        """Collect what distinguishes this run from others, as JSON values.

        Nothing derived from `sync_bn` is in it, so that two runs that differ only there are seen to be a
        pair.
        """
        names = [field.name for field in fields(self) if field.name not in NOT_TRAINING]
        return {name: getattr(self, name) for name in names} | {"world_size": world_size}


DEFAULT = Settings()


def check(settings: Settings, world_size: int) -> None:
    """Refuse what cannot work, with the reason. Equal on all ranks, for all have the same arguments.

    Raises UserError.
    """
    s = settings
    _check_counts(s)
    _check_optimization(s)
    if not 0 <= s.workers <= MOST_WORKERS:
        raise UserError(f"--workers {s.workers}: needs 0 to {MOST_WORKERS}")
    if s.tensorboard and s.log_dir is None:
        raise UserError("--tensorboard: needs --log-dir DIR, the folder to write to")
    if s.replicas == 1:
        raise UserError("--replicas 1: needs 2 or more; one replica is --method single, for hsdp --method fsdp")
    if s.monitor < 0:
        raise UserError(f"--monitor {s.monitor}: needs a number of steps, or 0 for no checks")
    if s.on_desync is not None and not s.monitor:
        raise UserError(f"--on-desync {s.on_desync}: needs --monitor N, the number of steps between two checks")
    check_hook(s)
    check_join(s, world_size)
    if s.fault_step is not None and s.fault is None:
        raise UserError("--fault-step: needs --fault; --list-faults names them")
    least = world_size * s.accumulate
    if s.batch_size < least:
        ranks = f"{world_size} rank{'s' * (world_size > 1)}"
        parts = f"{ranks} x {s.accumulate} micro-batches" if s.accumulate > 1 else ranks
        raise UserError(f"--batch-size {s.batch_size} (global) leaves some of {parts} empty; use {least} or more")


def _check_counts(s: Settings) -> None:
    for name in COUNTS:
        number = getattr(s, name)
        if number is not None and number < 1:
            raise UserError(f"--{name.replace('_', '-')} {number}: needs 1 or more")


def _check_optimization(s: Settings) -> None:
    if not (math.isfinite(s.lr) and s.lr > 0):
        raise UserError(f"--lr {s.lr}: needs a positive number")
    if s.grad_clip is not None and not (math.isfinite(s.grad_clip) and s.grad_clip > 0):
        raise UserError(f"--grad-clip {s.grad_clip}: needs a positive number")
    if s.ema is not None and not 0 < s.ema < 1:
        raise UserError(f"--ema {s.ema}: needs a number between 0 and 1, like 0.999")
    if not 0 <= s.momentum < 1:
        raise UserError(f"--momentum {s.momentum}: needs a number from 0 to below 1")
    if not 0 <= s.weight_decay <= LARGEST:
        raise UserError(f"--weight-decay {s.weight_decay}: needs 0 or a positive number up to {LARGEST}")
    if not 0 <= s.seed < 2**63:
        raise UserError(f"--seed {s.seed}: needs a number from 0 to 2**63 - 1")
    if s.warmup_steps is not None and s.warmup_epochs is not None:
        raise UserError("--warmup-steps and --warmup-epochs: give one of them")
    if s.warmup_steps is not None and s.warmup_steps < 0:
        raise UserError(f"--warmup-steps {s.warmup_steps}: needs 0 or more")
    if s.warmup_epochs is not None and not (math.isfinite(s.warmup_epochs) and s.warmup_epochs >= 0):
        raise UserError(f"--warmup-epochs {s.warmup_epochs}: needs 0 or a positive number")


def check_hook(settings: Settings) -> None:
    """Refuse what the hook of --comm-hook cannot do. Raises UserError."""
    s = settings
    for option, number in (("--powersgd-rank", s.powersgd_rank), ("--powersgd-start", s.powersgd_start)):
        if number is not None and s.comm_hook != "powersgd":
            raise UserError(f"{option}: needs --comm-hook powersgd")
    if s.powersgd_start is not None and s.powersgd_start < 2:
        raise UserError(f"--powersgd-start {s.powersgd_start}: needs 2 or more; DDP may change its buckets before")
    if s.comm_hook == "powersgd" and s.amp == "fp16":
        raise UserError(
            "--comm-hook powersgd: not with --amp fp16: an overflow would stay in the error that it adds to the next "
            "gradient; use --amp bf16"
        )


def check_join(settings: Settings, world_size: int) -> None:
    """Refuse what would wait for ranks that have no batch left, or what their last steps would be missing in.

    Raises UserError.
    """
    s = settings
    if not s.join:
        return
    for option, used, reason in (
        ("--sync-bn", s.sync_bn, "its forward sends statistics, for which join has no answer on ranks that are done"),
        ("--amp fp16", s.amp == "fp16", "ranks that are done would not hear of a new loss scale; use --amp bf16"),
        ("--ema", s.ema is not None, "ranks that are done would take no more weights into their average"),
        ("--accumulate", s.accumulate > 1, "a rank's last batch may be too small to be split"),
        ("--comm-hook powersgd", s.comm_hook == "powersgd", "join gives its hook zeros, which would change its memory"),
        ("--log-dir", s.log_dir is not None, "its records are gathered at steps that all ranks make"),
        ("--log-interval", s.log_interval is not None, "its records are gathered at steps that all ranks make"),
        ("--fault", s.fault is not None, "planted desyncs need all ranks at every step"),
    ):
        if used:
            raise UserError(f"--join: not with {option}: {reason}")
    if s.batch_size % world_size:
        raise UserError(
            f"--join --batch-size {s.batch_size}: every rank's batches are of one size; use a multiple of {world_size}"
        )
