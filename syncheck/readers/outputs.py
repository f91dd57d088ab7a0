"""Open every output file, and refuse a path if its replacement would lose data.

`check` refuses a path before anything is compared, and `write` repeats the check because the comparison may take hours.
No other module opens files for writing, except scratch files (tests/test_architecture.py lists them).
"""

from __future__ import annotations

import codecs
import glob
import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from syncheck import atomic
from syncheck.errors import OptionError
from syncheck.frozen import record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType

# Enough of a file to recognize an earlier output.
_HEAD = 16_384
# Text near the start of each format: JSON, HTML, JUnit, Markdown, maps, baselines and fingerprints,
# events, and text, whose first line ends with the verdict. An empty file can be replaced.
_EARLIER_OUTPUT = re.compile(
    rb'\A\Z|\A\s*\{\s*"schema": \d+,\s*"tool": "syncheck"|<title>syncheck: |<testsuites name="syncheck"|\A## syncheck: '
    rb'|^\[\[rule\]\]|^tied = |\A\s*\{\s*"syncheck_(?:baseline|fingerprint)"|\A\{"event": '
    rb"|\b(?:IN SYNC|OUT OF SYNC|COULD NOT TELL|ALONE)\b",
    re.MULTILINE,
)
# A file of Megatron or of Llama lies one folder below the folder of the checkpoint.
_LEVELS = 3
# Options whose outputs may be pipes, like /dev/stdout.
MAP, EVENTS = "write_map", "events"
_STREAMED = (MAP, EVENTS)


@record
class _Output:
    """An output file.

    path: the path of the user.
    option: the field of its option.
    replaceable: the reader of a replaceable format.
    """

    path: str
    option: str
    replaceable: ModuleType | None = None

    @property
    def is_stream(self) -> bool:
        """Whether the output goes to a pipe, a device or a standard stream.

        A report has a file extension, so a device at its path is a mistake.
        """
        return self.option in _STREAMED and atomic.is_stream(self.path)

    @property
    def has_any_extension(self) -> bool:
        """Whether the output may have any file extension, so a wrong path looks like a right one."""
        return self.option in _STREAMED or self.replaceable is not None

    def refuse(self, problem: str) -> NoReturn:
        """Raise OptionError for this path."""
        raise OptionError(f"{problem}; pass another path", **{self.option: self.path})


def protect_all(outputs: Sequence[tuple[str, str]], inputs: Sequence[str] = ()) -> None:
    """Raise OptionError if an output of a run would replace another output, an input or a checkpoint.

    outputs: option and path of each output, as for `check`.
    inputs: the files, folders and globs of the run.
    """
    kinds: dict[str, tuple[str, str]] = {}
    for option, path in outputs:
        protect(path, option, inputs=inputs)
        target = os.path.realpath(path)
        extension = os.path.splitext(path)[1].lower()
        # The same report twice is harmless. Another option, or a link with another extension, has another text.
        kind = option, extension
        if kinds.setdefault(target, kind) != kind:
            _Output(path, option).refuse("is also the file of another output")


def check(
    path: str, option: str = "output", *, inputs: Sequence[str] = (), replaceable: ModuleType | None = None
) -> None:
    """Raise OptionError if an output cannot be written, or would replace an input or a part of a checkpoint.

    option: the field of the path's option.
    inputs: the files, folders and globs of the run.
    replaceable: the reader of a replaceable format.
    """
    output = _Output(path, option)
    if not output.is_stream:
        # First, because a missing folder has the error of the operating system.
        with atomic.convert_errors(path, option):
            atomic.check_writable(path)
    protect(path, option, inputs=inputs, replaceable=replaceable)


