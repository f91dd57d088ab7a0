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
from syncheck.layout import views
from syncheck.messages import Note
from syncheck.tensors.blocks import has_elements

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.conversion.name_maps import NameMap, Rule
    from syncheck.messages import Message
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files

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
    split_names: frozenset[str] = frozenset(),
) -> tuple[list[Mapped], list[Message]]:
    """Return two models with equal names, as far as the map goes, and notes.

    models: tensors by name. A tensor of both models keeps its name if its shapes are equal.
    split_names: names of tensors that are split although both models have them.
    Raises UsageError if two rules of a file give one part.
    """
    model_a, model_b = models
    # Tensors that are split anyway have no partner.
    partners_a = {name: tensor for name, tensor in model_b.items() if name not in split_names}
    partners_b = {name: tensor for name, tensor in model_a.items() if name not in split_names}
    mapper_a = _Mapper(names, model_a, partners_a, variables, "A")
    mapper_b = _Mapper(names, model_b, partners_b, variables, "B")
    turned = _has_other_orientation(names, models)
    mapped_a, mapped_b = mapper_a.map_model(turned=False), mapper_b.map_model(turned=turned)
    mapped = [mapped_a, mapped_b]
    for pair in names.tied:
        _copy_tied(pair, mapped_a, mapped_b)
    for pair in names.tied:
        _copy_tied(pair, mapped_b, mapped_a)
    notes: list[Message] = []
    for side, model in zip(_SIDES, mapped, strict=True):
        notes += _list_notes(model, side, names.title)
    return mapped, notes


def _copy_tied(pair: tuple[str, str], mapped: Mapped, partner: Mapped) -> None:
    """Give a model that lacks a tied tensor of its partner the tensor that it uses instead.

    pair: see `NameMap.tied`.
    """
    first, second = pair
    if first in mapped.tensors or first not in partner.tensors or second not in mapped.tensors:
        return
    mapped.tensors[first] = replace(mapped.tensors[second], name=first)
    mapped.stored[first] = mapped.stored[second]
    if second in mapped.padded:
        mapped.padded[first] = mapped.padded[second]


def _list_notes(mapped: Mapped, side: str, title: str) -> list[Message]:
    """Return notes about the tensors that a map ignores or does not fit. title: of the map."""
    notes: list[Message] = []
    if mapped.ignored:
        notes.append(Note.IGNORED(side=side, names=tuple(mapped.ignored)))
    # Unknown variables are the reason for all tensors.
    if mapped.missing:
        variables = tuple(sorted(mapped.missing))
        notes.append(Note.UNKNOWN_SETTINGS(side=side, names=variables, count=len(mapped.unfit)))
    elif mapped.unfit:
        notes.append(Note.UNFIT(side=side, names=tuple(mapped.unfit), map=title))
    return notes


def _has_other_orientation(names: NameMap, models: Sequence[Mapping[str, Tensor]]) -> bool:
    """Whether B stores its linear layers in the other orientation than A.

    Libraries store the weight of a linear layer in both orientations under one name, but a model has one orientation.
    The shapes of most of these tensors decide; square ones show nothing. All others are transposed as well, so a
    conversion that forgot some of them differs.
    """
    model_a, model_b = models
    votes: Counter[bool] = Counter()
    common_names = [name for name in model_a if name in model_b]
    for name, rule, _ in names.match_names(common_names):
        shape, partner_shape = model_a[name].shape, model_b[name].shape
        # A vector has no orientation.
        if len(shape) < 2 or not rule.turns:
            continue
        exchanged = (*shape[:-2], shape[-1], shape[-2])
        if shape != exchanged and partner_shape in (shape, exchanged):
            votes[partner_shape == exchanged] += 1
    return votes[True] > votes[False]


