"""Which test items there are for some checkpoints: decided from names alone, before a tensor is read."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from syncheck import api
from syncheck.errors import one_line
from syncheck.report.items import ALONE, NOTHING, READABLE, item_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from syncheck.records import Unreadable

_MOST = 100  # characters of a part of an id; the name of a run may be anything
# Folders of one step or of one rank: they come and go with the files given, and say nothing that an id needs.
_MOMENT = re.compile(r"(?:(?:global_?)?step|epoch|iter|checkpoint|ckpt|rank|r)?[-_=.]?\d+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Planned:
    """One test item: what it is called and what it judges.

    folder: where its files lie. owner: the run and step, or the file. item: what of them; siblings: all items of the
    same owner. group: which of the groups found, None for a file that cannot be read.
    """

    folder: Path
    shown: str
    """The folder as it stands in the id."""
    owner: str
    item: str
    siblings: tuple[str, ...] = ()
    group: int | None = None
    unreadable: Unreadable | None = None

    @property
    def nodeid(self) -> str:
        """As pytest prints it."""
        return f"{self.shown}::{self.owner}::{self.item}"


def seen_from(start: Path, root: Path, nodeid: str) -> str:
    """Write an id as pytest does where it was not started in its rootdir: the folder as seen from there."""
    shown, separator, rest = nodeid.partition("::")
    return nodeid if start == root else f"{Path(os.path.relpath(root / shown, start)).as_posix()}{separator}{rest}"


def plan(found: api.GroupedCheckpoints, options: api.Options, start: Path, root: Path) -> list[Planned]:
    """Return the items in the order of the groups, unreadable files last.

    start: the folder to which the paths are relative. root: pytest's rootdir, to which ids are relative. Every group
    and every unreadable file has an item, so that nothing that was given can be passed over.
    """
    taken: Counter[tuple[str, str]] = Counter()
    planned: list[Planned] = []
    folders = _folders(found, start)
    steps = Counter(replicas.run for replicas in found.groups)
    for number, replicas in enumerate(found.groups):
        folder = folders[replicas.run]
        run = replicas.run.removeprefix(f"{os.path.relpath(folder, start)}/").removeprefix(f"{folder}/")
        # The step of a run's only files is no part of the id: it would change with each training.
        several = steps[replicas.run] > 1 and replicas.step is not None
        owner = _part(f"{run}-step-{replicas.step}" if several else run)
        shown = _shown(folder, root)
        owner = _unique(shown, owner, taken)
        if len(replicas.ranks) < 2:
            items: tuple[str, ...] = (ALONE,)
        else:
            items = tuple(dict.fromkeys(map(item_of, api.kinds_in(replicas, options)))) or (NOTHING,)
        planned += [Planned(folder, shown, owner, item, items, number) for item in items]
    for file in found.unreadable:
        folder = Path(os.path.abspath(start / file.path)).parent
        shown = _shown(folder, root)
        owner = _unique(shown, _part(os.path.basename(file.path)), taken)
        planned.append(Planned(folder, shown, owner, READABLE, (READABLE,), unreadable=file))
    return planned


def _folders(found: api.GroupedCheckpoints, start: Path) -> dict[str, Path]:
    """Return the folder of each run, the same for all of its steps."""
    paths: dict[str, list[str]] = {}
    for replicas in found.groups:
        paths.setdefault(replicas.run, []).extend(snapshot.path for _, snapshot in replicas.ranks)
    return {run: _folder(files, start) for run, files in paths.items()}


def _folder(paths: Iterable[str], start: Path) -> Path:
    folder = Path(os.path.commonpath([os.path.dirname(os.path.abspath(start / path)) for path in paths]))
    while folder != start and start in folder.parents and _MOMENT.fullmatch(folder.name):
        folder = folder.parent
    return folder


def _shown(folder: Path, root: Path) -> str:
    """Write a folder as pytest writes those of tests, and without what would take an id apart."""
    try:
        text = folder.relative_to(root).as_posix()
    except ValueError:
        text = folder.as_posix()
    return _escaped(text)


def _part(text: str) -> str:
    text = _escaped(text)
    return (text if len(text) <= _MOST else f"{text[:_MOST]}...") or "files"


def _escaped(text: str) -> str:
    """Take out of a name what has a meaning in an id: `::`, brackets, white space, control characters."""
    text = one_line(re.sub(r"\s", "_", text))
    return re.sub(r":{2,}", ":", text).strip(":").replace("[", "(").replace("]", ")")


def _unique(shown: str, owner: str, taken: Counter[tuple[str, str]]) -> str:
    """Number what would be called the same; the order of the groups is fixed, and so are the numbers."""
    taken[shown, owner] += 1
    count = taken[shown, owner]
    return owner if count == 1 else _unique(shown, f"{owner}~{count}", taken)
