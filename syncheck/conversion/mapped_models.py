"""Bring two models to one set of names and layouts by a map, and check the claims of the map.

A map may not hide anything: parts that collide, ignored tensors that differ, and rows beyond a vocabulary that are not
its padding are errors or differences.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from syncheck.conversion.name_maps import MOST_PARTS, split_tensor
from syncheck.conversion.paddings import is_padding_of_tokens
from syncheck.conversion.rows import digest_rows
from syncheck.conversion.shared_weights import is_output_tie
from syncheck.errors import UsageError
from syncheck.frozen import replace
from syncheck.layout import views
from syncheck.messages import Note, Usage
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
    split: list[str] = field(default_factory=list)
    """Stored tensors with other names or another layout."""
    ignored: list[str] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)
    """Stored tensors that keep their names: no rule fits, a variable is unknown, or a part's name is taken."""
    padded: dict[str, bool | int] = field(default_factory=dict)
    """Parts whose rows may have padding, and `Rule.pad`."""
    missing: set[str] = field(default_factory=set)
    """Unknown variables."""
    assumed_ties: list[str] = field(default_factory=list)
    """Names that the model lacks, and that no configuration states to be other names of tensors that it has."""

    def count_mapped(self) -> int:
        """Return the number of stored tensors that a rule applies to."""
        return len({*self.split, *self.ignored}.difference(self.unfit))

    def copy(self, name: str, new_name: str) -> None:
        """Add a tensor under a second name."""
        self.tensors[new_name] = replace(self.tensors[name], name=new_name)
        self.stored[new_name] = self.stored[name]
        if name in self.padded:
            self.padded[new_name] = self.padded[name]


def apply_map(
    names: NameMap,
    models: Sequence[Mapping[str, Tensor]],
    variables: Mapping[str, int],
    split_names: frozenset[str] = frozenset(),
    output_ties: tuple[bool | None, bool | None] = (None, None),
) -> tuple[list[Mapped], list[Message]]:
    """Return two models with equal names, as far as the map goes, and notes.

    models: tensors by name. A tensor of both models keeps its name if its shapes are equal.
    split_names: names of tensors that are split although both models have them.
    output_ties: for each model, whether its output layer uses the weight of the embedding; None if this is unknown.
    Raises UsageError if two rules of a file give one part.
    """
    model_a, model_b = models
    mapper_a = _Mapper(
        names,
        model=model_a,
        partner=_drop(model_b, split_names),
        variables=variables,
        side="A",
    )
    mapper_b = _Mapper(
        names,
        model=model_b,
        partner=_drop(model_a, split_names),
        variables=variables,
        side="B",
    )
    turned = _has_other_orientation(names, models)
    mapped_a = mapper_a.map_model(turned=False)
    mapped_b = mapper_b.map_model(turned=turned)
    _copy_tied(names.tied, mapped_a, mapped_b, output_ties[0])
    _copy_tied(names.tied, mapped_b, mapped_a, output_ties[1])
    mapped = [mapped_a, mapped_b]
    notes: list[Message] = []
    for side, model in zip(_SIDES, mapped, strict=True):
        notes += _list_notes(model, side, names.title)
    return mapped, notes


def _drop(model: Mapping[str, Tensor], names: frozenset[str]) -> dict[str, Tensor]:
    """Return a model without the tensors of these names: tensors that are split anyway have no partner."""
    return {name: tensor for name, tensor in model.items() if name not in names}


def _copy_tied(pairs: Iterable[tuple[str, str]], mapped: Mapped, partner: Mapped, output_tie: bool | None) -> None:
    """Give a model that lacks tied tensors of its partner the tensors that it uses instead.

    pairs: see `NameMap.tied`.
    output_tie: see `apply_map`. A model with an output layer of its own uses no other tensor for it.
    """
    for first, second in pairs:
        is_missing = first in partner.tensors and first not in mapped.tensors
        stated_tie = output_tie if is_output_tie(first, second) else None
        if is_missing and second in mapped.tensors and stated_tie is not False:
            mapped.copy(second, first)
            if stated_tie is None:
                mapped.assumed_ties.append(first)


