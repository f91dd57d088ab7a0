"""The exceptions of syncheck and their exit codes.

    SyncheckError                exit 2
    +-- UsageError               invalid options, globs or paths
    |   +-- OptionError          an invalid option, spelled as in Python, on the command line or in a file
    +-- CheckpointError          one file: path, location, problem, expectation, next step
    |   +-- UnreadableFile       the operating system cannot read the file
    |   +-- NotACheckpoint       unknown format
    |   +-- UnsupportedFormat    a known format that this version does not read
    |   +-- MalformedFile        a known format, but the content is invalid
    |   +-- RefusedFile          loading the file would run code
    +-- RankFailed               a rank could not take part in a comparison across ranks
    +-- DemoFailed               a step of the demo failed
    +-- OutOfSync                exit 1; also an AssertionError; contains the report

All texts are one line, except that of OutOfSync. OutOfSync is raised by `assert_in_sync` and by monitors only; other
functions return the verdict.
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
    r"""Escape line breaks and control characters, because names in files are untrusted."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def logged(text: str) -> str:
    r"""Escape the commands of CI systems in lines of a log, with or without ANSI colors.

    GitHub interprets `::` after white space as the start of a command, and `##[` anywhere in a line. Azure Pipelines
    interprets `##vso[`, TeamCity `##teamcity[`.
    https://github.com/actions/runner/blob/602c0085328df8cb595fc2641d69f640a11377a4/src/Runner.Worker/ActionCommand.cs
    """
    return _HASHES.sub(r"#\\x23", _COLONS.sub(r"\1\\x3a", text))


class _Brief(reprlib.Repr):
    """A reprlib.Repr with the same order of set members in every process."""

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
    """Return the repr of a value from a file, at most `most` characters long, in bounded time.

    `repr` takes exponential time for nested shared references, and fails for integers of more than 4,300 digits.
    """
    short = _Brief()
    short.maxstring = short.maxother = short.maxlong = most
    try:
        return short.repr(value)[:most]
    except ValueError:
        return f"a huge {type(value).__name__}"


def _short(text: str) -> str:
    """Return a text from a file on one line, without its middle if it is long, because names may have megabytes."""
    if len(text) > 400:
        text = f"{text[:200]}...{text[-200:]}"
    return one_line(text)


class SyncheckError(Exception):
    """Base of all errors. `exit_code` is the exit code of the command line."""

    exit_code = 2

    def __str__(self) -> str:
        return one_line(super().__str__())


class UsageError(SyncheckError):
    """The arguments are invalid."""


class RankFailed(SyncheckError):
    """A rank could not take part in a comparison. Raised on every rank of the group with the same text."""


@dataclass(frozen=True, slots=True)
class Words:
    """The spelling of options on a surface: `--group-by REGEX` on the COMMAND_LINE, `group_by='REGEX'` in PYTHON."""

    prefix: str
    equals: str

    def name(self, field: str) -> str:
        """Return the spelling of a field of `api.Options`. `tolerance.KEY` is an entry of the table `tolerance`."""
        field, dot, key = field.partition(".")
        entry = f'."{key}"' if self.prefix else f'["{key}"]'
        return self.prefix + (field.replace("_", "-") if self.prefix else field) + (entry if dot else "")

    def placeholder(self, field: str, metavar: str) -> str:
        """Return a field with a placeholder for its value: `--group-by REGEX`."""
        return f"{self.name(field)}{self.equals}{metavar}"

    def pair(self, field: str, value: object) -> str:
        """Return a field with its value."""
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
    """Return the spelling of options on the surface that is rendering text."""
    return _CURRENT.get()


@contextmanager
def spelling(words: Words) -> Iterator[None]:
    """Render messages and errors with this spelling of options, in a `with` block or a decorated function."""
    token = _CURRENT.set(words)
    try:
        yield
    finally:
        _CURRENT.reset(token)


class OptionError(UsageError):
    """An option is invalid or contradicts another option.

    text: the requirement; `{rtol}` in it is replaced by the spelling of this option. values: the invalid options, by
    field of `api.Options`. `str` uses the spelling of the current surface.
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
    """An assertion failed: replicas differ, or syncheck could not tell whether they differ. report: the result.

    The text has several lines, with names already escaped.
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
    """A step of `syncheck demo` failed or had an unexpected result."""


class CheckpointError(SyncheckError):
    """A file that cannot be compared.

    place: the record, header or tensor. found, needed: the actual and the expected content. next_step: advice.
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
    """The file does not exist, is a folder, or is not readable."""

    @classmethod
    def because(cls, path: str, error: OSError | ValueError, next_step: str = "") -> UnreadableFile:
        """Return the error for a file that could not be opened or read. A NUL in a path is a ValueError."""
        return cls(path, found=str(getattr(error, "strerror", None) or error).lower(), next_step=next_step)


class NotACheckpoint(CheckpointError):
    """The format of the content is unknown."""


class UnsupportedFormat(CheckpointError):
    """The format is known, but this version does not read it."""


class MalformedFile(CheckpointError):
    """The format is known, but the file is truncated, out of bounds or inconsistent."""


class RefusedFile(CheckpointError):
    """Loading the file would run code. syncheck ran nothing."""
