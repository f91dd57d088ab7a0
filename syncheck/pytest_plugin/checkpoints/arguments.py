"""Selection of the checkpoints to judge from the command line and the ini file."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from syncheck.frozen import record

if TYPE_CHECKING:
    from collections.abc import Sequence

# Names of files from which plugins may collect tests. `latest` does not match.
_TESTS = re.compile(r"(?:^|[^a-z])tests?(?:[^a-z]|$)|^conftest\.py$", re.IGNORECASE)


@record
class CheckpointArguments:
    """The checkpoints to judge.

    paths: files, folders and globs.
    ids: items to run, empty for all.
    source: option or ini value with the paths.
    not_judged: folders with checkpoints from which only tests are collected.
    unused: why the checkpoints of the ini file are ignored; empty if they are judged or if there are none.
    """

    paths: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    source: str = "--syncheck"
    not_judged: tuple[str, ...] = ()
    unused: str = ""


class Role(NamedTuple):
    """What a positional path is for.

    judged: it has checkpoints to judge.
    collected: pytest collects tests from it.
    """

    judged: bool
    collected: bool


def select_checkpoints(config: pytest.Config) -> CheckpointArguments:
    """Return the checkpoints to judge, and remove them from `config.args`, from which pytest collects tests.

    Raises UsageError for a path or glob without a match.
    """
    ids, paths = _split_arguments(config)
    if config.getoption("syncheck"):
        selection = _select_option(config, ids, paths)
    elif paths:
        selection = CheckpointArguments(unused=_unused(config, "paths were given"))
    else:
        selection = _select_ini_value(config, ids)

    start = config.invocation_params.dir
    for path in selection.paths:
        if not _exists(path, start):
            raise pytest.UsageError(f"{selection.source} {path or repr(path)}: no such file or folder in {start}")

    return selection


def _split_arguments(config: pytest.Config) -> tuple[list[str], list[str]]:
    """Return the positional arguments of the command line: ids of checkpoint items, and paths."""
    ids: list[str] = []
    paths: list[str] = []
    # Without arguments, pytest has replaced them by testpaths or the folder.
    if config.args_source != pytest.Config.ArgsSource.ARGS:
        return ids, paths

    for argument in config.args:
        if _is_id(argument, config.invocation_params.dir):
            ids.append(argument)
        else:
            paths.append(argument)

    return ids, paths


def _select_ini_value(config: pytest.Config, ids: list[str]) -> CheckpointArguments:
    """Return the checkpoints of the ini value. Like testpaths, it applies to runs from the rootdir without paths."""
    if not is_same(config.invocation_params.dir, config.rootpath):
        return CheckpointArguments(unused=_unused(config, f"pytest was not started in {config.rootpath}"))

    checkpoints = tuple(config.getini("syncheck_checkpoints"))
    # Ids of items are not paths from which pytest collects tests.
    if checkpoints and ids:
        _set_arguments(config, [])

    return CheckpointArguments(checkpoints, tuple(ids), "syncheck_checkpoints")


def _select_option(config: pytest.Config, ids: list[str], paths: list[str]) -> CheckpointArguments:
    """Return the checkpoints of `--syncheck`, and of positional paths among them.

    If the shell expanded `--syncheck GLOB`, all paths but the first are positional arguments.
    """
    checkpoints: list[str] = list(config.getoption("syncheck"))
    option_values = tuple(checkpoints)
    not_judged = []
    collected = []
    for path in paths:
        role = _find_role(config, path, option_values)
        if role.judged:
            checkpoints.append(path)
        elif _holds_checkpoint(config.invocation_params.dir / path):
            not_judged.append(path)

        if role.collected:
            collected.append(path)

    _set_arguments(config, collected)
    return CheckpointArguments(
        paths=tuple(checkpoints),
        ids=tuple(ids),
        not_judged=tuple(not_judged),
        unused=_unused(config, "--syncheck was given"),
    )


def _exists(path: str, start: Path) -> bool:
    """Whether a path exists, or a glob matches a file."""
    # An empty path is the start folder to `os.path`.
    if not path:
        return False

    if _is_glob(path, start):
        return bool(glob.glob(path, root_dir=start, recursive=True))

    return os.path.lexists(start / path)


def _is_glob(path: str, start: Path) -> bool:
    """Whether a path has the characters of a glob, and is not the name of a file with brackets."""
    return glob.has_magic(path) and not os.path.lexists(start / path)


def is_same(folder: Path, second: Path) -> bool:
    """Whether two paths are the same folder. pytest does not resolve a link in --rootdir."""
    return folder == second or os.path.samefile(folder, second)


def _unused(config: pytest.Config, reason: str) -> str:
    return reason if config.getini("syncheck_checkpoints") else ""


def _set_arguments(config: pytest.Config, arguments: list[str]) -> None:
    """Replace pytest's paths. Without paths pytest collects nothing, because their source is ARGS."""
    config.args = arguments
    config.args_source = pytest.Config.ArgsSource.ARGS


