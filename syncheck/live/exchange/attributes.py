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
    channel: Channel, attributes: Attributes | None, hashes: Mapping[int, bytes]
) -> dict[int, Attributes | None]:
    """Return the attributes of each rank that differ between ranks.

    A collective call if the hashes differ. attributes: of this rank. hashes: of all ranks, by rank; empty for a rank
    without modules, which has no attributes.
    """
    with_modules = [rank for rank, attribute_hash in hashes.items() if attribute_hash]
    differing: dict[int, Attributes | None] = dict.fromkeys(hashes)
    differing |= {rank: {} for rank in with_modules}
    if len(set(hashes.values())) == 1:
        return differing
    first = min(with_modules)
    reference: Attributes = channel.share(lambda: dict(attributes or {}), [first], "attributes")[first]
    changes: dict[int, dict[str, Any]] = channel.gather(
        _find_changes(reference if attributes is None else attributes, reference), "attributes that differ"
    )
    names: set[str] = set()
    for changed in changes.values():
        names.update(changed)
    # In the same order on all ranks: the order of a set of texts depends on the process.
    common = {name: value for name, value in reference.items() if name in names}
    for rank in with_modules:
        merged = common | changes[rank]
        # None stands for an attribute that the rank does not have.
        differing[rank] = {name: value for name, value in merged.items() if value is not None}
    return differing


def _find_changes(attributes: Attributes, reference: Attributes) -> dict[str, Any]:
    """Return the attributes that differ from the first rank, None for absent attributes, up to a limit."""
    changes: dict[str, Any] = {}
    for name in dict.fromkeys((*reference, *attributes)):
        # repr, because NaN equals NaN here, and True is not 1.
        if repr(attributes.get(name)) != repr(reference.get(name)):
            changes[name] = attributes.get(name)
        if len(changes) >= _MOST_SENT:
            break
    return changes
