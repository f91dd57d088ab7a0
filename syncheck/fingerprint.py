"""Make fingerprints: a digest, moments and counts in place of each tensor's bytes, a few kB a checkpoint.

Keep one beside what is deleted, send it instead of the checkpoint, or take it at every save: `compare` reads it in
place of the checkpoint (readers/fingerprint_file.py).
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from syncheck.atomic import check_writable, convert_errors, replace_file
from syncheck.comparison.values import counted
from syncheck.errors import UsageError
from syncheck.kernel.blocks import Files, ranges
from syncheck.kernel.digests import ALGORITHM, hasher
from syncheck.kernel.moments import Moments
from syncheck.kinds import kinds_in
from syncheck.metadata_block import SCHEMA
from syncheck.readers import ENDINGS, fingerprint_file, keep
from syncheck.readers.fingerprint_file import FORMAT, KEY, MOST_TEXT, VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.snapshots import Metadata, Snapshot, Tensor

ENDING = ".fingerprint.json"
# Characters of a text among the values: the longest that counts lists the members of a parameter group.
_MOST_VALUE = 1_000_000


def fingerprint(snapshot: Snapshot) -> str:
    """Read a checkpoint's tensors and return its fingerprint: JSON, one tensor a line.

    Of its Python values those are kept that count when they differ: step, epoch, param_groups, the scaler's state.
    Raises CheckpointError when the file can no longer be read.
    """
    tensors = snapshot.tensors
    kinds = kinds_in(snapshot).by_name
    source = os.path.basename(os.path.normpath(snapshot.path))
    found = counted(snapshot)
    values = {name: _value(value) for name, value in found.items() if _can_be_kept(value)}
    dropped = [
        f"the fingerprint leaves out {name}, whose value is no usual one" for name in found.keys() - values.keys()
    ]
    about = {
        KEY: VERSION,
        "source": {"name": source, "format": snapshot.format, "bytes": snapshot.bytes},
        "algorithm": ALGORITHM,
        "metadata": None if snapshot.metadata is None else _block(snapshot.metadata),
        "values": values,
        "stubs": [stub[:MOST_TEXT] for stub in snapshot.stubs],
        "notes": [str(note)[:MOST_TEXT] for note in (*snapshot.notes, *sorted(dropped))],
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in about.items()]
    with Files() as files:
        entries = [
            f"  {json.dumps(name)}: {json.dumps({'kind': kinds[name]} | _entry(tensor, files), allow_nan=False)}"
            for name, tensor in tensors.items()
        ]
    listed = ",\n".join(entries)
    return "{" + ",\n ".join(lines) + ',\n "tensors": {\n' + listed + "\n }}\n"


def places(snapshots: Sequence[Snapshot], output: str) -> list[tuple[Snapshot, str]]:
    """Say where the fingerprint of each checkpoint goes; what is a fingerprint already is left out.

    output: a file for one checkpoint. For several, or where it is a folder or ends as one, the folder in which each
    goes under its own name, and below the folder that all have in common under the same folders: rank and step in the
    names stay what they are. Raises UsageError where there is none to make, two would get one name, or a checkpoint
    lies there.
    """
    wanted = [snapshot for snapshot in snapshots if snapshot.format != FORMAT]
    if snapshots and not wanted:
        raise UsageError(f"{snapshots[0].path}: this is a fingerprint already; needs the checkpoint")
    paths = [snapshot.path for snapshot in wanted]
    if len(paths) == 1 and not os.path.isdir(output) and not output.endswith(os.sep):
        found = {paths[0]: output}
    elif os.path.isfile(output):
        raise UsageError(f"-o {output}: {len(paths)} checkpoints need a folder to write to, and this is a file")
    else:
        found = {path: os.path.join(output, name) for path, name in _below(paths).items()}
    taken: dict[str, str] = {}
    for path, place in found.items():
        other = taken.setdefault(place, path)
        if other != path:
            raise UsageError(f"{other} and {path}: both would be written to {place}; do them one at a time")
        if os.path.exists(place):
            keep(place, but=fingerprint_file)
            with convert_errors(place):
                check_writable(place)
    return [(snapshot, found[snapshot.path]) for snapshot in wanted]


def write(place: str, text: str) -> None:
    """Write a fingerprint; the folders above are made. The whole file is there afterwards, or what was there before.

    Raises UsageError when it cannot be written.
    """
    with convert_errors(place):
        folder = os.path.dirname(place) or "."
        if not os.path.exists(folder):
            os.makedirs(folder, exist_ok=True)
        replace_file(place, text)


def _below(paths: Sequence[str]) -> dict[str, str]:
    folders = [os.path.dirname(os.path.abspath(path)) for path in paths]
    common = os.path.commonpath(folders) if folders else ""
    names = {}
    for path, folder in zip(paths, folders, strict=True):
        name = os.path.basename(os.path.normpath(path))
        stem, ending = os.path.splitext(name)
        name = (stem if ending.lower() in ENDINGS else name) + ENDING
        names[path] = os.path.normpath(os.path.join(os.path.relpath(folder, common), name))
    return names


def _entry(tensor: Tensor, files: Files) -> dict[str, Any]:
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


def _can_be_kept(value: Any) -> bool:
    if isinstance(value, int):
        return abs(value) < 2**64
    return value is None or isinstance(value, float) or (isinstance(value, str) and len(value) <= _MOST_VALUE)


def _value(value: Any) -> Any:
    """Write a float that JSON cannot say as {"float": "nan"}."""
    return {"float": repr(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _block(metadata: Metadata) -> dict[str, Any]:
    """Return the metadata block, without what an untrusted file put into it that is no plain value."""
    block: dict[str, Any] = {"schema": SCHEMA}
    for name in type(metadata).__slots__:
        value = getattr(metadata, name)
        if value is not None and value != () and value != {}:
            block[name] = _plain(value)
    # An empty list says that a model without buffers was described.
    return block if metadata.buffers is None else block | {"buffers": list(metadata.buffers)}


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [part for part in value if _is_plain(part)]
    if isinstance(value, dict):
        return {key: part for key, part in value.items() if isinstance(key, str) and _is_plain(part)}
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str) or value is None or (isinstance(value, int) and abs(value) < 2**64)
