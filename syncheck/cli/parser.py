"""The arguments of every command."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any, NoReturn

from syncheck.config import COLORS
from syncheck.errors import logged, one_line
from syncheck.report.files import EXTENSIONS, FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterable

EPILOG = """exit codes: 0 in sync, 1 out of sync, 2 could not tell (wrong usage, unreadable
file, nothing compared), 3 a crash of syncheck, 130 interrupted"""

_COMPARED = """checkpoint files, folders or globs; under torchrun also one path such as 'rank_{rank}.pth', of which each
process reads its own"""


class _Version(argparse.Action):
    """Look the version up only when it is asked for: that costs as much as all the rest of the start."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        from syncheck.cli import about

        print("\n".join(about.lines()))
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """Colours its help with rich, which is imported when help is printed and not before.

    argparse makes a formatter for every argument that is added, to check it, so `formatter_class` is no lazy place.
    """

    def format_help(self) -> str:
        """Return the help of this parser."""
        from rich_argparse import RawDescriptionRichHelpFormatter

        self.formatter_class = RawDescriptionRichHelpFormatter
        return super().format_help()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; an option of a command that it does not have is its own error, for its help has those that it has."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and not self._subparsers:
            likely = _likely(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{likely}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line; the usage of ten lines would bury it."""
        told = logged(one_line(message))
        self.exit(2, f"{self.prog}: error: {told}{'' if told.endswith('?') else '.'} See: {self.prog} --help\n")

    def list_commands(self, _: argparse.Namespace) -> int:
        """Answer a line without a command: what there is, on stderr, for the line is wrong usage."""
        from syncheck.cli import streams

        self.formatter_class = argparse.RawDescriptionHelpFormatter
        streams.say(super().format_help().rstrip())
        return 2


def _likely(word: str, known: Iterable[str]) -> str:
    """Ask after the known word that a mistyped one resembles; empty where none does."""
    from difflib import get_close_matches

    return "".join(f"; did you mean {match}?" for match in get_close_matches(word, known, 1))


def build() -> argparse.ArgumentParser:
    """Return the parser; each command's `run` is a function of the parsed arguments."""
    from syncheck.cli import commands

    parser = _Parser(
        prog="syncheck",
        description="Are the replicas of my model really the same model?\n"
        "If not: which tensors, which ranks, why, and what to change.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions that a bug report needs")
    parser.set_defaults(run=parser.list_commands)
    # With a prog of its own, argparse does not format the usage, which would import rich on every start.
    add = parser.add_subparsers(title="commands", metavar="COMMAND", prog="syncheck").add_parser

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        made = add(name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=EPILOG)
        made.set_defaults(run=run)
        return made

    compare = command(
        "compare", commands.compare, "compare the replicas in each group of files and diagnose what differs"
    )
    _comparing(compare, "+", _COMPARED)
    report = command("report", commands.report, "look at all runs and steps: matrix, drift, what SyncBatchNorm closed")
    _comparing(report, "*", "files, folders or globs (default: checkpoints of pyproject.toml, else ckpts)")
    show = command("show", commands.show, "list what is in a checkpoint: name, kind, dtype, shape, bytes, statistics")
    show.add_argument("path", metavar="PATH", help="a checkpoint: a file, or a folder that is one")
    show.add_argument("--format", choices=("text", "json"), default="text", help="for stdout (default: text)")
    _color(show)
    fingerprint = command(
        "fingerprint",
        commands.fingerprint,
        "write digests and moments of each tensor, a few kB a checkpoint, for `compare` to take in its place",
    )
    _fingerprinting(fingerprint)
    explain = command(
        "explain", commands.explain, "tell what a finding means: its signature, cause, fix and real incidents"
    )
    explain.add_argument("code", nargs="?", metavar="CODE", help="as in SYN201; without one, all findings are listed")
    _color(explain)
    demo = command(
        "demo", commands.demo, "train DDP without and with SyncBatchNorm on two processes here, compare and report"
    )
    _color(demo)
    return parser


def _fingerprinting(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="PATH", help="checkpoint files, folders or globs")
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="FILE",
        help="where to; for several checkpoints a folder, in which each goes under its own name",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing but errors")


def _comparing(parser: argparse.ArgumentParser, number: str, paths: str) -> None:
    """Add what `compare` and `report` share. number: how many paths, as argparse has it; paths: the help of these."""
    parser.add_argument("paths", nargs=number, metavar="PATH", help=paths)
    parser.add_argument("--no-config", action="store_true", help="do without the table tool.syncheck of pyproject.toml")
    _selecting(parser.add_argument_group("what to compare"))
    _excusing(parser.add_argument_group("what to excuse (default: nothing, replicas are bitwise equal)"))
    _printing(parser.add_argument_group("output"))


def _selecting(what: Any) -> None:
    for kind, text in (
        ("params", "parameters"),
        ("buffers", "buffers, BatchNorm's included"),
        ("optimizer", "optimizer state"),
        ("rng", "random number states, which differ by design"),
    ):
        what.add_argument(
            f"--only-{kind}",
            dest="only",
            action="append_const",
            const=kind,
            help=f"only {text}{'; several --only are added up' * (kind == 'params')}",
        )
    what.add_argument(
        "--include",
        action="append",
        default=[],
        metavar="GLOB",
        help="only tensors whose name matches; repeatable",
    )
    what.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="GLOB",
        help="leave out tensors whose name matches; repeatable",
    )
    what.add_argument(
        "--buffers",
        action="append",
        default=[],
        metavar="GLOB",
        help="names that are buffers, where the files do not say",
    )
    what.add_argument("--group-by", metavar="REGEX", help="files whose path gives equal captured groups are replicas")
    what.add_argument(
        "--reference",
        metavar="PATH|RANK",
        help="describe differences against this replica (default: the majority)",
    )
    _flag(what, "--rng", "compare random number states too, which differ between ranks by design")
    _flag(what, "--quick", "compare the checksums that torch.save stored, and read no data")
    what.add_argument(
        "--jobs", type=_jobs, metavar="N", help="threads for large tensors (default: one a processor, at most 4)"
    )


