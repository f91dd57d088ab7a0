"""The settings of a run: a frozen record, and checks that need neither data nor a model."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from train.errors import UserError
from train.optional import MISSING

# Defaults of --lr, found on digits with resnet8 and a global batch of 32.
LEARNING_RATES = {"sgd": 0.1, "adamw": 0.005}
LARGEST = 3.4e38  # the maximum of float32, to which torch's optimizers convert rates
MOST_WORKERS = 1024  # per rank; each worker takes memory, so a larger number is probably a typing error
# Fields that do not affect training: paths, outputs and checks.
NOT_TRAINING = frozenset(
    {"data_dir", "download", "out", "save_per_rank", "save_every", "save_format", "save_best", "monitor", "on_desync"}
    | {"workers", "eval_every", "log_dir", "log_interval", "tensorboard", "checkpoint_every", "resume"}
)
# Fields that a user's task replaces.
OF_TASK = (
    *("model", "width", "depth", "alpha", "data", "data_dir", "download", "augment"),
    *("image_size", "channels", "classes", "train_samples"),
)
# Integers that need not be at least 1.
NOT_COUNTS = ("seed", "workers", "monitor", "warmup_steps", "powersgd_start")


@dataclass(frozen=True)
class Settings:
    """The settings of a run, one field for each option, with the defaults of the command line.

    None selects the default of the method, model or data set, unless the comment gives another meaning.
    """

    # The parallel method.
    method: str = "single"
    replicas: int | None = None  # of dp, or along the replicate dimension of hsdp
    average_every: int | None = None  # steps between averages of localsgd and diloco
    outer_lr: float | None = None  # learning rate of diloco's outer optimizer
    outer_momentum: float | None = None
    static_graph: bool = False  # let DDP rely on the order of gradients in the first step
    bucket_view: bool = False  # let gradients be views of DDP's buckets
    reshard_after_forward: str | None = None  # of FSDP: true, false, or a number of ranks
    cpu_offload: bool = False  # keep shards in the CPU's memory
    mp_policy: bool = False  # gather parameters and compute in bfloat16
    parallel_degree: int | None = None  # ranks that share one copy of the model: tp, pp, cp, ep
    sequence_parallel: bool = False  # tensor-parallel ranks have shards of the tokens between blocks
    loss_parallel: bool = False  # tensor-parallel ranks compute the loss from sharded logits
    context_mode: str | None = None  # how attention of cp communicates: allgather or ulysses
    pipeline_schedule: str | None = None  # of pp and pp_fsdp: 1f1b, gpipe, interleaved or zbv
    # Modifiers of the method.
    sync_bn: bool = False
    buffer_sync: bool = True
    amp: str = "off"  # or bf16, fp16
    accumulate: int = 1  # micro-batches per optimizer step
    grad_clip: float | None = None  # maximum norm of the whole gradient; None disables clipping
    find_unused: bool = False
    join: bool = False  # allow ranks to have different numbers of batches
    compile: bool = False  # use torch.compile
    channels_last: bool = False  # store the channels of a pixel contiguously (NHWC)
    cudnn_benchmark: bool = False  # let cuDNN choose its algorithms by timing them
    comm_hook: str = "none"  # or fp16, bf16, powersgd: compress gradients under DDP
    powersgd_rank: int | None = None  # columns of PowerSGD's matrices
    powersgd_start: int | None = None  # steps before PowerSGD starts
    ema: float | None = None  # decay of the moving average of the weights; None disables it
    # An injected fault.
    fault: str | None = None  # name
    fault_step: int | None = None  # optimizer step of the fault, counted from 1
    task: str | None = None  # package.module:Class of a user's task, with its own data and model
    # The network. width, depth and alpha: None for the network's default.
    model: str = "resnet8"
    width: int | None = None  # channels of the first layer
    depth: int | None = None  # layers or blocks
    alpha: int | None = None  # channels that a PyramidNet adds over all its blocks
    # The data. image_size, channels, classes and train_samples: of synthetic data.
    data: str = "digits"
    data_dir: Path | None = None
    download: bool = False  # download missing data
    augment: str = "none"  # random changes of training images: or basic, strong, timm
    image_size: int | None = None
    channels: int | None = None
    classes: int | None = None
    train_samples: int | None = None
    limit_train: int | None = None  # number of training samples; None: all
    shuffle: bool = True
    keep_last: bool = False  # also train on the last, smaller global batch of an epoch
    # The optimization.
    epochs: int = 10
    max_steps: int | None = None  # maximum number of optimizer steps
    batch_size: int = 32  # the global batch: samples per optimizer step, over all ranks and micro-batches
    optimizer: str = "sgd"
    lr: float = LEARNING_RATES["sgd"]  # peak of the schedule
    momentum: float = 0.9
    weight_decay: float = 5e-4
    lr_scale: str = "none"  # or linear, sqrt: with the number of shares of the global batch
    warmup_steps: int | None = None  # default of both: a tenth of the run
    warmup_epochs: float | None = None
    schedule: str = "cosine"  # or constant, after the warm-up
    seed: int = 0
    workers: int = 0  # data loading processes of each rank
    # Evaluation and checkpoints.
    eval_every: int = 1  # epochs between evaluations
    out: Path = Path("ckpts")
    save_per_rank: bool = False
    save_every: int | None = None  # optimizer steps between checkpoints; None: only at the end
    save_format: str = "pth"
    save_best: bool = False  # keep a checkpoint of the epoch with the best test metric
    # Logs. log_interval: optimizer steps between records; None for the default, and for no records on the terminal.
    log_dir: Path | None = None  # folder for logs and metrics; None disables them
    log_interval: int | None = None
    tensorboard: bool = False  # also write records for TensorBoard
    # States for --resume.
    checkpoint_every: int | None = None  # optimizer steps between states
    resume: bool = False  # continue from the newest state
    # Checks that all ranks hold the same model.
    monitor: int = 0  # optimizer steps between checks; 0 disables checks
    on_desync: Literal["raise", "warn", "resync"] | None = None  # reaction to a failed check; default: warn

    @property
    def run(self) -> str:
        """Return the name of the run: the method and its modifiers, used in file names and the metadata block."""
        powersgd_rank = (self.powersgd_rank or "") if self.comm_hook == "powersgd" else ""
        modifiers = {
            "seqparallel": self.sequence_parallel,
            "lossparallel": self.loss_parallel,
            "syncbn": self.sync_bn,
            "nobufsync": not self.buffer_sync,
            f"amp-{self.amp}": self.amp != "off",
            f"accum{self.accumulate}": self.accumulate > 1,
            f"clip{self.grad_clip or 0:g}": self.grad_clip is not None,
            "unused": self.find_unused,
            "join": self.join,
            "compile": self.compile,
            "channels-last": self.channels_last,
            f"hook-{self.comm_hook}{powersgd_rank}": self.comm_hook != "none",
            f"ema{self.ema or 0:g}": self.ema is not None,
            "static": self.static_graph,
            "offload": self.cpu_offload,
            "mp-bf16": self.mp_policy,
            f"fault-{self.fault}": self.fault is not None,
        }
        return "-".join([self.method, *(name for name, used in modifiers.items() if used)])

    def config(self, world_size: int) -> dict[str, Any]:
        """Return the settings that identify this run, as JSON values.

        Do not add values derived from `sync_bn`: syncheck must recognize two runs that differ only in this setting as a
        pair.
        """
        names = [field.name for field in fields(self) if field.name not in NOT_TRAINING]
        replaced = dict.fromkeys(set(OF_TASK) & set(names)) if self.task else {}
        return {name: getattr(self, name) for name in names} | replaced | {"world_size": world_size}


DEFAULT = Settings()


def check(settings: Settings, world_size: int) -> None:
    """Raise UserError for impossible settings. The result is equal on all ranks, because they have equal arguments."""
    s = settings
    _check_numbers(s)
    if s.tensorboard and s.log_dir is None:
        raise UserError("--tensorboard: requires --log-dir DIR, the folder to write to")
    if s.replicas == 1:
        raise UserError("--replicas 1: must be at least 2; for one replica use --method single (hsdp: fsdp)")
    if s.on_desync is not None and not s.monitor:
        raise UserError(f"--on-desync {s.on_desync}: requires --monitor N, the number of steps between checks")
    if s.reshard_after_forward not in (None, "true", "false") and not s.reshard_after_forward.strip("0").isdecimal():
        raise UserError(f"--reshard-after-forward {s.reshard_after_forward}: must be true, false, or a number of ranks")
    if s.static_graph and s.accumulate > 1:
        raise UserError("--static-graph: not with --accumulate: no_sync fails an internal assertion of DDP")
    if s.mp_policy and s.amp != "off":
        raise UserError(f"--mp-policy: not with --amp {s.amp}: both select the precision in which layers compute")
    for name in OF_TASK if s.task else ():
        if getattr(s, name) != getattr(DEFAULT, name):
            raise UserError(f"--{name.replace('_', '-')}: not with --task, which has its own data and model; omit it")
    for option, used in (("--monitor", s.monitor), ("--fault", s.fault)):
        if MISSING and used:
            raise UserError(f"{option}: {MISSING}; run in a clone of syncheck, or omit the option")
    check_hook(s)
    check_join(s, world_size)
    if s.fault_step is not None and s.fault is None:
        raise UserError("--fault-step: requires --fault NAME; see --list-faults")
    least = world_size * s.accumulate
    if s.batch_size < least:
        ranks = f"{world_size} rank{'s' * (world_size > 1)}"
        parts = f"{ranks} x {s.accumulate} micro-batches" if s.accumulate > 1 else ranks
        raise UserError(f"--batch-size {s.batch_size} (global) leaves some of {parts} empty; use {least} or more")


def _check_numbers(s: Settings) -> None:
    for field in fields(s):
        number = getattr(s, field.name)
        if field.type in ("int", "int | None") and field.name not in NOT_COUNTS and number is not None and number < 1:
            raise UserError(f"--{field.name.replace('_', '-')} {number}: must be at least 1")
    for name, valid, expected in (
        ("lr", math.isfinite(s.lr) and s.lr > 0, "a positive number"),
        ("outer_lr", s.outer_lr is None or (math.isfinite(s.outer_lr) and s.outer_lr > 0), "a positive number"),
        ("outer_momentum", s.outer_momentum is None or 0 <= s.outer_momentum < 1, "at least 0 and below 1"),
        ("grad_clip", s.grad_clip is None or (math.isfinite(s.grad_clip) and s.grad_clip > 0), "a positive number"),
        ("ema", s.ema is None or 0 < s.ema < 1, "between 0 and 1, for example 0.999"),
        ("momentum", 0 <= s.momentum < 1, "at least 0 and below 1"),
        ("weight_decay", 0 <= s.weight_decay <= LARGEST, f"from 0 to {LARGEST}"),
        ("seed", 0 <= s.seed < 2**63, "from 0 to 2**63 - 1"),
        ("warmup_steps", s.warmup_steps is None or s.warmup_steps >= 0, "at least 0"),
        ("warmup_epochs", s.warmup_epochs is None or 0 <= s.warmup_epochs < math.inf, "at least 0 and finite"),
        ("workers", 0 <= s.workers <= MOST_WORKERS, f"from 0 to {MOST_WORKERS}"),
        ("monitor", s.monitor >= 0, "a number of steps, or 0 for no checks"),
    ):
        if not valid:
            raise UserError(f"--{name.replace('_', '-')} {getattr(s, name)}: must be {expected}")
    if s.warmup_steps is not None and s.warmup_epochs is not None:
        raise UserError("--warmup-steps and --warmup-epochs: mutually exclusive")


def check_hook(settings: Settings) -> None:
    """Raise UserError for settings that the hook of --comm-hook does not support."""
    s = settings
    for option, number in (("--powersgd-rank", s.powersgd_rank), ("--powersgd-start", s.powersgd_start)):
        if number is not None and s.comm_hook != "powersgd":
            raise UserError(f"{option}: requires --comm-hook powersgd")
    if s.powersgd_start is not None and s.powersgd_start < 2:
        raise UserError(f"--powersgd-start {s.powersgd_start}: must be at least 2; earlier DDP may rebuild its buckets")
    if s.comm_hook == "powersgd" and s.amp == "fp16":
        raise UserError(
            "--comm-hook powersgd: not with --amp fp16: an overflow would remain in the error added to the next "
            "gradient; use --amp bf16"
        )


def check_join(settings: Settings, world_size: int) -> None:
    """Raise UserError for settings that need all ranks at every step."""
    s = settings
    if not s.join:
        return
    for option, used, reason in (
        ("--sync-bn", s.sync_bn, "ranks without batches do not take part in the collectives of its forward"),
        ("--amp fp16", s.amp == "fp16", "ranks without batches would miss changes of the loss scale; use --amp bf16"),
        ("--ema", s.ema is not None, "ranks without batches would stop updating their average"),
        ("--accumulate", s.accumulate > 1, "a rank's last batch may be too small to split"),
        ("--comm-hook powersgd", s.comm_hook == "powersgd", "join passes zeros to the hook, which change its state"),
        ("--log-dir", s.log_dir is not None, "its records are gathered at steps common to all ranks"),
        ("--log-interval", s.log_interval is not None, "its records are gathered at steps common to all ranks"),
        ("--fault", s.fault is not None, "injected faults need all ranks at every step"),
    ):
        if used:
            raise UserError(f"--join: not with {option}: {reason}")
    if s.batch_size % world_size:
        raise UserError(
            f"--join --batch-size {s.batch_size}: must be a multiple of {world_size}, because all batches have one size"
        )
