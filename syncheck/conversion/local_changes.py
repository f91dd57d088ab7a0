"""Find differences in few elements of a tensor, which are no property of the whole tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncheck.conversion.casts import convert, unit_roundoff
from syncheck.conversion.merges import find_merged_pair, find_outlier
from syncheck.findings import Relation, RelationKind
from syncheck.snapshots import unravel_index
from syncheck.tensors.blocks import ranges
from syncheck.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.conversion.merges import MergedPair
    from syncheck.conversion.model_pairs import Models
    from syncheck.records import TensorDiff
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files

# Largest shares of the different elements. Conversions and updates change nearly all elements of a tensor.
FEW = 0.1
PART = 0.9


def list_local(diffs: Sequence[TensorDiff], share: float = FEW) -> frozenset[str]:
    """Return the names of tensors with few different elements: a single element, or at most a share."""
    # Without a reason, the values differ.
    with_other_values = [diff for diff in diffs if (diff.status, diff.reason) == ("different", None)]
    names = set()
    for diff in with_other_values:
        most = max(1, share * diff.numel)
        # The number of different elements may be unknown.
        mismatched = diff.mismatched or diff.numel
        # The only element of a tensor is the whole tensor.
        if mismatched <= most and mismatched < diff.numel:
            names.add(diff.name)
    return frozenset(names)


def relate_local(name: str, models: Models) -> dict[str, Relation]:
    """Find the single element of B that a conversion of A to another dtype does not explain."""
    a, b = models.a[name], models.b[name]
    # The more precise tensor is converted.
    precise, coarse = sorted((a, b), key=_get_unit_roundoff)
    pair = convert(precise, (coarse.dtype,), models.files), coarse
    merged_pair = find_merged_pair(precise, coarse)
    if merged_pair is None:
        change = _find_single_change(pair, models.files)
    else:
        change = _find_change_of_merge(merged_pair, pair, models.files)
    position, bits = change or (0, 0)
    if not bits:
        return {}
    parameters: dict[str, Any] = {
        "index": unravel_index(position, a.shape),
        "bits": bits,
        "dtype": coarse.dtype,
    }
    return {name: Relation(RelationKind.LOCAL, parameters)}


def _find_change_of_merge(merged: MergedPair, pair: tuple[Tensor, Tensor], files: Files) -> tuple[int, int] | None:
    """Return the position of the only element that the rounding of a merge does not explain, and its changed bits.

    The merge was computed in another order, so further elements may differ by a neighbouring number.
    """
    position = find_outlier(merged, pair[1].dtype, files)
    if position is None:
        return None
    words, partner_words = _read_words(
        pair,
        position,
        1,
        files,
    )
    bits = int(words[0] ^ partner_words[0]).bit_count()
    # The conversion of the pair may drop the bits that differ.
    return position, bits


def _get_unit_roundoff(tensor: Tensor) -> float:
    return unit_roundoff(tensor.dtype)


def _find_single_change(pair: tuple[Tensor, Tensor], files: Files) -> tuple[int, int] | None:
    """Return the position of the only different element of two tensors, and its number of different bits.

    A neighbouring number has no bits, because another rounding explains it.
    """
    import numpy as np

    changes: list[tuple[int, int]] = []
    for start, count in ranges(pair):
        words, partner_words = _read_words(pair, start, count, files)
        different = np.nonzero(words != partner_words)[0]
        # The bits of two elements are enough to stop at any further element.
        for position in different[:2].tolist():
            word, partner_word = int(words[position]), int(partner_words[position])
            # The exponent is above the mantissa, so that the words of neighbouring numbers are neighbours, too.
            is_neighbour = abs(word - partner_word) == 1
            bits = 0 if is_neighbour else (word ^ partner_word).bit_count()
            changes.append((start + position, bits))
        if len(changes) > 1:
            return None
    return changes[0] if changes else None


def _read_words(pair: tuple[Tensor, Tensor], start: int, count: int, files: Files) -> tuple[Any, Any]:
    """Return some elements of two tensors of one dtype as unsigned integers with the same bits."""
    import numpy as np

    size = DTYPES[pair[0].dtype].size
    words: list[Any] = []
    for slot, tensor in enumerate(pair):
        data = bytes(files.read(tensor, start, count, slot))
        words.append(np.frombuffer(data, f"u{size}"))
    return words[0], words[1]
