"""Remove the prefixes of wrappers from the names of a model's values, as a comparison removes them from tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.tensors.names import normalize

if TYPE_CHECKING:
    from syncheck.snapshots import Snapshot

_PREFIX = "module."


def unwrap_values(snapshot: Snapshot) -> Snapshot:
    """Return a checkpoint whose values have no prefix if its tensors have the prefix of a wrapper."""
    if not snapshot.model_values:
        return snapshot

    names = list(snapshot.model_values)
    if any(name.startswith(_PREFIX) for name in snapshot.tensors):
        # A value outside of the wrapped model does not keep the prefix of the tensors.
        names = [name for name in names if name.startswith(_PREFIX)]
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
