"""A parser of arguments whose errors are one line, with the name that was probably meant."""

from __future__ import annotations

import argparse
import os
import re
from typing import TYPE_CHECKING, Any, ClassVar

from syncheck import suggestions
from syncheck.options import EXTENSIONS

if TYPE_CHECKING:
    from collections.abc import Callable

# Options of other tools, and of other surfaces, with what does the same here.
_COUNTERPARTS = {
    **dict.fromkeys(("--tolerance", "--tol", "--threshold", "--eps"), "--rtol R --atol A"),
    **dict.fromkeys(("--ignore", "--skip"), "--exclude GLOB"),
    **dict.fromkeys(("--filter", "--match"), "--include GLOB"),
    "--html": "-o FILE.html",
    "--json": "--format json",
}
# The message of argparse for an unknown command, or an unknown value of an option.
_INVALID_CHOICE = re.compile(r"invalid choice: '(?P<typed>.+?)' \(choose from (?P<choices>.+)\)$")


def describe_allow(code: str) -> str:
    """Return the help of `--allow` for a command with findings of its own. code: one of its findings."""
    return f"a finding that does not count, such as {code}; `syncheck explain` lists the codes; repeatable"


def capitalize(text: str) -> str:
    """Return a text with a capital as its first letter."""
    return text[:1].upper() + text[1:]


class SuggestingParser(argparse.ArgumentParser):
    """Suggest the names of options and commands, and import rich, which colors the help, only when help is printed.

    The start of an option is no option: a script that uses it would break, or mean another option, when an option is
    added.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def format_help(self) -> str:
        """Return the help of this parser."""
        from rich_argparse import RawDescriptionRichHelpFormatter

        class Formatter(RawDescriptionRichHelpFormatter):
            # The default is str.title, which suits no section of several words.
            group_name_formatter: ClassVar[Callable[[str], str]] = capitalize
            # Brackets in help texts are not markup.
            help_markup = False
            text_markup = False

        # argparse creates a formatter to check each added argument, so the class cannot be set in advance.
        self.formatter_class = Formatter
        return super().format_help()

    def format_plain_help(self) -> str:
        """Return the help without rich."""
        self.formatter_class = argparse.RawDescriptionHelpFormatter
        return super().format_help()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and report an unknown option here, so that the error refers to the help of this command."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            suggestion = self._suggest_option(unknown[0].partition("=")[0])
            self.error(f"unrecognized arguments: {' '.join(unknown)}{suggestion}")
        return namespace, unknown

    def _suggest_option(self, typed: str) -> str:
        # The shell replaces a glob without quotes by its files.
        if os.path.exists(typed):
            return "; several files of one argument need quotes: 'ckpts/*.pth'"
        counterpart = _COUNTERPARTS.get(typed, "")
        if counterpart.partition(" ")[0] in self._option_string_actions:
            return f"; did you mean {counterpart}?"
        return suggestions.suggest(typed, self._option_string_actions)

    def suggest_choice(self, message: str) -> str:
        """Return a question with the command or value that was probably meant by an invalid choice; empty if none is.

        message: of argparse.
        """
        match = _INVALID_CHOICE.search(message)
        # Also None if argparse suggests a choice itself, as newer versions of Python can.
        if match is None:
            return ""
        typed, choices = match["typed"], re.findall(r"[\w-]+", match["choices"])
        # Some formats are written to files only, and some have another name than their files.
        written = EXTENSIONS.get(f".{typed}", typed)
        if written not in choices and written in EXTENSIONS.values() and "-o" in self._option_string_actions:
            return f"; did you mean -o FILE.{typed}?"
        return suggestions.suggest(written, choices)
