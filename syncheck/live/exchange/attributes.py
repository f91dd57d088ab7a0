"""Exchange the plain attributes of modules that differ between ranks.

Attributes may differ at every check, as the states of metrics do. Therefore the first rank sends its attributes, and
each other rank answers with the attributes that differ from them, so that a message does not grow with the model.
"""

from __future__ import annotations

import hashlib
from functools import partial
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

    A collective call if the hashes differ.

    attributes: of this rank.
    hashes: of all ranks, by rank; empty for a rank without modules, which has no attributes.
    """
    differing: dict[int, Attributes | None] = dict.fromkeys(hashes)
    with_modules: list[int] = []
    for rank, attribute_hash in hashes.items():
        if attribute_hash:
            with_modules.append(rank)
            differing[rank] = {}

    if len(set(hashes.values())) == 1:
        return differing

    # The hashes differ, so at least one rank has modules.
    first = min(with_modules)
    reference: Attributes = channel.share(partial(dict, attributes or {}), [first], "attributes")[first]
    # A rank without modules takes part in the exchange, and reports no changes.
    compared = reference if attributes is None else attributes
    local_changes = _find_changes(compared, reference)
    changes: dict[int, dict[str, Any]] = channel.gather(local_changes, "attributes that differ")
    changed_names = set[str]().union(*changes.values())
    # In the same order on all ranks: the order of a set of texts depends on the process.
    common = {name: value for name, value in reference.items() if name in changed_names}
    for rank in with_modules:
        differing[rank] = _drop_absent(common | changes[rank])

    return differing


def _drop_absent(attributes: Attributes) -> dict[str, Any]:
    """Return attributes without None, which stands for an attribute that the rank does not have."""
    return {name: value for name, value in attributes.items() if value is not None}


def _find_changes(attributes: Attributes, reference: Attributes) -> dict[str, Any]:
    """Return the attributes that differ from the first rank, None for absent attributes, up to a limit."""
    changes: dict[str, Any] = {}
    for name in dict.fromkeys((*reference, *attributes)):
        value = attributes.get(name)
        # repr, because NaN equals NaN here, and True is not 1.
        if repr(value) != repr(reference.get(name)):
            changes[name] = value

        if len(changes) >= _MOST_SENT:
            break

    return changes
