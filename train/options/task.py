"""Options that say what is trained: model, data and optimization."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from train.data import AUGMENTATIONS, DATASETS
from train.models import MODELS, list_models
from train.options.parser import Print
from train.schedule import SCALES, SCHEDULES
from train.settings import DEFAULT, LEARNING_RATES

if TYPE_CHECKING:
    import argparse


# Of synthetic data.
SIZES = (
    ("image-size", "pixels along each edge (32)"),
    ("channels", "channels of an image (3)"),
    ("classes", "classes (10)"),
    ("train-samples", "training images (50,000); a tenth as many are for the test"),
)


def add_task(group: argparse._ArgumentGroup) -> None:
    """Add model and data."""
    group.add_argument(
        "--model", choices=MODELS, metavar="NAME", default=DEFAULT.model, help=f"{', '.join(MODELS)} (%(default)s)"
    )
    group.add_argument(
        "--list-models", action=Print, const=list_models, help="list the models with their sizes, and exit"
    )
    group.add_argument("--width", type=int, metavar="N", help="channels of the first layer (default: the model's own)")
    group.add_argument("--depth", type=int, metavar="N", help="layers of a pyramidnet; blocks of the transformer")
    group.add_argument("--alpha", type=int, metavar="N", help="channels that a pyramidnet adds over all its blocks")
    group.add_argument(
        "--data", choices=DATASETS, metavar="NAME", default=DEFAULT.data, help=f"{', '.join(DATASETS)} (%(default)s)"
    )
    group.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="folder of the data, which digits and synthetic do without"
    )
    group.add_argument(
        "--download",
        action="store_true",
        help="download the data into --data-dir if it is not there, on one rank of each machine; the others wait "
        "as long as --timeout says",
    )
    group.add_argument(
        "--augment",
        choices=AUGMENTATIONS,
        default=DEFAULT.augment,
        help="basic: shift and mirror; strong: also colours, RandAugment and erasing (%(default)s)",
    )
    for name, text in SIZES:
        group.add_argument(f"--{name}", type=int, metavar="N", help=f"{text}, with --data synthetic")
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
