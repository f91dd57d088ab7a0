"""Sentences and table cells shared by several report formats."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from syncheck.messages import Hint, Message, Note, Undecided
from syncheck.records import Reason, sets_within
from syncheck.text import brief, names_text, one_line, shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncheck.records import Counts, Finding, Group, History, Replica, Report, TensorDiff, ValueDiff

VERDICTS = {
    "in_sync": "IN SYNC",
    "out_of_sync": "OUT OF SYNC",
    "undecided": "COULD NOT TELL",
    "alone": "ALONE",
}

# The documentation site. tools/set_address.py replaces this placeholder everywhere when the project is released; its
# host is reserved and resolves nowhere (RFC 2606).
SITE = "https://syncheck.invalid/docs/latest"
# Columns of `difference_cells`, besides the number of differing elements.
NUMBERS = ("max abs", "max rel", "max ulp")
_MOST_VALUES = 5
_MOST_FIXED = 3
_MOST_PATHS = 6
_MOST_STEPS = 3
_MOST_NAME = 120  # characters
# The findings that affect neither the training nor the file of rank 0.
_HARMLESS = ("SYN201",)
# The findings that name no cause.
UNEXPLAINED = ("SYN299", "SYN399")


def counts_line(report: Report) -> str:
    """Return the last line of every report: the number of tensors by result, including those not compared."""
    excluded = sum(group.left_out for group in report.groups)
    return counts_text(report.counts) + (f" ({excluded} excluded by options)" if excluded else "")


def counts_text(counts: Counts) -> str:
    """Return the number of tensors by result."""
    equal = f", {counts.equal} equal" if counts.equal else ""
    return (
        f"{counts.tensors} tensors: {counts.identical} identical{equal}, {counts.close} close, "
        f"{counts.different} different, {counts.not_compared} not compared"
    )


def first_lines(report: Report) -> list[str]:
    """Return the first lines of a report: what a verdict does not say."""
    return [*unaffected_lines(report), *not_finite_lines(report)]


def unaffected_lines(report: Report) -> list[str]:
    """Return a line if the replicas differ, but neither the training nor the file of rank 0 is affected."""
    failing = [finding for group in report.groups for finding in group.findings if finding.fails]
    if failing and all(finding.severity == "warning" and finding.code in _HARMLESS for finding in failing):
        return [str(Note.RANK_0_UNAFFECTED())]
    return []


def not_finite_lines(report: Report) -> list[str]:
    """Return a line for the last step of each run that is not finite on all ranks."""
    by_run: dict[str, str] = {}
    for group in report.groups:
        fact = describe_not_finite(group)
        if fact is not None:
            by_run[group.run] = str(fact)
    lines = list(by_run.values())
    if len(by_run) > 1:
        lines = [f"{_shorten_name(run)}: {fact}" for run, fact in by_run.items()]
    return lines if len(lines) <= _MOST_PATHS else [*lines[:_MOST_PATHS], f"{len(lines) - _MOST_PATHS} more runs"]


def describe_not_finite(group: Group) -> Message | None:
    """Return which tensors are not finite on all replicas, and since when; None if there are none."""
    found = group.not_finite
    if found is None:
        return None
    fact = Note.NOT_FINITE(count=found.count, names=tuple(map(_shorten_name, found.names)))
    first = tuple(map(_shorten_name, found.first))
    if found.since is None:
        return fact
    if found.finite is None:
        return Note.NOT_FINITE_FROM_START(fact=fact, since=found.since, first=first)
    return Note.NOT_FINITE_SINCE(fact=fact, since=found.since, finite=found.finite, first=first)


def verdict_line(report: Report) -> str:
    """Return the verdict; if it is undecided, with the reason."""
    method = " by stored checksum" if report.quick and report.verdict != "undecided" else ""
    text = VERDICTS[report.verdict] + method
    if report.verdict == "in_sync":
        text += _ignored_findings(report)
        text += ", but the model is not finite" * any(group.not_finite is not None for group in report.groups)
    if report.verdict == "undecided":
        text += f": {undecided_reason(report)}"
    elif count := len(report.unreadable):
        text += f", and {count} file{'s' * (count != 1)} could not be read"
    return text


def _ignored_findings(report: Report) -> str:
    findings = [finding for group in report.groups for finding in group.findings]
    ignored = (
        ("allowed findings", sorted({finding.code for finding in findings if finding.allowed})),
        ("baseline findings", sorted({finding.code for finding in findings if finding.accepted})),
    )
    parts = [f"{label} ({', '.join(codes)})" for label, codes in ignored if codes]
    return f", ignoring {' and '.join(parts)}" if parts else ""


def undecided_reason(report: Report) -> Message:
    """Return why a report has no verdict."""
    if report.unreadable:
        return Undecided.UNREADABLE(count=len(report.unreadable))
    if len(report.groups) == 1 and report.groups[0].verdict == "alone":
        return Undecided.ALL_LINKS() if report.aliases else Undecided.ONE_FILE()
    alone = [group for group in report.groups if group.verdict == "alone"]
    if alone and len(alone) == len(report.groups):
        return Undecided.NO_REPLICAS()
    if alone:
        paths = names_text([_shorten_name(group.replicas[0].path) for group in alone])
        return Undecided.SOME_ALONE(count=len(alone), paths=paths)
    if claimed := [group.evidence.claimed_twice for group in report.groups if group.evidence.claimed_twice]:
        return Undecided.RANKS_TWICE(ranks=claimed[0])
    if uncompared := [diff for group in report.groups if group.labels for diff in group.tensors if diff.uncompared]:
        first = uncompared[0]
        return Undecided.NOT_COMPARED(count=len(uncompared), name=f"{first.name:.80}", detail=first.detail)
    if any(group.evidence.inferred for group in report.groups):
        return Undecided.INFERRED_MAP()
    if guessed := [group.evidence.guessed for group in report.groups if group.evidence.guessed]:
        return Undecided.GUESSED_HEADS(names=guessed[0])
    unknown = [diff for group in report.groups for diff in group.tensors if diff.unknown]
    if ambiguous := [diff for diff in unknown if diff.reason is Reason.AMBIGUOUS]:
        name, detail = f"{ambiguous[0].name:.80}", ambiguous[0].detail
        if len(ambiguous) == 1:
            return Undecided.AMBIGUOUS(name=name, detail=detail)
        return Undecided.MORE_AMBIGUOUS(name=name, more=len(ambiguous) - 1, detail=detail)
    if refused := [diff for diff in unknown if diff.reason is Reason.REFUSED]:
        return Undecided.NOT_COMPARED(count=len(refused), name=f"{refused[0].name:.80}", detail=refused[0].detail)
    if unknown:
        return Undecided.NO_CHECKSUMS(unknown=len(unknown), tensors=report.counts.tensors)
    if values := [value for group in report.groups for value in group.values if value.unknown]:
        return Undecided.VALUES(count=len(values), name=f"{values[0].name:.80}")
    if absent := [group.uncompared for group in report.groups if group.uncompared]:
        return Undecided.RANKS_NOT_COMPARED(ranks=absent[0])
    if any(group.shards for group in report.groups):
        return Undecided.ONLY_SHARDS()
    excluded = sum(group.left_out for group in report.groups)
    return Undecided.ALL_EXCLUDED(count=excluded) if excluded else Undecided.NOTHING()


def omission_lines(report: Report, format_name: Callable[[str], str] | None = None) -> list[str]:
    """Return one line per reason why some of the given paths were not compared.

    format_name: formats a path; by default, shortened on one line.
    """
    format_name = format_name or _shorten_name
    lines = []
    alone = [group for group in report.groups if group.verdict == "alone"]
    if alone and len(report.groups) > 1:
        subject = "checkpoints have no replica and were" if len(alone) > 1 else "checkpoint has no replica and was"
        paths = [format_name(group.replicas[0].path) for group in alone[: _MOST_PATHS + 1]]
        lines.append(f"{len(alone)} {subject} not compared: {names_text(paths, _MOST_PATHS, len(alone))}")
    if report.aliases:
        count = len(report.aliases)
        subject = (
            "paths are links to other given files and were"
            if count > 1
            else "path is a link to another given file and was"
        )
        links = [f"{format_name(alias.path)} -> {format_name(alias.of)}" for alias in report.aliases[: _MOST_PATHS + 1]]
        lines.append(f"{count} {subject} not compared: {names_text(links, _MOST_PATHS, count)}")
    if report.skipped:
        subject = "files are not checkpoints and were" if report.skipped > 1 else "file is not a checkpoint and was"
        lines.append(f"{report.skipped} {subject} skipped")
    return lines


def _shorten_name(name: str) -> str:
    return shorten(name, _MOST_NAME)


def rank_ranges(ranks: Sequence[int]) -> str:
    """Return ranks as ranges for a table cell: (0, 1, 2, 5) gives '0-2,5'."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], rank]
        else:
            ranges.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def ranks_label(ranks: Sequence[int]) -> str:
    """Return ranks for a sentence: 'rank 1', 'ranks 0-1'."""
    return f"rank{'s' * (len(ranks) > 1)} {rank_ranges(ranks)}"


