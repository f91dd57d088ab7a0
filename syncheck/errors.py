"""The errors that syncheck raises, with their exit codes, and the spelling of options in them.

    SyncheckError                exit 2
    +-- UsageError               options, globs or paths that cannot be used
    |   +-- OptionError          an option; each surface spells its name
    +-- CheckpointError          one file: path, place, found, needed, next step
    |   +-- UnreadableFile       the operating system cannot read it
    |   +-- NotACheckpoint       not of a known format
    |   +-- UnsupportedFormat    a known format that this version does not read
    |   +-- MalformedFile        a broken file of a known format
    |   +-- RefusedFile          loading it would run code
    +-- RankFailed               a rank could not take part in a comparison of all ranks
    +-- DemoFailed               the demo failed
    +-- records.OutOfSync        exit 1; also an AssertionError, with the report

The text of an error is one line, except that of OutOfSync. Only `assert_in_sync` and a monitor raise OutOfSync; other
functions return the verdict.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from syncheck.text import brief, one_line, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator


class SyncheckError(Exception):
    """Base class of the errors; `exit_code` is the exit code of the command line."""

    exit_code = 2

    def __str__(self) -> str:
        return one_line(super().__str__())


class UsageError(SyncheckError):
    """The arguments or options are wrong."""


class RankFailed(SyncheckError):
    """A rank could not take part in a comparison. Every rank of the group raises it with the same text."""


@dataclass(frozen=True, slots=True)
class Words:
    """The spelling of options on one surface: `--group-by REGEX` on the COMMAND_LINE, `group_by='REGEX'` in PYTHON.

    prefix, equals: the text before a name, and between a name and its value. switches: options whose values are
    separate switches, such as `--only-params`.
    """

    prefix: str
    equals: str
    switches: tuple[str, ...] = ()

    def name(self, field: str) -> str:
        """Return the name of a field of `options`; `tolerance.KEY` is an entry of that table."""
        field, dot, key = field.partition(".")
        name = self.prefix + (field.replace("_", "-") if self.prefix else field)
        if field in self.switches:
            name += "-..."
        entry = f'."{key}"' if self.prefix else f'["{key}"]'
        return name + (entry if dot else "")

    def placeholder(self, field: str, metavar: str) -> str:
        """Write a field with a placeholder for its value: `--group-by REGEX`."""
        return f"{self.name(field)}{self.equals}{metavar}"

    def pair(self, field: str, value: object) -> str:
        """Return the name of a field and its value. A flag that takes no value is its name alone."""
        if field in self.switches:
            return f"{self.prefix}{field}-{value}"
        if value is True and self.equals == " ":
            return self.name(field)
        text = brief(value)
        if isinstance(value, str) and self.equals == " ":
            import shlex

            text = shlex.quote(value)
        return f"{self.name(field)}{self.equals}{text}"


PYTHON = Words("", "=")
COMMAND_LINE = Words("--", " ", switches=("only",))
TOML = Words("tool.syncheck.", " = ")
PYTEST = Words("--syncheck-", " ")
_CURRENT: ContextVar[Words] = ContextVar("words", default=PYTHON)


def current_words() -> Words:
    """Return the spelling of options on the surface that is rendering text."""
    return _CURRENT.get()


@contextmanager
def spelling(words: Words) -> Iterator[None]:
    """Write options in the spelling of a surface while rendering messages, as a context manager or decorator."""
    token = _CURRENT.set(words)
    try:
        yield
    finally:
        _CURRENT.reset(token)


class OptionError(UsageError):
    """An option has a wrong value, or contradicts another option.

    text: the expected value. mentioned: the options that the text refers to, each as `{rtol}`. values: the wrong
    options by field name. `str` spells the options for the surface that prints the error (`spelling`).
    """

    def __init__(self, text: str, *mentioned: str, **values: object) -> None:
        self.text, self.mentioned, self.values = text, mentioned, values
        super().__init__(text)

    def __str__(self) -> str:
        words = current_words()
        head = " ".join(words.pair(name, value) for name, value in self.values.items())
        text = self.text
        for name in self.mentioned:
            text = text.replace(f"{{{name}}}", words.name(name))
        return one_line(f"{head}: {text}" if head else text)

    def __reduce__(self) -> tuple[type[UsageError], tuple[str]]:
        # Test runners send exceptions from one process to another.
        return UsageError, (str(self),)


class DemoFailed(SyncheckError):
    """A step of `syncheck demo` failed, or did not have the expected result."""


class CheckpointError(SyncheckError):
    """A file that cannot be compared.

    path: the file. place: the record, header or tensor. found, needed: the actual and the expected content. next_step:
    advice to the user.
    """

    def __init__(self, path: str, *, found: str, needed: str = "", place: str = "", next_step: str = "") -> None:
        self.path = path
        place, found, needed = map(shorten, (place, found, needed))
        self.reason = f"{place}: {found}" if place else found
        if needed:
            self.reason += f"; needed {needed}"
        if next_step:
            self.reason += f". {next_step[0].upper()}{next_step[1:]}."
        super().__init__(f"{path}: {self.reason}")


class UnreadableFile(CheckpointError):
    """The file is missing, is a folder, or must not be read."""

    @classmethod
    def because(cls, path: str, error: OSError | ValueError, next_step: str = "") -> UnreadableFile:
        """Return the error for a failed `open` or `read`, which raises ValueError for a NUL in the path."""
        return cls(path, found=str(getattr(error, "strerror", None) or error).lower(), next_step=next_step)


class NotACheckpoint(CheckpointError):
    """The content has no known format."""


class UnsupportedFormat(CheckpointError):
    """The format is known, but this version does not read it."""


class MalformedFile(CheckpointError):
    """The file is truncated, inconsistent, or refers to bytes out of its bounds."""


class RefusedFile(CheckpointError):
    """Loading the file would run code; syncheck has not run it."""


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        # OutOfSync contains a report, so it is defined in a higher layer. Its import path of version 0.2 still works:
        # this is the only import of a higher layer, and only the old path executes it.
        if name == "OutOfSync":
            return import_module("syncheck.records").OutOfSync
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
