"""The errors that syncheck raises, with their exit codes.

    SyncheckError                exit 2
    +-- UsageError               options, globs or paths that cannot be used
    |   +-- OptionError          an option, by the name of its field
    +-- CheckpointError          one file: path, place, found, needed, next step
    |   +-- UnreadableFile       the operating system cannot read it
    |   +-- NotACheckpoint       not of a known format
    |   +-- UnsupportedFormat    a known format that this version does not read
    |   +-- MalformedFile        a broken file of a known format
    |   +-- RefusedFile          loading it would run code
    +-- RankFailed               a rank could not take part in a comparison of all ranks
    +-- DemoFailed               the demo failed
    +-- records.OutOfSync        exit 1; also an AssertionError, with the report

The text of an error is one line, except that of OutOfSync. The assertions of `syncheck.testing`, a monitor, and a
watched program with `--on-desync raise` raise OutOfSync; other functions return the verdict.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from syncheck.text import one_line, option_text, shorten, system_reason


class SyncheckError(Exception):
    """Base class of the errors; `exit_code` is the exit code of the command line."""

    exit_code = 2

    def __str__(self) -> str:
        return one_line(super().__str__())


class UsageError(SyncheckError):
    """The arguments or options are wrong."""


class RankFailed(SyncheckError):
    """A rank could not take part in a comparison. Every rank of the group raises it with the same text."""


class PeersBlocked(UsageError):
    """The code of the user failed on this rank, while other ranks wait in a collective of the program."""


class OptionError(UsageError):
    """An option has a wrong value, or contradicts another option.

    text: the expected value, a `Message` if it mentions options. values: the wrong options by the name of their field,
    which starts the text.
    """

    def __init__(self, text: object, **values: object) -> None:
        self.text, self.values = text, values
        super().__init__(self._compose())

    def __str__(self) -> str:
        # Composed for each surface, because the command line spells options in its own way.
        return one_line(self._compose())

    def _compose(self) -> str:
        # A contradiction of several options may name them in the text alone.
        if not self.values:
            return str(self.text)
        options = " ".join(option_text(name, value) for name, value in self.values.items())
        return f"{options}: {self.text}"


class DemoFailed(SyncheckError):
    """A step of `syncheck demo` failed, or did not have the expected result."""


class CheckpointError(SyncheckError):
    """A file that cannot be compared.

    path: the file. place: the record, header or tensor. found, needed: the actual and the expected content. next_step:
    advice to the user.
    """

    def __init__(self, path: str, *, found: str, needed: str = "", place: str = "", next_step: str = "") -> None:
        self.path = path
        # Names in files may be megabytes.
        self.reason = shorten(found)
        if place:
            self.reason = f"{shorten(place)}: {self.reason}"
        if needed:
            self.reason += f"; needed {shorten(needed)}"
        if next_step:
            ending = "" if next_step.endswith("?") else "."
            self.reason += f". {next_step[0].upper()}{next_step[1:]}{ending}"
        super().__init__(f"{path}: {self.reason}")


class UnreadableFile(CheckpointError):
    """The file is missing, is a folder, or must not be read."""

    @classmethod
    def because(cls, path: str, error: OSError | ValueError, next_step: str = "") -> UnreadableFile:
        """Return the error for a failed `open` or `read`, which raises ValueError for a NUL in the path."""
        return cls(path, found=str(system_reason(error)).lower(), next_step=next_step)


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
