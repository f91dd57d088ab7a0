"""Compare two models in any layout: `syncheck diff A B`."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from syncheck.comparison.replicas import compare_group
from syncheck.conversion.acceptance import accept_conversions
from syncheck.conversion.adapters import AdaptedModel, finish_adapters, merge_adapters
from syncheck.conversion.causes import add_relations
from syncheck.conversion.inference import describe_inferred, extend_map, infer_map, mark_ambiguous
from syncheck.conversion.map_files import read_map, write_map
from syncheck.conversion.mapped_models import apply_map, check_ignored, remove_padding
from syncheck.conversion.merges import find_adapted
from syncheck.conversion.model_pairs import Models
from syncheck.conversion.name_maps import add_variables
from syncheck.conversion.quantized import dequantize
from syncheck.conversion.recognition import complete_variables, find_guessed, recognize_map, require_equal_heads
from syncheck.conversion.sides import LABELS, Side, Source, list_earlier, list_inputs, open_side
from syncheck.diagnose.measures import relation_of
from syncheck.diagnose.verdicts import judge_difference, judge_group, overall
from syncheck.errors import UsageError
from syncheck.findings import RelationKind, Stored
from syncheck.layout.copies import accept_partitioned_files, list_ties, require_own_numbers
from syncheck.layout.groups import ReplicaGroup
from syncheck.layout.labels import check_layouts
from syncheck.layout.progress import is_adapter
from syncheck.layout.second_weights import drop_unmatched_copies
from syncheck.layout.whole_model import add_tied_names, locate_shards
from syncheck.messages import Note
from syncheck.options import DiffOptions, build_selection
from syncheck.readers import outputs
from syncheck.records import Reason, Report
from syncheck.tensors.blocks import Files
from syncheck.tensors.kinds import find_outside_model
from syncheck.tensors.names import is_adapter_setting, normalize_keys
from syncheck.text import SIDES, names_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.conversion.inference import Inferred
    from syncheck.messages import Message
    from syncheck.records import Comparison, Group, Place
    from syncheck.snapshots import Tensor

# Limit of the tensors with a map of their shards on a page.
_MOST_STORED = 200


def diff(a: Source, b: Source, *, options: DiffOptions | None = None, histograms: bool = False) -> Report:
    """Compare two models in any layout, without a baseline. Parameters and errors as for `api.diff`."""
    options = options or DiffOptions()
    if options.write_map is not None:
        outputs.check(options.write_map, outputs.MAP, inputs=list_inputs((a, b), options))
    sides = tuple(open_side(label, source) for label, source in zip(LABELS, (a, b), strict=True))
    return compare_sides(sides, [compare_copies(side, options) for side in sides], options, histograms=histograms)


def compare_copies(side: Side, options: DiffOptions) -> Group | None:
    """Compare the copies of tensors and values in the files of a side; None for a side in one file.

    Raises UsageError for pipeline stages that number their layers from 0, and for several adapters.
    """
    _require_one_adapter(side, options)
    # The adapter of a model has other tensors, and its own run.
    ranks = tuple((rank, snapshot) for rank, snapshot in side.group.ranks if not is_adapter(snapshot))
    if len(ranks) < 2:
        return None
    own = replace(
        compare_group(replace(side.group, ranks=ranks), build_selection(options)), name=side.title, run=side.title
    )
    require_own_numbers(side.title, [snapshot for _, snapshot in ranks], own)
    return judge_group(accept_partitioned_files(own), (), _allowed(options))


def _require_one_adapter(side: Side, options: DiffOptions) -> None:
    """Raise UsageError if a side has two adapters: other values under one name, or other settings."""
    adapters = tuple((rank, snapshot) for rank, snapshot in side.group.ranks if is_adapter(snapshot))
    if len(adapters) < 2:
        return
    copies = compare_group(replace(side.group, ranks=adapters), build_selection(options))
    differing = [tensor.name for tensor in copies.tensors if tensor.out_of_sync or tensor.unknown]
    differing += [value.name for value in copies.values if value.counts or value.unknown]
    if differing:
        raise UsageError(
            f"{side.title}: the adapters of {adapters[0][1].path} and {adapters[1][1].path} are two: {differing[0]} "
            "differs. Merge an adapter first, and compare the result with the other adapter"
        )


def compare_sides(
    sides: Sequence[Side], copies: Sequence[Group | None], options: DiffOptions, *, histograms: bool = False
) -> Report:
    """Compare two models whose copies have been compared.

    copies: the results by side; None for a side in one file. histograms: see `diff`. Raises as `diff` does.
    """
    notes = _note_copies(sides, copies)
    reduced = drop_unmatched_copies([side.model for side in sides])
    sides = [replace(side, model=model) for side, model in zip(sides, reduced, strict=True)]
    check_layouts([side.model for side in sides], LABELS)
    listed = list_ties(snapshot for side in sides for _, snapshot in side.group.ranks)
    completed = add_tied_names([side.model for side in sides], listed.items())
    sides = tuple(replace(side, model=model) for side, (model, _) in zip(sides, completed, strict=True))
    notes += [Note.TIED(side=s.label, names=names) for s, (_, names) in zip(sides, completed, strict=True) if names]
    with Files(jobs=options.jobs) as files:
        mapped = _map_sides(_merge_adapters(sides, files), options, files)
        sides = _finish_adapters(mapped.sides, files)
        files.close_all()  # the comparison of the pair opens as many files
        pair = ReplicaGroup(
            " and ".join(side.model.path for side in sides),
            None,
            tuple(zip(SIDES, (side.model for side in sides), strict=True)),
            (),
        )
        found = compare_group(pair, replace(build_selection(options), histograms=histograms))
        comparison = _describe_sides(found, sides, subset=options.subset)
        comparison = accept_conversions(comparison, [_adapted(side) for side in sides], options.cast, files)
        comparison = _add_relations(comparison, sides, options, files)
    if histograms:
        evidence = replace(comparison.evidence, stored=_describe_stored(comparison, sides))
        comparison = replace(comparison, evidence=evidence)
    notes += mapped.notes
    if mapped.inferred and options.accept_inferred:
        notes.append(Note.ACCEPTED_MAP())
    if mapped.guessed:
        notes.append(Note.GUESSED_HEADS(names=mapped.guessed))
    is_proposal = mapped.inferred and not options.accept_inferred
    guessed = () if options.accept_inferred else mapped.guessed
    comparison = replace(
        comparison,
        notes=(*notes, *comparison.notes),
        evidence=replace(comparison.evidence, inferred=is_proposal, guessed=guessed, cast=options.cast or ""),
    )
    # Shards of a side are no reason for doubt, but copies that could not be compared are.
    doubtful = [
        own
        for own in copies
        if own is not None and (own.verdict == "out_of_sync" or any(diff.unknown for diff in own.tensors))
    ]
    groups = (*doubtful, judge_difference(comparison, _allowed(options)))
    return Report(
        verdict=overall(groups, ()),
        groups=groups,
        skipped=sum(side.skipped for side in sides),
        aliases=tuple(alias for side in sides for alias in side.aliases),
        command="diff",
    )


def _note_copies(sides: Sequence[Side], copies: Sequence[Group | None]) -> list[Message]:
    """Return how many tensors of each side in several files were compared with their copies."""
    notes = []
    for side, own in zip(sides, copies, strict=True):
        if len(side.group.ranks) > 1:
            compared = own.counts.compared if own is not None else 0
            sentence = Note.COPIES if compared else Note.NO_COPIES
            unit = "ranks" if side.model.format == "memory" else "files"
            notes.append(sentence(side=side.label, files=len(side.group.ranks), unit=unit, tensors=compared))
    return notes


def _merge_adapters(sides: Sequence[Side], files: Files) -> tuple[Side, ...]:
    """Return two sides with the values of quantized weights, and with merged adapters."""
    stored = [normalize_keys(side.model.tensors) for side in sides]
    models = [dequantize(own, other, files) for own, other in (stored, stored[::-1])]
    merged = merge_adapters(models, [side.model.format == "memory" for side in sides], files)
    results = []
    for side, own, before in zip(sides, merged, stored, strict=True):
        # Without a change, the names keep their prefixes, which are reported.
        if own.tensors is not before:
            # The settings of a merged adapter have no counterpart in the other model.
            values = {name: value for name, value in side.model.values.items() if not is_adapter_setting(name)}
            side = replace(side, model=replace(side.model, tensors=own.tensors, values=values), adapter=own.adapter)
        results.append(side)
    return tuple(results)


def _finish_adapters(sides: Sequence[Side], files: Files) -> tuple[Side, ...]:
    """Merge the parts whose modules have mapped names, and add all other parts to both sides, refused."""
    finished = finish_adapters([_adapted(side) for side in sides], files)
    if not any(own.adapter for own in finished):
        return tuple(sides)
    return tuple(
        replace(side, model=replace(side.model, tensors=own.tensors)) for side, own in zip(sides, finished, strict=True)
    )


def _adapted(side: Side) -> AdaptedModel:
    stored = {name: tensor.name for name, tensor in side.stored.items()}
    return AdaptedModel(normalize_keys(side.model.tensors), side.adapter, stored)


@dataclass(frozen=True, slots=True)
class MappedSides:
    """Two sides after a map of their names.

    notes: about the map. inferred: whether the names of some tensors follow from an inferred map. guessed: the numbers
    of heads that fit the data, and that no configuration states.
    """

    sides: tuple[Side, ...]
    notes: tuple[Message, ...]
    inferred: bool = False
    guessed: tuple[str, ...] = ()


def _map_sides(sides: Sequence[Side], options: DiffOptions, files: Files) -> MappedSides:
    """Return two sides with equal names if a map is given or found."""
    models: list[Mapping[str, Tensor]] = [normalize_keys(side.model.tensors) for side in sides]
    variables = {**sides[1].variables, **sides[0].variables}
    # A padded model may state its own size of the vocabulary; no stated token may be cut.
    if stated := [side.variables["vocabulary"] for side in sides if "vocabulary" in side.variables]:
        variables["vocabulary"] = max(stated)
    names = recognize_map(models, variables) if options.map is None else read_map(options.map)
    stated_variables = dict(variables)
    guessed: tuple[str, ...] = ()
    if names is not None:
        variables.update(names.variables)
        require_equal_heads([side.variables for side in sides])
        guessed = find_guessed(names, models, variables)
        variables = complete_variables(names, models, variables, files)
    inferred: Inferred | None = None
    if options.map is None:
        known = models if names is None else [own.tensors for own in apply_map(names, models, variables)[0]]
        inferred = infer_map(known, files)
    notes: list[Message] = [] if inferred is None else describe_inferred(inferred)
    written = names if inferred is None else extend_map(names, inferred)
    if inferred is not None and inferred.applies:
        names, variables = written, {**variables, **inferred.variables}
        models = mark_ambiguous(models, inferred)
    if options.write_map is not None and written is not None:
        numbers = variables if inferred is None else {**variables, **inferred.variables}
        written = add_variables(written, numbers, stated_variables)
        write_map(options.write_map, written, () if inferred is None else inferred.guessed)
    elif options.write_map is not None:
        notes.append(Note.NO_MAP(file=options.write_map))
    if names is None:
        return MappedSides(tuple(sides), tuple(notes))
    divided: set[str] = set()
    for side, own_model in zip(sides, models, strict=True):
        if side.adapter is not None:
            divided |= side.adapter.find_divided(names, own_model, variables)
    mapped, more = apply_map(names, models, variables, frozenset(divided))
    check_ignored(names, models, mapped, files)
    counts = [len(model.keys() - own.tensors.keys()) for model, own in zip(models, mapped, strict=True)]
    first = Note.MAP(map=names.title, count=counts[0], others=counts[1])
    notes = [first, *notes, *remove_padding(mapped, variables, files), *more]
    renamed = []
    for side, own in zip(sides, mapped, strict=True):
        model = replace(side.model, tensors=own.tensors)
        renamed.append(replace(side, model=model, stored=own.stored, map=names, variables=variables))
    is_inferred = inferred is not None and inferred.applies
    return MappedSides(tuple(renamed), tuple(notes), inferred=is_inferred, guessed=guessed)


def _allowed(options: DiffOptions) -> frozenset[str]:
    return frozenset(code.upper() for code in options.allow)


def _describe_sides(comparison: Comparison, sides: Sequence[Side], *, subset: bool) -> Comparison:
    """Add the labels of the sides, and the location of the worst element of each tensor.

    subset: whether B may lack tensors that do not belong to the model. Raises UsageError if the models have no name in
    common.
    """
    missing = [diff for diff in comparison.tensors if diff.reason is Reason.MISSING]
    if missing and len(missing) == comparison.counts.tensors:
        examples = "; ".join(f"{side.label} has {names_text([*side.model.tensors], 2) or 'none'}" for side in sides)
        raise UsageError(f"A and B have no tensor in common: {examples}; pass two copies of one model, or --map FILE")
    models = [normalize_keys(side.model.tensors) for side in sides]
    accepted = find_outside_model(replace(sides[0].model, tensors=models[0])) if subset else frozenset()
    tensors = []
    for diff in comparison.tensors:
        if diff.reason is Reason.MISSING and diff.clusters == ((0,),) and diff.name in accepted:
            diff = replace(diff, reason=Reason.SUBSET, minority=())
        if diff.index is not None:
            places: dict[int, Place] = {}
            for label, side in zip(SIDES, sides, strict=True):
                places[label] = side.locate(models[label][diff.name], diff.index)
            diff = replace(diff, places=places)
        tensors.append(diff)
    values = []
    for value in comparison.values:
        # Like tensors, values of the model must not be missing.
        may_be_missing = subset and value.by_rank.get(1) is None and value.kind != "model"
        values.append(replace(value, counts=False, unknown=False) if may_be_missing else value)
    notes = [*comparison.notes]
    if absent := tuple(diff.name for diff in tensors if diff.reason is Reason.SUBSET):
        notes.append(Note.SUBSET(count=len(absent), names=absent))
    replicas = tuple(
        replace(replica, label=side.label, files=len(side.group.ranks))
        for replica, side in zip(comparison.replicas, sides, strict=True)
    )
    return replace(comparison, replicas=replicas, tensors=tuple(tensors), values=tuple(values), notes=tuple(notes))


def _describe_stored(comparison: Comparison, sides: Sequence[Side]) -> dict[str, tuple[Stored | None, Stored | None]]:
    """Return how both sides store the tensors that differ, and others, up to a limit."""
    names = [diff.name for diff in comparison.tensors if diff.out_of_sync]
    wanted = list(dict.fromkeys((*names, *comparison.evidence.names)))[:_MOST_STORED]
    found: list[dict[str, Stored | None]] = []
    for side in sides:
        tensors = normalize_keys(side.model.tensors)
        held = {name: side.stored.get(name, tensor) for name, tensor in tensors.items() if name in wanted}
        boxes: dict[str, list[tuple[Any, Any, str]]] = {tensor.name: [] for tensor in held.values()}
        for _, rank, tensor, shards in locate_shards(dict(side.group.ranks)):
            for shard in [None] if shards is None else shards:
                part = tensor if shard is None else shard.tensor
                owner = f"rank {rank}" if len(side.group.ranks) > 1 else os.path.basename(part.path)
                if tensor.name in boxes:
                    placed = (None, None) if shard is None else (shard.start, part.shape)
                    boxes[tensor.name].append((*placed, owner))
        own = {
            name: Stored(tensor.name, tensor.dtype, tuple(tensor.full_shape), tuple(boxes[tensor.name]))
            for name, tensor in held.items()
        }
        found.append(dict(own))
    return {name: (found[0].get(name), found[1].get(name)) for name in wanted}


def _add_relations(comparison: Comparison, sides: Sequence[Side], options: DiffOptions, files: Files) -> Comparison:
    """Add how the tensors of B that differ follow from A, and from the model before the update."""
    names = [diff.name for diff in comparison.tensors if diff.out_of_sync]
    given = [] if options.base is None else [open_side("base", options.base)]
    if not names:
        return comparison
    one, other = sides
    a, b = (normalize_keys(side.model.tensors) for side in sides)
    models = Models(a, b, files, (one.stored, other.stored), one.map, one.variables)
    title = ""
    for base in given or list_earlier(one):
        models.base, title = _map_base(base, one), base.model.path
        if any(n in models.base and n in b and models.equals(models.base[n], b[n]) is not None for n in names):
            break
    else:
        models.base = {} if options.base is None else models.base
    diffs = add_relations(comparison.tensors, models)
    differing = {diff.name for diff in diffs if diff.out_of_sync}
    stale = any(relation_of(diff) is RelationKind.BASE for diff in diffs)
    kept = [n for n in models.base if stale and n not in differing and n in a and n in b]
    updated = sum(models.equals(models.base[n], a[n]) is None for n in kept)
    adapted = sum(find_adapted(tensor) is not None for tensor in a.values())
    evidence = replace(comparison.evidence, base=title, updated=updated, adapted=adapted)
    return replace(comparison, tensors=diffs, evidence=evidence)


def _map_base(base: Side, one: Side) -> Mapping[str, Tensor]:
    """Return the tensors of the earlier model by the names of A."""
    tensors = normalize_keys(base.model.tensors)
    if one.map is None:
        return tensors
    mapped, _ = apply_map(one.map, [tensors, one.model.tensors], one.variables)
    return mapped[0].tensors
