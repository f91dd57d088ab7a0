"""Create fingerprints: digests, moments and counts of all tensors of a checkpoint, in a few kB.

`compare` reads fingerprints like checkpoints (readers/fingerprint_file.py). Keep fingerprints of deleted checkpoints,
send them instead of checkpoints, or create them at every save.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from syncheck.atomic import convert_errors
from syncheck.errors import UsageError
from syncheck.messages import Refusal
from syncheck.readers import fingerprint_file, outputs
from syncheck.readers.fingerprint_file import FORMAT, KEY, MOST_TEXT, VERSION
from syncheck.readers.formats import EXTENSIONS
from syncheck.readers.metadata_block import SCHEMA
from syncheck.tensors.blocks import Files, ranges
from syncheck.tensors.digests import ALGORITHM, new_hasher
from syncheck.tensors.kinds import classify_snapshot
from syncheck.tensors.moments import Moments
from syncheck.tensors.value_kinds import select_counted_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.messages import Message
    from syncheck.snapshots import Metadata, Snapshot, Tensor

# Values of fields that the block does not have.
_EMPTY: tuple[object, ...] = (None, (), {})
ENDING = ".fingerprint.json"
# Maximum length of a text value. The longest values list the members of a parameter group.
_MOST_VALUE = 1_000_000


def fingerprint(snapshot: Snapshot) -> str:
    """Read the tensors of a checkpoint and return its fingerprint: JSON, one tensor per line.

    Includes the Python values whose differences count: step, epoch, param_groups, scaler state. Raises CheckpointError
    if the file can no longer be read.
    """
    content = _describe_checkpoint(snapshot)
    # NaN is no JSON, and other programs could not read it.
    header = [f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in content.items()]
    kinds = classify_snapshot(snapshot).by_name
    entries = []
    with Files() as files:
        for name, tensor in snapshot.tensors.items():
            entry = {"kind": kinds[name]} | _describe(tensor, files)
            entries.append(f"  {json.dumps(name)}: {json.dumps(entry, allow_nan=False)}")

    tensors = ",\n".join(entries)
    return "{" + ",\n ".join(header) + ',\n "tensors": {\n' + tensors + "\n }}\n"


def _describe_checkpoint(snapshot: Snapshot) -> dict[str, Any]:
    """Return the content of a fingerprint except for the tensors."""
    values = {}
    notes = [str(note) for note in snapshot.notes]
    dropped_notes = []
    for name, value in select_counted_values(snapshot).items():
        if _is_storable(value):
            values[name] = _encode_value(value)
        else:
            dropped_notes.append(f"not in the fingerprint: {name}, because of its type or size")

    notes += sorted(dropped_notes)
    model_values = {name: value.value for name, value in snapshot.model_values.items() if name in values}
    metadata = None if snapshot.metadata is None else _encode_metadata(snapshot.metadata)
    file_name = os.path.basename(os.path.normpath(snapshot.path))
    return {
        KEY: VERSION,
        "source": {"name": file_name, "format": snapshot.format, "bytes": snapshot.bytes},
        "algorithm": ALGORITHM,
        "metadata": metadata,
        "values": values,
        "model_values": model_values,
        "stubs": [stub[:MOST_TEXT] for stub in snapshot.stubs],
        "notes": [note[:MOST_TEXT] for note in notes],
    }


def choose_output_paths(snapshots: Sequence[Snapshot], output: str) -> list[tuple[Snapshot, str]]:
    """Return the output path of each checkpoint's fingerprint. Skips fingerprints.

    output: a file for one checkpoint. For several checkpoints, or if it is a folder or ends with a slash, the folder
    for the fingerprints. They keep their names and their folders below the common folder of all checkpoints, so ranks
    and steps in paths stay the same. Raises UsageError if there is no checkpoint, two fingerprints would have the same
    path, or a path is a checkpoint.
    """
    checkpoints = [snapshot for snapshot in snapshots if snapshot.format != FORMAT]
    if snapshots and not checkpoints:
        raise UsageError(f"{snapshots[0].path}: is a fingerprint already; pass the checkpoint")

    paths = [snapshot.path for snapshot in checkpoints]
    targets = _choose_targets(paths, output)
    sources: dict[str, str] = {}
    for path, target in targets.items():
        first_path = sources.setdefault(target, path)
        if first_path != path:
            raise UsageError(f"{first_path} and {path}: both would be written to {target}; pass them one at a time")
        # An earlier fingerprint can be replaced, but no other file.
        if os.path.exists(target):
            outputs.check(target, inputs=paths, replaceable=fingerprint_file)
    return [(snapshot, targets[snapshot.path]) for snapshot in checkpoints]


def _choose_targets(paths: Sequence[str], output: str) -> dict[str, str]:
    """Return the path of the fingerprint of each checkpoint. output: as for `choose_output_paths`."""
    is_folder = os.path.isdir(output) or output.endswith(os.sep)
    if len(paths) == 1 and not is_folder:
        return {paths[0]: output}
    if os.path.isfile(output):
        raise UsageError(f"-o {output}: is a file; pass a folder for the fingerprints of {len(paths)} checkpoints")
    return {path: os.path.join(output, name) for path, name in _relative_names(paths).items()}


def write(path: str, text: str) -> None:
    """Write a fingerprint atomically, and create its folders. Raises UsageError if it cannot be written."""
    with convert_errors(path):
        folder = os.path.dirname(path) or "."
        if not os.path.exists(folder):
            os.makedirs(folder, exist_ok=True)
    outputs.write(path, text, replaceable=fingerprint_file)


def _relative_names(paths: Sequence[str]) -> dict[str, str]:
    """Return the path of each fingerprint below the common folder of all checkpoints."""
    if not paths:
        return {}

    folders = [os.path.dirname(os.path.abspath(path)) for path in paths]
    common_folder = os.path.commonpath(folders)
    names = {}
    for path, folder in zip(paths, folders, strict=True):
        name = os.path.basename(os.path.normpath(path))
        stem, extension = os.path.splitext(name)
        new_name = (stem if extension.lower() in EXTENSIONS else name) + ENDING
        relative_folder = os.path.relpath(folder, common_folder)
        names[path] = os.path.normpath(os.path.join(relative_folder, new_name))
    return names


def _describe(tensor: Tensor, files: Files) -> dict[str, Any]:
    """Return the entry of a tensor without its kind."""
    entry: dict[str, Any] = {"dtype": tensor.dtype[:MOST_TEXT], "shape": list(tensor.shape)}
    if tensor.refused:
        return entry | _describe_refusal(tensor.refused)

    digest, moments = new_hasher(), Moments(tensor.dtype)
    for start, count in ranges([tensor]):
        block = files.read(tensor, start, count, slot=0)
        digest.update(block)
        moments.add(block)

    entry |= {"digest": digest.hexdigest(), "nonfinite": moments.nonfinite} | moments.values()
    if tensor.sharding is not None:
        entry["sharding"] = asdict(tensor.sharding)
    return entry


def _describe_refusal(refusal: Message) -> dict[str, Any]:
    """Return the part of an entry for a tensor without a digest."""
    if refusal.code is Refusal.IN_PARTS:
        return {"refused": str(refusal.parameters["refusal"])[:MOST_TEXT], "in_parts": True}
    return {"refused": str(refusal)[:MOST_TEXT]}


def _is_storable(value: Any) -> bool:
    if isinstance(value, int):
        return abs(value) < 2**64
    if isinstance(value, str):
        return len(value) <= _MOST_VALUE
    return value is None or isinstance(value, float)


def _encode_value(value: Any) -> Any:
    """Encode NaN and infinities for JSON: {"float": "nan"}."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return value


def _encode_metadata(metadata: Metadata) -> dict[str, Any]:
    """Return the metadata block without values of other types, which untrusted files may contain."""
    block: dict[str, Any] = {"schema": SCHEMA}
    for field in fields(metadata):
        value = getattr(metadata, field.name)
        if value not in _EMPTY:
            block[field.name] = _keep_plain(value)
    # An empty list means a model without buffers, None an unknown model.
    if metadata.buffers is not None:
        block["buffers"] = list(metadata.buffers)
    return block


def _keep_plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [part for part in value if _is_plain(part)]
    if isinstance(value, dict):
        return {key: part for key, part in value.items() if isinstance(key, str) and _is_plain(part)}
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return abs(value) < 2**64
    return value is None or isinstance(value, str)
