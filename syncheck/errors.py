"""Every error that syncheck raises on purpose, and the exit code each stands for.

    SyncheckError                exit 2
    +-- UsageError               options, globs or paths that cannot be used
    |   +-- OptionError          an option; says it in the words of Python, the command line or a file
    +-- CheckpointError          one file: path, place, found, needed, next step
    |   +-- UnreadableFile       the operating system would not give the bytes
    |   +-- NotACheckpoint       no known format
    |   +-- UnsupportedFormat    a known format that is not read
    |   +-- MalformedFile        a known format, broken
    |   +-- RefusedFile          it wants to run something when it is loaded
    +-- RankFailed               a rank could not take part in a comparison of all ranks
    +-- DemoFailed               the demo did not show what it promises
    +-- OutOfSync                exit 1; also an AssertionError, with the whole report

An error's text is one line, but for OutOfSync's. Being out of sync is a verdict, and raised only where that was asked
for: by `assert_in_sync` and by a monitor.
"""

from __future__ import annotations

import re
import reprlib
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from syncheck.records import Report

_COLONS = re.compile(r"^((?:[^\S\n]|\x1b\[[0-9;]*m)*):(?=(?:\x1b\[[0-9;]*m)*:)", re.MULTILINE)
_HASHES = re.compile(r"##(?=\w*\[)")


def one_line(text: str) -> str:
    r"""Escape what would break a line or steer a terminal: names in a file are not to be trusted."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def logged(text: str) -> str:
    r"""Escape what a CI system would obey in the lines of a log, coloured or not.

    GitHub takes `::` for the start of a command wherever only blanks stand before it, and `##[` anywhere in a line;
    Azure Pipelines takes `##vso[`, TeamCity `##teamcity[`.
    https://github.com/actions/runner/blob/602c0085328df8cb595fc2641d69f640a11377a4/src/Runner.Worker/ActionCommand.cs
    """
    return _HASHES.sub(r"#\\x23", _COLONS.sub(r"\1\\x3a", text))


class _Brief(reprlib.Repr):
    """As reprlib has it, but sets whose members have no order of their own read the same wherever they are read."""

    def repr_set(self, x: set[Any], level: int) -> str:
        return self._members(x, level, super().repr_set)

    def repr_frozenset(self, x: frozenset[Any], level: int) -> str:
        return self._members(x, level, super().repr_frozenset)

    def _members(self, x: Any, level: int, ordered: Callable[[Any, int], str]) -> str:
        if level <= 0 or {type(member) for member in x} in ({str}, {int}):
            return ordered(x, level)
        if len(x) > self.maxset:  # to write all of them, and all of theirs, could take all time
            return f"<{type(x).__name__} of {len(x)}>"
        return f"{type(x).__name__}({{{', '.join(sorted(self.repr1(member, level - 1) for member in x))}}})"


def brief(value: object, most: int = 60) -> str:
    """Write a value from a file in at most `most` characters, in bounded time whatever it holds.

    `repr` would follow shared references without end, and fails for integers of more than 4,300 digits.
    """
    short = _Brief()
    short.maxstring = short.maxother = short.maxlong = most
    try:
        return short.repr(value)[:most]
    except ValueError:
        return f"a huge {type(value).__name__}"


def _short(text: str) -> str:
    """Write a file's words in one line, and leave out the middle of what nobody would read: names may be megabytes."""
    if len(text) > 400:
        text = f"{text[:200]}...{text[-200:]}"
    return one_line(text)


class SyncheckError(Exception):
    """Base of all; `exit_code` is what the command line returns for it."""

    exit_code = 2

    def __str__(self) -> str:
        return one_line(super().__str__())


class UsageError(SyncheckError):
    """The call cannot be carried out as it stands."""


class RankFailed(SyncheckError):
    """A rank could not take part in a comparison; raised on every rank of the group, with the same text."""


