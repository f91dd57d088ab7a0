"""The arguments of every command."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, NoReturn

from syncheck import option_kinds, options
from syncheck.cli import commands
from syncheck.cli.suggesting_parser import SuggestingParser, capitalize, describe_allow
from syncheck.text import logged, one_line, to_flag

if TYPE_CHECKING:
    from syncheck.options import Declaration

# Completes paths in the shell; the same as shtab.FILE, which only writes the script of a shell.
FILES = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}
_PATHS = (option_kinds.PATH, option_kinds.PATHS, option_kinds.PATH_OR_RANK)

EPILOG = """exit codes: 0 in sync, 1 out of sync, 2 could not tell (usage error, unreadable
file, nothing compared), 3 crash of syncheck, 130 interrupted"""


class _Version(argparse.Action):
    """Look up the version only when it is printed: the lookup takes as long as the rest of the start-up."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        from syncheck.versions import list_versions

        print("\n".join(list_versions()))
        parser.exit()


class _Parser(SuggestingParser):
    """A parser whose errors refer to the help of the command."""

    def error(self, message: str) -> NoReturn:
        """Report a usage error in one line, without the usage of argparse."""
        text = logged(one_line(message + self.suggest_choice(message)))
        self.exit(2, f"{self.prog}: error: {text}{'' if text.endswith('?') else '.'} See: {self.prog} --help\n")

    def list_commands(self, _: argparse.Namespace) -> int:
        """Print the commands on stderr, because a call without a command is a usage error."""
        from syncheck.cli import streams

        streams.print_stderr(self.format_plain_help().rstrip())
        return 2


def build_parser(command: str = "") -> argparse.ArgumentParser:
    """Return the parser; each command's `run` is a function of the parsed arguments.

    command: the first argument. If it is a command, the parser has no other command, which makes it faster to build.
    """
    parser = _Parser(
        prog="syncheck",
        description="Are the replicas of a model the same model?\n"
        "If not: which tensors, which ranks, since when, why, and what is the fix?",
        epilog=EPILOG,
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="print the version, and the environment for a bug report"
    )
    parser.set_defaults(run=parser.list_commands)
    # Without `prog`, argparse formats the usage here, which would import rich on every start.
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", prog="syncheck")
    commands_to_add = {
        "compare": _add_compare,
        "diff": _add_diff,
        "report": _add_report,
        "show": _add_show,
        "fingerprint": _add_fingerprint,
        "watch": _add_watch,
        "parity": _add_parity,
        "explain": _add_explain,
        "demo": _add_demo,
    }
    for name, add in commands_to_add.items():
        if command == name or command not in commands_to_add:
            add(subparsers)
    return parser


def _add_command(subparsers: Any, name: str, function: Any, text: str, **settings: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name, help=text, description=f"{capitalize(text)}.", epilog=EPILOG, **settings
    )
    parser.set_defaults(run=function)
    return parser


def _add_compare(subparsers: Any) -> None:
    text = "compare the replicas in each group of checkpoints and diagnose differences"
    parser = _add_command(subparsers, "compare", commands.compare, text, usage="%(prog)s [OPTIONS] PATH [PATH ...]")
    paths = parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="checkpoint files, folders or globs; under torchrun, a single path such as 'rank_{rank}.pth', from which "
        "each process reads its own file",
    )
    _complete_files(paths)
    _add_options(parser, options.Options)


def _add_diff(subparsers: Any) -> None:
    text = "compare two models in any layout: A is the source, B the copy"
    parser = _add_command(subparsers, "diff", commands.diff, text, usage="%(prog)s [OPTIONS] A B")
    for side, example in (("a", "'ckpts/fsdp_rank*.pth'"), ("b", "hf_export/")):
        model = parser.add_argument(
            side,
            metavar=side.upper(),
            help=f"the files of one model: a file, folder or glob, or several separated by commas; such as {example}",
        )
        _complete_files(model)
    _add_options(parser, options.DiffOptions, options.NOT_IN_DIFF)


def _add_report(subparsers: Any) -> None:
    text = "summarize all runs and steps: differences by kind of tensor, BatchNorm drift, effect of SyncBatchNorm"
    parser = _add_command(subparsers, "report", commands.report, text, usage="%(prog)s [OPTIONS] [PATH ...]")
    paths = parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="checkpoint files, folders or globs (default: `checkpoints` of pyproject.toml, else the folder ckpts)",
    )
    _complete_files(paths)
    _add_options(parser, options.Options)


