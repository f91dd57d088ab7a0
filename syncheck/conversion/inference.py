"""Infer a map of names from data.

An inferred map is a proposal: equal data shows which tensors belong together, but not whether they should, so a verdict
that rests on it is undecided until the user accepts the map.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from syncheck.conversion.casts import convert
from syncheck.conversion.general_rules import make_rules
from syncheck.conversion.guesses import Guesses
from syncheck.conversion.layer_rules import assign_parts
from syncheck.conversion.map_files import describe_rule
from syncheck.conversion.name_maps import NameMap, Rule
from syncheck.conversion.pairings import Candidates, find_pairings
from syncheck.conversion.recognition import is_readable
from syncheck.conversion.rows import has_rows
from syncheck.dtypes import DTYPES
from syncheck.messages import Note, Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.conversion.layer_rules import Assignment
    from syncheck.kernel.blocks import Files
    from syncheck.messages import Message
    from syncheck.snapshots import Tensor

# Limit of the rules in a report; a file has all of them.
_MOST_PRINTED = 64


@dataclass(slots=True)
class Inferred:
    """A map from data."""

    map: NameMap
    variables: dict[str, int] = field(default_factory=dict)
    """The size of a head, if rows were permuted."""
    guessed: tuple[Rule, ...] = ()
    """Rules of the map for tensors with equal data, whose pairs only their names suggest."""
    ambiguous: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """Names of A and of B with equal data, whose pairs nothing shows."""
    applies: bool = True
    """Whether few names of the models are equal. Otherwise they have one naming, and another name is a mistake."""


def infer_map(models: Sequence[Mapping[str, Tensor]], files: Files) -> Inferred | None:
    """Return a map between the tensors that only one of two models has; None if no data is equal.

    models: tensors by name. Reads all of these tensors once or twice.
    """
    only_a = _list_candidates(models[0], models[1])
    only_b = _list_candidates(models[1], models[0])
    # If one model has no other names, there is nothing to pair.
    if 0 in (len(only_a), len(only_b)):
        return None
    candidates = Candidates([only_a, only_b], files)
    find_pairings(candidates)
    # Only tensors without a pair are converted: a pair in another dtype is a difference if equal data exists.
    if _convert_unused(candidates):
        find_pairings(candidates)
    assignment = assign_parts(candidates)
    guesses = Guesses(assignment, candidates)
    assignment.add(*guesses.pairings)
    rules = make_rules(assignment.pairings)
    ambiguous_a, ambiguous_b = guesses.ambiguous
    if not rules and not ambiguous_a:
        return None

    # Models with many equal names have one naming.
    shared_names = models[0].keys() & models[1].keys()
    least_names = min(len(models[0]), len(models[1]))
    return Inferred(
        NameMap("an inferred map", tuple(rules)),
        _find_head_dim(assignment),
        guessed=tuple(make_rules(guesses.pairings)),
        ambiguous=(tuple(ambiguous_a), tuple(ambiguous_b)),
        applies=2 * len(shared_names) < least_names,
    )


def _list_candidates(model: Mapping[str, Tensor], partner_model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that the partner lacks and whose data can be compared."""
    candidates = {}
    for name, tensor in model.items():
        # Equal names show a pair without an inference.
        if name not in partner_model and has_rows(tensor):
            candidates[name] = tensor
    return candidates


def _find_head_dim(assignment: Assignment) -> dict[str, int]:
    """Return the size of most heads as a variable, if rows were permuted: a model has one size."""
    sizes: Counter[int] = Counter()
    for pairing in assignment.pairings:
        head_dim = pairing.layout.head_dim
        sizes[head_dim] += 1
    # 0 is the size of layouts that are not rotary.
    del sizes[0]
    for size, _ in sizes.most_common(1):
        return {"head_dim": size}
    return {}


def _convert_unused(candidates: Candidates) -> bool:
    """Convert tensors without a pairing to a dtype of the other model. Return whether there are such tensors."""
    pool_a, pool_b = candidates.pools
    unused_a, unused_b = pool_a.select_tensors(), pool_b.select_tensors()
    converted_a = _convert_tensors(unused_a, unused_b, candidates.files)
    converted_b = _convert_tensors(unused_b, unused_a, candidates.files)
    pool_a.add(converted_a, candidates.files)
    pool_b.add(converted_b, candidates.files)
    count = len(converted_a) + len(converted_b)
    return count > 0


def _convert_tensors(tensors: Mapping[str, Tensor], partners: Mapping[str, Tensor], files: Files) -> dict[str, Tensor]:
    """Return tensors in the most frequent narrower dtype of the other model, as far as it has one."""
    dtypes = Counter(tensor.dtype for tensor in partners.values() if is_readable(tensor))
    converted = {}
    for name, tensor in tensors.items():
        # A narrower dtype follows from a wider one, and the wider one does not follow from it.
        size = DTYPES[tensor.dtype].size
        narrower = [dtype for dtype, _ in dtypes.most_common() if DTYPES[dtype].size < size]
        if narrower and is_readable(tensor):
            converted[name] = convert(tensor, narrower[:1], files)
    return converted


def extend_map(names: NameMap | None, inferred: Inferred) -> NameMap:
    """Return a known map together with the inferred one."""
    if names is None:
        return inferred.map
    # The known rules come first, so the inferred ones are for tensors without a known rule.
    title = f"{names.title} and an inferred map"
    return NameMap(title, (*names.rules, *inferred.map.rules), names.tied, built_in=names.built_in)


def mark_ambiguous(models: Sequence[Mapping[str, Tensor]], inferred: Inferred) -> list[Mapping[str, Tensor]]:
    """Return the models with all ambiguous tensors under the names of A, and refused: they are never "in sync"."""
    names_a, names_b = inferred.ambiguous
    refusal = Refusal.AMBIGUOUS_NAME()
    refused = {name: replace(models[0][name], name=name, refused=refusal) for name in names_a}
    # The names of B would be missing in A.
    marked_a, marked_b = dict(models[0]), dict(models[1])
    for name in names_b:
        del marked_b[name]
    return [marked_a | refused, marked_b | refused]


def describe_inferred(inferred: Inferred) -> list[Message]:
    """Return notes with the rules and the ambiguous tensors."""
    notes: list[Message] = []
    rules = inferred.map.rules
    if rules:
        sentence = Note.INFERRED if inferred.applies else Note.PROPOSED
        notes.append(sentence())
    # A report is read by people, and `--write-map` writes all rules.
    for rule in rules[:_MOST_PRINTED]:
        notes.append(Note.RULE(name=rule.name, parts=describe_rule(rule)))
    if len(rules) > _MOST_PRINTED:
        notes.append(Note.MORE_RULES(count=len(rules) - _MOST_PRINTED))
    if inferred.guessed:
        guessed_names = tuple(rule.name for rule in inferred.guessed)
        notes.append(Note.GUESSED_RULES(count=len(guessed_names), names=guessed_names))
    ambiguous_names, _ = inferred.ambiguous
    # A map that does not apply leaves all tensors under their names.
    if inferred.applies and ambiguous_names:
        notes.append(Note.AMBIGUOUS_MAP(count=len(ambiguous_names), names=ambiguous_names))
    return notes
