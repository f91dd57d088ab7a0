"""The options of run.py, and the settings that they make."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields
from typing import Any

from train.launch.environment import is_group_requested
from train.launch.options import add_options
from train.options.method import add_faults, add_method, add_modifiers
from train.options.output import add_monitor, add_output, add_records
from train.options.parser import Parser
from train.options.task import add_optimization, add_task
from train.settings import LEARNING_RATES, Settings

__all__ = ["Parser", "build_parser", "settings_from"]

DESCRIPTION = "Train a model under a parallel method and save one checkpoint per rank."
EXAMPLES = """examples:
  torchrun --nproc-per-node 2 train/run.py --save-per-rank          # ddp
  python train/run.py --spawn 2 --save-per-rank                     # the same
  python train/run.py --spawn 4 --method hsdp --sync-bn --amp bf16
  python train/run.py                                               # single
"""


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
    add_method(parser.add_argument_group("method"))
    add_options(parser)
    add_modifiers(parser.add_argument_group("modifiers of the method"))
    add_faults(parser.add_argument_group("planted desyncs, to see what they look like"))
    add_task(parser.add_argument_group("model and data"))
    add_optimization(parser.add_argument_group("optimization"))
    add_monitor(parser.add_argument_group("checks while it trains"))
    add_output(parser.add_argument_group("output"))
    add_records(parser.add_argument_group("progress, logs and metrics"))
    return parser


def settings_from(args: argparse.Namespace) -> Settings:
    """Turn parsed arguments into the settings of a run: those of the same name, and those that are derived."""
    derived: dict[str, Any] = {
        "method": args.method or ("ddp" if is_group_requested(os.environ, args) else "single"),
        "buffer_sync": not args.no_buffer_sync,
        "shuffle": not args.no_shuffle,
        "lr": LEARNING_RATES[args.optimizer] if args.lr is None else args.lr,
        "save_per_rank": args.save_per_rank or args.save_best or args.save_every is not None,
    }
    given = {field.name: getattr(args, field.name) for field in fields(Settings) if field.name not in derived}
    return Settings(**given, **derived)
