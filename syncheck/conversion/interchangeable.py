"""Find tensors that a conversion may have exchanged without a trace: constants of equal shape and value.

Norms of a new model are all 1. If a map that a user passes, or the conversion, exchanges two of them, the data is
equal.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from syncheck.messages import Note, note_if
from syncheck.tensors.blocks import has_elements, ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.conversion.sides import Side
    from syncheck.messages import Message
    from syncheck.options import DiffOptions
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files

# The elements to read first: nearly all tensors begin with different elements.
_BEGIN = 64


def note_interchangeable(sides: Sequence[Side], options: DiffOptions, files: Files) -> list[Message]:
    """Return a note with the constants of A that equal another one, if a map is passed: only their names differ."""
    names_by_content: defaultdict[object, list[str]] = defaultdict(list)
    for name, tensor in sides[0].model.tensors.items():
        if _is_mapped(name, tensor, sides, options):
            names_by_content[_make_key(name, tensor, files)].append(name)
    interchangeable: list[str] = []
    for names in names_by_content.values():
        if len(names) > 1:
            interchangeable += names
    note = Note.INTERCHANGEABLE(count=len(interchangeable), names=tuple(interchangeable))
    return note_if(interchangeable, note)


def _is_mapped(name: str, tensor: Tensor, sides: Sequence[Side], options: DiffOptions) -> bool:
    """Whether the passed map brings a tensor of A with elements and its partner in B to one name."""
    _, side_b = sides
    conditions = (
        # An inferred map has a note of its own, about the rules that it guessed.
        options.map is not None,
        tensor.numel > 0,
        has_elements(tensor),
        name in side_b.model.tensors,
        {side.stored.get(name, tensor).name for side in sides} != {name},
    )
    return all(conditions)


def _make_key(name: str, tensor: Tensor, files: Files) -> object:
    """Return a key that equal constants have in common; the name of a tensor with several values."""
    element = bytes(files.read(tensor, 0, 1, 0))
    beginning = (0, min(_BEGIN, tensor.numel))
    for start, count in (beginning, *ranges([tensor])):
        if bytes(files.read(tensor, start, count, 0)) != element * count:
            return name
    return tensor.dtype, tensor.shape, element
