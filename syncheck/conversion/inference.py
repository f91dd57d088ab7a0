"""Infer a map of names from data.

An inferred map is a proposal: equal data shows which tensors belong together, but not whether they should, so a verdict
that rests on it is undecided until the user accepts the map.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from syncheck.conversion.casts import convert
from syncheck.conversion.layer_rules import assign_parts, make_rules
from syncheck.conversion.map_files import describe_rule
from syncheck.conversion.name_maps import NameMap, Rule
from syncheck.conversion.numbering import split_numbers
from syncheck.conversion.pairings import Candidates, Pairing, find_pairings
from syncheck.conversion.recognition import is_readable
from syncheck.conversion.rows import MOST_ROWS, is_comparable
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
    candidates = [_list_candidates(models[0], models[1]), _list_candidates(models[1], models[0])]
    if not candidates[0] or not candidates[1]:
        return None
    found = find_pairings(candidates, files)
    _pair_converted(found, files)
    assignment = assign_parts(found)
    guessed, ambiguous = _guess_pairs(assignment, found)
    for pairing in guessed:
        assignment.add(pairing)
    rules = make_rules(assignment)
    if not rules and not any(ambiguous):
        return None
    guessed_names = {pairing.stored for pairing in guessed}
    unsure = [rule for rule in rules if any(rule.match(name) is not None for name in guessed_names)]
    heads = [pairing.layout.head_dim for own in assignment.parts for pairing in own.values()]
    head_dim = max(heads, default=0)
    applies = 2 * len(models[0].keys() & models[1].keys()) < min(map(len, models))
    names = NameMap("an inferred map", tuple(rules))
    return Inferred(names, {"head_dim": head_dim} if head_dim else {}, tuple(unsure), ambiguous, applies)


def _list_candidates(own: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that the other model lacks and whose data can be compared."""
    candidates = {}
    for name, tensor in own.items():
        if name not in other and is_comparable(tensor) and tensor.numel and tensor.shape[:1] <= (MOST_ROWS,):
            candidates[name] = tensor
    return candidates


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


def _guess_pairs(
    assignment: Assignment, candidates: Candidates
) -> tuple[list[Pairing], tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return pairs of tensors with equal data in the order of their names, and the names without a pair.

    The tensors of a freshly initialized model, such as norms of 1, are equal, so each pair of them is right about the
    data; which pair is meant, the user decides.
    """
    guessed: list[Pairing] = []
    ambiguous: tuple[list[str], list[str]] = ([], [])
    for group in [*candidates.ambiguous, *_group_constants(candidates)]:
        left = [[name for name in names if name not in assignment.claimed[side]] for side, names in enumerate(group)]
        sizes = [sum(candidates.tensors[side][name].numel for name in names) for side, names in enumerate(left)]
        pairs = _pair_in_order(left[0], left[1]) if group in candidates.ambiguous else []
        guessed += pairs
        # Constants of other shapes may be parts of each other, unless one model has more of them.
        if not pairs and (group in candidates.ambiguous or sizes[0] == sizes[1]):
            ambiguous[0].extend(left[0])
            ambiguous[1].extend(left[1])
    return guessed, (tuple(ambiguous[0]), tuple(ambiguous[1]))


def _group_constants(candidates: Candidates) -> list[tuple[list[str], list[str]]]:
    """Return the names of the tensors of A and of B that have one value everywhere, by this value."""
    groups: dict[tuple[str, bytes], tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for side in (0, 1):
        for name in candidates.unused(side):
            tensor, digests = candidates.tensors[side][name], candidates.rows[side][name]
            if len(set(digests)) > 1:
                continue
            row = bytes(candidates.files.read(tensor, 0, tensor.numel // len(digests), 0))
            element = row[: DTYPES[tensor.dtype].size]
            if row == element * (len(row) // len(element)):
                groups[tensor.dtype, element][side].append(name)
    return [group for group in groups.values() if group[0] and group[1]]


def _pair_in_order(ours: Sequence[str], theirs: Sequence[str]) -> list[Pairing]:
    """Pair names of A and B with the same numbers, in their order; none if a number occurs more often on one side."""
    by_numbers: dict[tuple[int, ...], tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for side, names in enumerate((ours, theirs)):
        for name in names:
            by_numbers[split_numbers(name)[1]][side].append(name)
    pairs = []
    for names_a, names_b in by_numbers.values():
        if len(names_a) != len(names_b):
            return []
        ends = {name.split(".")[-2:][0]: name for name in names_b}
        for name in names_a:
            # A tensor of the same module name first, such as a norm that has kept its name.
            same = ends.get(name.split(".")[-2:][0])
            partner = same if same in names_b else names_b[0]
            names_b.remove(partner)
            pairs.append(Pairing(1, partner, (name,)))
    return pairs


def extend_map(names: NameMap | None, inferred: Inferred) -> NameMap:
    """Return a known map together with the inferred one."""
    if names is None:
        return inferred.map
    title = f"{names.title} and an inferred map"
    return NameMap(title, (*names.rules, *inferred.map.rules), names.tied, built_in=names.built_in)


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
    if inferred.guessed:
        names = tuple(rule.name for rule in inferred.guessed)
        notes.append(Note.GUESSED_RULES(count=len(names), names=names))
    if inferred.applies and (names := inferred.ambiguous[0]):
        notes.append(Note.AMBIGUOUS_MAP(count=len(names), names=names))
    return notes