def replica_title(replica: Replica) -> str:
    """Return the rank, or the label of one of two models."""
    return replica.label or f"rank {replica.rank}"


def replica_text(replica: Replica) -> str:
    """Return a replica's rank or label, path, format and size."""
    unit = "ranks" if replica.format == "memory" else "files"
    files = f"{replica.files} {unit}, " if replica.files > 1 else ""
    count = f"{replica.tensors} tensor{'s' * (replica.tensors != 1)}"
    return f"{replica_title(replica)}: {replica.path} ({replica.format}, {files}{count}, {bytes_text(replica.bytes)})"


def place_lines(diffs: Sequence[TensorDiff], group: Group) -> list[str]:
    """Return the files with the largest difference of each tensor, if two models differ and one has several files."""
    mapped = any(place.tensor for diff in diffs for place in diff.places.values())
    if not group.labels or (all(replica.files < 2 for replica in group.replicas) and not mapped):
        return []
    lines = []
    for diff in diffs:
        places = [
            f"{group.labels[side]} {place.path}"
            + ("" if place.rank is None or place.path.endswith(f" on rank {place.rank}") else f" (rank {place.rank})")
            + (f", {place.tensor}{list(place.index) if place.index else ''}" if place.tensor else "")
            for side, place in diff.places.items()
        ]
        if places:
            lines.append(f"largest difference of {diff.name}: {', '.join(places)}")
    return lines


