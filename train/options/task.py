"""Options that say what is trained: model, data and optimization."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from train.data import DATASETS
from train.models import MODELS
from train.schedule import SCALES, SCHEDULES
from train.settings import DEFAULT, LEARNING_RATES

if TYPE_CHECKING:
    import argparse


def add_task(group: argparse._ArgumentGroup) -> None:
    """Add model and data."""
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
    group.add_argument(
        "--workers",
        type=int,
        default=DEFAULT.workers,
        metavar="N",
        help="processes of each rank that load data; 0: the rank itself (%(default)s)",
    )
    group.add_argument("--no-shuffle", action="store_true", help="the same order in every epoch")


def add_optimization(group: argparse._ArgumentGroup) -> None:
    """Add how long, with which batches and which optimizer."""
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
    group.add_argument("--lr", type=float, help=f"peak of warm-up and decay (default: {rates})")
    group.add_argument(
        "--lr-scale",
        choices=SCALES,
        default=DEFAULT.lr_scale,
        help="--lr is for one process: multiply it by the number of processes, or its root. For when you raise "
        "--batch-size, which is global, with them; where it stays, none is right (%(default)s)",
    )
    group.add_argument("--schedule", choices=SCHEDULES, default=DEFAULT.schedule, help="after warm-up (%(default)s)")
    group.add_argument("--warmup-steps", type=int, metavar="N", help="of a rising rate (a tenth of the run)")
    group.add_argument("--warmup-epochs", type=float, metavar="X", help="the same in epochs, also parts of one")
    group.add_argument("--momentum", type=float, default=DEFAULT.momentum, help="of sgd (%(default)s)")
    group.add_argument("--weight-decay", type=float, default=DEFAULT.weight_decay, help="(%(default)s)")
    group.add_argument("--seed", type=int, default=DEFAULT.seed, help="of weights and order (%(default)s)")
