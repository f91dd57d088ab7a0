"""The command-line options of run.py, and the parser class that all programs of the trainer share."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shutil
import signal
import sys
import textwrap
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from train.checkpoints.checkpoint_files import FORMATS
from train.columns import align_columns, join_columns
from train.data import AUGMENTATIONS, DATASETS
from train.data.folders import OWN_IMAGES
from train.errors import UserError
from train.faults import FAULTS
from train.launch.environment import is_group_requested, prints_for_all_ranks
from train.launch.launch_options import LaunchOptions
from train.methods import METHODS
from train.methods.cp import MODES
from train.methods.pipeline_stages import PIPELINES
from train.models import MODELS, build_model
from train.old_options import suggest_options
from train.option import spell
from train.schedule import SCALES, SCHEDULES
from train.settings import LEARNING_RATES, Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from _typeshed import SupportsWrite

DESCRIPTION = "Train a model with a parallel method; with --save-per-rank, save one checkpoint per rank."
EXAMPLES = """examples:
  torchrun --nproc-per-node 2 train/run.py --save-per-rank          # ddp
  python train/run.py --spawn 2 --save-per-rank                     # the same
  python train/run.py --spawn 4 --method hsdp --sync-bn --amp bf16
  python train/run.py                                               # single
"""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UserError, prints its help on one process only, and accepts --batch_size."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse arguments, after replacing the underscores in the names of options by hyphens."""
        return super().parse_known_args([*map(self._with_hyphens, sys.argv[1:] if args is None else args)], namespace)

    def _with_hyphens(self, argument: str) -> str:
        name, equals, value = argument.partition("=")
        hyphens = name.replace("_", "-")
        return hyphens + equals + value if hyphens in self._option_string_actions else argument

    def error(self, message: str) -> NoReturn:
        """Raise UserError with the message and a suggestion."""
        raise UserError(message + self._suggest(message))

    def _suggest(self, message: str) -> str:
        """Suggest the option or choice with the most similar spelling; Python does so itself since 3.14."""
        if "maybe you meant" in message:
            return ""
        match = re.search(r"argument (\S+): invalid choice: '(.+?)' \(choose from (.+)\)", message)
        if match is None:
            return suggest_options(message, self._option_string_actions)
        similar = difflib.get_close_matches(match[2].lower(), re.findall(r"[\w-]+", match[3]), n=1)
        if similar:
            return f"; did you mean {similar[0]}?"
        # The names of data sets, unlike other choices, are often a folder or a class of torchvision.
        return f"; {OWN_IMAGES}" if match[1] == "--data" else ""

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


def list_faults() -> str:
    """Format one line per fault: name, expected finding, and description."""
    return format_table([(name, fault.code, fault.summary) for name, fault in FAULTS.items()])


