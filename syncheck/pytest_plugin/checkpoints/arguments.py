"""What on the command line, or in the ini file, is a checkpoint to judge, and what is pytest's own."""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

# Files from which plugins collect are called like this too; a file `latest` is not.
_TESTS = re.compile(r"(?:^|[^a-z])tests?(?:[^a-z]|$)|^conftest\.py$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Asked:
    """What there is to judge.

    paths: files, folders and globs. ids: of the items to run, empty for all. source: what named the paths.
    passed: folders given that hold checkpoints and are only collected. unused: why the checkpoints of the ini file are
    not judged; empty where they are, or where it names none.
    """

    paths: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    source: str = "--syncheck"
    passed: tuple[str, ...] = ()
    unused: str = ""


def asked_for(config: pytest.Config) -> Asked:
    """Return what there is to judge, and leave in `config.args` only what pytest has to collect.

    Raises UsageError for a path or glob that nothing matches.
    """
    start = config.invocation_params.dir
    given: list[str] = config.getoption("syncheck")
    by_arguments = config.args_source == pytest.Config.ArgsSource.ARGS
    arguments = config.args if by_arguments else []
    ids = [argument for argument in arguments if _is_id(argument, start)]
    others = [argument for argument in arguments if not _is_id(argument, start)]
    if given:
        # A glob that the shell expanded leaves all but its first path among the positional arguments.
        sorted_out = [(argument, *_roles(config, argument, given)) for argument in others]
        more = [argument for argument, judged, _ in sorted_out if judged]
        asked = Asked(
            (*given, *more),
            tuple(ids),
            unused=_unused(config, "--syncheck was given"),
            passed=tuple(
                argument for argument, judged, _ in sorted_out if not judged and _holds_checkpoint(start / argument)
            ),
        )
        _set_arguments(config, [argument for argument, _, collected in sorted_out if collected])
    elif others:
        return Asked(unused=_unused(config, "paths were given"))
    elif is_same(start, config.rootpath):
        # As with testpaths: only in a run from the root that names no path. An id of ours names none.
        asked = Asked(tuple(config.getini("syncheck_checkpoints")), tuple(ids), "syncheck_checkpoints")
        if asked.paths and ids:
            _set_arguments(config, [])
    else:
        return Asked(unused=_unused(config, f"pytest was not started in {config.rootpath}"))
    for path in asked.paths:
        magic = glob.has_magic(path) and not os.path.lexists(start / path)
        if not path or not (
            glob.glob(path, root_dir=start, recursive=True) if magic else os.path.lexists(start / path)
        ):
            raise pytest.UsageError(f"{asked.source} {path or repr(path)}: no such file or folder, seen from {start}")
    return asked


def is_same(folder: Path, other: Path) -> bool:
    """Whether two paths are one folder; pytest takes over a link in --rootdir as it is written."""
    return folder == other or os.path.samefile(folder, other)


def _unused(config: pytest.Config, reason: str) -> str:
    return reason if config.getini("syncheck_checkpoints") else ""


def _set_arguments(config: pytest.Config, arguments: list[str]) -> None:
    """Leave pytest these paths; without any it would collect the whole folder, unless told that none is what it got."""
    config.args = arguments
    config.args_source = pytest.Config.ArgsSource.ARGS


def _is_id(argument: str, start: Path) -> bool:
    """Whether an argument names items of ours; pytest itself refuses a folder with `::` behind it."""
    folder, separator, _ = argument.partition("::")
    return bool(separator) and os.path.isdir(start / folder)


def _roles(config: pytest.Config, argument: str, given: list[str]) -> tuple[bool, bool]:
    """Say of a path beside --syncheck whether it is judged and whether pytest collects from it.

    A folder with both tests and checkpoints is judged too where it may come from a glob that the shell expanded. That
    cannot be where the glob reached us, nor for a folder that holds what --syncheck names.
    Raises UsageError for a folder with neither: pytest would pass over it in silence.
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
            raise pytest.UsageError(f"{argument}: neither a checkpoint nor a file of tests in this folder")
        return False, True
    patterns = config.getini("python_files")
    if not any(fnmatch(name, pattern) for name in names for pattern in patterns):
        return True, collected
    globs = any(glob.has_magic(one) and not os.path.lexists(start / one) for one in given)
    above = any(Path(os.path.abspath(start / one)).is_relative_to(os.path.abspath(path)) for one in given)
    return not globs and not above, True


def _may_be_tests(config: pytest.Config, name: str) -> bool:
    """Whether pytest or a plugin of it may collect from a file of this name."""
    patterns = [*config.getini("python_files"), *(config.getoption("doctestglob", None) or ())]
    if config.getoption("doctestmodules", False):
        patterns.append("*.py")
    return _TESTS.search(name) is not None or any(fnmatch(name, pattern) for pattern in patterns)


def _holds_checkpoint(path: Path) -> bool:
    from syncheck import api

    return api.holds_checkpoint(path)