def _is_id(argument: str, start: Path) -> bool:
    """Whether an argument is the id of a checkpoint item: pytest allows no `::` after a folder."""
    folder, separator, _ = argument.partition("::")
    return bool(separator) and os.path.isdir(start / folder)


def _find_role(config: pytest.Config, argument: str, option_values: Sequence[str]) -> Role:
    """Return the role of a positional path if --syncheck was given. option_values: the values of --syncheck.

    A folder with both tests and checkpoints is judged if it may come from a glob expanded by the shell. This is
    excluded if --syncheck received a glob, or a path inside the folder.
    Raises UsageError for a folder with neither, which pytest would silently ignore.
    """
    start = config.invocation_params.dir
    path = start / argument
    # The id of a test.
    if "::" in argument:
        return Role(judged=False, collected=True)

    if not path.is_dir():
        is_checkpoint = path.is_file() and path.suffix != ".py" and _holds_checkpoint(path)
        return Role(judged=is_checkpoint, collected=not is_checkpoint)

    names = _list_names(path)
    has_checkpoints = _holds_checkpoint(path)
    has_tests = any(_may_be_tests(config, name) for name in names)
    if not has_tests and not has_checkpoints:
        raise pytest.UsageError(f"{argument}: this folder contains neither checkpoints nor tests")

    if not has_checkpoints:
        return Role(judged=False, collected=True)

    if not _match_any(names, config.getini("python_files")):
        return Role(judged=True, collected=has_tests)

    return Role(judged=_may_be_expanded(path, option_values, start), collected=True)


def _may_be_expanded(folder: Path, option_values: Sequence[str], start: Path) -> bool:
    """Whether the shell may have expanded a glob to a folder: no glob, and no path inside it, arrived unexpanded."""
    # `..` in a path may lead into the folder.
    resolved_folder = os.path.abspath(folder)
    has_glob = any(_is_glob(value, start) for value in option_values)
    is_parent = any(Path(os.path.abspath(start / value)).is_relative_to(resolved_folder) for value in option_values)
    return not has_glob and not is_parent


def _list_names(folder: Path) -> list[str]:
    """Return the names of all files in a folder, at any depth, except in hidden folders."""
    names = []
    for _, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        names += files

    return names


def _match_any(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Whether any of the names matches any of the globs."""
    return any(fnmatch.filter(names, pattern) for pattern in patterns)


def _may_be_tests(config: pytest.Config, name: str) -> bool:
    """Whether pytest or a plugin may collect tests from a file of this name."""
    patterns = [*config.getini("python_files"), *(config.getoption("doctestglob", None) or ())]
    if config.getoption("doctestmodules", False):
        patterns.append("*.py")

    return _TESTS.search(name) is not None or _match_any([name], patterns)


def _holds_checkpoint(path: Path) -> bool:
    from syncheck import api

    return api.holds_checkpoint(path)