def columns(group: Group) -> tuple[str, ...]:
    """Return the headings of the table of tensors, for `cells`."""
    return ("tensor", "kind", "worst at" if group.labels else "ranks", "differing", *NUMBERS)


def cells(diff: TensorDiff, group: Group) -> tuple[str, ...]:
    """Return the row of a tensor in the table: for two models with the index of the worst element, else with ranks."""
    index = "" if diff.index is None else str(list(diff.index))
    return diff.name, diff.kind, index if group.labels else clusters_text(diff), *difference_cells(diff, group.labels)


def clusters_text(diff: TensorDiff) -> str:
    """Return the sets of ranks with equal values: '0,2,3 | 1', or '0 | 2; 1 | 3' for several replica groups."""
    sets_by_group = sets_within(diff)
    if len(sets_by_group) < 2:
        return _sets_text(diff.clusters)
    texts = [_sets_text(sets) for sets in sets_by_group[:4]]
    return "; ".join(texts) + (f"; {len(sets_by_group) - 4} more" if len(sets_by_group) > 4 else "")


def _sets_text(sets: Sequence[tuple[int, ...]]) -> str:
    shown = [rank_ranges(ranks) for ranks in sets[:4]]
    more = len(sets) - len(shown)
    return " | ".join(shown) + (f" | {more} more" if more > 0 else "")


def difference_cells(diff: TensorDiff, labels: Sequence[str] = ()) -> tuple[str, str, str, str]:
    """Return differing elements, max abs, max rel and max ULP of a tensor, or why it was not compared.

    labels: of two models.
    """
    if diff.status == "not_compared":
        return one_line(f"{diff.reason}: {diff.detail}"), "", "", ""
    if diff.mismatched is None:
        # Tensors of different dtypes that are close after a conversion have no reason.
        why = f"by {diff.reason}: {diff.detail}" if diff.reason else f"close: {diff.tolerance}"
        return one_line(why), "-", "-", "-"
    differing = f"{diff.mismatched} of {diff.numel}"
    ranks_not_finite = sum(1 for count in diff.nonfinite.values() if count)
    if 0 < ranks_not_finite < len(diff.nonfinite):
        differing += f" (not finite {'in one model' if labels else 'on some ranks'})"
    if diff.status == "close":
        differing += one_line(f", close: {diff.tolerance}")
    absolute = "-" if diff.max_abs is None else f"{diff.max_abs:.3g}"
    relative = "-" if diff.max_rel is None else f"{diff.max_rel:.2%}"
    return differing, absolute, relative, "-" if diff.max_ulp is None else str(diff.max_ulp)


