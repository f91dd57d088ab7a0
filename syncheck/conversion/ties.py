"""Find weights that are one weight in one model, and two different weights in the other."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING

from syncheck.conversion.shared_weights import is_shared_weight
from syncheck.conversion.vocabularies import classify_vocabulary
from syncheck.findings import Relation, RelationKind
from syncheck.frozen import replace
from syncheck.layout.copies import find_shared_tensors
from syncheck.tensors.blocks import has_elements

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.conversion.model_pairs import Models
    from syncheck.snapshots import Tensor


def relate_tied(name: str, models: Models) -> dict[str, Relation]:
    """Find the weight with which B ties a tensor that is a weight of its own in A."""
    return _relate_tie(
        name,
        models,
        side="B",
        tied=models.b,
        separate=models.a,
    )


def relate_untied(name: str, models: Models) -> dict[str, Relation]:
    """Find the weight with which A ties a tensor that is a weight of its own in B."""
    return _relate_tie(
        name,
        models,
        side="A",
        tied=models.a,
        separate=models.b,
    )


def _relate_tie(
    name: str, models: Models, side: str, tied: Mapping[str, Tensor], separate: Mapping[str, Tensor]
) -> dict[str, Relation]:
    """Find the second name of a weight of one model, if its tensors differ in the other model.

    side: the label of the first model.
    tied: its tensors.
    separate: the tensors of the other model.
    """
    for partner in sorted(models.partners.get(name, ())):
        # With another difference of the second tensor, a changed tie is not all that happened.
        if models.equals(models.a[partner], models.b[partner]) is None:
            continue
        # Two names of one weight have equal tensors in every model that ties them.
        if models.equals(tied[name], tied[partner]) is None:
            continue
        if models.equals(separate[name], separate[partner]) is None:
            return {name: Relation(RelationKind.TIE, {"other": partner, "tied": side})}
    return {}


def list_partners(models: Models) -> dict[str, set[str]]:
    """Return for each name in both models the names of tensors that are usually one weight with its tensor."""
    partners: dict[str, set[str]] = defaultdict(set)
    for tensors in (models.a, models.b):
        named_tensors = [replace(tensor, name=name) for name, tensor in tensors.items() if has_elements(tensor)]
        for names in find_shared_tensors(named_tensors):
            _add_pairs(partners, names, models)
    # A file may hold two copies of the bytes of one weight.
    vocabulary = [name for name in models.a if classify_vocabulary(name)]
    for pair in itertools.combinations(vocabulary, 2):
        if is_shared_weight(pair, models.a):
            _add_pairs(partners, pair, models)
    return partners


def _add_pairs(partners: dict[str, set[str]], names: Sequence[str], models: Models) -> None:
    """Add each pair of names whose tensors both models can read."""
    for pair in itertools.permutations(names, 2):
        if _is_usable(models.a, pair) and _is_usable(models.b, pair):
            name, partner = pair
            partners[name].add(partner)


def _is_usable(tensors: Mapping[str, Tensor], pair: tuple[str, ...]) -> bool:
    """Whether a model has tensors of two names and one shape, with data."""
    # A model may store the weight once, under one of its names.
    if not tensors.keys() >= set(pair):
        return False
    first, second = (tensors[name] for name in pair)
    # The shape of a tensor without data may be unknown.
    if not has_elements(first) or not has_elements(second):
        return False
    return first.shape == second.shape