def protect(
    path: str, option: str = "output", *, inputs: Sequence[str] = (), replaceable: ModuleType | None = None
) -> None:
    """Raise OptionError if an output would replace an input or a part of a checkpoint.

    The parameters are those of `check`. Raises UnreadableFile for an existing file that cannot be examined.
    """
    output = _Output(path, option, replaceable)
    # Links are followed, because the target of a link is replaced.
    target = os.path.realpath(path)
    _refuse_part(output, target)
    # A link in the folder of a checkpoint belongs to it, as in the cache of Hugging Face.
    link = os.path.abspath(path)
    _refuse_part(output, link)
    _refuse_input(output, target, inputs)


def write(path: str, text: str, option: str = "output", *, replaceable: ModuleType | None = None) -> None:
    """Check a path again, and replace its file atomically. Raises OptionError.

    The parameters are those of `check`.
    """
    check(path, option, replaceable=replaceable)
    output = _Output(path, option)
    with atomic.convert_errors(path, option):
        if output.is_stream:
            atomic.write_stream(path, text)
        else:
            atomic.replace_file(path, text)


def append_line(path: str, line: str) -> None:
    """Append a line to a file after `protect` has accepted the path. Raises OSError."""
    atomic.append(path, f"{line}\n")


def _refuse_part(output: _Output, path: str) -> None:
    """Raise OptionError if a file is a checkpoint or belongs to a checkpoint.

    path: the path of the output, or another path to the same file.
    """
    from syncheck.readers.formats import find_reader, read_head
    from syncheck.readers.open import is_in_checkpoint

    head = read_head(path, _HEAD) if os.path.isfile(path) else b""
    reader = find_reader(head)
    is_earlier_output = _EARLIER_OUTPUT.search(head) is not None
    must_be_earlier_output = output.has_any_extension and not output.is_stream
    # All outputs are text. Binary files are of unknown formats, like GGUF, or damaged checkpoints.
    is_foreign = not _is_text(head)
    # No reader opens the settings of a tokenizer, but they belong to a checkpoint too. An earlier report may lie beside
    # them.
    is_part = is_in_checkpoint(path, levels=_LEVELS, only_parts=is_earlier_output)
    problems = (
        ("a checkpoint", reader not in (None, output.replaceable)),
        ("a file of another program, which may be a checkpoint", is_foreign),
        ("a checkpoint", is_part),
        ("a file that syncheck did not write", must_be_earlier_output and not is_earlier_output),
    )
    for problem, applies in problems:
        # The first problem is the most specific.
        if applies:
            output.refuse(f"would overwrite {problem}")


def _is_text(head: bytes) -> bool:
    """Whether the first bytes of a file are text in UTF-8."""
    # Accepts a last character that is cut off.
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        text = decoder.decode(head)
    except UnicodeDecodeError:
        return False
    return "\0" not in text


def _refuse_input(output: _Output, target: str, inputs: Sequence[str]) -> None:
    """Raise OptionError if the output is an input, or a part of an input. target: the path without links."""
    # Files are compared by inode, which finds every spelling of a path.
    for path in _expand_globs(inputs):
        if _is_same(path, target):
            output.refuse("would overwrite an input")
        # The folder of an input may contain an earlier report, so only parts of checkpoints count. The target may be a
        # link to a file of this folder.
        for name in _list_files(path):
            if _is_same(name, target):
                _refuse_part(output, name)


def _expand_globs(patterns: Sequence[str]) -> Iterator[str]:
    """Yield the patterns themselves, because they may be paths, and their matches."""
    for pattern in patterns:
        yield pattern
        yield from glob.iglob(pattern, recursive=True)


def _list_files(folder: str) -> Iterator[str]:
    """Yield the absolute paths of the files below a folder; nothing for the path of a file."""
    # os.walk does not follow links to folders, which may lead back to a parent.
    for current, _, names in os.walk(os.path.abspath(folder)):
        yield from [os.path.join(current, name) for name in names]


def _is_same(path: str, target: str) -> bool:
    """Whether two paths lead to the same file. Missing inputs are reported later, when they are opened."""
    # A NUL in the path is a ValueError.
    with suppress(OSError, ValueError):
        return os.path.samefile(path, target)
    return False
