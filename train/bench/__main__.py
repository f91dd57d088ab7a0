"""Run methods, modifiers and launchers side by side, and print one table.

    python -m train.bench                                            # on 2 processes
    python -m train.bench ddp ddp-torchrun -o table.md -o table.json -- --model resnet8 --data digits
    python -m train.bench --parts -- --model resnet18                # why ddp is as fast as it is
    python -m train.bench --overhead                                 # the trainer against a loop written by hand

Each case is a real run of train/run.py, and all cases take turns, so that what else the machine does falls on all.
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

from train.bench.cases import CASES, chosen
from train.bench.overhead import overhead
from train.bench.parts import explain, parts
from train.bench.ranks import on_ranks
from train.bench.runs import Row, measure
from train.bench.table import as_json, as_markdown, as_text
from train.checkpoints.files import write_atomic
from train.errors import UserError
from train.options import Parser
from train.options import build_parser as trainer_options

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT = (
    *("single", "dp", "ddp", "ddp-torchrun", "ddp-launch", "ddp-sync-bn", "ddp-accumulate-2", "ddp-amp-bf16"),
    *("zero", "localsgd", "fsdp"),
)
# ResNet-18 on images of CIFAR's size. The first epoch warms up; the second is timed.
WORKLOAD = (
    *("--model", "resnet18", "--data", "synthetic", "--train-samples", "640", "--batch-size", "64"),
    *("--epochs", "2"),
)
FORMATS = {".md": as_markdown, ".json": as_json, ".txt": as_text}
EPILOG = f"""cases:
{textwrap.fill(", ".join(CASES), 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)}

What stands behind -- goes to every run, in place of
  {" ".join(WORKLOAD)}
The global batch (--batch-size) is split over the processes: the same work for every case. Of several epochs the first
warms up and is left out.

exit codes:
  0  all was measured, or refused by the method itself, which is told
  1  a case failed, or a file of -o could not be written
  2  a mistake in the options, or every case was refused
"""


def build_parser() -> argparse.ArgumentParser:
    """List the options."""
    parser = Parser(
        prog="python -m train.bench",
        usage="python -m train.bench [options] [CASE ...] [-- options of run.py]",
        description=(__doc__ or "").partition("\n")[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"(default: {' '.join(DEFAULT)}); all: every one")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="of each method that has several (2)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each case, in turns (3)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of each process on the CPU (1)")
    parser.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS", help="of one run (1800)")
    parser.add_argument(
        "-o", "--output", type=Path, action="append", default=[], metavar="FILE", help="also write .md, .json or .txt"
    )
    parser.add_argument("--parts", action="store_true", help="measure the parts of ddp's step instead")
    parser.add_argument("--overhead", action="store_true", help="measure the trainer against a bare loop instead")
    return parser


def machine(arguments: argparse.Namespace, options: Sequence[str]) -> dict[str, Any]:
    """Say what is measured with: processor, GPUs, versions, and the options of every run."""
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


def compare(arguments: argparse.Namespace, options: Sequence[str]) -> int:
    """Run the cases in turns and print their table; returns the exit code."""
    names = list(CASES) if arguments.cases == ["all"] else arguments.cases or DEFAULT
    rows = [Row(case, case.processes(arguments.processes)) for case in chosen(names)]
    received: list[int] = []

    def stop(number: int, _: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        take_turns(rows, arguments, options)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; this is what was measured until then\n")
    found = machine(arguments, options)
    written = [write(path, FORMATS[path.suffix](rows, found)) for path in arguments.output]
    sys.stdout.write(as_text(rows, found))
    if received:
        return 128 + received[0]
    if any(row.problem and not row.refused for row in rows) or not all(written):
        return 1
    return 2 if all(row.problem for row in rows) else 0


def write(path: Path, text: str) -> bool:
    """Write one file; where it cannot be, say why and where its text is instead. Returns whether it was."""
    try:
        write_atomic(path, text.encode())
    except UserError as error:
        with tempfile.NamedTemporaryFile("w", prefix="bench-", suffix=path.suffix, delete=False) as other:
            other.write(text)
        sys.stderr.write(f"train.bench: {error}; it is in {other.name} instead\n")
        return False
    return True


def take_turns(rows: Sequence[Row], arguments: argparse.Namespace, options: Sequence[str]) -> None:
    """Run every case once, then every case again, as often as there are rounds; what failed is not tried again."""
    with Console(stderr=True).status("") as status, tempfile.TemporaryDirectory() as folder:
        for turn in range(arguments.rounds):
            for row in rows:
                if not row.problem:
                    status.update(f"round {turn + 1} of {arguments.rounds}: {row.case.name}")
                    logs = Path(folder) / f"{turn}-{row.case.name}"
                    logs.mkdir()
                    command = row.case.command(arguments.processes, options)
                    measure(row, command, logs, arguments.threads, arguments.timeout)


def look_closer(arguments: argparse.Namespace, options: Sequence[str]) -> int:
    """Measure the parts of a step, or the trainer's overhead, and print them."""
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    ranks = ["--method", "ddp", "--spawn", str(arguments.processes)]
    if arguments.parts:
        sys.stdout.write(explain(on_ranks(parts, [*ranks, *options], arguments.rounds), arguments.processes) + "\n")
        return 0
    for method in (["--method", "single"], ranks):
        found = on_ranks(overhead, [*method, *options], arguments.rounds)
        sys.stdout.write(
            f"{method[1]}: {100 * (found['ratio'] - 1):+.2f} % a step against a bare loop "
            f"({len(found['ratios'])} pairs of epochs of {found['steps']} steps, "
            f"{100 * (min(found['ratios']) - 1):+.2f} to {100 * (max(found['ratios']) - 1):+.2f} %)\n"
        )
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    options = words[cut + 1 :] or list(WORKLOAD)
    try:
        arguments, unknown = build_parser().parse_known_args(words[:cut])
        if unknown:
            raise UserError(f"unrecognized arguments: {' '.join(unknown)}; options of run.py stand behind --")
        check(arguments, options)
        return look_closer(arguments, options) if arguments.parts or arguments.overhead else compare(arguments, options)
    except UserError as error:
        sys.stderr.write(f"train.bench: error: {error}\n")
        return 2


def check(arguments: argparse.Namespace, options: Sequence[str]) -> None:
    """Refuse what cannot be measured or written, before an hour goes into it. Raises UserError."""
    for name, least in (("processes", 2), ("rounds", 1), ("threads", 1)):
        if getattr(arguments, name) < least:
            raise UserError(f"--{name} {getattr(arguments, name)}: needs {least} or more")
    for path in arguments.output:
        if path.suffix not in FORMATS:
            raise UserError(f"-o {path}: the ending names the format; there are {', '.join(FORMATS)}")
        if not path.absolute().parent.is_dir():
            raise UserError(f"-o {path}: there is no folder {path.parent}")
        try:
            new = not path.exists()
            path.open("a").close()
            if new:
                path.unlink()
        except OSError as error:
            raise UserError(f"-o {path}: cannot be written: {error.strerror}") from error
    chosen([] if arguments.cases == ["all"] else arguments.cases)
    trainer_options().parse_args(list(options))


if __name__ == "__main__":
    sys.exit(main())