def drift_rows(report: Report) -> list[tuple[str, str, str, str]]:
    """Return run, step, largest drift and its tensor; steps with equal values share one row."""
    rows = []
    for (run, drift, tensor), points in groupby(report.drift, lambda point: (point.run, point.max_abs, point.tensor)):
        steps = [str(point.step) for point in points if point.step is not None]
        step = f"{steps[0]}-{steps[-1]}" if len(steps) > 1 else steps[0] if steps else "-"
        rows.append((run, step, f"{drift:.4g}", tensor or "-"))
    return rows


def bytes_text(size: int) -> str:
    """Return a size in bytes with a decimal unit: 46833547 gives '46.8 MB'."""
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def kind_cell(counts: Counts) -> str:
    """Return the result of one kind of tensor: '20 agree', '9/20 differ'."""
    parts = []
    if counts.different:
        parts.append(f"{counts.different}/{counts.tensors} differ")
    if counts.not_compared:
        parts.append(f"{counts.not_compared} not compared")
    if counts.close:
        parts.append(f"{counts.close} close")
    return ", ".join(parts) or (f"{counts.tensors} agree" if counts.tensors else "-")


def values_text(values: Sequence[ValueDiff], labels: Sequence[str] = ()) -> str:
    """Return the Python values that differ: 'lr: 0.1 on rank 0, 0.2 on rank 1'. Skips values missing on some ranks.

    labels: of two models, instead of ranks.
    """
    # A note names the attributes that differ.
    shown = [value for value in values if None not in value.by_rank.values() and value.kind != "attribute"]
    texts = []
    for value in shown[:_MOST_VALUES]:
        owners = (f"in {labels[rank]}" if labels else f"on rank {rank}" for rank in value.by_rank)
        parts = [f"{brief(of, 40)} {owner}" for owner, of in zip(owners, value.by_rank.values(), strict=True)]
        texts.append(f"{value.name}: {', '.join(parts[:4])}")
    if len(shown) > _MOST_VALUES:
        texts.append(f"and {len(shown) - _MOST_VALUES} more")
    return "; ".join(texts)


def sort_worst_first(diffs: Sequence[TensorDiff]) -> list[TensorDiff]:
    """Sort tensors by importance.

    Tensors out of sync come first, then NaN or infinity on some ranks only, then larger differences. Running
    statistics, which always drift a little under DDP, follow the parameters. Counters come last, because they count
    steps and their differences are on another scale.
    """

    def key(d: TensorDiff) -> tuple[object, ...]:
        nonfinite = len(set(d.nonfinite.values())) > 1
        late = {"bn_mean": 1, "bn_var": 1, "bn_count": 2, "optimizer_step": 2}.get(d.kind, 0)
        return not d.out_of_sync, d.status != "not_compared", not nonfinite, late, -(d.max_abs or 0)

    return sorted(diffs, key=key)


def tensors_to_list(group: Group, *, shards: bool = True) -> list[TensorDiff]:
    """Return the tensors to list in a report, worst first. shards: include tensors stored only as shards.

    RNG states, which differ by design, and tensors of A that B may lack are counted but not listed.
    """
    unlisted = ("rng", "subset") if shards else ("rng", "subset", "sharded")
    return sort_worst_first([diff for diff in group.tensors if diff.reason not in unlisted])


def note_lines(group: Group) -> list[str]:
    """Return how the files were grouped, and the notes of the group."""
    grouping = ["; ".join(map(str, group.grouping))] if group.grouping else []
    return [*grouping, *map(str, group.notes)]


def finding_title(finding: Finding) -> str:
    """Return the title of a finding: 'SYN201 bn-local-stats (warning, likely) on ranks 0-1'."""
    ignored = ", allowed" if finding.allowed else ", accepted by the baseline" if finding.accepted else ""
    if not finding.counts:
        ignored = ", does not fail"
    ranks = f" on {ranks_label(finding.ranks)}" if finding.ranks else ""
    return f"{finding.code} {finding.slug} ({finding.severity}, {finding.certainty}{ignored}){ranks}"


def fixed_lines(groups: Sequence[Group]) -> list[str]:
    """Return a line for each resolved run and code of the baseline."""
    lines = []
    for group in groups:
        for fixed in group.fixed:
            names = names_text([*map(_shorten_name, fixed.names)], _MOST_FIXED)
            lines.append(
                f"fixed: {_shorten_name(group.label or group.run)} no longer has {_shorten_name(fixed.code)} on "
                f"{names}; {Hint.UPDATE_BASELINE()}"
            )
    return lines


