"""Bring two sides to equal names: by a map that is given, recognized, or inferred from equal data."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.conversion.inference import describe_inferred, extend_map, infer_map, mark_ambiguous
from syncheck.conversion.map_files import read_map, write_map
from syncheck.conversion.mapped_models import apply_map, check_ignored, remove_padding
from syncheck.conversion.name_maps import add_variables
from syncheck.conversion.recognition import complete_variables, find_guessed, recognize_map, require_equal_heads
from syncheck.frozen import record
from syncheck.messages import Note
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
    guessed: tuple[str, ...] = ()
    """The numbers of heads that fit the data, and that no configuration states."""


def map_sides(sides: Sequence[Side], options: DiffOptions, files: Files) -> MappedSides:
    """Return two sides with equal names if a map is given or found."""
    models: list[Mapping[str, Tensor]] = [normalize_keys(side.model.tensors) for side in sides]
    stated_variables = _join_variables(sides)
    names = _find_map(models, stated_variables, options)
    variables = stated_variables
    guessed: tuple[str, ...] = ()
    if names is not None:
        require_equal_heads([side.variables for side in sides])
        known_variables = {**stated_variables, **dict(names.variables)}
        guessed = find_guessed(names, models, known_variables)
        variables = complete_variables(names, models, known_variables, files)
    inferred = None
    notes: list[Message] = []
    # A map that a user passes is the whole map.
    if options.map is None:
        inferred = _infer_remaining(names, models, variables, files)
    if inferred is not None:
        notes += describe_inferred(inferred)
    notes += _write_map(
        names,
        inferred,
        variables,
        stated_variables,
        options,
    )
    # A map between models of one naming is a proposal only.
    applied = inferred if inferred is not None and inferred.applies else None
    if applied is not None:
        names = extend_map(names, applied)
        variables = {**variables, **applied.variables}
        models = mark_ambiguous(models, applied)
    if names is None:
        return MappedSides(tuple(sides), tuple(notes))
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
        guessed=guessed,
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
        return read_map(options.map)
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
        write_map(path, written_map, inferred.guessed)
        return []
    if names is None:
        return [Note.NO_MAP(file=path)]
    write_map(path, add_variables(names, variables, stated_variables))
    return []


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
    )
    check_ignored(names, models, mapped, files)
    counts = [len(tensors.keys() - model.tensors.keys()) for tensors, model in zip(models, mapped, strict=True)]
    map_note = Note.MAP(map=names.title, count=counts[0], others=counts[1])
    padding_notes = remove_padding(mapped, variables, files)
    renamed_sides = []
    for side, mapped_model in zip(sides, mapped, strict=True):
        model = replace(side.model, tensors=mapped_model.tensors)
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
