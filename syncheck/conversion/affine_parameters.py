"""Recognize weight and bias by name: no library exchanges them, so their names count more than their data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.conversion.pairings import Pairing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.snapshots import Tensor

# The kind of a parameter by the last part of its name.
_KINDS = {
    "weight": "weight",
    "gamma": "weight",
    "scale": "weight",
    "kernel": "weight",
    "bias": "bias",
    "beta": "bias",
    "shift": "bias",
    "running_mean": "mean",
    "moving_mean": "mean",
    "running_var": "variance",
    "moving_var": "variance",
    "moving_variance": "variance",
}


def get_kind(name: str) -> str:
    """Return whether a tensor is a weight, a bias, a mean or a variance by its name; empty if it shows none."""
    _, _, last = name.rpartition(".")
    return _KINDS.get(last, "")


def correct_kinds(pairings: Iterable[Pairing], models: Sequence[Mapping[str, Tensor]]) -> list[Pairing]:
    """Return pairings without a tensor whose part has another kind, if both modules have a tensor of either kind.

    models: the tensors of A and of B that may be paired, by name.
    """
    corrected = []
    for pairing in pairings:
        part = pairing.parts[0]
        # Only single tensors are exchanged.
        is_single = len(pairing.parts) == 1 and not pairing.layout.stacked
        stored_kind, part_kind = get_kind(pairing.stored), get_kind(part)
        if is_single and stored_kind and part_kind and stored_kind != part_kind:
            partner = _find_sibling(part, stored_kind, models[1 - pairing.side])
            if partner and _find_sibling(pairing.stored, part_kind, models[pairing.side]):
                pairing = Pairing(pairing.side, pairing.stored, (partner,))
        corrected.append(pairing)
    return corrected


def _find_sibling(name: str, kind: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the name of a tensor of this kind in the module of a tensor, with its shape; empty if there is none."""
    module, dot, _ = name.rpartition(".")
    for last, sibling_kind in _KINDS.items():
        sibling = f"{module}{dot}{last}"
        if sibling_kind == kind and sibling in tensors and tensors[sibling].shape == tensors[name].shape:
            return sibling
    return ""
