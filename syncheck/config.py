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
from typing import TYPE_CHECKING, Any, TypeVar

from syncheck import option_kinds, options
from syncheck.errors import UsageError
from syncheck.suggestions import suggest
from syncheck.text import brief, options_as_typed, system_reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_Kind = TypeVar("_Kind", options.Options, options.DiffOptions, options.RunOptions)

# Most pyproject.toml files do not mention syncheck, and parsing TOML costs more than the rest of this module. As a key,
# `syncheck` is followed by a dot, a bracket or an equals sign in every spelling; as a dependency it seldom is.
_MENTION = rb"""syncheck["']?[ \t]*[].=]"""


def load(folder: str | os.PathLike[str] = ".") -> tuple[str | None, dict[str, Any]]:
    """Read the nearest [tool.syncheck] at or above a folder.

    Returns the path of the file, or None, and the options in it by field name. Paths in the file are relative to its
    folder; the returned paths are absolute or relative to the current folder. Raises UsageError for a file that cannot
    be read, a file that mentions syncheck and is not TOML, an unknown key and a wrong value.
    """
    for path in _walk_candidates(folder):
        try:
            with open(path, "rb") as file:
                content = file.read()
        except OSError as error:
            raise UsageError(f"{path}: cannot be read: {system_reason(error)}") from None
        table = _parse_table(path, content)
        if table is not None:
            return path, _check_table(path, table)
    return None, {}


def merge_options(values: Mapping[str, Any], kind: type[_Kind], overrides: Mapping[str, Any]) -> _Kind:
    """Return options of one class, from the file and from a command line.

    values: the options in the file.
    kind: `Options`, `DiffOptions` or `RunOptions`.
    overrides: values by field name that override the file. Names of other fields are ignored, None or an empty value
        counts as missing, and a list stands for a tuple. The tolerances are one option: any tolerance overrides all
        tolerances of the file.

    Raises OptionError as the class does.
    """
    merged = {name: values[name] for name in list_applied(values, kind, overrides)}
    for name in options.list_fields(kind):
        value = overrides.get(name)
        if _is_missing(value):
            continue
        if isinstance(value, list):
            value = tuple(value)
        merged[name] = value
    return kind(**merged)


def list_applied(values: Mapping[str, Any], kind: type, overrides: Mapping[str, Any]) -> list[str]:
    """Return the fields that `merge_options` takes from the file, to show which options affect the verdict."""
    overridden = {name for name, value in overrides.items() if not _is_missing(value)}
    tolerances = options.list_tolerances()
    if overridden & tolerances:
        overridden |= tolerances
    applicable = options.list_fields(kind) - overridden
    return [name for name in values if name in applicable]


def _is_missing(value: object) -> bool:
    return value in (None, (), [], {})


def _walk_candidates(folder: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the pyproject.toml of a folder and of its parents, up to the top of the repository."""
    try:
        current = os.path.abspath(folder)
    except OSError:
        # The current folder was removed.
        return
    below = ""
    # The root is its own parent.
    while current != below:
        path = os.path.join(current, "pyproject.toml")
        if os.path.isfile(path):
            yield path
        # .git is a file in a worktree and in a submodule.
        if os.path.lexists(os.path.join(current, ".git")):
            return
        below, current = current, os.path.dirname(current)


def _parse_table(path: str, content: bytes) -> Mapping[str, Any] | None:
    """Return the table tool.syncheck of a file, or None."""
    if not re.search(_MENTION, content):
        return None
    import tomllib

    try:
        tool = tomllib.loads(content.decode()).get("tool")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not TOML: {error}") from None
    if not isinstance(tool, dict):
        return None
    # TOML has no null, so None is a missing table.
    table = tool.get("syncheck")
    if not isinstance(table, dict | None):
        raise UsageError(f"{path}: tool.syncheck = {brief(table)}: must be a table")
    return table


def _check_table(path: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Check a table, each key by its declaration, then the values together; return the values by field name."""
    try:
        values = _read_values(table)
        merge_options(values, options.Options, {})
        merge_options(values, options.RunOptions, {})
    except UsageError as error:
        # The keys of the file are the names of fields.
        with options_as_typed(""):
            raise UsageError(f"{path}: {error}") from None
    return _resolve_paths(os.path.dirname(path), values)


def _read_values(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a table by field name, without empty values and flags that are off.

    Raises UsageError for an unknown key and a value of the wrong type.
    """
    declarations = options.list_options(options.TOML)
    values: dict[str, Any] = {}
    for key, value in table.items():
        # Deprecated: until version 0.2, keys had dashes, like the options of the command line.
        name = key.replace("-", "_")
        if name not in declarations:
            expected = f"must be one of {', '.join(declarations)}"
            raise UsageError(f"tool.syncheck.{key}: unknown key; {expected}{suggest(name, declarations)}")
        if name != key and name in table:
            raise UsageError(f"tool.syncheck.{key}: the same option as {name}; remove one of them")
        declaration = declarations[name]
        declaration.check(name, value)
        # A flag that is off, and an empty list, do not override a default. 0 equals False, but is a number.
        if value is False or _is_missing(value):
            continue
        values[name] = _convert(declaration.kind, value)
    return values


def _convert(kind: option_kinds.Kind, value: Any) -> Any:
    """Return a TOML value in the type of its field."""
    convert = _CONVERTERS.get(kind)
    if convert is None:
        return value
    return convert(value)


def _to_float(number: float) -> float:
    # TOML's integers are unbounded, and float() fails for huge integers.
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _resolve_paths(folder: str, values: dict[str, Any]) -> dict[str, Any]:
    """Resolve the paths among the values, which are relative to the file's folder."""
    declarations = options.list_options(options.TOML)
    resolved = {}
    for name, value in values.items():
        resolve = _RESOLVERS.get(declarations[name].kind, _keep)
        resolved[name] = resolve(folder, value)
    return resolved


def _keep(_: str, value: Any) -> Any:
    """Return a value that is no path."""
    return value


def _resolve_rank(folder: str, value: str | int) -> str | int:
    if isinstance(value, int) or value.isdecimal():
        return value
    return os.path.join(folder, value)


def _resolve_paths_shown(folder: str, paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return paths that the report prints: they are shorter if they are relative to the current folder."""
    return tuple(os.path.relpath(os.path.join(folder, path)) for path in paths)


def _resolve_patterns(folder: str, patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Return paths and globs of the file as seen from the current folder."""
    if folder == os.getcwd():
        return patterns
    import glob

    resolved = []
    for pattern in patterns:
        # A bracket in the folder's own path is not part of the pattern.
        parent = glob.escape(folder) if glob.has_magic(pattern) else folder
        resolved.append(os.path.join(parent, pattern))
    return tuple(resolved)


_CONVERTERS: dict[option_kinds.Kind, Callable[[Any], Any]] = {
    option_kinds.STRINGS: tuple,
    option_kinds.PATHS: tuple,
    option_kinds.PATTERNS: tuple,
    option_kinds.NUMBER: _to_float,
}
_RESOLVERS: dict[option_kinds.Kind, Callable[[str, Any], Any]] = {
    option_kinds.PATH: os.path.join,
    option_kinds.PATH_OR_RANK: _resolve_rank,
    option_kinds.PATHS: _resolve_paths_shown,
    option_kinds.PATTERNS: _resolve_patterns,
}
