"""The options of a project: the table [tool.syncheck] of its pyproject.toml.

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

The file is the nearest pyproject.toml with the table, in a folder or above it; the search ends at a folder with a
`.git`. The search starts in the current folder for the command line, and in pytest's rootdir for the plugin. `options`
declares the keys. An unknown key or a value of the wrong type is an error, because ignoring a key could change the
verdict.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from syncheck import options
from syncheck.errors import TOML, UsageError, spelling
from syncheck.text import brief

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

# Most pyproject.toml files do not mention syncheck, and parsing TOML costs more than the rest of this module. As a key,
# `syncheck` is followed by a dot, a bracket or an equals sign in every spelling; as a dependency it seldom is.
_MENTION = re.compile(rb"""syncheck["']?[ \t]*[].=]""")


@dataclass(frozen=True, slots=True)
class Config:
    """The checked table of a pyproject.toml; empty without a file.

    comparison, run: the fields of `Options` and of `RunOptions` set in the file. Paths in the file are relative to
    its folder; here they are absolute or relative to the current folder.
    """

    path: str | None = None
    comparison: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """The paths to compare if the command line has no path."""
        return tuple(self.run.get("checkpoints", ()))


def load(folder: str | os.PathLike[str] = ".") -> Config:
    """Read the nearest [tool.syncheck] at or above a folder; without one, the empty Config.

    Raises UsageError for a file that cannot be read, a file that mentions syncheck and is not TOML, an unknown key and
    a wrong value.
    """
    for path in _walk_candidates(folder):
        try:
            with open(path, "rb") as file:
                content = file.read()
        except OSError as error:
            raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
        if _MENTION.search(content):
            table = _parse_table(path, content)
            if table is not None:
                return _check_table(path, table)
    return Config()


def merge_options(config: Config, kind: type | None = None, **given: Any) -> Any:
    """Return the options of a comparison; given options override the file.

    kind: the class of the result, by default `Options`. given: its fields; None or an empty value counts as missing,
    and a list stands for a tuple. The tolerances are one option: a given tolerance overrides all tolerances of the
    file. Raises OptionError as the class does.
    """
    kept = {name: config.comparison[name] for name in _list_kept(config, given)}
    return (kind or options.Options)(**kept | _drop_missing(given))


def merge_run_options(config: Config, **given: Any) -> options.RunOptions:
    """Return the remaining options of a run; given fields of `RunOptions` override the file.

    Raises OptionError as `RunOptions` does.
    """
    return options.RunOptions(**{**config.run, **_drop_missing(given)})


def list_applied_keys(config: Config, **given: Any) -> tuple[str, ...]:
    """Return the keys of the file used by `merge_options`, to show which options affect the verdict."""
    return tuple(name.replace("_", "-") for name in _list_kept(config, given))


def _list_kept(config: Config, given: Mapping[str, Any]) -> list[str]:
    taken = set(_drop_missing(given))
    tolerances = options.list_tolerances()
    if taken & tolerances:
        taken |= tolerances
    return [name for name in config.comparison if name not in taken]


def _drop_missing(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with a value, lists as tuples."""
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
        if value is not None and value not in ((), [], {})
    }


def _walk_candidates(folder: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the pyproject.toml of a folder and of its parents, up to the top of the repository."""
    try:
        current = os.path.abspath(folder)
    except OSError:
        return  # the current folder was removed
    while True:
        path = os.path.join(current, "pyproject.toml")
        if os.path.isfile(path):
            yield path
        above = os.path.dirname(current)
        # .git is a file in a worktree and in a submodule.
        if above == current or os.path.lexists(os.path.join(current, ".git")):
            return
        current = above


def _parse_table(path: str, content: bytes) -> Mapping[str, Any] | None:
    """Return the table tool.syncheck of a file, or None."""
    import tomllib

    try:
        tool = tomllib.loads(content.decode()).get("tool")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not TOML: {error}") from None
    if not isinstance(tool, dict) or "syncheck" not in tool:
        return None
    table = tool["syncheck"]
    if not isinstance(table, dict):
        raise UsageError(f"{path}: tool.syncheck = {brief(table)}: must be a table")
    return table


def _check_table(path: str, table: Mapping[str, Any]) -> Config:
    """Check a table: each key by its declaration, then the values together."""
    try:
        values = _read_values(table)
        of_run = options.list_options(TOML, options.RunOptions)
        run = {name: value for name, value in values.items() if name in of_run}
        comparison = {name: value for name, value in values.items() if name not in of_run}
        options.Options(**comparison)
        options.RunOptions(**run)
    except UsageError as error:
        with spelling(TOML):
            raise UsageError(f"{path}: {error}") from None
    folder = os.path.dirname(path)
    return Config(path, _resolve_paths(folder, comparison), _resolve_paths(folder, run))


def _read_values(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a table by field name, without empty values and flags that are off.

    Raises UsageError for an unknown key and a value of the wrong type.
    """
    known = options.list_options(TOML)
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in known or "_" in key:
            keys = ", ".join(name.replace("_", "-") for name in known)
            raise UsageError(f"tool.syncheck.{key}: unknown key; must be one of {keys}")
        known[name].check(name, value)
        if value is not False and value not in ([], {}):
            values[name] = _convert(known[name].kind, value)
    return values


def _convert(kind: options.Kind, value: Any) -> Any:
    """Return a TOML value in the type of its field."""
    if kind.is_list:
        return tuple(value)
    if kind is options.NUMBER:
        # TOML's integers are unbounded, and float() fails for huge integers.
        return float(value) if abs(value) < 1e308 or not isinstance(value, int) else math.inf
    return value


def _resolve_paths(folder: str, values: dict[str, Any]) -> dict[str, Any]:
    """Resolve the paths among the values, which are relative to the file's folder."""
    known = options.list_options(TOML)
    resolved = {}
    for name, value in values.items():
        resolve = _RESOLVERS.get(known[name].kind)
        resolved[name] = value if resolve is None else resolve(folder, value)
    return resolved


def _resolve_rank(folder: str, value: str | int) -> str | int:
    is_rank = isinstance(value, int) or value.isdecimal()
    return value if is_rank else os.path.join(folder, str(value))


def _resolve_pattern(folder: str, pattern: str) -> str:
    """Return a path or glob of the file as seen from the current folder."""
    if folder == os.getcwd():
        return pattern
    if any(mark in pattern for mark in "*?["):
        import glob

        # A bracket in the folder's own path is not part of the pattern.
        folder = glob.escape(folder)
    return os.path.join(folder, pattern)


_RESOLVERS: dict[options.Kind, Callable[[str, Any], Any]] = {
    options.PATH: os.path.join,
    options.PATH_OR_RANK: _resolve_rank,
    # The report prints these paths, which are shorter if they are relative to the current folder.
    options.PATHS: lambda folder, paths: tuple(os.path.relpath(os.path.join(folder, path)) for path in paths),
    options.PATTERNS: lambda folder, patterns: tuple(_resolve_pattern(folder, pattern) for pattern in patterns),
}
