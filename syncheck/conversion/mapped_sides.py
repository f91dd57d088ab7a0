"""Bring two sides to equal names: by a map that is given, recognized, or inferred from equal data."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.conversion.divided_groups import find_divided_groups
from syncheck.conversion.inference import (
    describe_inferred,
    extend_map,
    infer_map,
    mark_ambiguous,
    mark_rule,
    separate_stacks,
)
from syncheck.conversion.map_files import read_map, write_map
from syncheck.conversion.map_prefixes import add_prefix, drop_prefix
from syncheck.conversion.mapped_models import apply_map, check_ignored, remove_padding
from syncheck.conversion.name_maps import add_variables
from syncheck.conversion.recognition import (
    complete_variables,
    find_guessed,
    list_fitted,
    recognize_map,
    require_equal_heads,
)
from syncheck.frozen import record
from syncheck.messages import Note, Undecided, note_if
from syncheck.tensors.names import normalize_keys

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.conversion.inference import Inferred
    from syncheck.conversion.name_maps import NameMap
    from syncheck.conversion.sides import Side
    from syncheck.messages import Message
    from syncheck.options import DiffOptions
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files


@record
class MappedSides:
    """Two sides after a map of their names."""

    sides: tuple[Side, ...]
    notes: tuple[Message, ...]
    """Notes about the map."""
    inferred: bool = False
    """Whether the names of some tensors follow from an inferred map."""
    contradicted: tuple[str, ...] = ()
    """The names of the rules of an inferred map that names of tensors contradict."""
    doubt: Message | None = None
    """Why equal data is no verdict: rules of one module contradict each other."""
    guessed: tuple[str, ...] = ()
    """The numbers of heads that fit the data, and that no configuration states."""
    fitted: tuple[str, ...] = ()
    """The tensors whose rows are in the order of a guessed size of a head."""


def map_sides(sides: Sequence[Side], options: DiffOptions, files: Files) -> MappedSides:
    """Return two sides with equal names if a map is given or found."""
    models: list[Mapping[str, Tensor]] = [normalize_keys(side.model.tensors) for side in sides]
    stated_variables = _join_variables(sides)
    names = _find_map(models, stated_variables, options)
    variables = stated_variables
    guessed: tuple[str, ...] = ()
    fitted: tuple[str, ...] = ()
    if names is not None:
        # A recognized map shows names of a library only. By passing a map, a user states that both models fit it.
        if options.map is not None:
            models = add_prefix(names, models)
        require_equal_heads([side.variables for side in sides])
        known_variables = {**stated_variables, **dict(names.variables)}
        guessed = find_guessed(names, models, known_variables)
        variables = complete_variables(names, models, known_variables, files)
        fitted = list_fitted(names, models) if guessed else ()
    inferred = None
    notes: list[Message] = []
    # A map that a user passes is the whole map.
    if options.map is None:
        inferred = _infer_remaining(names, models, variables, files)
    # A map between models of one naming is a proposal only, except for stacks.
    applied, proposed = (None, None) if inferred is None else separate_stacks(inferred)
    for part in (applied, proposed):
        if part is not None:
            notes += describe_inferred(part, options.write_map)
    notes += _write_map(
        names,
        inferred,
        variables,
        stated_variables,
        options,
    )
    if applied is not None:
        names = extend_map(names, applied)
        variables = {**variables, **applied.variables}
        models = mark_ambiguous(models, applied)
    if names is None:
        return MappedSides(tuple(sides), tuple(notes))
    divided = find_divided_groups(names, models, variables, files)
    # The rules of an inferred map are in a note already.
    if applied is None:
        notes += [mark_rule(rule, divided) for rule in divided]
    divided_names = tuple(rule.name for rule in divided)
    renamed_sides, first_note, more_notes = _rename_sides(
        sides,
        names,
        models,
        variables,
        files,
    )
    return MappedSides(
        renamed_sides,
        notes=(first_note, *notes, *more_notes),
        inferred=applied is not None,
        contradicted=() if applied is None else tuple(rule.name for rule in applied.contradicted),
        doubt=Undecided.DIVIDED_GROUPS(names=divided_names) if divided else None,
        guessed=guessed,
        fitted=fitted,
    )


def _join_variables(sides: Sequence[Side]) -> dict[str, int]:
    """Return the variables that the configurations of both sides state. Those of A take precedence."""
    side_a, side_b = sides
    variables = {**side_b.variables, **side_a.variables}
    vocabularies = [side.variables["vocabulary"] for side in sides if "vocabulary" in side.variables]
    # A padded model may state its own size of the vocabulary; no stated token may be cut.
    if vocabularies:
        variables["vocabulary"] = max(vocabularies)
    return variables


def _find_map(
    models: Sequence[Mapping[str, Tensor]], variables: Mapping[str, int], options: DiffOptions
) -> NameMap | None:
    """Return the map of the options, or the built-in map of a library whose names one of the models has."""
    if options.map is not None:
        return drop_prefix(read_map(options.map), models)
    return recognize_map(models, variables)


def _infer_remaining(
    names: NameMap | None, models: Sequence[Mapping[str, Tensor]], variables: Mapping[str, int], files: Files
) -> Inferred | None:
    """Return a map of the tensors that a recognized map does not bring to equal names."""
    if names is None:
        return infer_map(models, files)
    mapped, _ = apply_map(names, models, variables)
    return infer_map([model.tensors for model in mapped], files)


def _write_map(
    names: NameMap | None,
    inferred: Inferred | None,
    variables: Mapping[str, int],
    stated_variables: Mapping[str, int],
    options: DiffOptions,
) -> list[Message]:
    """Write the map to the file of the options. Return a note if no map was needed or found."""
    path = options.write_map
    if path is None:
        return []
    if inferred is not None:
        written_map = add_variables(extend_map(names, inferred), {**variables, **inferred.variables}, stated_variables)
        write_map(path, written_map, inferred.guessed, inferred.contradicted)
        return []
    if names is None:
        return [Note.NO_MAP(file=path)]
    write_map(path, add_variables(names, variables, stated_variables))
    return []


def _find_output_ties(sides: Sequence[Side]) -> tuple[bool | None, bool | None]:
    """Return for each side whether its output layer uses the weight of the embedding.

    The files of one side may have no configuration, and they are the same model.
    """
    tie_a, tie_b = (side.output_tie for side in sides)
    return (
        tie_b if tie_a is None else tie_a,
        tie_a if tie_b is None else tie_b,
    )


def _rename_sides(
    sides: Sequence[Side],
    names: NameMap,
    models: Sequence[Mapping[str, Tensor]],
    variables: Mapping[str, int],
    files: Files,
) -> tuple[tuple[Side, ...], Message, list[Message]]:
    """Return the sides after a map, a note about the map, and notes about the tensors without a rule.

    models: the tensors of the sides, without names that are ambiguous.
    """
    split_names: set[str] = set()
    for side, tensors in zip(sides, models, strict=True):
        if side.adapter is not None:
            split_names |= side.adapter.find_split_tensors(names, tensors, variables)
    mapped, coverage_notes = apply_map(
        names,
        models,
        variables,
        split_names=frozenset(split_names),
        output_ties=_find_output_ties(sides),
    )
    check_ignored(names, models, mapped, files)
    counts: list[Message] = []
    for side, mapped_model in zip(sides, mapped, strict=True):
        count = mapped_model.count_mapped()
        # A map from the names of B to those of A renames no tensor of A.
        counts += note_if(count, Note.MAPPED(count=count, side=side.label))
    map_note = Note.MAP(map=names.title, counts=tuple(counts) or (Note.NONE_MAPPED(),))
    padding_notes = remove_padding(mapped, variables, files)
    renamed_sides = []
    for side, mapped_model in zip(sides, mapped, strict=True):
        # The numbers of the optimizer had the names of before.
        model = replace(side.model, tensors=mapped_model.tensors, matched=())
        renamed_sides.append(
            replace(
                side,
                model=model,
                stored=mapped_model.stored,
                map=names,
                variables=variables,
            )
        )
    return tuple(renamed_sides), map_note, [*padding_notes, *coverage_notes]
