"""The options of run.py, and the settings that they make."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from train.checkpoint import FORMATS
from train.data import DATASETS
from train.errors import UserError
from train.faults import FAULTS, list_faults
from train.launch import add_options, launched, speaks
from train.methods import METHODS
from train.models import MODELS
from train.settings import LEARNING_RATES, Settings

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

DESCRIPTION = "Train a model under a parallel method and save one checkpoint per rank."
EXAMPLES = """examples:
  torchrun --nproc-per-node 2 train/run.py --save-per-rank          # ddp
  python train/run.py --spawn 2 --save-per-rank                     # the same
  python train/run.py --spawn 4 --method hsdp --sync-bn --amp bf16
  python train/run.py                                               # single
"""
DEFAULT = Settings()


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that says what is wrong in one line, once."""

    def error(self, message: str) -> NoReturn:
        """Hand over to the place where all mistakes are reported."""
        raise UserError(message)

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """Print the help once, whatever the number of processes."""
        if speaks(os.environ):
            super().print_help(file)


class ListFaults(argparse.Action):
    """Print the table of the faults once and leave."""

    def __init__(self, option_strings: list[str], dest: str, help: str | None = None) -> None:  # noqa: A002 - argparse's
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        """Leave with 0: it was asked for."""
        if speaks(os.environ):
            sys.stdout.write(list_faults())
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """List the options; their defaults are those of Settings."""
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
    _add_faults(parser.add_argument_group("planted desyncs, to see what they look like"))
    _add_task(parser.add_argument_group("model and data"))
    _add_optimization(parser.add_argument_group("optimization"))
    _add_monitor(parser.add_argument_group("checks while it trains"))
    _add_output(parser.add_argument_group("output"))
    return parser


def _add_method(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--method", choices=METHODS, help="default: ddp where several processes were started, else single"
    )
    group.add_argument(
        "--replicas", type=int, metavar="N", help="dp: replicas (its GPUs, or 2); hsdp: copies of the sharded model (2)"
    )
    group.add_argument(
        "--average-every", type=int, metavar="N", help="localsgd: steps between two averages of the models (4)"
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="wait this long for other ranks (%(default)s)",
    )


