"""What on the command line, or in the ini file, is a checkpoint to judge, and what is pytest's own."""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

# By its ending, a positional argument is taken for a checkpoint; by content, a zip of something else would be too.
ENDINGS = (".pth", ".pt", ".ckpt", ".bin", ".safetensors")


@dataclass(frozen=True, slots=True)
class Asked:
    """What there is to judge.

    paths: files, folders and globs. ids: of the items to run, empty for all. source: what named the paths.
    """

    paths: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    source: str = "--syncheck"


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
        # A glob that the shell expanded leaves all but its first file among the positional arguments.
        more = [argument for argument in others if _is_checkpoint(start / argument)]
        asked = Asked((*given, *more), tuple(ids))
        _set_arguments(config, [argument for argument in others if argument not in more])
    elif start == config.rootpath and not others:
        # As with testpaths: only in a run from the root that names no path. An id of ours names none.
        asked = Asked(tuple(config.getini("syncheck_checkpoints")), tuple(ids), "syncheck_checkpoints")
        if asked.paths and ids:
            _set_arguments(config, [])
    else:
        return Asked()
    for path in asked.paths:
        magic = glob.has_magic(path) and not os.path.lexists(start / path)
        if not path or not (
            glob.glob(path, root_dir=start, recursive=True) if magic else os.path.lexists(start / path)
        ):
            raise pytest.UsageError(f"{asked.source} {path or repr(path)}: no such file or folder, seen from {start}")
    return asked


def _set_arguments(config: pytest.Config, arguments: list[str]) -> None:
    """Leave pytest these paths; without any it would collect the whole folder, unless told that none is what it got."""
    config.args = arguments
    config.args_source = pytest.Config.ArgsSource.ARGS


def _is_id(argument: str, start: Path) -> bool:
    """Whether an argument names items of ours; pytest itself refuses a folder with `::` behind it."""
    folder, separator, _ = argument.partition("::")
    return bool(separator) and os.path.isdir(start / folder)


def _is_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint, or a folder of checkpoints in which there is no Python file to collect."""
    if path.is_file():
        return path.name.lower().endswith(ENDINGS)
    found = False
    for _, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if any(name.endswith(".py") for name in names):
            return False
        found = found or any(name.lower().endswith(ENDINGS) for name in names)
    return found