@dataclass(frozen=True, slots=True)
class Words:
    """How an option is written: `--group-by REGEX` as on the COMMAND_LINE, and `group_by='REGEX'` as in PYTHON."""

    prefix: str
    equals: str

    def name(self, field: str) -> str:
        """Write a field of `api.Options`; `tolerance.KEY` is an entry of that table."""
        field, dot, key = field.partition(".")
        entry = f'."{key}"' if self.prefix else f'["{key}"]'
        return self.prefix + (field.replace("_", "-") if self.prefix else field) + (entry if dot else "")

    def placeholder(self, field: str, metavar: str) -> str:
        """Write a field with a placeholder for its value: `--group-by REGEX`."""
        return f"{self.name(field)}{self.equals}{metavar}"

    def pair(self, field: str, value: object) -> str:
        """Write a field with its value."""
        text = f"{value:g}" if isinstance(value, float) else brief(value)
        if isinstance(value, str) and self.equals == " ":
            import shlex

            text = shlex.quote(value)
        return f"{self.name(field)}{self.equals}{text}"


PYTHON = Words("", "=")
COMMAND_LINE = Words("--", " ")
TOML = Words("tool.syncheck.", " = ")
PYTEST = Words("--syncheck-", " ")
_CURRENT: ContextVar[Words] = ContextVar("words", default=PYTHON)


def current_words() -> Words:
    """Return how the surface that renders text at present writes options."""
    return _CURRENT.get()


@contextmanager
def spelling(words: Words) -> Iterator[None]:
    """Render messages and errors with options written so, in a `with` block or a decorated function."""
    token = _CURRENT.set(words)
    try:
        yield
    finally:
        _CURRENT.reset(token)


class OptionError(UsageError):
    """An option makes no sense, or contradicts another one.

    text: what is needed; `{rtol}` in it stands for the option of that name. values: the options that are wrong, by the
    names of `api.Options`. `str` writes the options in the current surface's words.
    """

    _NAME = re.compile(r"\{(rtol|atol|ulp|close)\}")

    def __init__(self, text: str, **values: object) -> None:
        self.text, self.values = text, values
        super().__init__(text)

    def __str__(self) -> str:
        words = current_words()
        head = " ".join(words.pair(name, value) for name, value in self.values.items())
        text = self._NAME.sub(lambda found: words.name(found[1]), self.text)
        return one_line(f"{head}: {text}" if head else text)

    def __reduce__(self) -> tuple[type[UsageError], tuple[str]]:
        # Test runners send exceptions from one process to another.
        return UsageError, (str(self),)


class OutOfSync(SyncheckError, AssertionError):
    """Replicas differ, or, of an assertion, it could not be told whether they do. report: the whole answer.

    Its text is that of a failed assertion, of several lines; names in it are escaped where it is made.
    """

    exit_code = 1

    def __init__(self, text: str, report: Report) -> None:
        super().__init__(text)
        self.report = report

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[type[OutOfSync], tuple[str, Report]]:
        # Test runners send exceptions from one process to another.
        return type(self), (str(self), self.report)


class DemoFailed(SyncheckError):
    """A step of `syncheck demo` failed, or its result is not what the demo promises."""


class CheckpointError(SyncheckError):
    """A file that cannot be compared.

    path: the file. place: the record, header or tensor. found, needed: what is there and what would be right.
    next_step: what the user can do.
    """

    def __init__(self, path: str, *, found: str, needed: str = "", place: str = "", next_step: str = "") -> None:
        self.path = path
        place, found, needed = map(_short, (place, found, needed))
        self.reason = f"{place}: {found}" if place else found
        if needed:
            self.reason += f"; needed {needed}"
        if next_step:
            self.reason += f". {next_step[0].upper()}{next_step[1:]}."
        super().__init__(f"{path}: {self.reason}")


class UnreadableFile(CheckpointError):
    """The file is missing, a folder, or may not be read."""

    @classmethod
    def because(cls, path: str, error: OSError | ValueError, next_step: str = "") -> UnreadableFile:
        """Return the error for a file that Python could not open or read; it says ValueError of a NUL in a path."""
        return cls(path, found=str(getattr(error, "strerror", None) or error).lower(), next_step=next_step)


class NotACheckpoint(CheckpointError):
    """The content is of no known format."""


class UnsupportedFormat(CheckpointError):
    """The format is known, but this version does not read it."""


class MalformedFile(CheckpointError):
    """The format is known and this file breaks it: cut short, out of bounds, inconsistent."""


class RefusedFile(CheckpointError):
    """Loading the file would run code; nothing of it was run."""
