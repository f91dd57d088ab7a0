"""Recognize weight and bias by name: no library exchanges them, so their names count more than their data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.conversion.pairings import Pairing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.snapshots import Tensor

# The last parts of the names of each kind.
_LAST_PARTS = {
    "weight": ("weight", "gamma", "scale", "kernel"),
    "bias": ("bias", "beta", "shift"),
    "mean": ("running_mean", "moving_mean"),
    "variance": ("running_var", "moving_var", "moving_variance"),
}
_KINDS = {last: kind for kind, last_parts in _LAST_PARTS.items() for last in last_parts}


def get_kind(name: str) -> str:
    """Return whether a tensor is a weight, a bias, a mean or a variance by its name; empty if it shows none."""
    _, _, last = name.rpartition(".")
    return _KINDS.get(last, "")


def correct_kinds(pairings: Iterable[Pairing], models: Sequence[Mapping[str, Tensor]]) -> list[Pairing]:
    """Return pairings without a tensor whose part has another kind, if both modules have a tensor of either kind.

    models: the tensors of A and of B that may be paired, by name.
    """
    return [_correct_kind(pairing, models) for pairing in pairings]


def _correct_kind(pairing: Pairing, models: Sequence[Mapping[str, Tensor]]) -> Pairing:
    """Return a pairing, with the part of the stored tensor's kind if its part has another kind."""
    # Only single tensors are exchanged.
    if len(pairing.parts) > 1 or pairing.layout.stacked:
        return pairing
    (part,) = pairing.parts
    stored_kind, part_kind = get_kind(pairing.stored), get_kind(part)
    # A name without a kind shows nothing.
    if "" in (stored_kind, part_kind) or stored_kind == part_kind:
        return pairing
    partner = _find_sibling(part, stored_kind, models[1 - pairing.side])
    stored_sibling = _find_sibling(pairing.stored, part_kind, models[pairing.side])
    if "" in (partner, stored_sibling):
        return pairing
    return Pairing(pairing.side, pairing.stored, (partner,))


def _find_sibling(name: str, kind: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the name of a tensor of this kind in the module of a tensor, with its shape; empty if there is none."""
    module, dot, _ = name.rpartition(".")
    for last in _LAST_PARTS[kind]:
        sibling = tensors.get(f"{module}{dot}{last}")
        # A tensor of another shape was not exchanged with this one.
        if sibling is not None and sibling.shape == tensors[name].shape:
            return f"{module}{dot}{last}"
    return ""