def _excusing(how: Any) -> None:
    how.add_argument(
        "--rtol", type=_number, metavar="R", help="|a-b| <= atol + rtol * max(|a|,|b|) is close; with --atol"
    )
    how.add_argument("--atol", type=_number, metavar="A", help="see --rtol")
    how.add_argument("--ulp", type=int, metavar="N", help="floats within N steps of their dtype are close")
    _flag(how, "--close", "floats within the tolerance of torch.testing for their dtype are close")
    how.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="CODE",
        help="a finding that does not fail the run; repeatable",
    )
    how.add_argument(
        "--baseline", metavar="FILE", help="findings in this file do not fail the run; what it lacks does, and is named"
    )
    how.add_argument(
        "--update-baseline", action="store_true", help="write to that file what is found now, which is accepted then"
    )
    _flag(how, "--exit-zero", "exit 0 where it would be 1")


def _printing(out: Any) -> None:
    out.add_argument("--format", choices=FORMATS, help="for stdout (default: text)")
    out.add_argument(
        "-o",
        "--output",
        action="append",
        default=[],
        metavar="FILE",
        help=f"also write a report; the ending names its format: {', '.join(EXTENSIONS)}; repeatable",
    )
    out.add_argument(
        "-n",
        "--limit",
        type=_count,
        metavar="ROWS",
        help="tensors to print a group, 0 for all (default: 10)",
    )
    _flag(out, "-q", "--quiet", "print nothing but errors; the exit code tells")
    _color(out, default=None)


def _flag(parser: Any, *names: str) -> None:
    """Add an option that pyproject.toml may set, and that its `--no-` form takes back. The last name is the help."""
    *options, text = names
    parser.add_argument(*options, action=argparse.BooleanOptionalAction, help=text)


def _color(parser: Any, default: str | None = "auto") -> None:
    parser.add_argument(
        "--color", choices=COLORS, default=default, help="default: auto; NO_COLOR and FORCE_COLOR count"
    )


# The names of these functions stand in argparse's errors: "invalid number value: 'x'".
def _number(text: str) -> float:
    value = float(text)
    if value != value:
        raise ValueError
    return value


_number.__name__ = "number"


def _count(text: str) -> int:
    if not re.fullmatch(r"\d+", text):
        raise ValueError
    return int(text)


_count.__name__ = "number of rows"


def _jobs(text: str) -> int:
    if not re.fullmatch(r"0*[1-9]\d*", text):
        raise ValueError
    return int(text)


_jobs.__name__ = "number of threads"
