"""Infer a map of names from data.

An inferred map is a proposal: equal data shows which tensors belong together, but not whether they should, so a verdict
that rests on it is undecided until the user accepts the map.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from syncheck.conversion.casts import convert
from syncheck.conversion.general_rules import make_rules
from syncheck.conversion.layer_rules import assign_parts
from syncheck.conversion.map_files import describe_rule
from syncheck.conversion.name_maps import NameMap, Rule
from syncheck.conversion.numbering import split_numbers
from syncheck.conversion.pairings import Candidates, Pairing, find_pairings
from syncheck.conversion.recognition import is_readable
from syncheck.conversion.rows import MOST_ROWS
from syncheck.dtypes import DTYPES
from syncheck.kernel.blocks import has_elements
from syncheck.messages import Note, Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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
    guesses = _guess_pairs(assignment, found)
    assignment.add(guesses.pairings)
    rules = make_rules(assignment.list_pairings())
    if not rules and not any(guesses.ambiguous):
        return None
    guessed_names = {pairing.stored for pairing in guesses.pairings}
    unsure = [rule for rule in rules if any(rule.match(name) is not None for name in guessed_names)]
    head_dim = max((pairing.layout.head_dim for pairing in assignment.list_pairings()), default=0)
    return Inferred(
        NameMap("an inferred map", tuple(rules), tuple(guesses.tied)),
        {"head_dim": head_dim} if head_dim else {},
        tuple(unsure),
        (tuple(guesses.ambiguous[0]), tuple(guesses.ambiguous[1])),
        applies=2 * len(models[0].keys() & models[1].keys()) < min(map(len, models)),
    )


def _list_candidates(own: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that the other model lacks and whose data can be compared."""
    candidates = {}
    for name, tensor in own.items():
        if name not in other and has_elements(tensor) and tensor.numel and tensor.shape[:1] <= (MOST_ROWS,):
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


@dataclass(slots=True)
class _Guesses:
    """Pairs of tensors with equal data that their names suggest.

    tied: copies of a tensor in one model, and the name of the tensor that the other model stores once.
    ambiguous: names of A and of B whose pairs nothing suggests.
    """

    pairings: list[Pairing] = field(default_factory=list)
    tied: list[tuple[str, str]] = field(default_factory=list)
    ambiguous: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))

    def add_ambiguous(self, names_a: Sequence[str], names_b: Sequence[str]) -> None:
        """Add names whose pairs nothing suggests."""
        self.ambiguous[0].extend(names_a)
        self.ambiguous[1].extend(names_b)


def _guess_pairs(assignment: Assignment, candidates: Candidates) -> _Guesses:
    """Return pairs of tensors with equal data in the order of their names.

    The tensors of a freshly initialized model, such as norms of 1, are equal, so each pair of them is right about the
    data; which pair is meant, the user decides.
    """
    guesses = _Guesses()
    layers = _Layers(assignment.list_pairings())
    constants = _group_constants(candidates)
    for group in [*candidates.ambiguous, *constants]:
        names_a = [name for name in group[0] if (0, name) not in assignment.claimed]
        names_b = [name for name in group[1] if (1, name) not in assignment.claimed]
        if not names_a or not names_b:
            continue
        if group in constants:
            # Constants of other shapes may be parts of each other, unless one model has more of them.
            if _count_elements(candidates, 0, names_a) == _count_elements(candidates, 1, names_b):
                guesses.add_ambiguous(names_a, names_b)
        elif pairs := _pair_in_order(names_a, names_b, layers):
            guesses.pairings += pairs
        elif min(len(names_a), len(names_b)) == 1 and not _is_constant(candidates, 0, names_a[0]):
            # One model stores a tied weight once.
            guesses.pairings.append(Pairing(1, names_b[0], (names_a[0],)))
            guesses.tied += [(copy, names_a[0]) for copy in [*names_a[1:], *names_b[1:]]]
        else:
            guesses.add_ambiguous(names_a, names_b)
    return guesses