class _Mapper:
    """Splits the tensors of one model by the rules of a map."""

    def __init__(
        self,
        names: NameMap,
        model: Mapping[str, Tensor],
        partner: Mapping[str, Tensor],
        variables: Mapping[str, int],
        side: str,
    ) -> None:
        """Select the rules that apply to the model.

        partner: the tensors of the other model that keep their names if the shapes are equal.
        side: the name of the model in messages.
        """
        self._names = names.select_rules(model)
        self._model = model
        self._partner = partner
        self._variables = variables
        self._side = side
        self._mapped = Mapped()
        # The parts of each stored tensor that is not ignored.
        self._claims: dict[str, Mapping[str, Tensor]] = {}

    def map_model(self, *, turned: bool) -> Mapped:
        """Return the model after the map. Raises UsageError if two rules of a file give one part.

        turned: whether this model has the other orientation.
        """
        padding: dict[str, bool | int] = {}
        for name, tensor in self._model.items():
            match = self._names.find_rule(name)
            if match is None or tensor.refused:
                self._claims[name] = {name: tensor}
                continue
            rule, values = match
            padding[name] = rule.pad
            if self._keeps_name(rule, name, turned=turned):
                self._claims[name] = {name: tensor}
            else:
                self._split(rule, values, name)
        self._resolve_collisions()
        for name, parts in self._claims.items():
            self._add_parts(name, parts, padding.get(name, False))
        return self._mapped

    def _keeps_name(self, rule: Rule, name: str, *, turned: bool) -> bool:
        """Whether a tensor is compared under its stored name, in its stored layout."""
        if rule.turns:
            return not turned
        # `check_ignored` compares what a file ignores.
        if not rule.parts and not self._names.built_in:
            return False
        tensor, partner = self._model[name], self._partner.get(name)
        if partner is not None and (partner.shape == tensor.shape or partner.refused):
            return True
        return rule.parts == (rule.name,)

    def _split(self, rule: Rule, values: Mapping[str, str], name: str) -> None:
        """Claim the parts of a tensor by a rule. values: of the placeholders."""
        if not rule.parts:
            self._mapped.ignored.append(name)
            return
        unknown = rule.variables - self._variables.keys()
        parts = None
        if not unknown:
            parts = split_tensor(rule, values, self._model[name], self._variables)
        # A tensor without parts keeps its name.
        if parts is None or len(parts) > MOST_PARTS:
            parts = {name: self._model[name]}
            self._mapped.missing |= unknown
            self._mapped.unfit.append(name)
        self._claims[name] = parts

    def _add_parts(self, name: str, parts: Mapping[str, Tensor], pad: bool | int) -> None:
        """Add the parts of a stored tensor to the model. pad: see `Rule.pad`."""
        for part_name, part in parts.items():
            self._mapped.stored[part_name] = self._model[name]
            self._mapped.tensors[part_name] = part
            if part.name != part_name:
                self._mapped.tensors[part_name] = replace(part, name=part_name)
            if pad:
                self._mapped.padded[part_name] = pad

    def _resolve_collisions(self) -> None:
        """Let tensors keep their stored names if a part of them has the name of another tensor: nothing is lost.

        Raises UsageError if two rules of a file give one part.
        """
        clashing = self._find_clashing(must_differ=not self._names.built_in)
        while clashing:
            for name in clashing:
                self._claims[name] = {name: self._model[name]}
            self._mapped.unfit.extend(clashing)
            # A stored name may be the name of a part, too.
            clashing = self._find_clashing(must_differ=False)

    def _find_clashing(self, *, must_differ: bool) -> list[str]:
        """Return the split tensors with a part that another tensor has too.

        must_differ: whether two split tensors with one part are an error.
        """
        owners: dict[str, list[str]] = defaultdict(list)
        for name, parts in self._claims.items():
            for part in parts:
                owners[part].append(name)
        clashing: dict[str, None] = {}
        for part, stored_names in owners.items():
            if len(stored_names) == 1:
                continue
            split_names = [name for name in stored_names if [*self._claims[name]] != [name]]
            # Tensors that keep their names may have the name of one part.
            if len(split_names) > 1 and must_differ:
                raise UsageError(
                    f"{self._names.title}: {split_names[0]} and {split_names[1]} of {self._side} both become {part}; "
                    "give each its own part"
                )
            clashing |= dict.fromkeys(split_names)
        return list(clashing)


