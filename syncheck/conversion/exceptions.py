"""Find tensors that agree, although the same tensors of other layers are in another order or orientation in B.

The orientation of matrices and the order of rows are conventions of a library, so a conversion changes them in every
layer or not at all. Then the layers that were left out are the fault, and not the tensors that differ.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from syncheck.conversion.numbering import split_numbers
from syncheck.diagnose.measures import parameters_of, relation_of
from syncheck.diagnose.selection import list_names, select_out_of_sync
from syncheck.findings import RelationKind
from syncheck.layout import views
from syncheck.tensors.blocks import has_elements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.conversion.model_pairs import Models
    from syncheck.records import TensorDiff

    # The text around the numbers of a name.
    Pattern = tuple[str, ...]

# Relations that a conversion has in all layers or not at all. Exchanged parts are errors in each layer.
_CONVENTIONS = (RelationKind.TRANSPOSED, RelationKind.ROTARY, RelationKind.FUSED_ORDER)


def find_exceptions(diffs: Sequence[TensorDiff], models: Models) -> dict[str, str]:
    """Return the tensors that agree against a convention, each with a tensor of the same name that differs.

    A convention is a relation of most layers, or an orientation that shapes prove: a tensor of B that is not square can
    only have one orientation, and its conversion would transpose the square tensors as well.
    """
    groups: dict[tuple[RelationKind | None, Pattern], list[TensorDiff]] = defaultdict(list)
    for diff in diffs:
        pattern, _ = split_numbers(diff.name)
        groups[relation_of(diff), pattern].append(diff)
    agreeing_names = _group_agreeing(diffs, models)
    # In most layers, a shape differs. A single transposed matrix among many is a fault.
    of_most_layers = {key for key, similar in groups.items() if len(similar) > len(agreeing_names[key[1]])}
    is_turned = {key in of_most_layers for key, similar in groups.items() if similar[0].reason == "shape"} == {True}
    shown_by_shapes = {(RelationKind.TRANSPOSED, pattern) for pattern in agreeing_names} if is_turned else set()
    exceptions: dict[str, str] = {}
    for key in groups.keys() & (of_most_layers | shown_by_shapes):
        kind, pattern = key
        if kind not in _CONVENTIONS:
            continue
        similar = groups[key]
        dims = parameters_of(similar[0]).get("dims", ())
        for candidate in agreeing_names[pattern]:
            if _shows_order(candidate, dims, models):
                exceptions[candidate] = similar[0].name
    # Sets have any order.
    return dict(sorted(exceptions.items()))


def _group_agreeing(diffs: Sequence[TensorDiff], models: Models) -> dict[Pattern, list[str]]:
    """Return the names of the tensors of both models that agree, by the text around their numbers."""
    differing_names = set(list_names(select_out_of_sync(diffs)))
    groups: dict[Pattern, list[str]] = defaultdict(list)
    for name in sorted(models.a.keys() & models.b.keys() - differing_names):
        pattern, _ = split_numbers(name)
        groups[pattern].append(name)
    return groups


def _shows_order(name: str, dims: Sequence[int], models: Models) -> bool:
    """Whether a tensor would differ in another order. dims: two exchanged dimensions; empty for an order of rows."""
    a, b = models.a[name], models.b[name]
    # Constants, like the zeros of an output projection at the start of a training, are equal in every order.
    if not has_elements(a) or not models.is_distinct(a):
        return False
    if len(a.shape) <= max(dims, default=len(a.shape)):
        return not dims
    first, second = dims
    order = [*range(len(a.shape))]
    order[first], order[second] = second, first
    return models.equals(views.permute(a, order), b) is None