def _count_elements(candidates: Candidates, side: int, names: Sequence[str]) -> int:
    return sum(candidates.tensors[side][name].numel for name in names)


def _is_constant(candidates: Candidates, side: int, name: str) -> bool:
    """Whether a tensor has one value everywhere."""
    tensor, digests = candidates.tensors[side][name], candidates.rows[side][name]
    if len(set(digests)) > 1:
        return False
    row = bytes(candidates.files.read(tensor, 0, tensor.numel // len(digests), 0))
    size = DTYPES[tensor.dtype].size
    return row == row[:size] * (len(row) // size)


def _group_constants(candidates: Candidates) -> list[tuple[list[str], list[str]]]:
    """Return the names of the tensors of A and of B that have one value everywhere, by this value."""
    groups: dict[tuple[str, bytes], tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for side in (0, 1):
        for name in candidates.unused(side):
            if _is_constant(candidates, side, name):
                tensor = candidates.tensors[side][name]
                groups[tensor.dtype, bytes(candidates.files.read(tensor, 0, 1, 0))][side].append(name)
    return list(groups.values())


class _Layers:
    """The layer of a name: the text before its first number, and this number, as in the names of A."""

    def __init__(self, pairings: Sequence[Pairing]) -> None:
        votes: dict[tuple[str, int], Counter[tuple[str, int]]] = defaultdict(Counter)
        for pairing in pairings:
            for part in pairing.parts:
                name_a, name_b = (pairing.stored, part) if pairing.side == 0 else (part, pairing.stored)
                layer_a, layer_b = _find_layer(name_a), _find_layer(name_b)
                if layer_a is not None and layer_b is not None:
                    votes[layer_b][layer_a] += 1
        self._layers_of_a = {layer: counter.most_common(1)[0][0] for layer, counter in votes.items()}

    def find(self, name: str, side: int) -> tuple[str, int] | None:
        """Return the layer of a name of A (side 0) or B; a layer of B without any pairing has its own name."""
        layer = _find_layer(name)
        if side == 0 or layer is None:
            return layer
        return self._layers_of_a.get(layer, layer)


def _find_layer(name: str) -> tuple[str, int] | None:
    pattern, numbers = split_numbers(name)
    return (pattern[0], numbers[0]) if numbers else None


def _pair_in_order(names_a: Sequence[str], names_b: Sequence[str], layers: _Layers) -> list[Pairing]:
    """Pair names of A and B in the same layer, in their order; none if a layer has more of them in one model."""
    in_layers_of_a = _pair_by_key(names_a, names_b, layers.find)
    # Without any other pair, layers have equal numbers.
    return in_layers_of_a or _pair_by_key(names_a, names_b, _get_numbers)


def _get_numbers(name: str, _: int) -> tuple[int, ...]:
    return split_numbers(name)[1]


def _pair_by_key(names_a: Sequence[str], names_b: Sequence[str], key: Callable[[str, int], object]) -> list[Pairing]:
    """Pair names with equal keys in their order; none if one model has more names with a key."""
    groups: dict[object, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for side, names in enumerate((names_a, names_b)):
        for name in names:
            groups[key(name, side)][side].append(name)
    pairs = []
    for group_a, group_b in groups.values():
        if len(group_a) != len(group_b):
            return []
        modules = {_get_module(name): name for name in group_b}
        for name in group_a:
            # A module that has kept its name comes first.
            same = modules.get(_get_module(name))
            partner = same if same in group_b else group_b[0]
            group_b.remove(partner)
            pairs.append(Pairing(1, partner, (name,)))
    return pairs


def _get_module(name: str) -> str:
    return name.split(".")[-2:][0]


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
    if inferred.guessed:
        names = tuple(rule.name for rule in inferred.guessed)
        notes.append(Note.GUESSED_RULES(count=len(names), names=names))
    if inferred.applies and (names := inferred.ambiguous[0]):
        notes.append(Note.AMBIGUOUS_MAP(count=len(names), names=names))
    return notes
