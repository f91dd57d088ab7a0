"""Exchange the plain attributes of modules that differ between ranks.

Attributes may differ at every check, as the states of metrics do. Therefore the first rank sends its attributes, and
each other rank answers with the attributes that differ from them, so that a message does not grow with the model.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.live.channel import Channel

    Attributes = Mapping[str, Any]

# Differing attributes that a rank sends.
_MOST_SENT = 200


def hash_attributes(attributes: Attributes | None) -> bytes:
    """Return 16 bytes that are equal for equal attributes; empty without modules."""
    if attributes is None:
        return b""
    text = repr(sorted(attributes.items()))
    return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=16).digest()


def exchange_attributes(
    channel: Channel, own: Attributes | None, hashes: Mapping[int, bytes]
) -> dict[int, Attributes | None]:
    """Return the attributes of each rank that differ between ranks.

    A collective call if the hashes differ. own: of this rank. hashes: of all ranks, by rank; empty for a rank without
    modules, which has no attributes.
    """
    if len(set(hashes.values())) == 1:
        return {rank: {} if own_hash else None for rank, own_hash in hashes.items()}
    first = min(rank for rank, own_hash in hashes.items() if own_hash)
    reference: Attributes = channel.share(lambda: dict(own or {}), [first], "attributes")[first]
    changes: dict[str, Any] = {}
    if own is not None:
        changes = _find_changes(own, reference)
    by_rank: dict[int, dict[str, Any]] = channel.gather(changes, "attributes that differ")
    differing = {name for sent in by_rank.values() for name in sent}
    # In the same order on all ranks: the order of a set of texts depends on the process.
    names = [name for name in reference if name in differing]
    names += sorted(differing.difference(reference))
    attributes: dict[int, Attributes | None] = {}
    for rank, own_hash in hashes.items():
        merged = {name: reference[name] for name in names if name in reference} | by_rank[rank]
        # None stands for an attribute that the rank does not have.
        attributes[rank] = {name: value for name, value in merged.items() if value is not None} if own_hash else None
    return attributes


def _find_changes(own: Attributes, reference: Attributes) -> dict[str, Any]:
    """Return the attributes that differ from those of the first rank, None for absent ones, up to a limit."""
    changes: dict[str, Any] = {}
    for name in dict.fromkeys((*reference, *own)):
        # repr, because NaN equals NaN here, and True is not 1.
        if repr(own.get(name)) != repr(reference.get(name)) and len(changes) < _MOST_SENT:
            changes[name] = own.get(name)
    return changes