def _list_notes(mapped: Mapped, side: str, title: str) -> list[Message]:
    """Return notes about the tensors that a map ignores or does not fit. title: of the map."""
    notes: list[Message] = []
    if mapped.assumed_ties:
        notes.append(Note.ASSUMED_TIE(side=side, names=tuple(mapped.assumed_ties)))
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
    The shapes of most of these tensors decide. All others are transposed as well, so a conversion that forgot some of
    them differs.
    """
    model_a, model_b = models
    same_orientation = other_orientation = 0
    # A vector has no orientation.
    matrices = [name for name in model_a if name in model_b and len(model_a[name].shape) > 1]
    for name, rule, _ in names.match_names(matrices):
        if not rule.turns:
            continue
        shape = model_a[name].shape
        exchanged = (*shape[:-2], shape[-1], shape[-2])
        # A square matrix counts for both orientations, which shows nothing.
        same_orientation += model_b[name].shape == shape
        other_orientation += model_b[name].shape == exchanged
    return other_orientation > same_orientation


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
        self._claims = {name: {name: tensor} for name, tensor in self._model.items()}
        # A tensor that cannot be read keeps its name.
        readable_names = [name for name, tensor in self._model.items() if not tensor.refused]
        for name, rule, values in self._names.match_names(readable_names):
            padding[name] = rule.pad
            if not self._keeps_name(rule, name, turned=turned):
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
        return rule.parts == (rule.name,) or self._has_partner(name)

    def _has_partner(self, name: str) -> bool:
        """Whether the other model has a tensor of this name and shape."""
        partner = self._partner.get(name)
        if partner is None:
            return False
        # The shape of a tensor that cannot be read may be unknown.
        return bool(partner.refused) or partner.shape == self._model[name].shape

    def _split(self, rule: Rule, values: Mapping[str, str], name: str) -> None:
        """Claim the parts of a tensor by a rule. values: of the placeholders."""
        if not rule.parts:
            self._mapped.ignored.append(name)
            del self._claims[name]
            return
        parts = split_tensor(
            rule,
            values,
            tensor=self._model[name],
            variables=self._variables,
        )
        # A tensor without parts keeps its name.
        if parts is None or len(parts) > MOST_PARTS:
            self._mapped.missing |= rule.variables - self._variables.keys()
            self._mapped.unfit.append(name)
        else:
            self._claims[name] = parts
            self._mapped.split.append(name)

    def _add_parts(self, name: str, parts: Mapping[str, Tensor], pad: bool | int) -> None:
        """Add the parts of a stored tensor to the model. pad: see `Rule.pad`."""
        for part_name, part in parts.items():
            self._mapped.stored[part_name] = self._model[name]
            # A part has the name of the stored tensor that it is a view of.
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
        shared_parts = [part for part, stored_names in owners.items() if len(stored_names) > 1]
        for part in shared_parts:
            split_names = [name for name in owners[part] if [*self._claims[name]] != [name]]
            # Tensors that keep their names may have the name of one part.
            if must_differ and len(split_names) > 1:
                first, second, *_ = split_names
                raise UsageError(
                    f"{self._names.title}: {first} and {second} of {self._side} both become {part}; "
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
    ignored_a = _select_ignored(models[0], mapped[0])
    ignored_b = _select_ignored(models[1], mapped[1])
    different: list[str] = []
    for name, tensor in ignored_a.items():
        partner = ignored_b.get(name, tensor)
        if tensor.shape != partner.shape:
            different.append(name)
    names_a, names_b = _group_by_shape(ignored_a), _group_by_shape(ignored_b)
    for shape in names_a.keys() & names_b.keys():
        contents_a = _count_contents(ignored_a, names_a[shape], files)
        contents_b = _count_contents(ignored_b, names_b[shape], files)
        # Ignored tensors have no names in common, so all of this shape are suspected.
        if contents_a != contents_b:
            different += names_a[shape]
    if different:
        raise UsageError(Usage.IGNORED_DIFFERS(map=names.title, name=different[0]))


def _select_ignored(model: Mapping[str, Tensor], mapped: Mapped) -> dict[str, Tensor]:
    """Return the tensors of a model that the map ignores."""
    return {name: model[name] for name in mapped.ignored}


def _group_by_shape(tensors: Mapping[str, Tensor]) -> dict[tuple[int, ...], list[str]]:
    """Return the names of the tensors of each shape."""
    names: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        names[tensor.shape].append(name)
    return names


def _count_contents(tensors: Mapping[str, Tensor], names: Iterable[str], files: Files) -> Counter[tuple[str, bytes]]:
    """Return how many tensors of some names have each dtype and content."""
    contents: Counter[tuple[str, bytes]] = Counter()
    for name in names:
        tensor = tensors[name]
        if not has_elements(tensor):
            continue
        # A tensor without elements has no row.
        digest = digest_rows(tensor, files, 1)[0] if tensor.numel else b""
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
        rows, partner_rows = _count_rows(first.tensors[name]), _count_rows(second.tensors[name])
        longer, shorter = (second, first) if rows < partner_rows else (first, second)
        tensor = longer.tensors[name]
        unpadded = _cut_padding(
            tensor,
            shorter=shorter.tensors[name],
            pad=longer.padded.get(name),
            variables=variables,
            files=files,
        )
        if unpadded is not None:
            longer.tensors[name] = unpadded
            removed[name] = abs(rows - partner_rows)
    if not removed:
        return []
    return [Note.PADDED(names=tuple(removed), rows=max(removed.values()))]


def _count_rows(tensor: Tensor) -> int:
    """Return the length of the first dimension, 0 without dimensions."""
    return sum(tensor.shape[:1])


def _cut_padding(
    tensor: Tensor,
    shorter: Tensor,
    pad: bool | int | None,
    variables: Mapping[str, int],
    files: Files,
) -> Tensor | None:
    """Return a tensor without its padding; None if the rows that a shorter tensor lacks are no padding.

    pad: see `Rule.pad`; `None` for a tensor without a rule of this kind.
    """
    if pad is None or not _may_be_padded(tensor, shorter):
        return None
    least, most = shorter.shape[0], tensor.shape[0]
    if most not in _list_padded_lengths(least, pad, variables):
        return None
    # Rows that only one model has may be tokens, too.
    padding = views.narrow(tensor, 0, least, most - least)
    if not _is_padding(padding, least, variables, files):
        return None
    return views.narrow(tensor, 0, 0, least)


def _may_be_padded(longer: Tensor, shorter: Tensor) -> bool:
    """Whether two tensors of known data and at least one dimension differ in their number of rows only."""
    if not has_elements(longer) or not has_elements(shorter):
        return False
    # A number without dimensions has no rows that could be padded.
    if not shorter.shape or _count_rows(longer) == _count_rows(shorter):
        return False
    return longer.shape[1:] == shorter.shape[1:]


def _is_padding(rows: Tensor, least: int, variables: Mapping[str, int], files: Files) -> bool:
    """Whether further rows are not in the vocabulary, or all equal if its size is unknown.

    least: the number of rows before them.
    """
    vocabulary = variables.get("vocabulary", 0)
    if vocabulary:
        return vocabulary <= least
    return is_padding_of_tokens(rows, files)


def _list_padded_lengths(least: int, pad: bool | int, variables: Mapping[str, int]) -> list[int]:
    """Return the next multiples of rows after `least`, for the known multiples. pad: see `Rule.pad`."""
    multiples = {variables.get("vocabulary_multiple", 0)}
    # `true` stands for the multiple in the model's arguments.
    if pad is not True:
        multiples.add(pad)
    return [-(-least // multiple) * multiple for multiple in multiples if multiple > 0]
