"""What a project says once about its comparisons: the table [tool.syncheck] of its pyproject.toml.

    [tool.syncheck]
    checkpoints = ["ckpts/*.pth"]
    allow = ["SYN201"]
    rtol = 1e-5
    atol = 1e-8

The file is the nearest pyproject.toml, in a folder or above it, that has the table; the search ends at a folder with a
`.git`. The folder is the current one for the command line, and pytest's rootdir for the plugin. A key that is unknown
or of the wrong type is an error: an option that is not applied would change the verdict.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from syncheck.errors import UsageError, brief

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from syncheck.api import Options

_STRINGS, _STRING, _NUMBER, _WHOLE = "a list of strings", "a string", "a number", "a whole number"
# Every key of the table, in the order in which errors list them, and what it needs.
KEYS = {
    "checkpoints": _STRINGS,
    "only": _STRINGS,
    "include": _STRINGS,
    "exclude": _STRINGS,
    "buffers": _STRINGS,
    "rtol": _NUMBER,
    "atol": _NUMBER,
    "ulp": _WHOLE,
    "allow": _STRINGS,
    "group-by": _STRING,
}
# One is no use without the other, so a value given for one replaces both.
_PAIR = ("rtol", "atol")

# Most files say nothing about us, and parsing one costs more than all else here. `syncheck` as a key of any spelling
# is followed by a dot, a bracket or an equals sign; as a dependency it seldom is.
_MENTION = re.compile(rb"""syncheck["']?[ \t]*[].=]""")
# How api.Options names an option in its errors, and how the file does.
_OPTION = re.compile(r"--(rtol|atol|ulp|allow|group-by)\b")


@dataclass(frozen=True, slots=True)
class Config:
    """The table of one pyproject.toml, checked; empty where there is none.

    checkpoints: paths to use where none is given; they are relative to the folder of the file, and are absolute here
    unless that is the current folder. values: fields of `api.Options` by name, only those that the file sets.
    """

    path: str | None = None
    checkpoints: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)


def load(folder: str | os.PathLike[str] = ".") -> Config:
    """Read the nearest [tool.syncheck] at or above a folder; without one, the empty Config.

    Raises UsageError, with file, key, what was found and what is needed, for a file that mentions us and is no TOML,
    for a file that cannot be read, and for a key or value that makes no sense.
    """
    for path in _candidates(folder):
        try:
            with open(path, "rb") as file:
                content = file.read()
        except OSError as error:
            raise UsageError(f"{path}: cannot read it: {error.strerror or error}") from None
        if _MENTION.search(content):
            table = _table(path, content)
            if table is not None:
                return _config(path, table)
    return Config()


def options(config: Config, **given: Any) -> Options:
    """Return the options of a comparison: those given, and for the others those of the file.

    given: fields of `api.Options`, lists in place of tuples too; None and empty ones mean that a field is not given.
    rtol and atol are one option: where either is given, neither is taken from the file.
    Raises UsageError as `api.Options` does.
    """
    from syncheck import api

    kept = {name: config.values[name] for name in _kept(config, given)}
    taken = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if _is_given(v)}
    return api.Options(**kept | taken)


def applied(config: Config, **given: Any) -> tuple[str, ...]:
    """Return the keys of the file that `options` takes from it: an option that excuses something must be visible."""
    return tuple(name.replace("_", "-") for name in _kept(config, given))


def _kept(config: Config, given: Mapping[str, Any]) -> list[str]:
    taken = {name for name, value in given.items() if _is_given(value)}
    if taken.intersection(_PAIR):
        taken.update(_PAIR)
    return [name for name in config.values if name not in taken]


def _is_given(value: Any) -> bool:
    return value is not None and value not in ((), [])


def _candidates(folder: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the files pyproject.toml from a folder upwards, to the top of its repository."""
    try:
        here = os.path.abspath(folder)
    except OSError:
        return  # the current folder was removed
    while True:
        path = os.path.join(here, "pyproject.toml")
        if os.path.isfile(path):
            yield path
        above = os.path.dirname(here)
        # .git is a file in a worktree and in a submodule.
        if above == here or os.path.lexists(os.path.join(here, ".git")):
            return
        here = above


def _table(path: str, content: bytes) -> Mapping[str, Any] | None:
    """Return our table of a file, None where it has none."""
    import tomllib

    try:
        tool = tomllib.loads(content.decode()).get("tool")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not TOML: {error}") from None
    if not isinstance(tool, dict) or "syncheck" not in tool:
        return None
    table = tool["syncheck"]
    if not isinstance(table, dict):
        raise UsageError(f"{path}: tool.syncheck = {brief(table)}; needs a table")
    return table


def _config(path: str, table: Mapping[str, Any]) -> Config:
    """Check a table: every key by its type, and the values as `api.Options` does."""
    from syncheck import api

    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in KEYS:
            raise UsageError(f"{path}: tool.syncheck.{key}: no such key; needs one of {', '.join(KEYS)}")
        read = _read(value, KEYS[key])
        if read is None:
            raise UsageError(f"{path}: tool.syncheck.{key} = {brief(value)}; needs {KEYS[key]}")
        if read != ():
            values[key.replace("-", "_")] = read
    checkpoints = values.pop("checkpoints", ())
    try:
        api.Options(**values)
    except UsageError as error:
        raise UsageError(f"{path}: tool.syncheck: {_OPTION.sub(lambda found: found[1], str(error))}") from None
    return Config(path, tuple(_from_folder(os.path.dirname(path), pattern) for pattern in checkpoints), values)


def _read(value: Any, needed: str) -> Any:
    """Return a TOML value as a field of `api.Options` holds it, None where it is not what is needed."""
    if needed == _STRINGS:
        return tuple(value) if isinstance(value, list) and all(isinstance(item, str) for item in value) else None
    if needed == _STRING:
        return value if isinstance(value, str) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if needed == _WHOLE:
        return value if isinstance(value, int) else None
    # TOML's integers have no bound here, and float() has one.
    return float(value) if abs(value) < 1e308 or not isinstance(value, int) else math.inf


def _from_folder(folder: str, pattern: str) -> str:
    """Return a path or glob of the file as seen from the current folder."""
    if folder == os.getcwd():
        return pattern
    if any(mark in pattern for mark in "*?["):
        import glob

        # A bracket in the name of a folder above is no pattern.
        folder = glob.escape(folder)
    return os.path.join(folder, pattern)
