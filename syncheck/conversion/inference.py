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
from syncheck.conversion.rows import MOST_ROWS
from syncheck.conversion.templates import parse_template
from syncheck.dtypes import DTYPES
from syncheck.kernel.blocks import has_elements
from syncheck.messages import Note, Refusal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

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
    prefix: Message | None = None
    """A note, if the names of one model are those of the other one with a prefix."""
    applies: bool = True
    """Whether few names of the models are equal. Otherwise they have one naming, and another name is a mistake."""


def infer_map(models: Sequence[Mapping[str, Tensor]], files: Files) -> Inferred | None:
    """Return a map between the tensors that only one of two models has; None if no data is equal.

    models: tensors by name. Reads all of these tensors once or twice.
    """
    candidates = [_list_candidates(models[0], models[1]), _list_candidates(models[1], models[0])]
    if not candidates[0] or not candidates[1]:
        return None
    found = find_pairings(candidates, files)
    _pair_converted(found, files)
    assignment = assign_parts(found)
    guesses = Guesses(assignment, found)
    names = NameMap("an inferred map", tuple(make_rules(assignment.list_pairings(), found.tensors)))
    if not names.rules and not any(guesses.ambiguous):
        return None
    tied = tuple((_map_copy(copy, names), stored_once) for copy, stored_once in guesses.tied)
    ambiguous_a, ambiguous_b = guesses.ambiguous

    # Models with many equal names have one naming.
    shared_names = models[0].keys() & models[1].keys()
    least_names = min(len(models[0]), len(models[1]))
    return Inferred(
        replace(names, tied=tied),
        _find_head_dim(assignment),
        guessed=_list_guessed(names, guesses),
        ambiguous=(tuple(ambiguous_a), tuple(ambiguous_b)),
        prefix=_find_prefix(models),
        applies=2 * len(shared_names) < least_names,
    )


def _find_prefix(models: Sequence[Iterable[str]]) -> Message | None:
    """Return a note if all names that differ are those of the other model with one prefix, else None."""
    names_a, names_b = set(models[0]), set(models[1])
    only_a, only_b = sorted(names_a - names_b), sorted(names_b - names_a)
    if len(only_a) != len(only_b):
        return None
    shorter, longer, sides = only_a, only_b, ("A", "B")
    if len(only_a[0]) > len(only_b[0]):
        shorter, longer, sides = only_b, only_a, ("B", "A")
    # A prefix keeps the order of names.
    prefix = longer[0].removesuffix(shorter[0])
    if longer != [prefix + name for name in shorter]:
        return None
    return Note.PREFIX(count=len(longer), longer=sides[1], shorter=sides[0], prefix=prefix)


def _map_copy(name: str, names: NameMap) -> str:
    """Return the name of a copy after a map: the rule of its layer may match the copy too."""
    match = names.find_rule(name)
    if match is None:
        return name
    rule, values = match
    return parse_template(rule.parts[0]).fill(values)


def _find_head_dim(assignment: Assignment) -> dict[str, int]:
    """Return the size of a head as a variable, if rows were permuted."""
    head_dim = max((pairing.layout.head_dim for pairing in assignment.list_pairings()), default=0)
    return {"head_dim": head_dim} if head_dim else {}


def _list_guessed(names: NameMap, guesses: Guesses) -> tuple[Rule, ...]:
    """Return the rules of a map for pairings that no data shows."""
    guessed_names = {pairing.stored for pairing in guesses.pairings}
    guessed = []
    for rule in names.rules:
        if any(rule.match(name) is not None for name in guessed_names):
            guessed.append(rule)
    return tuple(guessed)


def _list_candidates(model: Mapping[str, Tensor], partner_model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that the partner lacks and whose data can be compared."""
    candidates = {}
    for name, tensor in model.items():
        # Equal names show a pair without an inference.
        if name not in partner_model and _has_rows(tensor):
            candidates[name] = tensor
    return candidates


def _has_rows(tensor: Tensor) -> bool:
    """Whether a tensor has rows that can be read, and not too many of them."""
    return has_elements(tensor) and tensor.numel > 0 and tensor.shape[:1] <= (MOST_ROWS,)


def _pair_converted(candidates: Candidates, files: Files) -> None:
    """Pair tensors that are equal after a conversion to a dtype of the other model."""
    left = []
    for side in (0, 1):
        left.append({name: candidates.tensors[side][name] for name in candidates.unused(side)})
    dtypes = [Counter(tensor.dtype for tensor in own.values() if is_readable(tensor)) for own in left]
    converted: list[dict[str, Tensor]] = [{}, {}]
    for side in (0, 1):
        for name, tensor in left[side].items():
            size = DTYPES[tensor.dtype].size
            narrower = [dtype for dtype, _ in dtypes[1 - side].most_common() if DTYPES[dtype].size < size]
            is_wider = is_readable(tensor) and bool(narrower)
            converted[side][name] = convert(tensor, (narrower[0],), files) if is_wider else tensor
    if converted == left or not left[0] or not left[1]:
        return
    found = find_pairings(converted, files)
    for pairing in found.pairings:
        candidates.add(pairing)
    candidates.ambiguous += found.ambiguous


def extend_map(names: NameMap | None, inferred: Inferred) -> NameMap:
    """Return a known map together with the inferred one."""
    if names is None:
        return inferred.map
    title = f"{names.title} and an inferred map"
    tied = (*names.tied, *inferred.map.tied)
    return NameMap(title, (*names.rules, *inferred.map.rules), tied, built_in=names.built_in)


def mark_ambiguous(models: Sequence[Mapping[str, Tensor]], inferred: Inferred) -> list[Mapping[str, Tensor]]:
    """Return the models with all ambiguous tensors under the names of A, and refused: they are never "in sync"."""
    names = inferred.ambiguous
    if not names[0]:
        return list(models)
    marked = []
    for side, own in enumerate(models):
        removed = set(names[side])
        marked.append({name: tensor for name, tensor in own.items() if name not in removed})
    for name in names[0]:
        refused = replace(models[0][name], name=name, refused=Refusal.AMBIGUOUS_NAME())
        marked[0][name] = marked[1][name] = refused
    return [*marked]


def describe_inferred(inferred: Inferred) -> list[Message]:
    """Return notes with the rules and the ambiguous tensors."""
    notes: list[Message] = []
    if rules := inferred.map.rules:
        sentence = Note.INFERRED if inferred.applies else Note.PROPOSED
        notes.append(sentence())
        notes += [Note.RULE(name=rule.name, parts=describe_rule(rule)) for rule in rules[:_MOST_PRINTED]]
        if len(rules) > _MOST_PRINTED:
            notes.append(Note.MORE_RULES(count=len(rules) - _MOST_PRINTED))
        notes += [Note.COPY_RULE(name=first, copied=second) for first, second in inferred.map.tied[:_MOST_PRINTED]]
    if inferred.prefix is not None:
        notes.append(inferred.prefix)
    if inferred.guessed:
        names = tuple(rule.name for rule in inferred.guessed)
        notes.append(Note.GUESSED_RULES(count=len(names), names=names))
    if inferred.applies and (names := inferred.ambiguous[0]):
        notes.append(Note.AMBIGUOUS_MAP(count=len(names), names=names))
    return notes
