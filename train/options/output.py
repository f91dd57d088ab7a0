"""Options that say what is checked, saved and shown; none changes what is trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from train.checkpoints.formats import FORMATS
from train.settings import DEFAULT

if TYPE_CHECKING:
    import argparse


def add_monitor(group: argparse._ArgumentGroup) -> None:
    """Add the checks while it trains."""
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


def add_output(group: argparse._ArgumentGroup) -> None:
    """Add what is saved."""
    group.add_argument(
        "--out",
        type=Path,
        default=DEFAULT.out,
        metavar="DIR",
        help="(%(default)s); a run replaces an ended one of the same method and modifiers, and a live one keeps it out",
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
        help="keep DIR/best/<run>/rank_<r> of the epoch that was best on the test set; implies --save-per-rank",
    )
    group.add_argument(
        "--checkpoint-every",
        type=int,
        metavar="N",
        help="every N steps and after the last, write what --resume needs to DIR/.resume/<run>",
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest state that --checkpoint-every has left in DIR; at step 0 if there was none",
    )
    group.add_argument("--save-format", choices=FORMATS, default=DEFAULT.save_format, help="(%(default)s)")


def add_records(group: argparse._ArgumentGroup) -> None:
    """Add what is measured, shown and logged while it trains."""
    group.add_argument(
        "--progress",
        choices=("auto", "bar", "plain", "none"),
        default="auto",
        help="a bar on a terminal, else a line per epoch (%(default)s)",
    )
    group.add_argument(
        "--eval-every",
        type=int,
        default=DEFAULT.eval_every,
        metavar="N",
        help="evaluate on the test set every N epochs, and after the last (%(default)s)",
    )
    group.add_argument(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="write DIR/<run>/metrics.jsonl and a log of each rank; they replace those of a run of the same name",
    )
    group.add_argument(
        "--log-interval",
        type=int,
        metavar="N",
        help="optimizer steps between two records of --log-dir (50); given, `plain` prints a line for each",
    )
    group.add_argument(
        "--tensorboard",
        action="store_true",
        help="also write the records of --log-dir for TensorBoard (needs it installed)",
    )
