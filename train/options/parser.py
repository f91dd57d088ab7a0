"""What all command lines of the trainer share."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

from train.errors import UserError
from train.launch.environment import prints_for_all_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from _typeshed import SupportsWrite


class Print(argparse.Action):
    """Print what the function `const` returns, once whatever the number of processes, and leave."""

    def __init__(self, option_strings: list[str], dest: str, const: Callable[[], str], help: str) -> None:  # noqa: A002 - argparse's
        super().__init__(option_strings, dest, nargs=0, const=const, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        """Leave with 0: it was asked for."""
        if prints_for_all_ranks(os.environ):
            try:
                sys.stdout.write(self.const())
                sys.stdout.flush()
            except BrokenPipeError:  # as `| head` leaves; what is still to be flushed goes nowhere
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                parser.exit(128 + signal.SIGPIPE)
            except OSError as error:
                raise UserError(f"cannot write to stdout: {error.strerror}") from error
        parser.exit()


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that says what is wrong in one line, once."""

    def error(self, message: str) -> NoReturn:
        """Hand over to the place where all mistakes are reported."""
        raise UserError(message + self._meant(message))

    def _meant(self, message: str) -> str:
        """Name the option or choice that is spelt most like what was typed, if any is; Python does from 3.14 on."""
        if "maybe you meant" in message:
            return ""
        typed, known, alike = "", [], 0.6
        if found := re.search(r"invalid choice: '(.+?)' \(choose from (.+)\)", message):
            typed, known = found[1], re.findall(r"[\w-]+", found[2])
        elif found := re.search(r"unrecognized arguments: (--[\w-]+)", message):
            # Half of them are alike by their dashes.
            typed, known, alike = found[1], list(self._option_string_actions), 0.75
        near = difflib.get_close_matches(typed, known, n=1, cutoff=alike)
        return f"; did you mean {near[0]}?" if near else ""

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """Print the help once, whatever the number of processes."""
        if prints_for_all_ranks(os.environ):
            super().print_help(file)
