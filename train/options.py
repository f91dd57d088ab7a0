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
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from train.checkpoints.formats import FORMATS
from train.data import AUGMENTATIONS, DATASETS
from train.errors import UserError
from train.faults import FAULTS
from train.launch.environment import LaunchOptions, is_group_requested, prints_for_all_ranks
from train.methods import METHODS
from train.methods.cp import MODES
from train.methods.pipeline_stages import PIPELINES
from train.models import MODELS, build_model
from train.schedule import SCALES, SCHEDULES
from train.settings import DEFAULT, LEARNING_RATES, Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from _typeshed import SupportsWrite

DESCRIPTION = "Train a model with a parallel method, and save one checkpoint per rank."
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
    *widths, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = []
    for *cells, last in rows:
        lines.append("  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), last]))
    if sys.stdout.isatty():
        columns, indent = shutil.get_terminal_size().columns, " " * sum(width + 2 for width in widths)
        lines = [textwrap.fill(line, max(columns, 60), subsequent_indent=indent) for line in lines]
    return "\n".join(lines) + "\n"


# Fields whose options have their names, and argparse's arguments for their types.
FIELDS = {field.name: field for field in (*fields(Settings), *fields(LaunchOptions))}
TYPES: dict[str, dict[str, Any]] = {
    "int": {"type": int, "metavar": "N"},
    "float": {"type": float},
    "Path": {"type": Path, "metavar": "DIR"},
    "str": {},
}


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of run.py; types and defaults come from Settings and LaunchOptions."""
    parser = Parser(
        prog="run.py",
        usage="run.py [options]",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=DESCRIPTION,
        allow_abbrev=False,
    )
    parser.set_defaults(local_world_size=None)
    for add_options in (_add_method, _add_launch, _add_modifiers, _add_model_and_data, _add_optimization, _add_output):
        add_options(parser)
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


def _add(group: argparse._ArgumentGroup, option: str, text: str, **arguments: Any) -> None:
    """Add the option of a field, with the type and default of the field. text: its help, without the default."""
    field = FIELDS[option.removeprefix("--").replace("-", "_")]
    if field.type == "bool":
        group.add_argument(option, action="store_true", help=text)
        return
    if field.default is not None:
        text += " (default: %(default)s)"
    group.add_argument(option, default=field.default, help=text, **TYPES[str(field.type).split(" | ")[0]] | arguments)


def _add_method(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("method")
    add = partial(_add, group)
    text = "default: ddp if several processes were started, otherwise single"
    group.add_argument("--method", choices=METHODS, help=text)
    text = "dp: replicas (default: all its GPUs, or 2); hsdp, hsdp_tp: replicas of the sharded model (default: 2)"
    add("--replicas", text)
    add("--average-every", "localsgd, diloco: steps between averages (default: 4; diloco: 20)")
    add("--outer-lr", "diloco: learning rate of the outer optimizer (default: 0.7)")
    add("--outer-momentum", "diloco: Nesterov momentum of the outer optimizer (default: 0.9)")
    add("--static-graph", "ddp, zero, localsgd: assume that every step uses the same parameters")
    add("--bucket-view", "ddp, zero, localsgd: store gradients in DDP's buckets only, which saves memory")
    text = "fsdp, hsdp: free gathered parameters after forward (true, false), or keep shards of N ranks"
    add("--reshard-after-forward", text, metavar="true|false|N")
    add("--cpu-offload", "fsdp, hsdp, replicate: keep parameters, gradients and optimizer in the CPU's memory")
    add("--mp-policy", "fsdp, hsdp, replicate: gather parameters and compute in bf16, reduce in float32")
    text = "tp, pp, cp, ep and combinations: ranks that share one copy of the model (default: depends on the method)"
    add("--parallel-degree", text)
    add("--sequence-parallel", "tp and combinations: shard the tokens between blocks")
    add("--loss-parallel", "tp and combinations: compute the loss from logits sharded by vocabulary")
    text = "cp: gather keys and values, or exchange tokens for heads (default: allgather)"
    add("--context-mode", text, choices=MODES)
    text = "pp, pp_fsdp: order of the micro-batches in the pipeline (default: 1f1b)"
    add("--pipeline-schedule", text, choices=PIPELINES)
    text = "maximum time to wait for other ranks (default: %(default)s)"
    group.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help=text)


def _add_launch(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("processes", "default: the ranks of torchrun or srun, else this process alone")
    add = partial(_add, group)
    text = "start N processes on this machine; implied (2, or one per GPU) by torchrun with one process "
    text += "and --save-per-rank, without --method"
    add("--spawn", text)
    add("--rank", "by hand, in a shell per process: its number, from 0", metavar="R")
    add("--world-size", "by hand: the number of processes")
    text = "by hand: its number on this machine, which selects the GPU (default: the rank modulo the GPUs)"
    add("--local-rank", text, metavar="L")
    text = "by hand: rendezvous at tcp://ADDRESS:PORT of rank 0, or in file:///PATH, a new file for each run"
    add("--init-method", text, metavar="URL")
    text = "with --port: short for --init-method tcp://ADDRESS:PORT; with --spawn instead of a temporary file"
    add("--ip", text, metavar="ADDRESS")
    add("--port", "a free port of rank 0's machine, the same everywhere", metavar="PORT")
    group = parser.add_argument_group("devices")
    add = partial(_add, group)
    text = "GPUs of this machine, as 0,1, or none for the CPU: each process uses one, dp all (default: all, "
    text += "or the CPU if there are fewer GPUs than processes)"
    add("--gpus", text, metavar="LIST")
    add("--backend", "of the process group (default: nccl on GPUs, gloo on CPUs)", choices=("gloo", "nccl"))


def _add_modifiers(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("modifiers of the method")
    add = partial(_add, group)
    add("--sync-bn", "compute BatchNorm over the samples of all ranks")
    group.add_argument("--no-buffer-sync", action="store_true", help="let each rank keep separate BatchNorm statistics")
    add("--amp", "mixed precision with torch.autocast; fp16 uses loss scaling", choices=("off", "bf16", "fp16"))
    text = "partition each rank's share into K micro-batches, and reduce gradients after the last"
    add("--accumulate", text, metavar="K")
    add("--grad-clip", "clip the norm of the whole gradient", metavar="NORM")
    add("--find-unused", "let DDP search for parameters that are unused in a step")
    add("--join", "let ranks have different numbers of batches, with DDP's join context manager")
    add("--compile", "use torch.compile; the first step takes seconds to minutes")
    add("--channels-last", "use the memory format NHWC for images and weights; faster on many GPUs")
    text = "let cuDNN time its algorithms for each shape of input, and use the fastest; for GPUs and equal shapes"
    add("--cudnn-benchmark", text)
    text = "gradient compression of DDP: none, 16-bit floats, or low-rank matrices"
    add("--comm-hook", text, choices=("none", "fp16", "bf16", "powersgd"))
    add("--powersgd-rank", "rank of powersgd's matrices (default: 1)")
    add("--powersgd-start", "number of first steps without powersgd (default: 2)")
    text = "also save an exponential moving average of the weights, for example with decay 0.999"
    add("--ema", text, metavar="DECAY")
    group = parser.add_argument_group("injected faults")
    add = partial(_add, group)
    add("--fault", "inject this fault; --list-faults prints the names", metavar="NAME", choices=FAULTS)
    add("--fault-step", "step of the fault (default: depends on the fault)")
    group.add_argument("--list-faults", action=Print, const=list_faults, help="list the faults with effects, and exit")


def _add_model_and_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model and data")
    add = partial(_add, group)
    text = "own data, model, loss and metrics: a subclass of train.task.Task; replaces --model and --data"
    add("--task", text, metavar="MODULE:CLASS")
    add("--model", ", ".join(MODELS), choices=MODELS, metavar="NAME")
    text = "list the models with their sizes, and exit"
    group.add_argument("--list-models", action=Print, const=list_models, help=text)
    add("--width", "channels of the first layer (default: depends on the model)")
    add("--depth", "layers of a pyramidnet, blocks of the transformer")
    add("--alpha", "channels that a pyramidnet adds over all its blocks")
    add("--data", ", ".join(DATASETS), choices=DATASETS, metavar="NAME")
    add("--data-dir", "folder of the data; digits, text and synthetic need no folder")
    text = "download missing data into --data-dir, on one rank per machine; other ranks wait up to --timeout"
    add("--download", text)
    text = "basic: shift and mirror; strong: also color jitter, RandAugment and random erasing; timm: "
    text += "RandomResizedCrop, RandAugment, mixup and label smoothing"
    add("--augment", text, choices=AUGMENTATIONS)
    add("--image-size", "pixels along each edge, for --data synthetic (default: 32)")
    add("--channels", "channels of an image, for --data synthetic (default: 3)")
    add("--classes", "number of classes, for --data synthetic (default: 10)")
    add("--train-samples", "training images, with a tenth as many test images, for --data synthetic (default: 50000)")
    add("--limit-train", "use only the first N training samples")
    text = "also train on the last, smaller batch of each epoch, if every share of it has at least 2 samples"
    add("--keep-last", text)
    add("--workers", "data loading processes per rank; 0: load in the rank itself")
    group.add_argument("--no-shuffle", action="store_true", help="use the same order in every epoch")


def _add_optimization(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("optimization")
    add = partial(_add, group)
    add("--epochs", "number of epochs")
    add("--max-steps", "stop after N optimizer steps")
    add("--batch-size", "global batch size, partitioned over the ranks; uneven shares are weighted exactly")
    add("--optimizer", "optimizer", choices=LEARNING_RATES)
    rates = ", ".join(f"{name} {rate}" for name, rate in LEARNING_RATES.items())
    group.add_argument("--lr", type=float, help=f"peak learning rate of the schedule (default: {rates})")
    text = "multiply --lr by the number of processes (linear) or its square root (sqrt). Use it if --batch-size "
    text += "grows with the number of processes; otherwise none is correct"
    add("--lr-scale", text, choices=SCALES)
    add("--schedule", "learning rate after warm-up", choices=SCHEDULES)
    add("--warmup-steps", "steps of linear warm-up (default: a tenth of the run)")
    add("--warmup-epochs", "warm-up in epochs; may be a fraction", metavar="X")
    add("--momentum", "momentum of sgd")
    add("--weight-decay", "weight decay")
    add("--seed", "seed of weights and sample order", metavar=None)
    group = parser.add_argument_group("checks during training")
    text = "check every N optimizer steps, and after the last step, that all ranks hold the same model (0: never). "
    text += "Use the longer name with torchrun, because --monitor is ambiguous among its own options"
    group.add_argument("--monitor", "--monitor-every", type=int, default=DEFAULT.monitor, metavar="N", help=text)
    text = "if a check fails: exit with code 1, warn and continue, or repair the affected ranks (default: warn)"
    group.add_argument("--on-desync", choices=("raise", "warn", "resync"), help=text)


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    add = partial(_add, group)
    text = "output folder. A run replaces the files of a finished run with the same method and modifiers, and is "
    text += "refused while such a run is active"
    add("--out", text)
    add("--save-per-rank", "at the end, write DIR/<run>_rank<r>")
    add("--save-every", "also write DIR/history/<run>/step_<n>/rank_<r> every N steps; implies --save-per-rank")
    add("--save-best", "keep DIR/best/<run>/rank_<r> of the epoch with the best test metric; implies --save-per-rank")
    text = "every N steps and after the last step, write the state for --resume to DIR/.resume/<run>"
    add("--checkpoint-every", text)
    add("--resume", "resume from the newest state of --checkpoint-every in DIR, or start at step 0 without a state")
    add("--save-format", "checkpoint format", choices=FORMATS)
    group = parser.add_argument_group("progress, logs and metrics")
    add = partial(_add, group)
    text = "auto: a bar on a terminal, otherwise a line per epoch (default: %(default)s)"
    group.add_argument("--progress", choices=("auto", "bar", "plain", "none"), default="auto", help=text)
    add("--eval-every", "evaluate on the test set every N epochs, and after the last epoch")
    add("--log-dir", "write DIR/<run>/metrics.jsonl and a log per rank, replacing the logs of a run with the same name")
    text = "optimizer steps between records of --log-dir (default: 50); if set, --progress plain prints each record"
    add("--log-interval", text)
    add("--tensorboard", "also write the records of --log-dir for TensorBoard, which must be installed")
