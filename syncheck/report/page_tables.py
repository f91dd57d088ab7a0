"""The notes and tables of a run on a report page, in HTML: rules of a map, kinds, tensors, histograms and files."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from syncheck.messages import Note
from syncheck.records import Counts
from syncheck.report import elements, tables, words
from syncheck.report.elements import paragraphs
from syncheck.report.page_data import bin_counts, bin_titles, bins_in_use, find_histograms, make_curves

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncheck.records import Group
    from syncheck.sentences import Message

# Rows of a table without JavaScript.
MOST_ROWS = 200
# Tensors of two models with the files that hold their largest difference.
_MOST_PLACES = 10
# Rules of a map of names before the fold.
_MOST_RULES = 3
_RULES = (Note.RULE, Note.COPY_RULE, Note.MORE_RULES)
_COUNTS = ("identical", "equal", "close", "different", "not_compared")


def make_notes(group: Group) -> list[str]:
    """Return the notes of a group. Only the first rules of a map are visible."""
    parts = []
    for is_rule, notes in groupby(words.list_details(group), key=_is_rule):
        if is_rule:
            parts += _rules(list(notes))
        else:
            parts += paragraphs(map(str, notes), "note")

    return parts


def _is_rule(note: Message) -> bool:
    return note.code in _RULES


def _rules(notes: Sequence[Message]) -> list[str]:
    """Return the rules of a map of names. The first rules are visible; a fold has the rest, and counts them."""
    # A note counts the rules beyond the limit of the list.
    rule_count = 0
    for note in notes[_MOST_RULES:]:
        rule_count += note.parameters.get("count", 1)

    lines = paragraphs(map(str, notes), "name")
    visible_lines, folded_lines = lines[:_MOST_RULES], lines[_MOST_RULES:]
    if not folded_lines:
        return visible_lines

    title = f"{words.count_text(rule_count, 'more rule')} of the map"
    return [*visible_lines, elements.fold(title, "\n".join(folded_lines))]


def make_kinds(group: Group) -> list[str]:
    """Return the counts of each kind of tensor; empty for a group without tensors."""
    if not group.kinds:
        return []

    statuses = list_statuses([group])
    rows = []
    for kind, counts in group.kinds.items():
        numbers = [str(getattr(counts, status)) for status in statuses]
        rows.append((kind, str(counts.tensors), *numbers))

    titles = ["tensors", *(status.replace("_", " ") for status in statuses)]
    table = elements.table(("kind", *titles), rows, numbers=titles)
    lines = ["<h3>Tensors by kind</h3>", f'<div class="kinds">{table}</div>']
    if group.left_out:
        lines += paragraphs([f"excluded by options: {group.left_out} tensors"], "note")

    return lines


def list_statuses(groups: Iterable[Group]) -> list[str]:
    """Return the statuses that any tensor of the groups has."""
    totals = sum((group.counts for group in groups), Counts())
    return [name for name in _COUNTS if getattr(totals, name)]


def make_files(group: Group) -> list[str]:
    """Return the table of the replicas, or the event file or case of a running job with all of them."""
    paths = {replica.path for replica in group.replicas}
    if len(paths) == 1 and group.replicas[0].format == "memory":
        return ["<h3>Running job</h3>", *paragraphs(sorted(paths), "name")]

    return ["<h3>Files</h3>", _file_table(group)]


def _file_table(group: Group) -> str:
    columns = ("file", "model" if group.is_pair else "rank", "format", "tensors", "bytes")
    rows = []
    for replica in group.replicas:
        row = (
            replica.path,
            replica.label or str(replica.rank),
            replica.format,
            str(replica.tensors),
            words.bytes_text(replica.bytes),
        )
        rows.append(row)

    return elements.table(columns, rows, numbers=("rank", "tensors", "bytes"))


def make_history(group: Group) -> list[str]:
    """Return the largest difference of each finding at each step; empty without a history."""
    curves = make_curves(group)
    if not curves:
        return []

    rows = []
    # All curves have a point for each compared step.
    for points in zip(*curves.values(), strict=False):
        step, _ = points[0]
        cells = [tables.difference_text(difference) for _, difference in points]
        rows.append((str(step), *cells))

    table = elements.table(("step", *curves), rows, ("step", *curves))
    return [elements.fold("Max abs difference of each finding at each step", table)]


def make_histograms(group: Group) -> list[str]:
    """Return the data of the histograms, worst tensor first."""
    diffs = tables.tensors_to_list(group)
    histograms = find_histograms(diffs)
    if not histograms:
        return []

    bins = bins_in_use(histograms.values())
    rows = []
    note = ""
    for diff in diffs:
        histogram = histograms.get(diff.name)
        if histogram is None:
            continue
        differing, max_abs, *_ = tables.difference_cells(diff)
        counts = [str(elements) for elements in bin_counts(histogram, bins)]
        rows.append((diff.name, differing, max_abs, *counts))
        if histogram.elements < diff.numel:
            note = '<p class="note">Large tensors are sampled in evenly spaced parts.</p>'

    columns = ("tensor", "differing", "max abs", *bin_titles(bins))
    table = elements.table(columns, rows, columns[2:])
    return [elements.fold("Number of elements by absolute difference", f"{note}{table}")]


def make_tensors(group: Group) -> list[str]:
    """Return the table of the tensors of a group, worst first; empty if there are none."""
    diffs = tables.tensors_to_list(group)
    if not diffs:
        return []

    rows = [tables.cells(diff, group) for diff in diffs[:MOST_ROWS]]
    parts = [
        "<h3>Tensors that are not identical</h3>",
        '<div class="tensors">',
        elements.table(tables.columns(group), rows, numbers=tables.NUMBERS),
    ]
    if len(diffs) > MOST_ROWS:
        more = len(diffs) - MOST_ROWS
        parts.append(f'<p class="note unscripted">... and {more} more; enable JavaScript to see them.</p>')

    parts += paragraphs(tables.place_lines(diffs[:_MOST_PLACES], group), "note")
    return [*parts, "</div>"]
