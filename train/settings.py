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
APART = frozenset(
    {"data_dir", "download", "out", "save_per_rank", "save_every", "save_format", "save_best", "monitor", "on_desync"}
    | {"workers", "eval_every", "log_dir", "log_interval", "tensorboard", "checkpoint_every", "resume"}
)


@dataclass(frozen=True)
class Settings:
    """All that decides a run; the defaults are those of the command line.

    batch_size: samples per optimizer step, over all ranks and micro-batches together. accumulate:
    micro-batches per optimizer step. amp: off, bf16 or fp16. grad_clip: largest norm of the whole gradient. ema:
    decay of the weights' average, or None for no average.
    join: let ranks have unequal numbers of batches.
    compile: generate code for what training calls. channels_last: keep a pixel's channels beside each other in memory.
    comm_hook: what DDP sends of a gradient: none for all of it, fp16, bf16 or powersgd. powersgd_rank: columns of its
    matrices. powersgd_start: steps before it begins. None for the hook's own default.
    replicas: of dp, and along the replicate dimension of hsdp; None for the method's own default.
    average_every: steps between two averages of localsgd; None for its default. width: channels of the
    model's first layer, depth: its layers or blocks, alpha: channels that it adds; None for the model's own.
    download: fetch the data if it is not there. augment: how training images are changed at random. image_size,
    channels, classes, train_samples: of synthetic data; None for its own. lr: peak of the schedule. limit_train: keep
    this many training samples only. keep_last: train on the last, smaller global batch of an epoch too. save_every:
    optimizer steps between two saved steps. fault: name of a planted desync. fault_step: the optimizer step,
    counted from 1, at which it strikes; None for its own default. monitor: optimizer steps between two checks that all
    ranks hold the same model, 0 for none. on_desync: raise, warn or resync where they do not; None for warn.
    lr_scale: none, linear or sqrt, in the number of shares of the global batch. warmup_steps, warmup_epochs: of the
    learning rate's rise; None for a tenth of the run. schedule: cosine or constant, after it. workers: processes of
    each rank that load data. eval_every: epochs between two evaluations. save_best: keep a checkpoint of the best
    epoch. log_dir: folder of logs and metrics, None for none. log_interval: optimizer steps between two of their
    records, None for the default and no lines of their own on the terminal. tensorboard: write them for TensorBoard
    too.
    checkpoint_every: optimizer steps between two states from which the run can be resumed. resume: go on from the
    newest of them.
    """

    method: str = "single"
    replicas: int | None = None
    average_every: int | None = None
    sync_bn: bool = False
    buffer_sync: bool = True
    amp: str = "off"
    accumulate: int = 1
    grad_clip: float | None = None
    find_unused: bool = False
    join: bool = False
    compile: bool = False
    channels_last: bool = False
    comm_hook: str = "none"
    powersgd_rank: int | None = None
    powersgd_start: int | None = None
    ema: float | None = None
    fault: str | None = None
    fault_step: int | None = None
    model: str = "resnet8"
    width: int | None = None
    depth: int | None = None
    alpha: int | None = None
    data: str = "digits"
    data_dir: Path | None = None
    download: bool = False
    augment: str = "none"
    image_size: int | None = None
    channels: int | None = None
    classes: int | None = None
    train_samples: int | None = None
    limit_train: int | None = None
    shuffle: bool = True
    keep_last: bool = False
    epochs: int = 10
    max_steps: int | None = None
    batch_size: int = 32
    optimizer: str = "sgd"
    lr: float = LEARNING_RATES["sgd"]
    momentum: float = 0.9
    weight_decay: float = 5e-4
    lr_scale: str = "none"
    warmup_steps: int | None = None
    warmup_epochs: float | None = None
    schedule: str = "cosine"
    seed: int = 0
    workers: int = 0
    eval_every: int = 1
    out: Path = Path("ckpts")
    save_per_rank: bool = False
    save_every: int | None = None
    save_format: str = "pth"
    save_best: bool = False
    log_dir: Path | None = None
    log_interval: int | None = None
    tensorboard: bool = False
    checkpoint_every: int | None = None
    resume: bool = False
    monitor: int = 0
    on_desync: Literal["raise", "warn", "resync"] | None = None

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
        names = [field.name for field in fields(self) if field.name not in APART]
        return {name: getattr(self, name) for name in names} | {"world_size": world_size}


DEFAULT = Settings()


def check(settings: Settings, world_size: int) -> None:
    """Refuse what cannot work, with the reason. Equal on all ranks, for all have the same arguments.

    Raises UserError.
    """
    s = settings
    for option, number in (
        ("--epochs", s.epochs),
        ("--batch-size", s.batch_size),
        ("--width", s.width),
        ("--depth", s.depth),
        ("--alpha", s.alpha),
        ("--image-size", s.image_size),
        ("--channels", s.channels),
        ("--classes", s.classes),
        ("--train-samples", s.train_samples),
        ("--limit-train", s.limit_train),
        ("--max-steps", s.max_steps),
        ("--save-every", s.save_every),
        ("--checkpoint-every", s.checkpoint_every),
        ("--accumulate", s.accumulate),
        ("--replicas", s.replicas),
        ("--average-every", s.average_every),
        ("--fault-step", s.fault_step),
        ("--eval-every", s.eval_every),
        ("--log-interval", s.log_interval),
        ("--powersgd-rank", s.powersgd_rank),
    ):
        if number is not None and number < 1:
            raise UserError(f"{option} {number}: needs 1 or more")
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
    _check_running(s)
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
    if s.batch_size < world_size * s.accumulate:
        parts = f"{world_size} rank{'s' * (world_size > 1)}" + (
            f" x {s.accumulate} micro-batches" if s.accumulate > 1 else ""
        )
        least = world_size * s.accumulate
        raise UserError(f"--batch-size {s.batch_size} (global) leaves some of {parts} empty; use {least} or more")


def _check_running(s: Settings) -> None:
    if s.warmup_steps is not None and s.warmup_epochs is not None:
        raise UserError("--warmup-steps and --warmup-epochs: give one of them")
    if s.warmup_steps is not None and s.warmup_steps < 0:
        raise UserError(f"--warmup-steps {s.warmup_steps}: needs 0 or more")
    if s.warmup_epochs is not None and not (math.isfinite(s.warmup_epochs) and s.warmup_epochs >= 0):
        raise UserError(f"--warmup-epochs {s.warmup_epochs}: needs 0 or a positive number")
    if not 0 <= s.workers <= MOST_WORKERS:
        raise UserError(f"--workers {s.workers}: needs 0 to {MOST_WORKERS}")
    if s.tensorboard and s.log_dir is None:
        raise UserError("--tensorboard: needs --log-dir DIR, the folder to write to")


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
