"""Bring two models to one set of names and layouts by a map, and check the claims of the map.

A map may not hide anything: parts that collide, ignored tensors that differ, and rows beyond a vocabulary that are not
its padding are errors or differences.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from syncheck.conversion.name_maps import MOST_PARTS, split_tensor
from syncheck.conversion.rows import digest_rows
from syncheck.errors import UsageError
from syncheck.kernel.blocks import has_elements
from syncheck.logical import views
from syncheck.messages import Note

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.conversion.name_maps import NameMap, Rule
    from syncheck.kernel.blocks import Files
    from syncheck.messages import Message
    from syncheck.snapshots import Tensor

_SIDES = "AB"


@dataclass(slots=True)
class Mapped:
    """A model after a map."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Views of the stored tensors, by name."""
    stored: dict[str, Tensor] = field(default_factory=dict)
    """The stored tensor of each view."""
    ignored: list[str] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)
    """Stored tensors that keep their names: no rule fits, a variable is unknown, or a part's name is taken."""
    padded: dict[str, bool | int] = field(default_factory=dict)
    """Parts whose rows may have padding, and `Rule.pad`."""
    missing: set[str] = field(default_factory=set)
    """Unknown variables."""


def apply_map(
    names: NameMap,
    models: Sequence[Mapping[str, Tensor]],
    variables: Mapping[str, int],
    divided: frozenset[str] = frozenset(),
) -> tuple[list[Mapped], list[Message]]:
    """Return two models with equal names, as far as the map goes, and notes.

    models: tensors by name. A tensor of both models keeps its name if its shapes are equal.
    divided: names of tensors that are divided although both models have them.
    Raises UsageError if two rules of a file give one part.
    """
    turned = _find_turned(names, models)
    mapped = [
        _map_model(names, models[0], models[1], variables, divided, turned=turned, side="A"),
        _map_model(names, models[1], models[0], variables, divided, turned=turned, side="B"),
    ]
    for one, other in (mapped, mapped[::-1]):
        for first, second in names.tied:
            if first not in one.tensors and first in other.tensors and second in one.tensors:
                one.tensors[first] = replace(one.tensors[second], name=first)
                one.stored[first] = one.stored[second]
                if second in one.padded:
                    one.padded[first] = one.padded[second]
    notes: list[Message] = []
    for side, own in zip(_SIDES, mapped, strict=True):
        if own.ignored:
            notes.append(Note.IGNORED(side=side, names=tuple(own.ignored)))
        if own.missing:
            notes.append(Note.UNKNOWN_SETTINGS(side=side, names=tuple(sorted(own.missing)), count=len(own.unfit)))
        elif own.unfit:
            notes.append(Note.UNFIT(side=side, names=tuple(own.unfit), map=names.title))
    return mapped, notes


def _find_turned(names: NameMap, models: Sequence[Mapping[str, Tensor]]) -> bool:
    """Whether B stores its linear layers in the other orientation than A.

    Libraries store the weight of a linear layer in both orientations under one name, but a model has one orientation.
    The shapes of most of these tensors decide; square ones show nothing. All others are transposed as well, so a
    conversion that forgot some of them differs.
    """
    votes: Counter[bool] = Counter()
    for name, tensor in models[0].items():
        other = models[1].get(name)
        found = names.find_rule(name)
        if other is None or found is None or not found[0].turns or len(tensor.shape) < 2:
            continue
        exchanged = (*tensor.shape[:-2], *tensor.shape[:-3:-1])
        if exchanged != tensor.shape and other.shape in (tensor.shape, exchanged):
            votes[other.shape == exchanged] += 1
    return votes[True] > votes[False]


def _map_model(
    names: NameMap,
    own: Mapping[str, Tensor],
    other: Mapping[str, Tensor],
    variables: Mapping[str, int],
    divided: frozenset[str],
    *,
    turned: bool,
    side: str,
) -> Mapped:
    """Return a model after a map. divided: see `apply_map`. turned: whether B has the other orientation."""
    mapped, names = Mapped(), names.select_rules(own)
    claims: dict[str, Mapping[str, Tensor]] = {}
    padded: dict[str, bool | int] = {}
    for name, tensor in own.items():
        found = names.find_rule(name)
        claims[name] = {name: tensor}
        if found is None or tensor.refused:
            continue
        rule, values = found
        padded[name] = rule.pad
        partner = None if name in divided else other.get(name)
        if _keeps_name(rule, tensor, partner, built_in=names.built_in, turned=turned and side == "B"):
            continue
        if not rule.parts:
            del claims[name]
            mapped.ignored.append(name)
            continue
        unknown = rule.variables - variables.keys()
        parts = None if unknown else split_tensor(rule, values, tensor, variables)
        if parts is None or len(parts) > MOST_PARTS:
            mapped.missing |= unknown
            mapped.unfit.append(name)
        else:
            claims[name] = parts
    _resolve_collisions(claims, own, mapped, names, side)
    for name, claimed in claims.items():
        for part_name, part in claimed.items():
            mapped.tensors[part_name] = part if part.name == part_name else replace(part, name=part_name)
            mapped.stored[part_name] = own[name]
            if padded.get(name):
                mapped.padded[part_name] = padded[name]
    return mapped


