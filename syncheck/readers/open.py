"""Open a checkpoint of any format, a file or a folder, and describe files and folders that are none."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.errors import UnreadableFile
from syncheck.readers.adapter_config import add_adapter_settings
from syncheck.readers.formats import EXTENSIONS, read_file, read_head, read_with
from syncheck.tensors.names import normalize

if TYPE_CHECKING:
    from types import ModuleType

    from syncheck.readers.unread import Unread
    from syncheck.snapshots import Snapshot

# Text files in which Megatron, DeepSpeed and TensorFlow name the newest checkpoint of a folder.
TRACKERS = ("latest", "latest_universal", "latest_checkpointed_iteration.txt", "checkpoint")
# The prefix of DistributedDataParallel, DataParallel and DeepSpeed.
_WRAPPER = "module."


def read(path: str) -> Snapshot:
    """Open a checkpoint of any supported format, a file or a folder; the bytes of its tensors stay on disk.

        for name, tensor in read("ckpts/ddp_rank0.pth").tensors.items():
            print(name, tensor.dtype, tensor.shape)  # such as bn1.running_mean float32 (64,)

    path: of the file or folder. Its content determines the format; nothing in it is imported or executed.
    Raises CheckpointError with the location of the fault, the finding and the next step.
    """
    reader = sniff_folder(path) if os.path.isdir(path) else None
    snapshot = read_with(reader, path) if reader else read_file(path)
    return add_adapter_settings(_unwrap_values(snapshot))


def _unwrap_values(snapshot: Snapshot) -> Snapshot:
    """Remove the prefixes of wrappers from the names of a model's values, as a comparison removes them from tensors."""
    if not snapshot.model_values:
        return snapshot

    names = list(snapshot.model_values)
    if any(name.startswith(_WRAPPER) for name in snapshot.tensors):
        # A value outside of the wrapped model does not keep the prefix of the tensors.
        names = [name for name in names if name.startswith(_WRAPPER)]
    plain_names = normalize([*snapshot.tensors, *names])
    new_names = {name: plain_names[name] for name in names if plain_names[name] != name}
    # Two values of one name would not be distinguished any more.
    renamed = {name: plain for name, plain in new_names.items() if plain not in snapshot.values}
    if not renamed:
        return snapshot
    return replace(
        snapshot,
        values={renamed.get(name, name): value for name, value in snapshot.values.items()},
        model_values={renamed.get(name, name): membership for name, membership in snapshot.model_values.items()},
    )


def describe_unread(folder: str) -> Unread | None:
    """Return the format of a folder without checkpoints, or of its first file in such a format. Raises OSError."""
    # For errors only, to start faster.
    from syncheck.readers.unread import describe_file, describe_folder

    unread = describe_folder(folder)
    if unread is not None:
        return unread

    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if not os.path.isfile(path):
            continue
        head = read_head(path)
        unread = describe_file(path, head) if head else None
        if unread is not None:
            return unread._replace(title=f"{name} is {unread.title}")
    return None


def sniff_folder(folder: str) -> ModuleType | None:
    """Return the reader of a folder that is a single checkpoint, or None.

    Raises UnreadableFile for a folder that cannot be listed.
    """
    # Imported for folders only, to start faster.
    from syncheck.readers.folders import FOLDERS

    try:
        return next((reader for reader in FOLDERS.values() if reader.matches_folder(folder)), None)
    except (OSError, ValueError) as error:
        raise UnreadableFile.because(folder, error) from None


def is_in_checkpoint(path: str, *, levels: int, only_parts: bool) -> bool:
    """Whether a file has the name of a checkpoint's file, or lies in a folder that is a single checkpoint.

    levels: the number of folders above the file to examine.
    only_parts: whether only the files count that the reader of the folder opens.
    """
    has_name = path.lower().endswith(EXTENSIONS) or os.path.basename(path) in TRACKERS
    if has_name and not only_parts:
        return True

    folder = path
    for _ in range(levels):
        folder = os.path.dirname(folder)
        reader = None
        with suppress(UnreadableFile):
            reader = sniff_folder(folder)
        if reader is None:
            continue
        if reader.holds(os.path.relpath(path, folder)) or not only_parts:
            return True
    return False
