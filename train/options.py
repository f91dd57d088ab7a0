"""The command-line options of run.py, and the parser class that all programs of the trainer share."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import signal
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from train.checkpoints.formats import FORMATS
from train.data import AUGMENTATIONS, DATASETS
from train.errors import UserError
from train.faults import FAULTS, list_faults
from train.launch.environment import is_group_requested, prints_for_all_ranks
from train.launch.options import add_options
from train.methods import METHODS
from train.models import MODELS, list_models
from train.schedule import SCALES, SCHEDULES
from train.settings import DEFAULT, LEARNING_RATES, Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from _typeshed import SupportsWrite

DESCRIPTION = "Train a model with a parallel method, and save one checkpoint per rank."
EXAMPLES = """examples:
  torchrun --nproc-per-node 2 train/run.py --save-per-rank          # ddp
  python train/run.py --spawn 2 --save-per-rank                     # the same
  python train/run.py --spawn 4 --method hsdp --sync-bn --amp bf16
  python train/run.py                                               # single
"""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UserError, and prints its help on one process only."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError with the message and a suggestion."""
        raise UserError(message + self._suggest(message))

    def _suggest(self, message: str) -> str:
        """Suggest the option or choice with the most similar spelling; Python does so itself since 3.14."""
        if "maybe you meant" in message:
            return ""
        typed, known, cutoff = "", [], 0.6
        if match := re.search(r"invalid choice: '(.+?)' \(choose from (.+)\)", message):
            typed, known = match[1], re.findall(r"[\w-]+", match[2])
        elif match := re.search(r"unrecognized arguments: (--[\w-]+)", message):
            # A higher cutoff, because the leading dashes make all options similar.
            typed, known, cutoff = match[1], list(self._option_string_actions), 0.75
        similar = difflib.get_close_matches(typed, known, n=1, cutoff=cutoff)
        return f"; did you mean {similar[0]}?" if similar else ""

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """Print the help once, for any number of processes."""
        if prints_for_all_ranks(os.environ):
            super().print_help(file)


