"""Create fingerprints: digests, moments and counts of all tensors of a checkpoint, in a few kB.

`compare` reads fingerprints like checkpoints (readers/fingerprint_file.py). Keep fingerprints of deleted checkpoints,
send them instead of checkpoints, or create them at every save.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
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

    from syncheck.snapshots import Metadata, Snapshot, Tensor

ENDING = ".fingerprint.json"
# Maximum length of a text value. The longest values list the members of a parameter group.
_MOST_VALUE = 1_000_000


def fingerprint(snapshot: Snapshot) -> str:
    """Read the tensors of a checkpoint and return its fingerprint: JSON, one tensor per line.

    Includes the Python values whose differences count: step, epoch, param_groups, scaler state. Raises CheckpointError
    if the file can no longer be read.
    """
    tensors = snapshot.tensors
    kinds = classify_snapshot(snapshot).by_name
    source = os.path.basename(os.path.normpath(snapshot.path))
    counted = select_counted_values(snapshot)
    values = {name: _encode_value(value) for name, value in counted.items() if _is_storable(value)}
    dropped = [
        f"not in the fingerprint: {name}, because of its type or size" for name in counted.keys() - values.keys()
    ]
    about = {
        KEY: VERSION,
        "source": {"name": source, "format": snapshot.format, "bytes": snapshot.bytes},
        "algorithm": ALGORITHM,
        "metadata": None if snapshot.metadata is None else _encode_metadata(snapshot.metadata),
        "values": values,
        "model_values": {name: value.value for name, value in snapshot.model_values.items() if name in values},
        "stubs": [stub[:MOST_TEXT] for stub in snapshot.stubs],
        "notes": [str(note)[:MOST_TEXT] for note in (*snapshot.notes, *sorted(dropped))],
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in about.items()]
    with Files() as files:
        entries = [
            f"  {json.dumps(name)}: {json.dumps({'kind': kinds[name]} | _describe(tensor, files), allow_nan=False)}"
            for name, tensor in tensors.items()
        ]
    listed = ",\n".join(entries)
    return "{" + ",\n ".join(lines) + ',\n "tensors": {\n' + listed + "\n }}\n"


def choose_output_paths(snapshots: Sequence[Snapshot], output: str) -> list[tuple[Snapshot, str]]:
    """Return the output path of each checkpoint's fingerprint. Skips fingerprints.

    output: a file for one checkpoint. For several checkpoints, or if it is a folder or ends with a slash, the folder
    for the fingerprints. They keep their names and their folders below the common folder of all checkpoints, so ranks
    and steps in paths stay the same. Raises UsageError if there is no checkpoint, two fingerprints would have the same
    path, or a path is a checkpoint.
    """
    wanted = [snapshot for snapshot in snapshots if snapshot.format != FORMAT]
    if snapshots and not wanted:
        raise UsageError(f"{snapshots[0].path}: is a fingerprint already; pass the checkpoint")
    paths = [snapshot.path for snapshot in wanted]
    if len(paths) == 1 and not os.path.isdir(output) and not output.endswith(os.sep):
        targets = {paths[0]: output}
    elif os.path.isfile(output):
        raise UsageError(f"-o {output}: is a file; pass a folder for the fingerprints of {len(paths)} checkpoints")
    else:
        targets = {path: os.path.join(output, name) for path, name in _relative_names(paths).items()}
    sources: dict[str, str] = {}
    for path, target in targets.items():
        other = sources.setdefault(target, path)
        if other != path:
            raise UsageError(f"{other} and {path}: both would be written to {target}; pass them one at a time")
        if os.path.exists(target):
            outputs.check(target, inputs=paths, replaceable=fingerprint_file)
    return [(snapshot, targets[snapshot.path]) for snapshot in wanted]


def write(path: str, text: str) -> None:
    """Write a fingerprint atomically, and create its folders. Raises UsageError if it cannot be written."""
    with convert_errors(path):
        folder = os.path.dirname(path) or "."
        if not os.path.exists(folder):
            os.makedirs(folder, exist_ok=True)
    outputs.write(path, text, replaceable=fingerprint_file)


def _relative_names(paths: Sequence[str]) -> dict[str, str]:
    folders = [os.path.dirname(os.path.abspath(path)) for path in paths]
    common = os.path.commonpath(folders) if folders else ""
    names = {}
    for path, folder in zip(paths, folders, strict=True):
        name = os.path.basename(os.path.normpath(path))
        stem, ending = os.path.splitext(name)
        name = (stem if ending.lower() in EXTENSIONS else name) + ENDING
        names[path] = os.path.normpath(os.path.join(os.path.relpath(folder, common), name))
    return names


def _describe(tensor: Tensor, files: Files) -> dict[str, Any]:
    entry: dict[str, Any] = {"dtype": tensor.dtype[:MOST_TEXT], "shape": list(tensor.shape)}
    if tensor.refused:
        in_parts = tensor.refused.code is Refusal.IN_PARTS
        reason = tensor.refused.parameters["refusal"] if in_parts else tensor.refused
        return entry | {"refused": str(reason)[:MOST_TEXT]} | ({"in_parts": True} if in_parts else {})
    digest, moments = new_hasher(), Moments(tensor.dtype)
    for start, count in ranges([tensor]):
        block = files.read(tensor, start, count, slot=0)
        digest.update(block)
        moments.add(block)
    entry |= {"digest": digest.hexdigest(), "nonfinite": moments.nonfinite} | moments.values()
    return entry if tensor.sharding is None else entry | {"sharding": asdict(tensor.sharding)}


def _is_storable(value: Any) -> bool:
    if isinstance(value, int):
        return abs(value) < 2**64
    return value is None or isinstance(value, float) or (isinstance(value, str) and len(value) <= _MOST_VALUE)


def _encode_value(value: Any) -> Any:
    """Encode NaN and infinities for JSON: {"float": "nan"}."""
    return {"float": repr(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _encode_metadata(metadata: Metadata) -> dict[str, Any]:
    """Return the metadata block without values of other types, which untrusted files may contain."""
    block: dict[str, Any] = {"schema": SCHEMA}
    for name in type(metadata).__slots__:
        value = getattr(metadata, name)
        if value is not None and value != () and value != {}:
            block[name] = _keep_plain(value)
    # An empty list means a model without buffers, None an unknown model.
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