def group_title(group: Group) -> str:
    """Return the name of a group with its number of replicas, or of two models."""
    if group.labels:
        return one_line(group.name)
    count = len(group.replicas)
    return f"{one_line(group.name)}, {count} replica{'s' if count != 1 else ''}"


def more_text(finding: Finding) -> str:
    """Return the page of a finding on the documentation site."""
    return f"{SITE}/reference/findings/{finding.code.lower()}/"


def step_text(group: Group) -> str:
    """Return 'step 300', or the name of the group without a step."""
    return one_line(group.name) if group.step is None else f"step {group.step}"


def cause_text(finding: Finding) -> str:
    """Return the cause of a finding, with all causes that fit the evidence as well."""
    if finding.certainty != "consistent":
        return str(finding.cause)
    listed = _name_findings(finding.alternatives)
    if finding.code in UNEXPLAINED:
        return f"{finding.cause} Not excluded: {listed}." if listed else str(finding.cause)
    others = f" Also possible: {listed}." if listed else " A cause that no finding names is possible too."
    return f"Possible cause: {finding.cause}{others}"


def _name_findings(codes: Sequence[str]) -> str:
    """Return codes with their names in words, as in 'SYN211 gradients-not-reduced'."""
    if not codes:
        return ""
    # All rules are loaded only for a finding with alternatives.
    from syncheck.diagnose.rules import RULES

    names = {rule.code: rule.slug for rule in RULES}
    # A saved report may have codes of another version.
    return ", ".join(f"{code} {names[code]}" if code in names else code for code in codes)


def finding_rows(finding: Finding) -> list[tuple[str, str]]:
    """Return labels and texts: what happened, when if there is a history, why, and the fix."""
    when = [] if finding.history is None else [("when", describe_history(finding))]
    return [("what", finding.evidence), *when, ("why", cause_text(finding)), ("fix", str(finding.fix))]


def describe_history(finding: Finding) -> str:
    """Return first step, first tensors, steps in sync again and differences; empty without a history."""
    history = finding.history
    if history is None:
        return ""
    return "; ".join(part for part in (_first_difference(history), _steps_in_sync(history), _range(history)) if part)


def summarize_history(finding: Finding) -> str:
    """Return the first step and the trend; empty without a history."""
    history = finding.history
    if history is None:
        return ""
    return _since(history) + (f", {history.trend}" if history.trend else "")


def difference_text(difference: float | None) -> str:
    """Return a difference with three digits, or a dash if it is unknown."""
    return "-" if difference is None else f"{difference:.3g}"


def _since(history: History) -> str:
    if history.agreed is None:
        return f"out of sync since the first step compared ({history.since})"
    if any(point.step == history.agreed and point.others_differ for point in history.points):
        # Other tensors differed before, so the run was not in sync.
        return f"equal until step {history.agreed}, different from step {history.since}"
    return f"in sync until step {history.agreed}, out of sync from step {history.since}"


def _first_difference(history: History) -> str:
    count = len(history.tensors)
    if not count:
        return _since(history)
    first = one_line(history.tensors[0])
    tensors = f"first in {first}" if count == 1 else f"first in {count} tensors including {first}"
    return f"{_since(history)}, {tensors} on {ranks_label(history.ranks)}"


def _steps_in_sync(history: History) -> str:
    """Return later steps in sync: an intermittent difference has other causes than a permanent one."""
    later = [point for point in history.points if point.step > history.since and not point.differing]
    in_sync = [str(point.step) for point in later if not point.others_differ]
    equal = [str(point.step) for point in later if point.others_differ]
    parts = []
    for sentence, steps in (("in sync again", in_sync), ("equal again, while other tensors differ,", equal)):
        if steps:
            parts.append(f"{sentence} at step{'s' * (len(steps) > 1)} {names_text(steps, _MOST_STEPS)}")
    return "; ".join(parts)


def _range(history: History) -> str:
    """Return the largest difference at the first step out of sync and at the last step."""
    points = [point for point in history.points if point.step >= history.since]
    first, last = points[0], points[-1]
    if first.max_abs is None and last.max_abs is None:
        return ""
    ends = ["unknown" if point.max_abs is None else difference_text(point.max_abs) for point in (first, last)]
    difference = ends[0] if len(points) == 1 else " -> ".join(ends)
    return f"max abs difference {difference}" + (f", {history.trend}" if history.trend else "")
