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
    plain_values = {name: to_plain(value) for name, value in snapshot.values.items()}
    huge_names = [name for name, value in plain_values.items() if isinstance(value, Huge)]
    if huge_names:
        _refuse_huge(snapshot.path, huge_names, plain_values)
        snapshot = replace(snapshot, values=plain_values)

    notes = {name: tensor for name, tensor in snapshot.tensors.items() if name.startswith(_NOTES)}
    scalars = {name: _read_number(tensor) for name, tensor in notes.items() if _is_number(tensor)}
    # Each of the 625 words would be a value of its own.
    values = {name: value for name, value in plain_values.items() if not _is_word(name)}
    if not scalars and len(values) == len(plain_values):
        return snapshot

    tensors = {name: tensor for name, tensor in snapshot.tensors.items() if name not in scalars}
    return replace(snapshot, tensors=tensors, values=values | scalars)


def _refuse_huge(path: str, huge_names: list[str], values: dict[str, Any]) -> None:
    """Raise MalformedFile if an integer beyond the range of floats is a step, a setting or a scale."""
    kind_of = make_value_classifier(values)
    for name in huge_names:
        if kind_of(name) != "other":
            raise MalformedFile(
                path,
                place=name,
                found="an integer beyond the range of floats",
                needed="a number of steps, a rate or a scale",
                next_step="no library writes this; check the origin of the file",
            )


def _is_word(name: str) -> bool:
    """Whether a value is a word of an RNG state."""
    # A shortcut, because most names do not end with a digit.
    if not name[-1:].isdigit():
        return False
    segments = name.split(".")
    return segments[-1].isdecimal() and is_rng_state(segments)


def _is_number(tensor: Tensor) -> bool:
    """Whether a tensor is one number in a file."""
    if tensor.refused or tensor.shape != ():
        return False
    is_in_file = tensor.data is None and tensor.digest is None and not tensor.shards
    return is_in_file and DTYPES[tensor.dtype].struct != ""


def _read_number(tensor: Tensor) -> Any:
    byte_order = ">" if tensor.big_endian else "<"
    layout = struct.Struct(byte_order + DTYPES[tensor.dtype].struct)
    with open_regular_file(tensor.path) as file:
        file.seek(tensor.offset)
        data = file.read(layout.size)

    # The file contained the number when the checkpoint was opened.
    if len(data) < layout.size:
        raise MalformedFile(
            tensor.path,
            place=f"tensor '{tensor.name}'",
            found="the file ends before",
            next_step="it was changed while it was read: run again when no process writes to it",
        )

    (number,) = layout.unpack(data)
    return number
