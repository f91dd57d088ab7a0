"""`syncheck watch`: run a script with its ranks watched.

Unlike the other commands it runs code of the user in this process, so nothing of the process is changed for speed.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, NoReturn

from syncheck.cli import output
from syncheck.cli.suggesting_parser import SuggestingParser, describe_allow
from syncheck.errors import UsageError
from syncheck.live.watching.settings import ACTIONS, WITNESSES, WatchSettings, check_patience, check_witnesses
from syncheck.options import COMMAND_LINE, Options, list_options
from syncheck.text import TYPED, to_flag

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

USAGE = "syncheck watch [OPTIONS] SCRIPT [ARGUMENTS]\n       syncheck watch [OPTIONS] -m MODULE [ARGUMENTS]"
# Lines as they are printed: a command must not be broken within an option.
_DESCRIPTION = """\
Run a training script, unmodified, and check while it runs that all ranks hold
the same model. Put it between the launcher and the script:

  torchrun --nproc-per-node 8 -m syncheck watch train.py

The exit code is the script's, or 2 for an error in the options of syncheck."""
_MODULE = "-m"


def run(argv: Sequence[str]) -> int:
    """Run the command. argv: the arguments after `watch`. Returns the exit code of the script, or 2 for an error."""
    try:
        options, program, arguments = _split(argv)
        settings, is_module = _read_settings(options), _MODULE in options
        if not program:
            raise UsageError(
                "watch: no script; pass one, as in `torchrun --nproc-per-node 2 -m syncheck watch train.py`"
            )
        from syncheck.live.watching import program as programs

        programs.check_target(program, is_module=is_module)
        if find_spec("torch") is None:
            raise UsageError("watch: torch is not installed in this environment, so no training can be watched")
    except UsageError as error:
        output.print_error(error)
        return UsageError.exit_code
    return programs.run_program(program, arguments, settings, is_module=is_module)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the options before the script."""
    parser = _Parser(prog="syncheck watch", usage=USAGE, description=_DESCRIPTION)
    add_options(parser)
    return parser


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options before the script."""
    defaults = WatchSettings()
    parser.add_argument(
        "--every",
        type=int,
        default=defaults.every,
        metavar="N",
        help=f"reductions between two comparisons of all replicas; 0 for none (default: {defaults.every})",
    )
    parser.add_argument(
        "--witnesses",
        default=",".join(WITNESSES),
        metavar="LIST",
        help=f"what is observed at each step, separated by commas, or none (default: {','.join(WITNESSES)})",
    )
    parser.add_argument(
        "--on-desync",
        choices=ACTIONS,
        default=defaults.on_desync,
        help="warn: print the finding. raise: end all ranks before the step. resync: repair at the next comparison. "
        f"save: write one checkpoint per rank, once (default: {defaults.on_desync})",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=defaults.patience,
        metavar="SECONDS",
        help=f"how long `raise` waits before a step for the other ranks (default: {defaults.patience:g})",
    )
    parser.add_argument("--allow", action="append", default=[], metavar="CODE", help=describe_allow("SYN201"))
    declarations = list_options(COMMAND_LINE, Options)
    for name in ("only", "include", "exclude"):
        declared = declarations[name]
        help_text = f"{declared.full_help}; repeatable"
        parser.add_argument(to_flag(name), action="append", default=[], metavar=declared.metavar, help=help_text)
    parser.add_argument("--events", metavar="FILE", help="append events to a JSONL file, one object per line")
    parser.add_argument(
        "-o",
        "--output",
        action="append",
        default=[],
        metavar="FILE",
        help="write a report at the end: .html, .json, .md, .xml",
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit with 1 if the script exits with 0 and ranks were out of sync"
    )
    parser.add_argument(_MODULE, action="store_true", help="the script is the name of a module, as in python -m")


class _Parser(SuggestingParser):
    """A parser whose errors are those of syncheck."""

    def error(self, message: str) -> NoReturn:
        message += self.suggest_choice(message)
        separator = "" if message.endswith("?") else ";"
        raise UsageError(f"watch: {message}{separator} `syncheck watch --help` lists the options before the script")


def _split(argv: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """Split the arguments into options of syncheck, the script, and its arguments."""
    with_value: set[str] = set()
    for action in build_parser()._actions:  # noqa: SLF001 - argparse has no public list
        if action.nargs is None:
            with_value.update(action.option_strings)
    position = 0
    while position < len(argv) and argv[position].startswith("-"):
        option = argv[position]
        if option == "--":
            return list(argv[:position]), *_take_program(argv[position + 1 :])
        position += 2 if option in with_value else 1
        # Options after the name of the module are its own.
        if option == _MODULE:
            break
    return list(argv[:position]), *_take_program(argv[position:])


def _take_program(argv: Sequence[str]) -> tuple[str, list[str]]:
    return (argv[0] if argv else "", list(argv[1:]))


def _read_settings(options: Sequence[str]) -> WatchSettings:
    """Return the settings of a command line. Raises UsageError."""
    values = build_parser().parse_args(options)
    if values.every < 0:
        raise UsageError(f"--every {values.every}: must be at least 0")
    check_patience(values.patience)
    witnesses = () if values.witnesses == "none" else check_witnesses(values.witnesses.split(","))
    settings = WatchSettings(
        every=values.every,
        witnesses=witnesses,
        on_desync=values.on_desync,
        allow=tuple(map(str.upper, values.allow)),
        only=tuple(values.only),
        include=tuple(values.include),
        exclude=tuple(values.exclude),
        events=values.events,
        outputs=tuple(values.output),
        strict=values.strict,
        patience=values.patience,
        prefix=TYPED,
    )
    _check_selection(settings)
    return settings


def _check_selection(settings: WatchSettings) -> None:
    """Raise UsageError for an unknown code, kind or format now, and not in the middle of a run."""
    from syncheck.live.checks import make_options
    from syncheck.report.formats import check_extensions

    make_options(only=settings.only, include=settings.include, exclude=settings.exclude, allow=settings.allow)
    check_extensions(settings.outputs)
    _check_outputs(settings)


def _check_outputs(settings: WatchSettings) -> None:
    """Raise UsageError for a file that cannot be written, or that the run would replace: the end is hours away."""
    from syncheck.readers import outputs

    # The other ranks write nothing, and may run on nodes without the folder.
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) != "0":
        return
    named = [("output", path) for path in settings.outputs]
    if settings.events is not None:
        named.append((outputs.EVENTS, settings.events))
    for option, path in named:
        outputs.check(path, option)
    outputs.protect_all(named)