def _add_modifiers(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--sync-bn", action="store_true", help="BatchNorm over the samples of all ranks")
    group.add_argument("--no-buffer-sync", action="store_true", help="let each rank keep its own BatchNorm statistics")
    group.add_argument(
        "--amp",
        choices=("off", "bf16", "fp16"),
        default=DEFAULT.amp,
        help="mixed precision by torch.autocast, with loss scaling for fp16 (%(default)s)",
    )
    group.add_argument(
        "--accumulate",
        type=int,
        default=DEFAULT.accumulate,
        metavar="K",
        help="split each rank's share into K micro-batches; gradients are reduced after the last (%(default)s)",
    )
    group.add_argument("--grad-clip", type=float, metavar="NORM", help="clip the norm of the whole gradient")
    group.add_argument(
        "--find-unused", action="store_true", help="let DDP look for parameters that a step does not use"
    )
    group.add_argument(
        "--ema", type=float, metavar="DECAY", help="also keep and save the moving average of the weights, like 0.999"
    )


def _add_faults(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--fault", metavar="NAME", choices=FAULTS, help="plant one; --list-faults names them")
    group.add_argument("--fault-step", type=int, metavar="N", help="the step at which it strikes (default: its own)")
    group.add_argument("--list-faults", action=ListFaults, help="list the faults and what each does, and exit")


def _add_task(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model", choices=MODELS, metavar="NAME", default=DEFAULT.model, help=f"{', '.join(MODELS)} (%(default)s)"
    )
    group.add_argument("--width", type=int, help="channels of the first layer (default: the model's own)")
    group.add_argument("--data", choices=DATASETS, default=DEFAULT.data, help="(%(default)s)")
    group.add_argument("--data-dir", type=Path, metavar="DIR", help="folder of the data (default: the clone's own)")
    group.add_argument("--limit-train", type=int, metavar="N", help="use the first N training samples only")
    group.add_argument(
        "--keep-last",
        action="store_true",
        help="train on the last, smaller batch of each epoch too, if every share of it has 2 samples or more",
    )
    group.add_argument("--no-shuffle", action="store_true", help="the same order in every epoch")


def _add_optimization(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--epochs", type=int, default=DEFAULT.epochs, metavar="N", help="(%(default)s)")
    group.add_argument(
        "--max-steps", type=int, metavar="N", help="end after N optimizer steps, if the epochs have more"
    )
    group.add_argument(
        "--batch-size",
        type=int,
        default=DEFAULT.batch_size,
        metavar="N",
        help="global batch, split over the ranks; an uneven split is weighted exactly (%(default)s)",
    )
    group.add_argument("--optimizer", choices=LEARNING_RATES, default=DEFAULT.optimizer, help="(%(default)s)")
    rates = ", ".join(f"{name} {rate}" for name, rate in LEARNING_RATES.items())
    group.add_argument("--lr", type=float, help=f"peak of warm-up and cosine decay (default: {rates})")
    group.add_argument("--momentum", type=float, default=DEFAULT.momentum, help="of sgd (%(default)s)")
    group.add_argument("--weight-decay", type=float, default=DEFAULT.weight_decay, help="(%(default)s)")
    group.add_argument("--seed", type=int, default=DEFAULT.seed, help="of weights and order (%(default)s)")


def _add_monitor(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--monitor",
        "--monitor-every",
        type=int,
        default=DEFAULT.monitor,
        metavar="N",
        help="check every N optimizer steps, and after the last, that all ranks hold the same model (0: "
        "never); the longer name is for torchrun, which may take the shorter for an option of its own",
    )
    group.add_argument(
        "--on-desync",
        choices=("raise", "warn", "resync"),
        help="where they do not: end with exit code 1, say so and go on, or repair the ranks that are apart (warn)",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--out",
        type=Path,
        default=DEFAULT.out,
        metavar="DIR",
        help="(%(default)s); a run replaces one of the same method and modifiers",
    )
    group.add_argument("--save-per-rank", action="store_true", help="at the end, write DIR/<run>_rank<r>")
    group.add_argument(
        "--save-every",
        type=int,
        metavar="N",
        help="also write DIR/history/<run>/step_<n>/rank_<r> every N steps; implies --save-per-rank",
    )
    group.add_argument("--save-format", choices=FORMATS, default=DEFAULT.save_format, help="(%(default)s)")
    group.add_argument(
        "--progress",
        choices=("auto", "bar", "plain", "none"),
        default="auto",
        help="a bar on a terminal, else a line per epoch (%(default)s)",
    )


def settings_from(args: argparse.Namespace) -> Settings:
    """Turn parsed arguments into the settings of a run."""
    return Settings(
        method=args.method or ("ddp" if launched(os.environ, args) else "single"),
        replicas=args.replicas,
        average_every=args.average_every,
        sync_bn=args.sync_bn,
        buffer_sync=not args.no_buffer_sync,
        amp=args.amp,
        accumulate=args.accumulate,
        grad_clip=args.grad_clip,
        find_unused=args.find_unused,
        ema=args.ema,
        fault=args.fault,
        fault_step=args.fault_step,
        model=args.model,
        width=args.width,
        data=args.data,
        data_dir=args.data_dir,
        limit_train=args.limit_train,
        shuffle=not args.no_shuffle,
        keep_last=args.keep_last,
        epochs=args.epochs,
        max_steps=args.max_steps,
        batch_size=args.batch_size,
        optimizer=args.optimizer,
        lr=LEARNING_RATES[args.optimizer] if args.lr is None else args.lr,
        momentum=args.momentum,
        weight_decay=args.weight_decay,
        seed=args.seed,
        out=args.out,
        save_per_rank=args.save_per_rank or args.save_every is not None,
        save_every=args.save_every,
        save_format=args.save_format,
        monitor=args.monitor,
        on_desync=args.on_desync,
    )