def _keeps_name(rule: Rule, tensor: Tensor, partner: Tensor | None, *, built_in: bool, turned: bool) -> bool:
    """Whether a tensor is compared under its stored name, in its stored layout.

    partner: the tensor of this name in the other model. turned: whether this model has the other orientation.
    """
    if rule.turns:
        return not turned
    if not rule.parts and not built_in:
        return False  # `check_ignored` compares what a file ignores
    if partner is not None and (partner.shape == tensor.shape or partner.refused):
        return True
    return rule.parts == (rule.name,)


def _resolve_collisions(
    claims: dict[str, Mapping[str, Tensor]], own: Mapping[str, Tensor], mapped: Mapped, names: NameMap, side: str
) -> None:
    """Let tensors keep their stored names if a part of them has the name of another tensor: nothing is lost.

    claims: the parts of each stored tensor. Raises UsageError if two rules of a file give one part.
    """
    first_round = True
    while True:
        owners: dict[str, list[str]] = defaultdict(list)
        for stored, parts in claims.items():
            for part in parts:
                owners[part].append(stored)
        clashing: dict[str, None] = {}
        for part, stored_names in owners.items():
            divided = [stored for stored in stored_names if [*claims[stored]] != [stored]]
            if len(stored_names) > 1:
                clashing |= dict.fromkeys(divided)
            if len(divided) > 1 and first_round and not names.built_in:
                raise UsageError(
                    f"{names.title}: {divided[0]} and {divided[1]} of {side} both become {part}; give each its own part"
                )
        if not clashing:
            return
        for stored in clashing:
            claims[stored] = {stored: own[stored]}
        mapped.unfit.extend(clashing)
        first_round = False


def check_ignored(
    names: NameMap, models: Sequence[Mapping[str, Tensor]], mapped: Sequence[Mapped], files: Files
) -> None:
    """Raise UsageError if a map from a file ignores tensors that both models have with different data.

    Tensors belong together if they have the same name or, as ignored tensors have no other name, the same shape.
    """
    if names.built_in:
        return
    ignored = [{name: model[name] for name in own.ignored} for model, own in zip(models, mapped, strict=True)]
    suspects = [
        name for name, tensor in ignored[0].items() if name in ignored[1] and tensor.shape != ignored[1][name].shape
    ]
    for shape in {tensor.shape for tensor in ignored[0].values()} & {tensor.shape for tensor in ignored[1].values()}:
        contents = [_count_contents(own.values(), shape, files) for own in ignored]
        if contents[0] != contents[1]:
            suspects += [name for name, tensor in ignored[0].items() if tensor.shape == shape]
    if suspects:
        raise UsageError(
            f"{names.title}: the map ignores {suspects[0]}, which differs between A and B; name its parts, or leave it "
            "out on purpose with --exclude"
        )


def _count_contents(tensors: Iterable[Tensor], shape: tuple[int, ...], files: Files) -> Counter[tuple[str, bytes]]:
    """Return how many tensors of a shape have each dtype and content."""
    contents: Counter[tuple[str, bytes]] = Counter()
    for tensor in tensors:
        if tensor.shape == shape and has_elements(tensor):
            contents[tensor.dtype, digest_rows(tensor, files, 1)[0] if tensor.numel else b""] += 1
    return contents


def remove_padding(mapped: Sequence[Mapped], variables: Mapping[str, int], files: Files) -> list[Message]:
    """Cut the padding of vocabularies, and return a note about it.

    Rows are padding if a rule of the longer model allows it, the length is the next multiple that the rule or the
    model's arguments state, and a configuration states the size of the vocabulary or all further rows are equal.
    """
    removed: dict[str, int] = {}
    first, second = mapped
    for name in sorted((first.padded.keys() | second.padded.keys()) & first.tensors.keys() & second.tensors.keys()):
        pair = (first.tensors[name], second.tensors[name])
        if not all(has_elements(tensor) and len(tensor.shape) > 0 for tensor in pair):
            continue
        lengths = [tensor.shape[0] for tensor in pair]
        if pair[0].shape[1:] != pair[1].shape[1:] or lengths[0] == lengths[1]:
            continue
        longer = first if lengths[0] > lengths[1] else second
        least, most = sorted(lengths)
        if name not in longer.padded or not _is_multiple(least, most, longer.padded[name], variables):
            continue
        extra = views.narrow(longer.tensors[name], 0, least, most - least)
        vocabulary = variables.get("vocabulary", 0)
        if vocabulary > least or (not vocabulary and len(set(digest_rows(extra, files, most - least))) > 1):
            continue
        longer.tensors[name] = views.narrow(longer.tensors[name], 0, 0, least)
        removed[name] = most - least
    return [Note.PADDED(names=tuple(removed), rows=max(removed.values()))] if removed else []


def _is_multiple(least: int, most: int, pad: bool | int, variables: Mapping[str, int]) -> bool:
    """Whether `most` is the next multiple of rows after `least`. pad: see `Rule.pad`."""
    stated = variables.get("vocabulary_multiple", 0)
    multiples = [multiple for multiple in (stated, 0 if pad is True else pad) if multiple > 0]
    return any(most == -(-least // multiple) * multiple for multiple in multiples)