def list_models() -> str:
    """Format the table of models: name, number of parameters, normalization layers, source.

    The number of parameters is for images of 3x32x32 and 10 classes, or for text of 256 different bytes.
    """
    rows = [("name", "parameters", "norm", "source")]
    for name, network in MODELS.items():
        try:
            with torch.device("meta"):  # allocates no memory, and skips the initialization
                model = build_model(name, *((0, 256) if network.text else (3, 10)), None)
        except UserError as error:  # torchvision is not installed
            rows.append((name, "", "", str(error)))
            continue
        parameters = sum(parameter.numel() for parameter in model.parameters())
        norms = {
            type(module).__name__.removesuffix("2d")
            for module in model.modules()
            if isinstance(module, (_BatchNorm, nn.LayerNorm, nn.RMSNorm))
        }
        rows.append((name, f"{parameters:>10,}", " ".join(norms) or "none", network.paper))
    return format_table(rows)


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows in columns, one line per row. On a terminal the last column is wrapped."""
    columns = align_columns(rows, texts=len(rows[0]))
    lines = join_columns(columns)
    if sys.stdout.isatty():
        width = max(shutil.get_terminal_size().columns, 60)
        indent = " " * sum(len(column[0]) + 2 for column in columns[:-1])
        lines = [textwrap.fill(line, width, subsequent_indent=indent) for line in lines]
    return "".join(f"{line}\n" for line in lines)


# Choices of options from tables of plug-ins.
CHOICES: dict[str, Iterable[str]] = {
    "method": METHODS,
    "context_mode": MODES,
    "pipeline_schedule": PIPELINES,
    "fault": FAULTS,
    "model": MODELS,
    "data": DATASETS,
    "augment": AUGMENTATIONS,
    "optimizer": LEARNING_RATES,
    "lr_scale": SCALES,
    "schedule": SCHEDULES,
    "save_format": FORMATS,
}
# The groups of the help in order, with their descriptions.
GROUPS = {
    "method": None,
    "processes": "default: the ranks of torchrun or srun, else this process alone",
    "devices": None,
    "modifiers of the method": None,
    "injected faults": None,
    "model and data": None,
    "optimization": None,
    "checks during training": None,
    "output": None,
    "progress, logs and metrics": None,
}
# argparse's arguments for the types of fields.
TYPES: dict[str, dict[str, Any]] = {
    "int": {"type": int, "metavar": "N"},
    "float": {"type": float},
    "Path": {"type": Path, "metavar": "DIR"},
}


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of run.py from the options declared in Settings and LaunchOptions."""
    parser = Parser(
        prog="run.py",
        usage="run.py [options]",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=DESCRIPTION,
        allow_abbrev=False,
    )
    parser.set_defaults(local_world_size=None)
    groups = {title: parser.add_argument_group(title, description) for title, description in GROUPS.items()}
    for declarations in (Settings, LaunchOptions):
        for field in fields(declarations):
            if field.metadata:
                if field.metadata["group"] is not None:
                    group = groups[field.metadata["group"]]
                _add_option(group, field)
    _add_program_options(groups)
    return parser


def _add_option(group: argparse._ArgumentGroup, field: Field[Any]) -> None:
    """Add the declared option of a field."""
    spellings = (spell(field), *field.metadata["aliases"])
    text = field.metadata["text"]
    if field.type == "bool":
        action = "store_false" if field.default else "store_true"
        group.add_argument(*spellings, dest=field.name, action=action, help=text)
        return
    arguments: dict[str, Any] = {"default": field.default}
    if field.name in CHOICES:
        arguments["choices"] = CHOICES[field.name]
        text = text or ", ".join(CHOICES[field.name])
    type_name = str(field.type).partition(" | ")[0]
    arguments |= TYPES.get(type_name, {}) | field.metadata["arguments"]
    if arguments["default"] is not None:
        text += " (default: %(default)s)"
    group.add_argument(*spellings, dest=field.name, help=text, **arguments)


def _add_program_options(groups: Mapping[str, argparse._ArgumentGroup]) -> None:
    """Add the options of the program that are not settings of a run."""
    text = "maximum time to wait for other ranks (default: %(default)s)"
    groups["method"].add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help=text)
    text = "list the faults with effects, and exit"
    groups["injected faults"].add_argument("--list-faults", action=Print, const=list_faults, help=text)
    text = "list the models with their sizes, and exit"
    groups["model and data"].add_argument("--list-models", action=Print, const=list_models, help=text)
    text = "auto: a bar on a terminal, otherwise a line per epoch (default: %(default)s)"
    kinds = ("auto", "bar", "plain", "none")
    groups["progress, logs and metrics"].add_argument("--progress", choices=kinds, default="auto", help=text)


def settings_from(args: argparse.Namespace) -> Settings:
    """Convert parsed arguments to the settings of a run. Some defaults depend on other options or on the launcher."""
    values = {field.name: getattr(args, field.name) for field in fields(Settings)}
    if values["method"] is None:
        values["method"] = "ddp" if is_group_requested(os.environ, args) else "single"
    if values["data"] is None:
        # No image data set suits a model that predicts text.
        values["data"] = "text" if MODELS[args.model].text else Settings.data
    if values["lr"] is None:
        values["lr"] = LEARNING_RATES[args.optimizer]
    if args.save_best or args.save_every is not None:
        values["save_per_rank"] = True
    return Settings(**values)
