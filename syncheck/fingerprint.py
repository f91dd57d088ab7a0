"""Create fingerprints, which store a digest and statistics instead of each tensor's bytes: a few kB per checkpoint.

`compare` reads a fingerprint like a checkpoint (readers/fingerprint_file.py). Keep it when the checkpoint is deleted,
send it instead of the checkpoint, or write it with every checkpoint.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from syncheck.atomic import check_writable, convert_write_errors, replace_file
from syncheck.comparison.values import counted
from syncheck.errors import UsageError
from syncheck.kernel.blocks import Files, ranges
from syncheck.kernel.digests import ALGORITHM, hasher
from syncheck.kernel.moments import Moments
from syncheck.kinds import classify_snapshot
from syncheck.metadata_block import SCHEMA
from syncheck.readers import EXTENSIONS, fingerprint_file, refuse_overwrite
from syncheck.readers.fingerprint_file import FORMAT, KEY, MOST_TEXT, VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.snapshots import Metadata, Snapshot, Tensor

ENDING = ".fingerprint.json"
# Maximum length of a string value; the longest that is compared lists the members of a parameter group.
_MOST_VALUE = 1_000_000


def fingerprint(snapshot: Snapshot) -> str:
    """Read a checkpoint's tensors and return its fingerprint: JSON with one tensor per line.

    It contains the Python values that are compared: step, epoch, param_groups, scaler state. Raises CheckpointError if
    the file can no longer be read.
    """
    tensors = snapshot.tensors
    kinds = classify_snapshot(snapshot).by_name
    source = os.path.basename(os.path.normpath(snapshot.path))
    found = counted(snapshot)
    values = {name: _encode_value(value) for name, value in found.items() if _is_storable(value)}
    dropped = [
        f"the fingerprint does not contain {name}: its value cannot be stored" for name in found.keys() - values.keys()
    ]
    header = {
        KEY: VERSION,
        "source": {"name": source, "format": snapshot.format, "bytes": snapshot.bytes},
        "algorithm": ALGORITHM,
        "metadata": None if snapshot.metadata is None else _encode_metadata(snapshot.metadata),
        "values": values,
        "stubs": [stub[:MOST_TEXT] for stub in snapshot.stubs],
        "notes": [str(note)[:MOST_TEXT] for note in (*snapshot.notes, *sorted(dropped))],
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in header.items()]
    with Files() as files:
        entries = {name: {"kind": kinds[name]} | _digest_tensor(tensor, files) for name, tensor in tensors.items()}
    listed = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(entry, allow_nan=False)}" for name, entry in entries.items()
    )
    return "{" + ",\n ".join(lines) + ',\n "tensors": {\n' + listed + "\n }}\n"


def choose_paths(snapshots: Sequence[Snapshot], output: str) -> list[tuple[Snapshot, str]]:
    """Return the path of the fingerprint of each checkpoint. Fingerprints among the checkpoints are skipped.

    output: the file for a single checkpoint, or a folder. In a folder, fingerprints have the names of the checkpoints
    and the folders below their common folder, so that ranks and steps in paths are kept. Raises UsageError if all paths
    are fingerprints, two checkpoints have the same output path, or the output path is a checkpoint.
    """
    wanted = [snapshot for snapshot in snapshots if snapshot.format != FORMAT]
    if snapshots and not wanted:
        raise UsageError(f"{snapshots[0].path}: already a fingerprint; pass the checkpoint")
    paths = [snapshot.path for snapshot in wanted]
    if len(paths) == 1 and not os.path.isdir(output) and not output.endswith(os.sep):
        chosen = {paths[0]: output}
    elif os.path.isfile(output):
        raise UsageError(f"-o {output}: a file; {len(paths)} checkpoints need a folder")
    else:
        chosen = {path: os.path.join(output, name) for path, name in _name_files(paths).items()}
    taken: dict[str, str] = {}
    for path, target in chosen.items():
        other = taken.setdefault(target, path)
        if other != path:
            raise UsageError(
                f"{other} and {path}: both would be written to {target}; write their fingerprints separately"
            )
        if os.path.exists(target):
            refuse_overwrite(target, replaceable=fingerprint_file)
            with convert_write_errors(target):
                check_writable(target)
    return [(snapshot, chosen[snapshot.path]) for snapshot in wanted]


def write(path: str, text: str) -> None:
    """Write a fingerprint atomically, and create its folder if necessary. Raises UsageError if this fails."""
    with convert_write_errors(path):
        folder = os.path.dirname(path) or "."
        if not os.path.exists(folder):
            os.makedirs(folder, exist_ok=True)
        replace_file(path, text)


def _name_files(paths: Sequence[str]) -> dict[str, str]:
    """Return the path of each fingerprint below the output folder, by the path of its checkpoint."""
    folders = [os.path.dirname(os.path.abspath(path)) for path in paths]
    common = os.path.commonpath(folders) if folders else ""
    names = {}
    for path, folder in zip(paths, folders, strict=True):
        name = os.path.basename(os.path.normpath(path))
        stem, ending = os.path.splitext(name)
        name = (stem if ending.lower() in EXTENSIONS else name) + ENDING
        names[path] = os.path.normpath(os.path.join(os.path.relpath(folder, common), name))
    return names


def _digest_tensor(tensor: Tensor, files: Files) -> dict[str, Any]:
    entry: dict[str, Any] = {"dtype": tensor.dtype[:MOST_TEXT], "shape": list(tensor.shape)}
    if tensor.refused:
        return entry | {"refused": str(tensor.refused)[:MOST_TEXT]}
    digest, seen = hasher(), Moments(tensor.dtype)
    for start, count in ranges([tensor]):
        block = files.read(tensor, start, count, slot=0)
        digest.update(block)
        seen.add(block)
    entry |= {"digest": digest.hexdigest(), "nonfinite": seen.nonfinite} | seen.found()
    return entry if tensor.sharding is None else entry | {"sharding": asdict(tensor.sharding)}


def _is_storable(value: Any) -> bool:
    if isinstance(value, int):
        return abs(value) < 2**64
    return value is None or isinstance(value, float) or (isinstance(value, str) and len(value) <= _MOST_VALUE)


def _encode_value(value: Any) -> Any:
    """Return the value for JSON, with NaN and infinity as {"float": "nan"}."""
    return {"float": repr(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _encode_metadata(metadata: Metadata) -> dict[str, Any]:
    """Return the metadata block for JSON, without the values of an untrusted file that JSON cannot store."""
    block: dict[str, Any] = {"schema": SCHEMA}
    for name in type(metadata).__slots__:
        value = getattr(metadata, name)
        if value is not None and value != () and value != {}:
            block[name] = _keep_plain(value)
    # An empty list is kept: it describes a model without buffers.
    return block if metadata.buffers is None else block | {"buffers": list(metadata.buffers)}


def _keep_plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [part for part in value if _is_plain(part)]
    if isinstance(value, dict):
        return {key: part for key, part in value.items() if isinstance(key, str) and _is_plain(part)}
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str) or value is None or (isinstance(value, int) and abs(value) < 2**64)
