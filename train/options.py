"""The options of run.py, and the settings that they make."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from train.checkpoint import FORMATS
from train.data import DATASETS
from train.errors import UserError
from train.launch import launched
from train.methods import METHODS
from train.models import MODELS
from train.settings import LEARNING_RATES, Settings

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

DESCRIPTION = "Train a model under a parallel method and save one checkpoint per rank."
DEFAULT = Settings()


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that says what is wrong in one line, once."""

    def error(self, message: str) -> NoReturn:
        """Hand over to the place where all mistakes are reported."""
        raise UserError(message)

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """Print the help on rank 0 only."""
        if os.environ.get("RANK", "0") == "0":
            super().print_help(file)


def build_parser() -> argparse.ArgumentParser:
    """List the options; their defaults are those of Settings."""
    parser = Parser(prog="run.py", description=DESCRIPTION, allow_abbrev=False)
    method = parser.add_argument_group("method")
    method.add_argument("--method", choices=METHODS, help="default: ddp under torchrun, single without")
    method.add_argument("--sync-bn", action="store_true", help="BatchNorm over the samples of all ranks")
    method.add_argument("--no-buffer-sync", action="store_true", help="let each rank keep its own BatchNorm statistics")
    method.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="wait this long for other ranks (%(default)s)",
    )

    task = parser.add_argument_group("model and data")
    task.add_argument("--model", choices=MODELS, default=DEFAULT.model, help="(%(default)s)")
    task.add_argument("--width", type=int, help="channels of the first layer (default: the model's own)")
    task.add_argument("--data", choices=DATASETS, default=DEFAULT.data, help="(%(default)s)")
    task.add_argument("--data-dir", type=Path, metavar="DIR", help="folder of the data (default: the clone's own)")
    task.add_argument("--limit-train", type=int, metavar="N", help="use the first N training samples only")
    task.add_argument("--no-shuffle", action="store_true", help="the same order in every epoch")

    run = parser.add_argument_group("optimization")
    run.add_argument("--epochs", type=int, default=DEFAULT.epochs, metavar="N", help="(%(default)s)")
    run.add_argument("--max-steps", type=int, metavar="N", help="end after N optimizer steps, if the epochs have more")
    run.add_argument(
        "--batch-size",
        type=int,
        default=DEFAULT.batch_size,
        metavar="N",
        help="global batch, split over the ranks; an uneven split is weighted exactly (%(default)s)",
    )
    run.add_argument("--optimizer", choices=LEARNING_RATES, default=DEFAULT.optimizer, help="(%(default)s)")
    rates = ", ".join(f"{name} {rate}" for name, rate in LEARNING_RATES.items())
    run.add_argument("--lr", type=float, help=f"peak of warm-up and cosine decay (default: {rates})")
    run.add_argument("--momentum", type=float, default=DEFAULT.momentum, help="of sgd (%(default)s)")
    run.add_argument("--weight-decay", type=float, default=DEFAULT.weight_decay, help="(%(default)s)")
    run.add_argument("--seed", type=int, default=DEFAULT.seed, help="of weights and order (%(default)s)")

    output = parser.add_argument_group("output")
    output.add_argument("--out", type=Path, default=DEFAULT.out, metavar="DIR", help="(%(default)s)")
    output.add_argument("--save-per-rank", action="store_true", help="at the end, write DIR/<run>_rank<r>")
    output.add_argument(
        "--save-every",
        type=int,
        metavar="N",
        help="also write DIR/history/<run>/step_<n>/rank_<r> every N steps; implies --save-per-rank",
    )
    output.add_argument("--save-format", choices=FORMATS, default=DEFAULT.save_format, help="(%(default)s)")
    output.add_argument(
        "--progress",
        choices=("auto", "bar", "plain", "none"),
        default="auto",
        help="a bar on a terminal, else a line per epoch (%(default)s)",
    )
    return parser


def settings_from(args: argparse.Namespace) -> Settings:
    """Turn parsed arguments into the settings of a run."""
    return Settings(
        method=args.method or ("ddp" if launched(os.environ) else "single"),
        sync_bn=args.sync_bn,
        buffer_sync=not args.no_buffer_sync,
        model=args.model,
        width=args.width,
        data=args.data,
        data_dir=args.data_dir,
        limit_train=args.limit_train,
        shuffle=not args.no_shuffle,
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
    )
