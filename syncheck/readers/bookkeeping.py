"""Separate bookkeeping of trainers from tensors: scalars of callbacks become values, and RNG words are removed."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncheck.errors import MalformedFile
from syncheck.readers.pickles.keys import Huge, to_plain
from syncheck.readers.untrusted import open_regular_file
from syncheck.tensors.dtypes import DTYPES
from syncheck.tensors.names import is_rng_state
from syncheck.tensors.value_kinds import make_value_classifier

if TYPE_CHECKING:
    from syncheck.snapshots import Snapshot, Tensor

# Top-level keys of a Lightning checkpoint for the state of callbacks and loops.
_NOTES = ("callbacks.", "loops.")


def remove_bookkeeping(snapshot: Snapshot) -> Snapshot:
    """Return a checkpoint without bookkeeping that should not be compared tensor by tensor.

    Scalar tensors of callbacks become values, which are listed but never a finding. Larger tensors, such as averaged
    weights, stay tensors. The 625 words of Python's RNG state are removed: they differ by design, as do tensors of RNG
    states, which are compared only on request. Raises MalformedFile for a step, setting or scale that is an integer
    beyond the range of floats.
    """
    values = {name: to_plain(value) for name, value in snapshot.values.items()}
    huge = [name for name, value in values.items() if isinstance(value, Huge)]
    kind_of = make_value_classifier(values if huge else ())
    if invalid := next((name for name in huge if kind_of(name) != "other"), None):
        found, needed = "an integer beyond the range of floats", "a number of steps, a rate or a scale"
        again = "no library writes this; check the origin of the file"
        raise MalformedFile(snapshot.path, place=invalid, found=found, needed=needed, next_step=again)
    notes = {name: t for name, t in snapshot.tensors.items() if name.startswith(_NOTES) and _is_number(t)}
    words = {name for name in values if name[-1:].isdigit() and _is_word(name)}
    if not notes and not words:
        return replace(snapshot, values=values) if huge else snapshot
    values = {name: value for name, value in values.items() if name not in words}
    values |= {name: _read_number(tensor) for name, tensor in notes.items()}
    tensors = {name: t for name, t in snapshot.tensors.items() if name not in notes}
    return replace(snapshot, tensors=tensors, values=values)


def _is_word(name: str) -> bool:
    parts = name.split(".")
    return parts[-1].isdecimal() and is_rng_state(parts)


def _is_number(tensor: Tensor) -> bool:
    stored = tensor.data is None and tensor.digest is None and not tensor.shards
    return stored and tensor.shape == () and not tensor.refused and bool(DTYPES[tensor.dtype].struct)


def _read_number(tensor: Tensor) -> Any:
    code = (">" if tensor.big_endian else "<") + DTYPES[tensor.dtype].struct
    with open_regular_file(tensor.path) as file:
        file.seek(tensor.offset)
        data = file.read(struct.calcsize(code))
    if len(data) < struct.calcsize(code):  # its place was within the file when that was read
        again = "it was changed while it was read: run again when no process writes to it"
        raise MalformedFile(tensor.path, place=f"tensor '{tensor.name}'", found="the file ends before", next_step=again)
    return struct.unpack(code, data)[0]
