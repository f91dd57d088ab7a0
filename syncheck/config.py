"""What a project says once about its comparisons: the table [tool.syncheck] of its pyproject.toml.

    [tool.syncheck]
    checkpoints = ["ckpts/*.pth"]
    allow = ["SYN201"]
    baseline = "syncheck-baseline.json"
    rtol = 1e-5
    atol = 1e-8
    limit = 20

    [tool.syncheck.tolerance]
    bn_mean = {rtol = 1e-5, atol = 1e-8}
    "layer4.*" = {ulp = 4}
    optimizer = "close"
    "lm_head.*" = "bitwise"

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

from syncheck.errors import TOML, OptionError, UsageError, brief, spelling
from syncheck.report.files import FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from syncheck.api import Options

_STRINGS, _STRING, _NUMBER, _WHOLE = "a list of strings", "a string", "a number", "a whole number"
_FLAG, _RULES, _PLACE = "true or false", "a table by kind or glob of names", "a path or a rank"
_ROWS = "a number of rows, 0 for all"
_TYPES: dict[str, Any] = {
    _STRING: str,
    _NUMBER: int | float,
    _WHOLE: int,
    _FLAG: bool,
    _RULES: dict,
    _PLACE: int | str,
    _ROWS: int,
}
# What `--color` may say, here and on the command line.
COLORS = ("auto", "always", "never")
_FORMAT, _COLOR = (f"one of {', '.join(choices)}" for choices in (FORMATS, COLORS))
_CHOICES = {_FORMAT: FORMATS, _COLOR: COLORS}
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
    "close": _FLAG,
    "tolerance": _RULES,
    "allow": _STRINGS,
    "baseline": _STRING,
    "group-by": _STRING,
    "reference": _PLACE,
    "jobs": _WHOLE,
    "quick": _FLAG,
    "rng": _FLAG,
}
# Those of the command line's printing; the pytest plugin has options of its own for that.
PRINTING = {
    "exit-zero": _FLAG,
    "format": _FORMAT,
    "output": _STRINGS,
    "limit": _ROWS,
    "quiet": _FLAG,
    "color": _COLOR,
}

# Most files say nothing about us, and parsing one costs more than all else here. `syncheck` as a key of any spelling
# is followed by a dot, a bracket or an equals sign; as a dependency it seldom is.
_MENTION = re.compile(rb"""syncheck["']?[ \t]*[].=]""")


@dataclass(frozen=True, slots=True)
class Config:
    """The table of one pyproject.toml, checked; empty where there is none.

    checkpoints: paths to use where none is given; they are relative to the folder of the file, and are absolute here
    unless that is the current folder, as are the paths in the others. values: fields of `api.Options` by name, only
    those that the file sets. printing: likewise of what the command line does with the answer.
    """

    path: str | None = None
    checkpoints: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    printing: Mapping[str, Any] = field(default_factory=dict)


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
    The tolerances are one option: where any is given, none is taken from the file.
    Raises OptionError as `api.Options` does.
    """
    from syncheck import api

    kept = {name: config.values[name] for name in _kept(config, given)}
    taken = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if _is_given(v)}
    return api.Options(**kept | taken)


def applied(config: Config, **given: Any) -> tuple[str, ...]:
    """Return the keys of the file that `options` takes from it: an option that excuses something must be visible."""
    return tuple(name.replace("_", "-") for name in _kept(config, given))


def _kept(config: Config, given: Mapping[str, Any]) -> list[str]:
    from syncheck import api

    taken = {name for name, value in given.items() if _is_given(value)}
    if taken.intersection(api.TOLERANCE):
        taken.update(api.TOLERANCE)
    return [name for name in config.values if name not in taken]


def _is_given(value: Any) -> bool:
    return value is not None and value not in ((), [], {})


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
        needed = (KEYS | PRINTING).get(key)
        if needed is None:
            known = ", ".join(KEYS | PRINTING)
            raise UsageError(f"{path}: tool.syncheck.{key}: no such key; needs one of {known}")
        read = _read(value, needed)
        if read is None:
            raise UsageError(f"{path}: tool.syncheck.{key} = {brief(value)}; needs {needed}")
        if _is_given(read) and read is not False:
            values[key.replace("-", "_")] = read
    folder = os.path.dirname(path)
    checkpoints = tuple(_from_folder(folder, pattern) for pattern in values.pop("checkpoints", ()))
    printing = {name: values.pop(name) for key in PRINTING if (name := key.replace("-", "_")) in values}
    try:
        api.Options(**values)
    except OptionError as error:
        with spelling(TOML):
            raise UsageError(f"{path}: {error}") from None
    if "output" in printing:
        printing["output"] = tuple(os.path.relpath(os.path.join(folder, file)) for file in printing["output"])
    if "baseline" in values:
        values["baseline"] = os.path.join(folder, values["baseline"])
    place = values.get("reference")
    if isinstance(place, str) and not place.isdecimal():
        values["reference"] = os.path.join(folder, place)
    return Config(path, checkpoints, values, printing)


def _read(value: Any, needed: str) -> Any:
    """Return a TOML value as a field of `api.Options` holds it, None where it is not what is needed."""
    if needed == _STRINGS:
        return tuple(value) if isinstance(value, list) and all(isinstance(item, str) for item in value) else None
    if needed in _CHOICES:
        return value if value in _CHOICES[needed] else None
    # To Python true and false are numbers.
    if isinstance(value, bool) != (needed == _FLAG) or not isinstance(value, _TYPES[needed]):
        return None
    if needed == _ROWS:
        return value if value >= 0 else None
    if needed == _NUMBER:
        # TOML's integers have no bound here, and float() has one.
        return float(value) if abs(value) < 1e308 or not isinstance(value, int) else math.inf
    return value


def _from_folder(folder: str, pattern: str) -> str:
    """Return a path or glob of the file as seen from the current folder."""
    if folder == os.getcwd():
        return pattern
    if any(mark in pattern for mark in "*?["):
        import glob

        # A bracket in the name of a folder above is no pattern.
        folder = glob.escape(folder)
    return os.path.join(folder, pattern)
