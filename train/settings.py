"""The settings of a run: a frozen record, and checks that need neither data nor a model."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from train.errors import UserError, refuse
from train.option import (
    CHECKS,
    DECAY,
    FINITE,
    MOMENTUM,
    NOT_NEGATIVE,
    POSITIVE,
    POWERSGD_START,
    SEED,
    WEIGHT_DECAY,
    WORKERS,
    option,
    spell,
)
from train.optional import MISSING

if TYPE_CHECKING:
    from collections.abc import Iterable

# Defaults of --lr, found on digits with resnet8 and a global batch of 32.
LEARNING_RATES = {"sgd": 0.1, "adamw": 0.005}


@dataclass(frozen=True)
class Settings:
    """The settings of a run, one field for each option, with the defaults of the command line.

    None selects the default of the method, model or data set, or disables what the option enables. The types of the
    fields are the types of the options.
    """

    # A run always has a method. The parser's default is None, so that `settings_from` can choose it by the launcher.
    method: str = option(
        "single", "default: ddp if several processes were started, otherwise single", group="method", default=None
    )
    replicas: int | None = option(
        None, "dp: replicas (default: all its GPUs, or 2); hsdp, hsdp_tp: replicas of the sharded model (default: 2)"
    )
    average_every: int | None = option(None, "localsgd, diloco: steps between averages (default: 4; diloco: 20)")
    outer_lr: float | None = option(
        None, "diloco: learning rate of the outer optimizer (default: 0.7)", numbers=POSITIVE
    )
    outer_momentum: float | None = option(
        None, "diloco: Nesterov momentum of the outer optimizer (default: 0.9)", numbers=MOMENTUM
    )
    static_graph: bool = option(False, "ddp, zero, localsgd: assume that every step uses the same parameters")
    bucket_view: bool = option(False, "ddp, zero, localsgd: store gradients in DDP's buckets only, which saves memory")
    reshard_after_forward: str | None = option(
        None,
        "fsdp, hsdp: free gathered parameters after forward (true, false), or keep shards of N ranks",
        metavar="true|false|N",
    )
    cpu_offload: bool = option(
        False, "fsdp, hsdp, replicate: keep parameters, gradients and optimizer in the CPU's memory"
    )
    mp_policy: bool = option(False, "fsdp, hsdp, replicate: gather parameters and compute in bf16, reduce in float32")
    parallel_degree: int | None = option(
        None, "tp, pp, cp, ep and combinations: ranks that share one copy of the model (default: depends on the method)"
    )
    sequence_parallel: bool = option(False, "tp and combinations: shard the tokens between blocks")
    loss_parallel: bool = option(False, "tp and combinations: compute the loss from logits sharded by vocabulary")
    context_mode: str | None = option(
        None, "cp: gather keys and values, or exchange tokens for heads (default: allgather)"
    )
    pipeline_schedule: str | None = option(
        None, "pp, pp_fsdp: order of the micro-batches in the pipeline (default: 1f1b)"
    )

    sync_bn: bool = option(False, "compute BatchNorm over the samples of all ranks", group="modifiers of the method")
    buffer_sync: bool = option(True, "let each rank keep separate BatchNorm statistics")
    amp: str = option(
        "off", "mixed precision with torch.autocast; fp16 uses loss scaling", choices=("off", "bf16", "fp16")
    )
    accumulate: int = option(
        1, "partition each rank's share into K micro-batches, and reduce gradients after the last", metavar="K"
    )
    grad_clip: float | None = option(None, "clip the norm of the whole gradient", metavar="NORM", numbers=POSITIVE)
    find_unused: bool = option(False, "let DDP search for parameters that are unused in a step")
    join: bool = option(False, "let ranks have different numbers of batches, with DDP's join context manager")
    compile: bool = option(False, "use torch.compile; the first step takes seconds to minutes")
    channels_last: bool = option(False, "use the memory format NHWC for images and weights; faster on many GPUs")
    cudnn_benchmark: bool = option(
        False, "let cuDNN time its algorithms for each shape of input, and use the fastest; for GPUs and equal shapes"
    )
    comm_hook: str = option(
        "none",
        "gradient compression of DDP: none, 16-bit floats, or low-rank matrices",
        choices=("none", "fp16", "bf16", "powersgd"),
    )
    powersgd_rank: int | None = option(None, "rank of powersgd's matrices (default: 1)")
    powersgd_start: int | None = option(
        None, "number of first steps without powersgd (default: 2)", numbers=POWERSGD_START
    )
    ema: float | None = option(
        None,
        "also save an exponential moving average of the weights, for example with decay 0.999",
        metavar="DECAY",
        numbers=DECAY,
    )

    fault: str | None = option(
        None, "inject this fault; --list-faults prints the names", metavar="NAME", group="injected faults"
    )
    fault_step: int | None = option(None, "step of the fault (default: depends on the fault)")

    task: str | None = option(
        None,
        "own data, model, loss and metrics: a subclass of train.task.Task; replaces --model and --data",
        metavar="MODULE:CLASS",
        group="model and data",
    )
    model: str = option("resnet8", metavar="NAME", replaced_by_task=True)
    width: int | None = option(
        None, "channels of the first layer (default: depends on the model)", replaced_by_task=True
    )
    depth: int | None = option(None, "layers of a pyramidnet, blocks of the transformer", replaced_by_task=True)
    alpha: int | None = option(None, "channels that a pyramidnet adds over all its blocks", replaced_by_task=True)
    data: str = option(
        "digits",
        "digits, synthetic, text, mnist, cifar10, cifar100 (default: text for a model of text, otherwise digits)",
        metavar="NAME",
        replaced_by_task=True,
        default=None,
    )
    data_dir: Path | None = option(
        None,
        "folder of the data; digits, text and synthetic need no folder",
        affects_training=False,
        replaced_by_task=True,
    )
    download: bool = option(
        False,
        "download missing data into --data-dir, on one rank per machine; other ranks wait up to --timeout",
        affects_training=False,
        replaced_by_task=True,
    )
    augment: str = option(
        "none",
        "basic: shift and mirror; strong: also color jitter, RandAugment and random erasing; "
        "timm: the transform of timm's create_transform, with crop, RandAugment and random erasing",
        replaced_by_task=True,
    )
    mixup: float = option(
        0.0, "mix each training sample with another one, by a weight of Beta(X, X)", metavar="X", numbers=FINITE,
        replaced_by_task=True,
    )  # fmt: skip
    label_smoothing: float = option(
        0.0,
        "share of the probability of a label that is spread over all classes",
        metavar="X",
        numbers=MOMENTUM,
        replaced_by_task=True,
    )
    image_size: int | None = option(
        None, "pixels along each edge, for --data synthetic (default: 32)", replaced_by_task=True
    )
    channels: int | None = option(
        None, "channels of an image, for --data synthetic (default: 3)", replaced_by_task=True
    )
    classes: int | None = option(None, "number of classes, for --data synthetic (default: 10)", replaced_by_task=True)
    train_samples: int | None = option(
        None,
        "training images, with a tenth as many test images, for --data synthetic (default: 50000)",
        replaced_by_task=True,
    )
    limit_train: int | None = option(None, "use only the first N training samples")
    shuffle: bool = option(True, "use the same order in every epoch")
    keep_last: bool = option(
        False, "also train on the last, smaller batch of each epoch, if every share of it has at least 2 samples"
    )
    workers: int = option(
        0, "data loading processes per rank; 0: load in the rank itself", numbers=WORKERS, affects_training=False
    )

    epochs: int = option(10, "number of epochs", group="optimization")
    max_steps: int | None = option(None, "stop after N optimizer steps")
    batch_size: int = option(32, "global batch size, partitioned over the ranks; uneven shares are weighted exactly")
    optimizer: str = option("sgd", "optimizer")
    lr: float = option(
        LEARNING_RATES["sgd"],
        "peak learning rate of the schedule (default: "
        + ", ".join(f"{name} {rate}" for name, rate in LEARNING_RATES.items())
        + ")",
        numbers=POSITIVE,
        default=None,
    )
    lr_scale: str = option(
        "none",
        "multiply --lr by the number of processes (linear) or its square root (sqrt). Use "
        "it if --batch-size grows with the number of processes; otherwise none is correct",
    )
    schedule: str = option("cosine", "learning rate after warm-up")
    warmup_steps: int | None = option(
        None, "steps of linear warm-up (default: a tenth of the run)", numbers=NOT_NEGATIVE
    )
    warmup_epochs: float | None = option(None, "warm-up in epochs; may be a fraction", metavar="X", numbers=FINITE)
    momentum: float = option(0.9, "momentum of sgd", numbers=MOMENTUM)
    weight_decay: float = option(5e-4, "weight decay", numbers=WEIGHT_DECAY)
    seed: int = option(0, "seed of weights and sample order", metavar=None, numbers=SEED)

    monitor: int = option(
        0,
        "check every N optimizer steps, and after the last step, that all ranks hold the same "
        "model (0: never). Use the longer name with torchrun, because --monitor is ambiguous among "
        "its own options",
        group="checks during training",
        aliases=("--monitor-every",),
        numbers=CHECKS,
        affects_training=False,
    )
    on_desync: Literal["raise", "warn", "resync"] | None = option(
        None,
        "if a check fails: exit with code 1, warn and continue, or repair the affected ranks (default: warn)",
        choices=("raise", "warn", "resync"),
        affects_training=False,
    )

    out: Path = option(
        Path("ckpts"),
        "output folder. A run replaces the files of a finished run with the same method "
        "and modifiers, and is refused while such a run is active",
        group="output",
        affects_training=False,
    )
    save_per_rank: bool = option(False, "at the end, write DIR/<run>_rank<r>", affects_training=False)
    save_every: int | None = option(
        None,
        "also write DIR/history/<run>/step_<n>/rank_<r> every N steps; implies --save-per-rank",
        affects_training=False,
    )
    save_best: bool = option(
        False,
        "keep DIR/best/<run>/rank_<r> of the epoch with the best test metric; implies --save-per-rank",
        affects_training=False,
    )
    checkpoint_every: int | None = option(
        None,
        "every N steps and after the last step, write the state for --resume to DIR/.resume/<run>",
        affects_training=False,
    )
    resume: bool = option(
        False,
        "resume from the newest state of --checkpoint-every in DIR, or start at step 0 without a state",
        affects_training=False,
    )
    save_format: str = option("pth", "checkpoint format", affects_training=False)

    eval_every: int = option(
        1,
        "evaluate on the test set every N epochs, and after the last epoch",
        group="progress, logs and metrics",
        affects_training=False,
    )
    log_dir: Path | None = option(
        None,
        "write DIR/<run>/metrics.jsonl and a log per rank, replacing the logs of a run with the same name",
        affects_training=False,
    )
    log_interval: int | None = option(
        None,
        "optimizer steps between records of --log-dir (default: 50); if set, --progress plain prints each record",
        affects_training=False,
    )
    tensorboard: bool = option(
        False, "also write the records of --log-dir for TensorBoard, which must be installed", affects_training=False
    )

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

    @property
    def has_stateless_optimizer(self) -> bool:
        """Return whether the optimizer keeps no state between steps: SGD without momentum."""
        return self.optimizer == "sgd" and self.momentum == 0

    def config(self, world_size: int) -> dict[str, Any]:
        """Return the settings that identify this run, as JSON values.

        Do not add values derived from `sync_bn`: syncheck must recognize two runs that differ only in this setting as a
        pair.
        """
        config: dict[str, Any] = {}
        for field in fields(self):
            if field.metadata["affects_training"]:
                replaced = self.task is not None and field.metadata["replaced_by_task"]
                config[field.name] = None if replaced else getattr(self, field.name)
        return config | {"world_size": world_size}

    def uses(self, option_text: str) -> bool:
        """Return whether the settings use an option: "--join" for another value than the default, or "--amp bf16"."""
        typed, _, value = option_text.partition(" ")
        name = OPTION_FIELDS[typed]
        if value:
            return str(getattr(self, name)) == value
        return bool(getattr(self, name) != getattr(DEFAULT, name))

    def list_used(self, option_texts: Iterable[str]) -> list[str]:
        """Return the options among these that the settings use."""
        return [option_text for option_text in option_texts if self.uses(option_text)]


DEFAULT = Settings()
# Fields by option, as users type it.
OPTION_FIELDS = {spell(field): field.name for field in fields(Settings)}


class Combination(NamedTuple):
    """Two options that exclude each other, or of which the first requires the second."""

    option: str
    second: str
    """The option that the first requires or excludes."""
    message: str
    """The error of a wrong combination. Braces contain names of settings."""
    required: bool = False
    """Whether the first option requires the second."""


COMBINATIONS = (
    Combination(
        "--tensorboard",
        "--log-dir",
        "--tensorboard: requires --log-dir DIR, the folder to write to",
        required=True,
    ),
    Combination(
        "--on-desync",
        "--monitor",
        "--on-desync {on_desync}: requires --monitor N, the number of steps between checks",
        required=True,
    ),
    Combination(
        "--fault-step",
        "--fault",
        "--fault-step: requires --fault NAME; see --list-faults",
        required=True,
    ),
    Combination(
        "--powersgd-rank",
        "--comm-hook powersgd",
        "--powersgd-rank: requires --comm-hook powersgd",
        required=True,
    ),
    Combination(
        "--powersgd-start",
        "--comm-hook powersgd",
        "--powersgd-start: requires --comm-hook powersgd",
        required=True,
    ),
    Combination(
        "--warmup-steps",
        "--warmup-epochs",
        "--warmup-steps and --warmup-epochs: mutually exclusive",
    ),
    Combination(
        "--static-graph",
        "--accumulate",
        "--static-graph: not with --accumulate: no_sync fails an internal assertion of DDP",
    ),
    Combination(
        "--mp-policy",
        "--amp",
        "--mp-policy: not with --amp {amp}: both select the precision in which layers compute",
    ),
    Combination(
        "--comm-hook powersgd",
        "--amp fp16",
        "--comm-hook powersgd: not with --amp fp16: an overflow would remain in the error added to the next "
        "gradient; use --amp bf16",
    ),
)
# Options that need all ranks at every step, and why, for --join.
NOT_WITH_JOIN = {
    "--sync-bn": "ranks without batches do not take part in the collectives of its forward",
    "--amp fp16": "ranks without batches would miss changes of the loss scale; use --amp bf16",
    "--ema": "ranks without batches would stop updating their average",
    "--accumulate": "a rank's last batch may be too small to split",
    "--comm-hook powersgd": "join passes zeros to the hook, which change its state",
    "--log-dir": "its records are gathered at steps common to all ranks",
    "--log-interval": "its records are gathered at steps common to all ranks",
    "--fault": "injected faults need all ranks at every step",
}


def check(settings: Settings, world_size: int) -> None:
    """Raise UserError for impossible settings. The result is equal on all ranks, because they have equal arguments."""
    check_numbers(settings)
    check_combinations(settings)
    check_task(settings)
    if settings.join:
        check_join(settings, world_size)
    if MISSING:
        for option_text in settings.list_used(("--monitor", "--fault")):
            raise UserError(f"{option_text}: {MISSING}; run in a clone of syncheck, or omit the option")
    check_batch_size(settings, world_size)


def check_numbers(settings: Settings) -> None:
    """Raise UserError for a number that its option does not accept."""
    for field in fields(settings):
        number, numbers = getattr(settings, field.name), field.metadata["numbers"]
        # The type bool is a subclass of int.
        if type(number) in (int, float) and not numbers.accept(number):
            raise UserError(f"{spell(field)} {number}: must be {numbers.expected}")
    group = settings.reshard_after_forward
    is_group = group in (None, "true", "false") or group.strip("0").isdecimal()
    refuse(
        (
            settings.replicas == 1,
            "--replicas 1: must be at least 2; for one replica use --method single (hsdp: fsdp)",
        ),
        (not is_group, f"--reshard-after-forward {group}: must be true, false, or a number of ranks"),
    )


def check_combinations(settings: Settings) -> None:
    """Raise UserError for options that exclude each other, and for an option without the option that it requires."""
    for combination in COMBINATIONS:
        if not settings.uses(combination.option):
            continue
        if settings.uses(combination.second) != combination.required:
            raise UserError(combination.message.format(**vars(settings)))


def check_task(settings: Settings) -> None:
    """Raise UserError for options that a user's task replaces."""
    if settings.task is None:
        return
    replaced = [spell(field) for field in fields(settings) if field.metadata["replaced_by_task"]]
    for option_text in settings.list_used(replaced):
        raise UserError(f"{option_text}: not with --task, which has its own data and model; omit it")


def check_batch_size(settings: Settings, world_size: int) -> None:
    """Raise UserError if a micro-batch would be empty."""
    least = world_size * settings.accumulate
    parts = f"{world_size} rank{'s' * (world_size > 1)}"
    if settings.accumulate > 1:
        parts += f" x {settings.accumulate} micro-batches"
    if settings.batch_size < least:
        raise UserError(
            f"--batch-size {settings.batch_size} (global) leaves some of {parts} empty; use {least} or more"
        )


def check_join(settings: Settings, world_size: int) -> None:
    """Raise UserError for settings that need all ranks at every step."""
    for option_text in settings.list_used(NOT_WITH_JOIN):
        raise UserError(f"--join: not with {option_text}: {NOT_WITH_JOIN[option_text]}")
    size = settings.batch_size
    if size % world_size:
        raise UserError(
            f"--join --batch-size {size}: must be a multiple of {world_size}, because all batches have one size"
        )