def _add_show(subparsers: Any) -> None:
    text = "list the tensors of a checkpoint with kind, dtype, shape, bytes and statistics"
    parser = _add_command(subparsers, "show", commands.show, text)
    path = parser.add_argument("path", metavar="PATH", help="a checkpoint file or folder; with --shards, as for `diff`")
    _complete_files(path)
    parser.add_argument(
        "--shards", action="store_true", help="show which rank and file hold which part of each tensor of a model"
    )
    parser.add_argument(
        "-n",
        "--limit",
        type=options.list_options(options.COMMAND_LINE)["limit"].parse,
        default=0,
        metavar="ROWS",
        help="number of tensors to print as text (default: all)",
    )
    parser.add_argument(
        "--format", choices=("text", "json"), default="text", help="format of the list on stdout (default: text)"
    )
    _add_color(parser)


def _add_fingerprint(subparsers: Any) -> None:
    text = "write a fingerprint of each checkpoint: digests and statistics that `compare` reads like a checkpoint"
    parser = _add_command(subparsers, "fingerprint", commands.fingerprint, text)
    paths = parser.add_argument("paths", nargs="+", metavar="PATH", help="checkpoint files, folders or globs")
    output = parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="FILE",
        help="the file to write; for several checkpoints a folder, which gets one file named after each checkpoint",
    )
    _complete_files(paths)
    _complete_files(output)
    parser.add_argument("-q", "--quiet", action="store_true", help="print only errors")


def _add_watch(subparsers: Any) -> None:
    # Only for the help: `cli.watch` parses its arguments, which end with those of the script.
    from syncheck.cli import watch

    text = "run a training script, and check while it runs that all ranks are in sync"
    watch.add_options(_add_command(subparsers, "watch", None, text, usage=watch.USAGE))


def _run_parity(arguments: argparse.Namespace) -> int:
    """`syncheck parity`."""
    # No other command needs the processes of torchrun and the module of a user.
    from syncheck.cli import parity

    return parity.run(arguments)


def _add_parity(subparsers: Any) -> None:
    text = "compare the gradient of a parallel program with that of one process; start it with torchrun"
    parser = _add_command(
        subparsers, "parity", _run_parity, text, usage="torchrun --nproc-per-node N -m %(prog)s [OPTIONS] CASE"
    )
    parser.add_argument(
        "case",
        metavar="CASE",
        help="a subclass of syncheck.testing.ParityCase, as module:Class; the working directory is searched first",
    )
    parser.add_argument(
        "--dtype",
        default="float64",
        choices=("float64", "float32", "bfloat16"),
        help="dtype of both computations (default: float64)",
    )
    allow_help = describe_allow("SYN441")
    parser.add_argument("--allow", action="append", default=[], metavar="CODE", help=allow_help)
    _add_options(parser, options.RunOptions, frozenset({"no_config", "update_baseline"}))


def _add_explain(subparsers: Any) -> None:
    text = "explain a finding: signature, cause, fix and real incidents"
    parser = _add_command(subparsers, "explain", commands.explain, text)
    parser.add_argument("code", nargs="?", metavar="CODE", help="a code such as SYN201 (default: list all findings)")
    _add_color(parser)


def _add_demo(subparsers: Any) -> None:
    text = "train DDP without and with SyncBatchNorm on two local processes, then compare them"
    _add_color(_add_command(subparsers, "demo", commands.demo, text))


def _add_options(parser: argparse.ArgumentParser, comparison: type, without: frozenset[str] = frozenset()) -> None:
    """Add the declared options of the command line, in the sections of the help.

    comparison: the class of the options for the comparison. without: names of options that do not apply.
    """
    groups: dict[str, Any] = {section: parser.add_argument_group(section) for section in options.SECTIONS}
    for name, declaration in options.list_options(options.COMMAND_LINE, comparison, options.RunOptions).items():
        if name in without:
            continue
        group = groups.get(declaration.section, parser)
        if declaration.switch_help:
            for value, help_text in declaration.switch_help.items():
                flag = to_flag(f"{name}_{value}")
                group.add_argument(flag, dest=name, action="append_const", const=value, help=help_text)
        else:
            flags = [declaration.short] if declaration.short else []
            action = group.add_argument(*flags, to_flag(name), **_settings(declaration))
            if declaration.kind in _PATHS:
                _complete_files(action)


def _complete_files(action: Any) -> None:
    """Let the shell complete paths for an argument (see the completion in README)."""
    action.complete = FILES


def _settings(declaration: Declaration) -> dict[str, Any]:
    settings = declaration.argparse_settings()
    if declaration.kind is option_kinds.FLAG and options.TOML in declaration.surfaces:
        # The `--no-` form overrides a flag that pyproject.toml sets.
        settings["action"] = argparse.BooleanOptionalAction
    return settings


def _add_color(parser: argparse.ArgumentParser) -> None:
    """Add `--color` to a command that does not read pyproject.toml, so its default applies here."""
    declaration = options.list_options(options.COMMAND_LINE)["color"]
    parser.add_argument("--color", **declaration.argparse_settings() | {"default": declaration.default})
