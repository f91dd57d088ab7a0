"""The test items of a set of checkpoints, planned from names alone before any tensor is read."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from syncheck import api
from syncheck.frozen import record
from syncheck.report.items import ALONE, NOTHING, READABLE, item_of
from syncheck.text import make_unique_name, one_line, shorten

if TYPE_CHECKING:
    from collections.abc import Iterable

    from syncheck.layout.groups import CheckpointGroup
    from syncheck.records import Unreadable

# Characters of a part of an id, because the name of a run may be arbitrarily long.
_MOST = 100
# Folders of one step or rank. They change with the files given, so an id must not contain them.
_STEP_OR_RANK = re.compile(r"(?:(?:global_?)?step|epoch|iter|checkpoint|ckpt|rank|r)?[-_=.]?\d+", re.IGNORECASE)


@record
class Planned:
    """One test item.

    folder: of its files.
    folder_in_id: its escaped path, relative to the rootdir.
    owner: the run and step, or the file.
    item: see report.items.
    siblings: all items of the same owner.
    group: index of its group, None for an unreadable file.
    """

    folder: Path
    folder_in_id: str
    owner: str
    item: str
    siblings: tuple[str, ...] = ()
    group: int | None = None
    unreadable: Unreadable | None = None

    @property
    def nodeid(self) -> str:
        """The id as printed by pytest."""
        return f"{self.folder_in_id}::{self.owner}::{self.item}"


def relative_id(start: Path, root: Path, nodeid: str) -> str:
    """Return an id relative to the folder in which pytest was started, as pytest prints ids."""
    if start == root:
        return nodeid
    folder, separator, names = nodeid.partition("::")
    relative = Path(os.path.relpath(root / folder, start)).as_posix()
    return f"{relative}{separator}{names}"


def plan_items(checkpoints: api.Found, options: api.Options, start: Path, root: Path) -> list[Planned]:
    """Return the items of all groups, then the items of unreadable files. Every given file has an item.

    start: the folder to which paths are relative.
    root: pytest's rootdir, to which ids are relative.
    """
    owners: dict[str, set[str]] = defaultdict(set)
    planned: list[Planned] = []
    folders = _folders(checkpoints, start)
    steps = Counter(replicas.run for replicas in checkpoints.groups)
    for number, replicas in enumerate(checkpoints.groups):
        folder = folders[replicas.run]
        folder_in_id = _folder_part(folder, root)
        run = replicas.run.removeprefix(f"{os.path.relpath(folder, start)}/").removeprefix(f"{folder}/")
        # With one step only, the id does not contain the step, because it changes with each training.
        if steps[replicas.run] > 1 and replicas.step is not None:
            run = f"{run}-step-{replicas.step}"

        owner = _add_owner(_id_part(run), owners[folder_in_id])
        items = _list_items(replicas, options)
        for item in items:
            planned.append(
                Planned(
                    folder=folder,
                    folder_in_id=folder_in_id,
                    owner=owner,
                    item=item,
                    siblings=items,
                    group=number,
                )
            )

    for file in checkpoints.unreadable:
        folder = Path(os.path.abspath(start / file.path)).parent
        folder_in_id = _folder_part(folder, root)
        owner = _add_owner(_id_part(os.path.basename(file.path)), owners[folder_in_id])
        planned.append(
            Planned(
                folder=folder,
                folder_in_id=folder_in_id,
                owner=owner,
                item=READABLE,
                siblings=(READABLE,),
                unreadable=file,
            )
        )

    return planned


def _list_items(replicas: CheckpointGroup, options: api.Options) -> tuple[str, ...]:
    """Return the items of a group: one for each kind of tensor."""
    if len(replicas.ranks) < 2:
        return (ALONE,)
    items = dict.fromkeys(item_of(kind) for kind in api.kinds_in(replicas, options))
    return tuple(items) or (NOTHING,)


def _folders(checkpoints: api.Found, start: Path) -> dict[str, Path]:
    """Return the folder of each run, common to all of its steps."""
    paths: dict[str, list[str]] = defaultdict(list)
    for replicas in checkpoints.groups:
        for _, snapshot in replicas.ranks:
            paths[replicas.run].append(snapshot.path)
    return {run: _folder(files, start) for run, files in paths.items()}


def _folder(paths: Iterable[str], start: Path) -> Path:
    """Return the folder of the files of a run, above the folders of steps and ranks."""
    folders = [os.path.dirname(os.path.abspath(start / path)) for path in paths]
    folder = Path(os.path.commonpath(folders))
    while start in folder.parents and _STEP_OR_RANK.fullmatch(folder.name):
        folder = folder.parent

    return folder


def _folder_part(folder: Path, root: Path) -> str:
    """Return a folder relative to the rootdir, like the folders of tests, escaped for an id."""
    try:
        text = folder.relative_to(root).as_posix()
    except ValueError:
        text = folder.as_posix()
    return _escape(text)


def _id_part(text: str) -> str:
    return shorten(_escape(text), _MOST) or "files"


def _escape(text: str) -> str:
    """Replace characters with a meaning in ids: `::`, brackets, white space, control characters."""
    text = one_line(re.sub(r"\s", "_", text))
    return re.sub(r":{2,}", ":", text).strip(":").replace("[", "(").replace("]", ")")


def _add_owner(owner: str, owners: set[str]) -> str:
    """Add an owner to those of its folder, with a number if it is repeated. The numbers follow the order of groups."""
    unique_owner = make_unique_name(owner, owners, "~")
    owners.add(unique_owner)
    return unique_owner
