"""Find the copy of the model in A from which B was made: an average of the weights, or another model of the file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncheck.findings import Relation, RelationKind

if TYPE_CHECKING:
    from syncheck.conversion.model_pairs import Models

# A single tensor with the values of another tensor is no copy of the model.
_FEWEST_TENSORS = 2


def relate_model_copy(name: str, models: Models) -> dict[str, Relation]:
    """Find the tensors that B has from one copy of the model, whose names in A have a prefix.

    Tensors with few elements are equal by chance, so this tensor has many elements, and its copy shows the prefix.
    """
    b = models.b[name]
    if not models.is_distinct(b):
        return {}
    ending = f".{name}"
    # If B has the copy as well, both are exchanged, which pairs of names state.
    for other in sorted(models.a.keys() - models.b.keys()):
        if other.endswith(ending) and models.equals(models.a[other], b) is not None:
            relations = _relate_all(other.removesuffix(name), models)
            # With a single tensor, the values of a module are at a wrong place.
            return relations if len(relations) >= _FEWEST_TENSORS else {}
    return {}


def _relate_all(prefix: str, models: Models) -> dict[str, Relation]:
    """Return the relations of the differing tensors of B that have the values of a copy. prefix: of its names in A."""
    relations = {}
    for name in models.kinds.keys() & models.b.keys() & models.a.keys():
        source = models.a.get(prefix + name, models.a[name])
        # The tensor of the model itself differs.
        conversion = models.equals(source, models.b[name])
        if conversion is not None:
            parameters: dict[str, Any] = {**conversion, "other": prefix + name, "copy": prefix}
            relations[name] = Relation(RelationKind.SHARD, parameters)
    return relations