def check_ignored(
    names: NameMap, models: Sequence[Mapping[str, Tensor]], mapped: Sequence[Mapped], files: Files
) -> None:
    """Raise UsageError if a map from a file ignores tensors that both models have with different data.

    Tensors belong together if they have the same name or, as ignored tensors have no other name, the same shape.
    """
    if names.built_in:
        return
    ignored_a, ignored_b = _select_ignored(models[0], mapped[0]), _select_ignored(models[1], mapped[1])
    different: list[str] = []
    for name, tensor in ignored_a.items():
        if name in ignored_b and tensor.shape != ignored_b[name].shape:
            different.append(name)
    shapes_a = {tensor.shape for tensor in ignored_a.values()}
    shapes_b = {tensor.shape for tensor in ignored_b.values()}
    for shape in shapes_a & shapes_b:
        contents_a = _count_contents(ignored_a.values(), shape, files)
        contents_b = _count_contents(ignored_b.values(), shape, files)
        # Ignored tensors have no names in common, so all of this shape are suspected.
        if contents_a != contents_b:
            different += [name for name, tensor in ignored_a.items() if tensor.shape == shape]
    if different:
        raise UsageError(
            f"{names.title}: the map ignores {different[0]}, which differs between A and B; name its parts, or leave "
            "it out on purpose with --exclude"
        )


def _select_ignored(model: Mapping[str, Tensor], mapped: Mapped) -> dict[str, Tensor]:
    """Return the tensors of a model that the map ignores."""
    return {name: model[name] for name in mapped.ignored}


def _count_contents(tensors: Iterable[Tensor], shape: tuple[int, ...], files: Files) -> Counter[tuple[str, bytes]]:
    """Return how many tensors of a shape have each dtype and content."""
    contents: Counter[tuple[str, bytes]] = Counter()
    for tensor in tensors:
        if tensor.shape != shape or not has_elements(tensor):
            continue
        digest = b""
        # A tensor without elements has no row.
        if tensor.numel:
            (digest,) = digest_rows(tensor, files, 1)
        contents[tensor.dtype, digest] += 1
    return contents


def remove_padding(mapped: Sequence[Mapped], variables: Mapping[str, int], files: Files) -> list[Message]:
    """Cut the padding of vocabularies, and return a note about it.

    Rows are padding if a rule of the longer model allows it, the length is the next multiple that the rule or the
    model's arguments state, and a configuration states the size of the vocabulary or all further rows are equal.
    """
    removed: dict[str, int] = {}
    first, second = mapped
    padded_names = first.padded.keys() | second.padded.keys()
    for name in sorted(padded_names & first.tensors.keys() & second.tensors.keys()):
        longer, shorter = first, second
        if _count_rows(first.tensors[name]) < _count_rows(second.tensors[name]):
            longer, shorter = second, first
        tensor, least = longer.tensors[name], _count_rows(shorter.tensors[name])
        padding_rows = _count_rows(tensor) - least
        if not _may_be_padded(tensor, shorter.tensors[name]) or name not in longer.padded:
            continue
        if not _is_multiple(least, least + padding_rows, longer.padded[name], variables):
            continue
        padding = views.narrow(tensor, 0, least, padding_rows)
        if _is_padding(padding, least, variables, files):
            longer.tensors[name] = views.narrow(tensor, 0, 0, least)
            removed[name] = padding_rows
    if not removed:
        return []
    return [Note.PADDED(names=tuple(removed), rows=max(removed.values()))]


def _count_rows(tensor: Tensor) -> int:
    """Return the length of the first dimension, 0 without dimensions."""
    return sum(tensor.shape[:1])


def _may_be_padded(longer: Tensor, shorter: Tensor) -> bool:
    """Whether two tensors of known data and at least one dimension differ in their number of rows only."""
    if not has_elements(longer) or not has_elements(shorter):
        return False
    if not longer.shape or not shorter.shape:
        return False
    return longer.shape[0] > shorter.shape[0] and longer.shape[1:] == shorter.shape[1:]


def _is_padding(rows: Tensor, least: int, variables: Mapping[str, int], files: Files) -> bool:
    """Whether further rows are not in the vocabulary, or all equal if its size is unknown.

    least: the number of rows before them.
    """
    vocabulary = variables.get("vocabulary", 0)
    if vocabulary:
        return vocabulary <= least
    return len(set(digest_rows(rows, files, rows.shape[0]))) == 1


def _is_multiple(least: int, most: int, pad: bool | int, variables: Mapping[str, int]) -> bool:
    """Whether `most` is the next multiple of rows after `least`. pad: see `Rule.pad`."""
    multiples = [variables.get("vocabulary_multiple", 0)]
    # `true` stands for the multiple in the model's arguments.
    if pad is not True:
        multiples.append(pad)
    return any(multiple > 0 and most == -(-least // multiple) * multiple for multiple in multiples)
