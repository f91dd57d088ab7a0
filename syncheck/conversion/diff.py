"""Compare two models in any layout: `syncheck diff A B`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.comparison.replicas import compare_group
from syncheck.conversion.acceptance import accept_conversions
from syncheck.conversion.adapters import AdaptedModel, finish_adapters, merge_adapters
from syncheck.conversion.common_files import note_common_files
from syncheck.conversion.converted_tensors import compare_converted, compare_models
from syncheck.conversion.frequencies import omit_frequencies
from syncheck.conversion.interchangeable import note_interchangeable
from syncheck.conversion.mapped_sides import MappedSides, map_sides
from syncheck.conversion.model_settings import add_settings
from syncheck.conversion.odd_copies import add_other_model, find_differing_copies
from syncheck.conversion.quantized import dequantize
from syncheck.conversion.side_evidence import add_relations_of_sides, describe_sides, describe_stored
from syncheck.conversion.sides import LABELS, Side, Source, list_inputs, list_snapshots, open_side
from syncheck.conversion.single_shards import explain_single_shard
from syncheck.conversion.unmarked_shards import compare_unmarked_shards
from syncheck.conversion.unpaired_stacks import explain_stacks
from syncheck.conversion.unplaced_parts import explain_unpaired
from syncheck.diagnose.verdicts import judge_difference, judge_group, overall
from syncheck.errors import UsageError
from syncheck.layout.copies import accept_partitioned_files, list_ties, require_own_numbers
from syncheck.layout.labels import check_layouts
from syncheck.layout.named_steps import note_contradicting_steps
from syncheck.layout.progress import is_adapter
from syncheck.layout.second_weights import drop_unmatched_copies
from syncheck.layout.whole_model import add_tied_names, join
from syncheck.messages import Note, note_if
from syncheck.options import DiffOptions, build_selection
from syncheck.readers import outputs
from syncheck.records import Report
from syncheck.tensors.blocks import Files
from syncheck.tensors.names import is_adapter_setting, normalize_keys
from syncheck.tensors.traffic import TRAFFIC

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.layout.groups import CheckpointGroup
    from syncheck.messages import Message
    from syncheck.records import Alias, Comparison, Group, Replica, TensorDiff, ValueDiff


def diff(a: Source, b: Source, *, options: DiffOptions | None = None, histograms: bool = False) -> Report:
    """Compare two models in any layout, without a baseline. Parameters and errors as for `api.diff`."""
    options = options or DiffOptions()
    if options.write_map is not None:
        outputs.check(options.write_map, outputs.MAP, inputs=list_inputs((a, b), options))
    label_a, label_b = LABELS
    sides = open_side(label_a, a), open_side(label_b, b)
    for side in sides:
        TRAFFIC.expect(list_snapshots(side.group))
    copies = [compare_copies(side, options) for side in sides]
    return compare_sides(
        [place_unmarked_shards(side, group) for side, group in zip(sides, copies, strict=True)],
        copies,
        options,
        histograms=histograms,
    )


def compare_copies(side: Side, options: DiffOptions) -> Group | None:
    """Compare the copies of tensors and values in the files of a side; None for a side in one file.

    Raises UsageError for pipeline stages that number their layers from 0, and for several adapters.
    """
    _require_one_adapter(side, options)
    # The adapter of a model has other tensors, and its own run.
    group = _select_ranks(side, adapters=False)
    if len(group.ranks) < 2:
        return None
    selection = build_selection(options)
    copies, _ = compare_unmarked_shards(compare_group(group, selection), group, selection)
    copies = replace(copies, name=side.title, run=side.title)
    require_own_numbers(side.title, list_snapshots(group), copies)
    return judge_group(accept_partitioned_files(copies), (), _list_allowed(options))


def place_unmarked_shards(side: Side, copies: Group | None) -> Side:
    """Return a side whose files look like shards with their positions. copies: the comparison of its files."""
    if copies is None or copies.evidence.doubt is None:
        return side
    meshes = {replica.rank: replica.mesh for replica in copies.replicas}
    ranks = []
    for rank, snapshot in side.group.ranks:
        ranks.append((rank, replace(snapshot, mesh=meshes.get(rank, snapshot.mesh))))
    return replace(side, group=replace(side.group, ranks=tuple(ranks)), model=join(dict(ranks), side.model.path))


def _select_ranks(side: Side, *, adapters: bool) -> CheckpointGroup:
    """Return the files of a side that hold adapters, or all other files."""
    ranks = tuple((rank, snapshot) for rank, snapshot in side.group.ranks if is_adapter(snapshot) == adapters)
    return replace(side.group, ranks=ranks)


def _require_one_adapter(side: Side, options: DiffOptions) -> None:
    """Raise UsageError if a side has two adapters: other values under one name, or other settings."""
    group = _select_ranks(side, adapters=True)
    if len(group.ranks) < 2:
        return
    copies = compare_group(group, build_selection(options))
    differing = [tensor.name for tensor in copies.tensors if tensor.out_of_sync or tensor.unknown]
    # Their settings are values.
    differing += [value.name for value in copies.values if value.counts or value.unknown]
    if differing:
        first, second, *_ = list_snapshots(group)
        raise UsageError(
            f"{side.title}: the adapters of {first.path} and {second.path} are two: {differing[0]} "
            "differs. Merge an adapter first, and compare the result with the other adapter"
        )


def compare_sides(
    sides: Sequence[Side], copies: Sequence[Group | None], options: DiffOptions, *, histograms: bool = False
) -> Report:
    """Compare two models whose copies have been compared.

    copies: the results by side; None for a side in one file. histograms: see `diff`. Raises as `diff` does.
    """
    notes = [*note_common_files(sides), *_note_copies(sides, copies)]
    stored_sides = sides
    sides, tied_notes = _complete_models(sides)
    with Files(jobs=options.jobs) as files:
        sides, omitted_notes = omit_frequencies(sides, files)
        mapped = map_sides(_merge_adapters(sides, files), options, files)
        sides = _finish_adapters(mapped.sides, files)
        constant_notes = note_interchangeable(sides, options, files)
        files.close_all()  # the comparison of the pair opens as many files
        comparison = compare_models([side.model for side in sides], options, histograms=histograms)
        comparison = explain_single_shard(explain_unpaired(comparison, sides), sides)
        comparison = explain_stacks(comparison, sides, files)
        comparison = describe_sides(comparison, sides, subset=options.subset)
        comparison = accept_conversions(
            comparison,
            models=[_adapt(side) for side in sides],
            dtype=options.cast,
            files=files,
        )
        comparison = compare_converted(
            comparison,
            sides,
            options,
            files,
            histograms=histograms,
        )
        comparison = add_relations_of_sides(comparison, sides, options, files)
        copies = add_other_model(sides, copies, files)
        comparison = add_settings(
            comparison,
            sides,
            options.exclude,
            files,
            assumes_tie=any(note.code is Note.ASSUMED_TIE for note in mapped.notes),
        )
    if histograms:
        evidence = replace(comparison.evidence, stored=describe_stored(comparison, sides))
        comparison = replace(comparison, evidence=evidence)
    comparison = _add_doubt(comparison, mapped, options)
    notes += [*tied_notes, *omitted_notes, *_note_map(mapped, options), *constant_notes, *comparison.notes]
    comparison = replace(comparison, notes=tuple(notes), replicas=_count_stored(comparison, stored_sides))
    return _build_report(comparison, sides, copies, options)


def _count_stored(comparison: Comparison, sides: Sequence[Side]) -> tuple[Replica, ...]:
    """Return the replicas with the numbers of tensors in their files, which a map divides, joins and adds."""
    replicas = []
    for replica, side in zip(comparison.replicas, sides, strict=True):
        replicas.append(replace(replica, tensors=len(side.model.tensors)))
    return tuple(replicas)


def _note_copies(sides: Sequence[Side], copies: Sequence[Group | None]) -> list[Message]:
    """Return how many tensors of each side in several files were compared with their copies."""
    notes: list[Message] = []
    for side, group in zip(sides, copies, strict=True):
        notes += note_contradicting_steps(list_snapshots(side.group))
        files = len(side.group.ranks)
        # A single file has no copies.
        if files < 2:
            continue
        compared = 0 if group is None else group.counts.compared
        sentence = Note.COPIES if compared else Note.NO_COPIES
        note = sentence(
            side=side.label,
            files=files,
            unit="ranks" if side.model.format == "memory" else "files",
            tensors=compared,
        )
        notes.append(note)
        doubt = None if group is None else group.evidence.doubt
        if doubt is not None:
            notes.append(Note.UNMARKED_SHARDS(side=side.label, shards=doubt.parameters["shards"]))
    return notes


def _complete_models(sides: Sequence[Side]) -> tuple[tuple[Side, ...], list[Message]]:
    """Return the sides with all names of tied weights and without second copies of weights, and notes."""
    models = drop_unmatched_copies([side.model for side in sides])
    check_layouts(models, LABELS)
    snapshots = []
    for side in sides:
        snapshots += list_snapshots(side.group)
    ties = list_ties(snapshots)
    completed_sides, notes = [], []
    completed_models = add_tied_names(models, ties.items(), [side.are_separate for side in sides])
    for side, (model, names) in zip(sides, completed_models, strict=True):
        completed_sides.append(replace(side, model=model))
        if names:
            notes.append(Note.TIED(side=side.label, names=names))
    return tuple(completed_sides), notes


def _merge_adapters(sides: Sequence[Side], files: Files) -> tuple[Side, ...]:
    """Return two sides with the values of quantized weights, and with merged adapters."""
    side_a, side_b = sides
    stored_a, stored_b = normalize_keys(side_a.model.tensors), normalize_keys(side_b.model.tensors)
    models = [dequantize(stored_a, stored_b, files), dequantize(stored_b, stored_a, files)]
    memory = [side.model.format == "memory" for side in sides]
    merged = merge_adapters(models, memory, files)
    merged_sides = []
    for side, model, stored in zip(sides, merged, (stored_a, stored_b), strict=True):
        # Without a change, the names keep their prefixes, which are reported.
        if model.tensors is not stored:
            # The settings of a merged adapter have no counterpart in the other model.
            values = {name: value for name, value in side.model.values.items() if not is_adapter_setting(name)}
            snapshot = replace(side.model, tensors=model.tensors, values=values)
            side = replace(side, model=snapshot, adapter=model.adapter)
        merged_sides.append(side)
    return tuple(merged_sides)


def _finish_adapters(sides: Sequence[Side], files: Files) -> tuple[Side, ...]:
    """Merge the parts whose modules have mapped names, and add all other parts to both sides, refused."""
    models = finish_adapters([_adapt(side) for side in sides], files)
    if not any(model.adapter for model in models):
        return tuple(sides)
    finished_sides = []
    for side, model in zip(sides, models, strict=True):
        snapshot = replace(side.model, tensors=model.tensors)
        finished_sides.append(replace(side, model=snapshot))
    return tuple(finished_sides)


def _adapt(side: Side) -> AdaptedModel:
    """Return the model of a side with its adapter, and the stored names of its tensors."""
    stored_names = {name: tensor.name for name, tensor in side.stored.items()}
    return AdaptedModel(normalize_keys(side.model.tensors), side.adapter, stored_names)


def _add_doubt(comparison: Comparison, mapped: MappedSides, options: DiffOptions) -> Comparison:
    """Note on which guesses the comparison rests, unless the options accept them, and the accepted conversion."""
    guessed = () if options.accept_inferred else mapped.guessed
    is_proposal = mapped.inferred and not _is_accepted(mapped, options)
    evidence = replace(
        comparison.evidence,
        inferred=is_proposal,
        contradicted=mapped.contradicted,
        doubt=mapped.doubt,
        written_map=options.write_map or "",
        guessed=guessed,
        fitted=mapped.fitted,
        cast=options.cast or "",
    )
    return replace(comparison, evidence=evidence)


def _note_map(mapped: MappedSides, options: DiffOptions) -> list[Message]:
    """Return notes about the map, and about its guesses."""
    is_accepted = mapped.inferred and _is_accepted(mapped, options)
    return [
        *mapped.notes,
        *note_if(is_accepted, Note.ACCEPTED_MAP()),
        *note_if(mapped.guessed, Note.GUESSED_HEADS(names=mapped.guessed)),
    ]


def _is_accepted(mapped: MappedSides, options: DiffOptions) -> bool:
    """Whether the options accept an inferred map. A map that names contradict needs a map that the user passes."""
    return options.accept_inferred and not mapped.contradicted


def _build_report(
    comparison: Comparison, sides: Sequence[Side], copies: Sequence[Group | None], options: DiffOptions
) -> Report:
    """Diagnose the differences of two models, and return a report with the groups of copies that differ."""
    groups = [group for group in copies if group is not None and _is_doubtful(group)]
    groups.append(_judge_models(comparison, copies, options))
    aliases: list[Alias] = []
    skipped_paths: list[str] = []
    for side in sides:
        aliases += side.aliases
        skipped_paths += side.skipped_paths
    return Report(
        verdict=overall(groups, ()),
        groups=tuple(groups),
        skipped=sum(side.skipped for side in sides),
        skipped_paths=tuple(skipped_paths),
        aliases=tuple(aliases),
        command="diff",
    )


def _judge_models(comparison: Comparison, copies: Sequence[Group | None], options: DiffOptions) -> Group:
    """Return the diagnosis of the difference of two models. copies: the results by side."""
    notes = [Note.FIRST_COPIES(side=label) for label in find_differing_copies(copies)]
    comparison = replace(comparison, notes=(*comparison.notes, *notes))
    group = judge_difference(comparison, _list_allowed(options))
    # Models without a difference are not in sync: copies that were not compared with the other model differ.
    return replace(group, verdict="undecided") if notes and group.verdict == "in_sync" else group


def _is_doubtful(copies: Group) -> bool:
    """Whether copies differ or could not be compared. Shards of a side are no reason for doubt."""
    differences: tuple[TensorDiff | ValueDiff, ...] = (*copies.tensors, *copies.values)
    return copies.verdict == "out_of_sync" or any(diff.unknown for diff in differences)


def _list_allowed(options: DiffOptions) -> frozenset[str]:
    """Return the codes of allowed findings."""
    return frozenset(code.upper() for code in options.allow)
