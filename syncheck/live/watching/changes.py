"""How a script changes parameters, between two steps and after the last one.

The step of an optimizer that is not torch's is a change after the reduction, and a script may change parameters after
each step, as a clip of the weights or a lookahead does. A change of another kind, such as a loaded checkpoint, stands
out.
"""

from __future__ import annotations

import weakref
from collections import deque
from operator import ne, sub
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

# Kinds of changes that are remembered.
_MOST_KINDS = 16
_NUMBERS = 1 << 24
# The kind of no change.
_UNCHANGED = 0


class States(NamedTuple):
    """What tensors were at one moment: an operation in place changes a version, another tensor has another address."""

    versions: tuple[int, ...]
    """Of all tensors, then of their shards: operations on a DTensor change its version, and not that of its shard."""
    addresses: tuple[int, ...]


def read_states(tensors: Sequence[Any]) -> States:
    """Return the versions and addresses of tensors."""
    contents = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    # There is no public name.
    versions = [tensor._version for tensor in (*tensors, *contents)]  # noqa: SLF001
    return States(tuple(versions), tuple(map(_read_address, contents)))


def read_state(tensor: Any) -> tuple[int, ...]:
    """Return the versions and the address of one tensor."""
    content = getattr(tensor, "_local_tensor", tensor)
    return tensor._version, content._version, _read_address(content)  # noqa: SLF001 - there is no public name


def _read_address(content: Any) -> int:
    # A sparse tensor has no address.
    return 0 if content.is_sparse else content.data_ptr()


def list_existing(references: Iterable[weakref.ref[Any]]) -> list[Any]:
    """Return the objects that have not ended."""
    existing = []
    for reference in references:
        content = reference()
        if content is not None:
            existing.append(content)
    return existing


class ParameterChanges:
    """The changes of some parameters that this rank has seen. The parameters may end before."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        self._references = list(map(weakref.ref, parameters))
        # After the last step, or at the last reduction for an optimizer that is not torch's.
        self._states: States | None = None
        # The kinds of changes since then, each time before the next step.
        self._usual: deque[int] = deque(maxlen=_MOST_KINDS)

    def list_parameters(self) -> list[Any]:
        """Return the parameters that have not ended."""
        return list_existing(self._references)

    @property
    def are_known(self) -> bool:
        """Whether it is known how the script changes parameters."""
        return bool(self._usual)

    def note_before_step(self) -> None:
        """Note how the script changed the parameters since the last step, or at a reduction."""
        states = read_states(self.list_parameters())
        if self._states is not None:
            self._add(self._find_kind(states))
        self._states = states

    def note_step(self) -> None:
        """Note the parameters as they are after a step, which the script then need not change."""
        self._states = read_states(self.list_parameters())
        self._add(_UNCHANGED)

    def has_new(self) -> bool:
        """Whether parameters were changed after the last step in a new way; False if unknown."""
        return self.are_known and self.find_last() not in (_UNCHANGED, *self._usual)

    def find_last(self) -> int:
        """Return the kind of the change after the last step: 0 for none, else a number, equal on all ranks."""
        return self._find_kind(read_states(self.list_parameters()))

    def _find_kind(self, states: States) -> int:
        if self._states is None or states == self._states:
            return _UNCHANGED
        versions = tuple(map(sub, states.versions, self._states.versions))
        # An address tells nothing on another rank.
        moved = tuple(map(ne, states.addresses, self._states.addresses))
        return hash((versions, moved)) % _NUMBERS + 1

    def _add(self, kind: int) -> None:
        if kind not in self._usual:
            self._usual.append(kind)
