"""Bring two models to one set of names and layouts by a map, and check the claims of the map.

A map may not hide anything: parts that collide, ignored tensors that differ, and rows beyond a vocabulary that are not
its padding are errors or differences.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from syncheck.conversion.name_maps import split_tensor
from syncheck.conversion.rows import digest_rows, is_comparable
from syncheck.errors import UsageError
from syncheck.logical import views
from syncheck.messages import Note

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.conversion.name_maps import NameMap, Rule
    from syncheck.kernel.blocks import Files
    from syncheck.messages import Message
    from syncheck.snapshots import Tensor


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

    def add(self, name: str, view: Tensor, stored_tensor: Tensor, pad: bool | int) -> None:
        """Add a view of a stored tensor under a name. pad: see `Rule.pad`."""
        self.tensors[name] = replace(view, name=name)
        self.stored[name] = stored_tensor
        # Only vocabularies have padding.
        if pad:
            self.padded[name] = pad


def apply_map(
    names: NameMap, models: Sequence[Mapping[str, Tensor]], variables: Mapping[str, int]
) -> tuple[list[Mapped], list[Message]]:
    """Return two models with equal names, as far as the map goes, and notes.

    models: tensors by name. A tensor of both models keeps its name if its shapes are equal.
    Raises UsageError if two rules of a file give one part.
    """
    model_a, model_b = models
    # Only B is turned: A has the orientation of the result.
    mapped_a = _Mapper("A", names, model_a, model_b, variables).map()
    turned = _find_turned(names, model_a, model_b)
    mapped_b = _Mapper("B", names, model_b, model_a, variables, turned=turned).map()
    _add_tied(names, mapped_a, mapped_b)
    _add_tied(names, mapped_b, mapped_a)
    notes = _describe_problems(names, mapped_a, "A") + _describe_problems(names, mapped_b, "B")
    return [mapped_a, mapped_b], notes


def _add_tied(names: NameMap, mapped: Mapped, partner: Mapped) -> None:
    """Give a model the tied tensors that only the other model stores."""
    missing = partner.tensors.keys() - mapped.tensors.keys()
    for name, source in names.tied:
        view = mapped.tensors.get(source)
        # A model without both names stores no data for them.
        if name in missing and view is not None:
            stored_tensor = mapped.stored[source]
            pad = mapped.padded.get(source, False)
            mapped.add(name, view, stored_tensor, pad)


def _describe_problems(names: NameMap, mapped: Mapped, side: str) -> list[Message]:
    """Return notes about the tensors of a side that the map ignores or does not fit."""
    notes: list[Message] = []
    if mapped.ignored:
        notes.append(Note.IGNORED(side=side, names=tuple(mapped.ignored)))
    unfit = tuple(mapped.unfit)
    # Unknown variables are the reason of the tensors that do not fit.
    if mapped.missing:
        missing = tuple(sorted(mapped.missing))
        notes.append(Note.UNKNOWN_SETTINGS(side=side, names=missing, count=len(unfit)))
    elif unfit:
        notes.append(Note.UNFIT(side=side, names=unfit, map=names.title))
    return notes


def _find_turned(names: NameMap, model_a: Mapping[str, Tensor], model_b: Mapping[str, Tensor]) -> bool:
    """Whether B stores its linear layers in the other orientation than A.

    Libraries store the weight of a linear layer in both orientations under one name, but a model has one orientation.
    The shapes of most of these tensors decide; square ones show nothing. All others are transposed as well, so a
    conversion that forgot some of them differs.
    """
    equal_shapes = exchanged_shapes = 0
    for name in model_a.keys() & model_b.keys():
        match = names.find_rule(name)
        # Other rules do not depend on the orientation.
        if match is None or not match[0].turns:
            continue
        shape_a, shape_b = model_a[name].shape, model_b[name].shape
        exchanged = (*shape_a[:-2], *shape_a[:-3:-1])
        # Square matrices vote for both orientations.
        equal_shapes += shape_b == shape_a
        exchanged_shapes += shape_b == exchanged
    return exchanged_shapes > equal_shapes


class _Mapper:
    """Maps the tensors of one model.

    side: A or B.
    partner: the other model.
    turned: whether linear layers have the other orientation than in A.
    """

    def __init__(
        self,
        side: str,
        names: NameMap,
        model: Mapping[str, Tensor],
        partner: Mapping[str, Tensor],
        variables: Mapping[str, int],
        *,
        turned: bool = False,
    ) -> None:
        self._side = side
        self._names = names.select_rules(model)
        self._model, self._partner = model, partner
        self._variables = variables
        self._turned = turned
        self._mapped = Mapped()
        # The parts of each stored tensor by name, and `Rule.pad`.
        self._parts: dict[str, Mapping[str, Tensor]] = {}
        self._pads: dict[str, bool | int] = {}

    def map(self) -> Mapped:
        """Return the model after the map. Raises UsageError if two rules of a file give one part."""
        for name in self._model:
            self._map_tensor(name)
        self._resolve_collisions()
        for name, parts in self._parts.items():
            tensor = self._model[name]
            pad = self._pads.get(name, False)
            for part_name, part in parts.items():
                self._mapped.add(part_name, part, tensor, pad)
        return self._mapped

    def _map_tensor(self, name: str) -> None:
        """Find the parts of a tensor. It keeps its name if no rule fits it."""
        tensor = self._model[name]
        self._parts[name] = {name: tensor}
        match = self._names.find_rule(name)
        # Data that cannot be read is not divided.
        if match is None or tensor.refused:
            return
        rule, values = match
        self._pads[name] = rule.pad
        if self._keeps_name(name, rule):
            return
        # A rule without parts is for tensors that are computed from the configuration, such as masks.
        if not rule.parts:
            del self._parts[name]
            self._mapped.ignored.append(name)
            return
        # Without the number of heads, nothing shows where the parts of a fused tensor begin.
        unknown = rule.variables - self._variables.keys()
        parts: Mapping[str, Tensor] = {}
        if not unknown:
            parts = split_tensor(rule, values, tensor, self._variables)
        # A shape that the rule cannot divide gives no parts.
        if parts:
            self._parts[name] = parts
        else:
            self._mapped.missing |= unknown
            self._mapped.unfit.append(name)

    def _keeps_name(self, name: str, rule: Rule) -> bool:
        """Whether a tensor is compared under its stored name, in its stored layout."""
        if rule.turns:
            return not self._turned
        # `check_ignored` compares what the map of a file ignores.
        if not rule.parts and not self._names.built_in:
            return False
        partner = self._partner.get(name)
        if partner is None:
            return False
        # A partner that cannot be read does not show another layout.
        return bool(partner.refused) or partner.shape == self._model[name].shape

    def _resolve_collisions(self) -> None:
        """Let tensors keep their stored names if a part of them has the name of another tensor: nothing is lost.

        Raises UsageError if two rules of a file give one part.
        """
        clashing = self._find_clashing()
        # A built-in map may fit two libraries by chance, but the user's map is meant for these models.
        if not self._names.built_in:
            self._refuse_common_parts(clashing)
        while clashing:
            for name in clashing:
                self._parts[name] = {name: self._model[name]}
            self._mapped.unfit.extend(clashing)
            # A tensor that has its name again may collide with a part of another tensor.
            clashing = self._find_clashing()

    def _find_clashing(self) -> list[str]:
        """Return the tensors with a part that another tensor gives too, or that has the name of another tensor."""
        counts = Counter(itertools.chain.from_iterable(self._parts.values()))
        shared = {part for part, count in counts.items() if count > 1}
        clashing = []
        for name, parts in self._parts.items():
            keeps_name = list(parts) == [name]
            # Tensors that keep their names cannot give way.
            if not keeps_name and not shared.isdisjoint(parts):
                clashing.append(name)
        return clashing

    def _refuse_common_parts(self, clashing: Sequence[str]) -> None:
        """Raise UsageError if two of these tensors give the same part."""
        parts = itertools.chain.from_iterable(self._parts[name] for name in clashing)
        for part, count in Counter(parts).most_common(1):
            if count > 1:
                owners = [name for name in clashing if part in self._parts[name]]
                both = f"{owners[0]} and {owners[1]} of {self._side}"
                raise UsageError(f"{self._names.title}: {both} both become {part}; give each its own part")


def check_ignored(
    names: NameMap, models: Sequence[Mapping[str, Tensor]], mapped: Sequence[Mapped], files: Files
) -> None:
    """Raise UsageError if a map from a file ignores tensors that both models have with different data.

    Tensors belong together if they have the same name or, as ignored tensors have no other name, the same shape.
    """
    # The built-in maps ignore only masks and frequencies, which follow from the configuration.
    if names.built_in:
        return
    ignored_a = {name: models[0][name] for name in mapped[0].ignored}
    ignored_b = {name: models[1][name] for name in mapped[1].ignored}
    contents_a = _count_contents(ignored_a.values(), files)
    contents_b = _count_contents(ignored_b.values(), files)
    for name, tensor in ignored_a.items():
        shape = tensor.shape
        partner = ignored_b.get(name, tensor)
        # A shape that only one model has shows nothing: models may have masks and caches of their own.
        has_other_data = contents_b.get(shape, contents_a[shape]) != contents_a[shape]
        if partner.shape != shape or has_other_data:
            problem = f"the map ignores {name}, which differs between A and B"
            advice = "name its parts, or leave it out on purpose with --exclude"
            raise UsageError(f"{names.title}: {problem}; {advice}")


def _count_contents(tensors: Iterable[Tensor], files: Files) -> dict[tuple[int, ...], Counter[object]]:
    """Return for each shape how many tensors have each dtype and content."""
    contents: dict[tuple[int, ...], Counter[object]] = defaultdict(Counter)
    for tensor in tensors:
        counts = contents[tensor.shape]
        content = None
        # Tensors without elements, and tensors that cannot be read, have no data to compare.
        if is_comparable(tensor) and tensor.numel:
            content = digest_rows(tensor, files, 1)[0]
        counts[tensor.dtype, content] += 1
    return contents


def remove_padding(mapped: Sequence[Mapped], variables: Mapping[str, int], files: Files) -> list[Message]:
    """Cut the padding of vocabularies, and return a note about it.

    Rows are padding if a rule of the longer model allows it, the length is the next multiple that the rule or the
    model's arguments state, and a configuration states the size of the vocabulary or all further rows are equal.
    """
    mapped_a, mapped_b = mapped
    removed = _cut_padding(mapped_a, mapped_b, variables, files)
    removed |= _cut_padding(mapped_b, mapped_a, variables, files)
    if not removed:
        return []
    names = tuple(sorted(removed))
    most_rows = max(removed.values())
    return [Note.PADDED(names=names, rows=most_rows)]


def _cut_padding(longer: Mapped, shorter: Mapped, variables: Mapping[str, int], files: Files) -> dict[str, int]:
    """Cut the padding of the tensors of one model, and return the number of removed rows by name."""
    removed = {}
    for name in longer.padded.keys() & shorter.tensors.keys():
        tensor, partner = longer.tensors[name], shorter.tensors[name]
        if not _has_more_rows(tensor, partner):
            continue
        # Padded models state the multiple in their arguments, or the map states the multiple of their library.
        rows = partner.shape[0]
        multiples = {variables.get("vocabulary_multiple", 0), int(longer.padded[name])}
        is_padded = _is_multiple(rows, tensor.shape[0], multiples - {0})
        if is_padded and _is_padding(tensor, rows, variables, files):
            removed[name] = tensor.shape[0] - rows
            longer.tensors[name] = views.narrow(tensor, 0, 0, rows)
    return removed


def _has_more_rows(tensor: Tensor, partner: Tensor) -> bool:
    """Whether a tensor has more rows than its partner, and its data can be read."""
    has_same_rows = tensor.shape[1:] == partner.shape[1:]
    # Shapes with the same rows are in the order of their numbers of rows. A number without dimensions has none.
    is_longer = tensor.shape > partner.shape > ()
    return is_comparable(tensor) and has_same_rows and is_longer


def _is_multiple(rows: int, length: int, multiples: Iterable[int]) -> bool:
    """Whether a length is the next multiple after a number of rows, for one of these multiples.

    1, the value of a rule without a number, never gives a larger length.
    """
    next_lengths = [-(-rows // multiple) * multiple for multiple in multiples]
    return length in next_lengths


def _is_padding(tensor: Tensor, rows: int, variables: Mapping[str, int], files: Files) -> bool:
    """Whether the rows of a tensor after so many rows are no tokens of its vocabulary."""
    vocabulary = variables.get("vocabulary", 0)
    if vocabulary:
        return vocabulary <= rows
    # Without a stated size, tokens have different rows, and padding has equal ones.
    count = tensor.shape[0] - rows
    further = views.narrow(tensor, 0, rows, count)
    return len(set(digest_rows(further, files, count))) == 1