class Print(argparse.Action):
    """Print the result of the function `const` once, for any number of processes, and exit."""

    def __init__(self, option_strings: list[str], dest: str, const: Callable[[], str], help: str) -> None:  # noqa: A002 - argparse's
        super().__init__(option_strings, dest, nargs=0, const=const, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        """Print and exit with code 0. Raises UserError if stdout is not writable."""
        if prints_for_all_ranks(os.environ):
            try:
                sys.stdout.write(self.const())
                sys.stdout.flush()
            except BrokenPipeError:  # for example `| head`; Python flushes the rest to /dev/null when it exits
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                parser.exit(128 + signal.SIGPIPE)
            except OSError as error:
                raise UserError(f"cannot write to stdout: {error.strerror}") from error
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of run.py; its defaults come from Settings."""
    parser = Parser(
        prog="run.py",
        usage="run.py [options]",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=DESCRIPTION,
        allow_abbrev=False,
    )
    _add_method(parser.add_argument_group("method"))
    add_options(parser)
    _add_modifiers(parser.add_argument_group("modifiers of the method"))
    _add_faults(parser.add_argument_group("injected faults"))
    _add_model_and_data(parser.add_argument_group("model and data"))
    _add_optimization(parser.add_argument_group("optimization"))
    _add_monitor(parser.add_argument_group("checks during training"))
    _add_output(parser.add_argument_group("output"))
    _add_logs(parser.add_argument_group("progress, logs and metrics"))
    return parser


def settings_from(args: argparse.Namespace) -> Settings:
    """Convert parsed arguments to the settings of a run: copy fields of the same name, and derive the rest."""
    derived: dict[str, Any] = {
        "method": args.method or ("ddp" if is_group_requested(os.environ, args) else "single"),
        "buffer_sync": not args.no_buffer_sync,
        "shuffle": not args.no_shuffle,
        "lr": LEARNING_RATES[args.optimizer] if args.lr is None else args.lr,
        "save_per_rank": args.save_per_rank or args.save_best or args.save_every is not None,
    }
    copied = {field.name: getattr(args, field.name) for field in fields(Settings) if field.name not in derived}
    return Settings(**copied, **derived)


def _add_method(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--method", choices=METHODS, help="default: ddp if several processes were started, otherwise single"
    )
    group.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="dp: replicas (default: all its GPUs, or 2); hsdp: replicas of the sharded model (default: 2)",
    )
    group.add_argument(
        "--average-every", type=int, metavar="N", help="localsgd: steps between model averages (default: 4)"
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="maximum time to wait for other ranks (default: %(default)s)",
    )


def _add_modifiers(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--sync-bn", action="store_true", help="compute BatchNorm over the samples of all ranks")
    group.add_argument("--no-buffer-sync", action="store_true", help="let each rank keep separate BatchNorm statistics")
    group.add_argument(
        "--amp",
        choices=("off", "bf16", "fp16"),
        default=DEFAULT.amp,
        help="mixed precision with torch.autocast; fp16 uses loss scaling (default: %(default)s)",
    )
    group.add_argument(
        "--accumulate",
        type=int,
        default=DEFAULT.accumulate,
        metavar="K",
        help="partition each rank's share into K micro-batches, and reduce gradients after the last (default: "
        "%(default)s)",
    )
    group.add_argument("--grad-clip", type=float, metavar="NORM", help="clip the norm of the whole gradient")
    group.add_argument(
        "--find-unused", action="store_true", help="let DDP search for parameters that are unused in a step"
    )
    group.add_argument(
        "--join",
        action="store_true",
        help="let ranks have different numbers of batches, with DDP's join context manager",
    )
    group.add_argument(
        "--compile", action="store_true", help="use torch.compile; the first step takes seconds to minutes"
    )
    group.add_argument(
        "--channels-last",
        action="store_true",
        help="use the memory format NHWC for images and weights; faster on many GPUs",
    )
    group.add_argument(
        "--comm-hook",
        choices=("none", "fp16", "bf16", "powersgd"),
        default=DEFAULT.comm_hook,
        help="gradient compression of DDP: none, 16-bit floats, or low-rank matrices (default: %(default)s)",
    )
    group.add_argument("--powersgd-rank", type=int, metavar="N", help="rank of powersgd's matrices (default: 1)")
    group.add_argument(
        "--powersgd-start", type=int, metavar="N", help="number of first steps without powersgd (default: 2)"
    )
    group.add_argument(
        "--ema",
        type=float,
        metavar="DECAY",
        help="also save an exponential moving average of the weights, for example with decay 0.999",
    )


def _add_faults(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--fault", metavar="NAME", choices=FAULTS, help="inject this fault; --list-faults prints the names"
    )
    group.add_argument("--fault-step", type=int, metavar="N", help="step of the fault (default: depends on the fault)")
    group.add_argument("--list-faults", action=Print, const=list_faults, help="list the faults with effects, and exit")


# Sizes of synthetic data.
SIZES = (
    ("image-size", "pixels along each edge", "32"),
    ("channels", "channels of an image", "3"),
    ("classes", "number of classes", "10"),
    ("train-samples", "training images, with a tenth as many test images", "50000"),
)


def _add_model_and_data(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        choices=MODELS,
        metavar="NAME",
        default=DEFAULT.model,
        help=f"{', '.join(MODELS)} (default: %(default)s)",
    )
    group.add_argument(
        "--list-models", action=Print, const=list_models, help="list the models with their sizes, and exit"
    )
    group.add_argument(
        "--width", type=int, metavar="N", help="channels of the first layer (default: depends on the model)"
    )
    group.add_argument("--depth", type=int, metavar="N", help="layers of a pyramidnet, blocks of the transformer")
    group.add_argument("--alpha", type=int, metavar="N", help="channels that a pyramidnet adds over all its blocks")
    group.add_argument(
        "--data",
        choices=DATASETS,
        metavar="NAME",
        default=DEFAULT.data,
        help=f"{', '.join(DATASETS)} (default: %(default)s)",
    )
    group.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="folder of the data; digits and synthetic need no folder"
    )
    group.add_argument(
        "--download",
        action="store_true",
        help="download missing data into --data-dir, on one rank per machine; other ranks wait up to --timeout",
    )
    group.add_argument(
        "--augment",
        choices=AUGMENTATIONS,
        default=DEFAULT.augment,
        help="basic: shift and mirror; strong: also color jitter, RandAugment and random erasing (default: "
        "%(default)s)",
    )
    for name, text, default in SIZES:
        group.add_argument(
            f"--{name}", type=int, metavar="N", help=f"{text}, for --data synthetic (default: {default})"
        )
    group.add_argument("--limit-train", type=int, metavar="N", help="use only the first N training samples")
    group.add_argument(
        "--keep-last",
        action="store_true",
        help="also train on the last, smaller batch of each epoch, if every share of it has at least 2 samples",
    )
    group.add_argument(
        "--workers",
        type=int,
        default=DEFAULT.workers,
        metavar="N",
        help="data loading processes per rank; 0: load in the rank itself (default: %(default)s)",
    )
    group.add_argument("--no-shuffle", action="store_true", help="use the same order in every epoch")


def _add_optimization(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--epochs", type=int, default=DEFAULT.epochs, metavar="N", help="number of epochs (default: %(default)s)"
    )
    group.add_argument("--max-steps", type=int, metavar="N", help="stop after N optimizer steps")
    group.add_argument(
        "--batch-size",
        type=int,
        default=DEFAULT.batch_size,
        metavar="N",
        help="global batch size, partitioned over the ranks; uneven shares are weighted exactly (default: %(default)s)",
    )
    group.add_argument(
        "--optimizer", choices=LEARNING_RATES, default=DEFAULT.optimizer, help="optimizer (default: %(default)s)"
    )
    rates = ", ".join(f"{name} {rate}" for name, rate in LEARNING_RATES.items())
    group.add_argument("--lr", type=float, help=f"peak learning rate of the schedule (default: {rates})")
    group.add_argument(
        "--lr-scale",
        choices=SCALES,
        default=DEFAULT.lr_scale,
        help="multiply --lr by the number of processes (linear) or its square root (sqrt). Use it if --batch-size "
        "grows with the number of processes; otherwise none is correct (default: %(default)s)",
    )
    group.add_argument(
        "--schedule",
        choices=SCHEDULES,
        default=DEFAULT.schedule,
        help="learning rate after warm-up (default: %(default)s)",
    )
    group.add_argument(
        "--warmup-steps", type=int, metavar="N", help="steps of linear warm-up (default: a tenth of the run)"
    )
    group.add_argument("--warmup-epochs", type=float, metavar="X", help="warm-up in epochs; may be a fraction")
    group.add_argument(
        "--momentum", type=float, default=DEFAULT.momentum, help="momentum of sgd (default: %(default)s)"
    )
    group.add_argument(
        "--weight-decay", type=float, default=DEFAULT.weight_decay, help="weight decay (default: %(default)s)"
    )
    group.add_argument(
        "--seed", type=int, default=DEFAULT.seed, help="seed of weights and sample order (default: %(default)s)"
    )


def _add_monitor(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--monitor",
        "--monitor-every",
        type=int,
        default=DEFAULT.monitor,
        metavar="N",
        help="check every N optimizer steps, and after the last step, that all ranks hold the same model (0: never). "
        "Use the longer name with torchrun, because --monitor is ambiguous among its own options",
    )
    group.add_argument(
        "--on-desync",
        choices=("raise", "warn", "resync"),
        help="if a check fails: exit with code 1, warn and continue, or repair the affected ranks (default: warn)",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--out",
        type=Path,
        default=DEFAULT.out,
        metavar="DIR",
        help="output folder. A run replaces the files of a finished run with the same method and modifiers, and is "
        "refused while such a run is active (default: %(default)s)",
    )
    group.add_argument("--save-per-rank", action="store_true", help="at the end, write DIR/<run>_rank<r>")
    group.add_argument(
        "--save-every",
        type=int,
        metavar="N",
        help="also write DIR/history/<run>/step_<n>/rank_<r> every N steps; implies --save-per-rank",
    )
    group.add_argument(
        "--save-best",
        action="store_true",
        help="keep DIR/best/<run>/rank_<r> of the epoch with the highest test accuracy; implies --save-per-rank",
    )
    group.add_argument(
        "--checkpoint-every",
        type=int,
        metavar="N",
        help="every N steps and after the last step, write the state for --resume to DIR/.resume/<run>",
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="resume from the newest state of --checkpoint-every in DIR, or start at step 0 without a state",
    )
    group.add_argument(
        "--save-format", choices=FORMATS, default=DEFAULT.save_format, help="checkpoint format (default: %(default)s)"
    )


def _add_logs(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--progress",
        choices=("auto", "bar", "plain", "none"),
        default="auto",
        help="auto: a bar on a terminal, otherwise a line per epoch (default: %(default)s)",
    )
    group.add_argument(
        "--eval-every",
        type=int,
        default=DEFAULT.eval_every,
        metavar="N",
        help="evaluate on the test set every N epochs, and after the last epoch (default: %(default)s)",
    )
    group.add_argument(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="write DIR/<run>/metrics.jsonl and a log per rank, replacing the logs of a run with the same name",
    )
    group.add_argument(
        "--log-interval",
        type=int,
        metavar="N",
        help="optimizer steps between records of --log-dir (default: 50); if set, --progress plain prints each record",
    )
    group.add_argument(
        "--tensorboard",
        action="store_true",
        help="also write the records of --log-dir for TensorBoard, which must be installed",
    )
