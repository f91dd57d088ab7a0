"""Selection of the checkpoints to judge from the command line and the ini file."""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

# Names of files from which plugins may collect tests. `latest` does not match.
_TESTS = re.compile(r"(?:^|[^a-z])tests?(?:[^a-z]|$)|^conftest\.py$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Selection:
    """The checkpoints to judge.

    paths: files, folders and globs. ids: items to run, empty for all. source: option or ini value with the paths.
    not_judged: given folders with checkpoints from which only tests are collected. unused: why the checkpoints of the
    ini file are ignored; empty if they are judged or if there are none.
    """

    paths: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    source: str = "--syncheck"
    not_judged: tuple[str, ...] = ()
    unused: str = ""


def select_checkpoints(config: pytest.Config) -> Selection:
    """Return the checkpoints to judge, and remove them from `config.args`, from which pytest collects tests.

    Raises UsageError for a path or glob without a match.
    """
    start = config.invocation_params.dir
    given: list[str] = config.getoption("syncheck")
    by_arguments = config.args_source == pytest.Config.ArgsSource.ARGS
    arguments = config.args if by_arguments else []
    ids = [argument for argument in arguments if _is_id(argument, start)]
    others = [argument for argument in arguments if not _is_id(argument, start)]
    if given:
        # If the shell expanded `--syncheck GLOB`, all paths but the first are positional arguments.
        roles = [(argument, *_argument_roles(config, argument, given)) for argument in others]
        more = [argument for argument, judged, _ in roles if judged]
        selection = Selection(
            (*given, *more),
            tuple(ids),
            unused=_unused(config, "--syncheck was given"),
            not_judged=tuple(
                argument for argument, judged, _ in roles if not judged and _holds_checkpoint(start / argument)
            ),
        )
        _set_arguments(config, [argument for argument, _, collected in roles if collected])
    elif others:
        return Selection(unused=_unused(config, "paths were given"))
    elif is_same(start, config.rootpath):
        # Like testpaths, the ini value applies to runs from the rootdir without paths. Ids of items are not paths.
        selection = Selection(tuple(config.getini("syncheck_checkpoints")), tuple(ids), "syncheck_checkpoints")
        if selection.paths and ids:
            _set_arguments(config, [])
    else:
        return Selection(unused=_unused(config, f"pytest was not started in {config.rootpath}"))
    for path in selection.paths:
        magic = glob.has_magic(path) and not os.path.lexists(start / path)
        if not path or not (
            glob.glob(path, root_dir=start, recursive=True) if magic else os.path.lexists(start / path)
        ):
            raise pytest.UsageError(f"{selection.source} {path or repr(path)}: no such file or folder in {start}")
    return selection


def is_same(folder: Path, other: Path) -> bool:
    """Whether two paths are the same folder. pytest does not resolve a link in --rootdir."""
    return folder == other or os.path.samefile(folder, other)


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


def _argument_roles(config: pytest.Config, argument: str, given: list[str]) -> tuple[bool, bool]:
    """Return whether a positional path is judged, and whether pytest collects from it, if --syncheck was given.

    A folder with both tests and checkpoints is judged if it may come from a glob expanded by the shell. This is
    excluded if --syncheck received a glob, or a path inside the folder.
    Raises UsageError for a folder with neither, which pytest would silently ignore.
    """
    start = config.invocation_params.dir
    path = start / argument
    if "::" in argument or not path.is_dir():
        judged = "::" not in argument and path.is_file() and path.suffix != ".py" and _holds_checkpoint(path)
        return judged, not judged
    names = []
    for _, folders, found in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        names += found
    collected = any(_may_be_tests(config, name) for name in names)
    if not _holds_checkpoint(path):
        if not collected:
            raise pytest.UsageError(f"{argument}: this folder contains neither checkpoints nor tests")
        return False, True
    patterns = config.getini("python_files")
    if not any(fnmatch(name, pattern) for name in names for pattern in patterns):
        return True, collected
    has_glob = any(glob.has_magic(value) and not os.path.lexists(start / value) for value in given)
    is_parent = any(Path(os.path.abspath(start / value)).is_relative_to(os.path.abspath(path)) for value in given)
    return not has_glob and not is_parent, True


def _may_be_tests(config: pytest.Config, name: str) -> bool:
    """Whether pytest or a plugin may collect tests from a file of this name."""
    patterns = [*config.getini("python_files"), *(config.getoption("doctestglob", None) or ())]
    if config.getoption("doctestmodules", False):
        patterns.append("*.py")
    return _TESTS.search(name) is not None or any(fnmatch(name, pattern) for pattern in patterns)


def _holds_checkpoint(path: Path) -> bool:
    from syncheck import api

    return api.holds_checkpoint(path)
