"""Benchmark methods, modifiers and launchers, and print one table.

    python -m train.bench                                            # on 2 processes
    python -m train.bench methods --rounds 2                         # each method on its minimum number of processes
    python -m train.bench ddp ddp-torchrun -o table.md -o table.json -- --model resnet8 --data digits

Each case is a real run of train/run.py. All cases run in turns, so that other load on the machine affects all of them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import signal
import sys
import tempfile
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__" and find_spec("torch") is None:
    sys.stderr.write("train.bench: error: torch is not installed; in this clone: pip install -e '.[train]'\n")
    sys.exit(2)

import torch
from rich.console import Console

from train.bench.cases import CASES, select_cases
from train.bench.runs import Row, run_case
from train.bench.table import as_json, as_markdown, as_text
from train.checkpoints.checkpoint_files import write_atomic
from train.errors import UserError, explain_os_error, refuse
from train.options import Parser
from train.options import build_parser as build_trainer_parser

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT = (
    *("single", "dp", "ddp", "ddp-torchrun", "ddp-launch", "ddp-sync-bn", "ddp-accumulate-2", "ddp-amp-bf16"),
    *("zero", "localsgd", "fsdp"),
)
# ResNet-18 on images of CIFAR's size. The first epoch is warm-up, the second is timed.
WORKLOAD = (
    *("--model", "resnet18", "--data", "synthetic", "--train-samples", "640", "--batch-size", "64"),
    *("--epochs", "2"),
)
# For the case list `methods`; 5 steps per epoch.
METHODS_WORKLOAD = "--model gpt-tiny --data text --limit-train 80 --batch-size 16 --epochs 3".split()
FORMATS = {".md": as_markdown, ".json": as_json, ".txt": as_text}
EPILOG = f"""cases:
{textwrap.fill(", ".join(CASES), 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)}

"all" runs every case; "methods" runs every method on its minimum number of processes.

Options after -- are passed to every run and replace the defaults
  {" ".join(WORKLOAD)}
  {" ".join(METHODS_WORKLOAD)} (for "methods")
The global batch (--batch-size) is partitioned over the processes, so every case does the same work. The first of
several epochs is warm-up and is excluded.

exit codes:
  0  every case was measured, or refused by its method with a printed reason
  1  a case failed, or a file of -o could not be written
  2  invalid options, or every case was refused
"""


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = Parser(
        prog="python -m train.bench",
        usage="python -m train.bench [options] [CASE ...] [-- options of run.py]",
        description=(__doc__ or "").partition("\n")[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    text = f"cases to run, all, or methods (default: {' '.join(DEFAULT)})"
    parser.add_argument("cases", nargs="*", metavar="CASE", help=text)
    for option, kind, default, text in (
        ("--processes", int, 2, "processes of each distributed method"),
        ("--rounds", int, 3, "runs of each case, in turns"),
        ("--threads", int, 1, "CPU threads per process"),
        ("--timeout", float, 1800, "time limit of a run in seconds"),
    ):
        parser.add_argument(option, type=kind, default=default, metavar="N", help=f"{text} (default: {default})")
    text = "also write the table to FILE.md, .json or .txt"
    parser.add_argument("-o", "--output", type=Path, action="append", default=[], metavar="FILE", help=text)
    return parser


def describe_machine(arguments: argparse.Namespace, options: Sequence[str]) -> dict[str, Any]:
    """Return processor, GPUs, versions, and the options of every run."""
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": names,
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "options": list(options),
    }


def compare_cases(arguments: argparse.Namespace, options: Sequence[str]) -> int:
    """Run the cases in turns, print their table, and return the exit code."""
    rows = [Row(case, case.count_processes(arguments.processes)) for case in select_cases(arguments.cases or DEFAULT)]

    def stop(number: int, _: object) -> None:
        raise KeyboardInterrupt(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    received = 0
    try:
        run_rounds(rows, arguments, options)
    except KeyboardInterrupt as interrupt:
        received = interrupt.args[0]
        sys.stderr.write("interrupted; the table contains the results so far\n")
    machine = describe_machine(arguments, options)
    written = [write_file(path, FORMATS[path.suffix](rows, machine)) for path in arguments.output]
    sys.stdout.write(as_text(rows, machine))
    if received:
        return 128 + received
    has_failed = any(row.problem and not row.refused for row in rows)
    if has_failed or not all(written):
        return 1
    if all(row.problem for row in rows):
        return 2
    return 0


def write_file(path: Path, text: str) -> bool:
    """Write a file and return whether this succeeded; otherwise write a temporary file and print its name."""
    try:
        write_atomic(path, text.encode())
    except UserError as error:
        with tempfile.NamedTemporaryFile("w", prefix="bench-", suffix=path.suffix, delete=False) as backup:
            backup.write(text)
        sys.stderr.write(f"train.bench: {error}; the table was saved to {backup.name}\n")
        return False
    return True


def run_rounds(rows: Sequence[Row], arguments: argparse.Namespace, options: Sequence[str]) -> None:
    """Run every case once per round; failed cases are not repeated."""
    with Console(stderr=True).status("") as status, tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            for row in rows:
                if not row.problem:
                    status.update(f"round {number + 1} of {arguments.rounds}: {row.case.name}")
                    logs = Path(folder) / f"{number}-{row.case.name}"
                    logs.mkdir()
                    commands = row.case.build_commands(arguments.processes, options, logs)
                    run_case(row, commands, logs, arguments.threads, arguments.timeout)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    options = words[end + 1 :] or list(METHODS_WORKLOAD if "methods" in words[:end] else WORKLOAD)
    try:
        arguments, unknown = build_parser().parse_known_args(words[:end])
        if unknown:
            raise UserError(f"unrecognized arguments: {' '.join(unknown)}; pass options of run.py after --")
        check_arguments(arguments, options)
        return compare_cases(arguments, options)
    except UserError as error:
        sys.stderr.write(f"train.bench: error: {error}\n")
        return 2


def check_arguments(arguments: argparse.Namespace, options: Sequence[str]) -> None:
    """Check the arguments before a long measurement starts. Raises UserError."""
    for name, least in (("processes", 2), ("rounds", 1), ("threads", 1)):
        number = getattr(arguments, name)
        refuse((number < least, f"--{name} {number}: must be at least {least}"))
    select_cases(arguments.cases)
    build_trainer_parser().parse_args(list(options))
    for path in arguments.output:
        refuse((path.suffix not in FORMATS, f"-o {path}: unknown file extension; supported: {', '.join(FORMATS)}"))
        with explain_os_error(f"-o {path}: cannot be written"):
            path.open("a").close()


if __name__ == "__main__":
    sys.exit(main())
