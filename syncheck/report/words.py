"""Sentences and cells that more than one format prints."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from syncheck.errors import brief, one_line
from syncheck.evidence.suspects import sets_within
from syncheck.messages import Hint, Message, Undecided, names_text
from syncheck.records import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncheck.records import Counts, Finding, Group, Report, TensorDiff, ValueDiff

VERDICTS = {
    "in_sync": "IN SYNC",
    "out_of_sync": "OUT OF SYNC",
    "undecided": "COULD NOT TELL",
    "alone": "ALONE",
}

_MOST_VALUES = 5
_MOST_FIXED = 3


def counts_line(report: Report) -> str:
    """Return the last line of every report: how many tensors ended how, what was not compared included."""
    counts = report.counts
    equal = f", {counts.equal} equal" if counts.equal else ""
    line = (
        f"{counts.tensors} tensors: {counts.identical} identical{equal}, {counts.close} close, "
        f"{counts.different} different, {counts.not_compared} not compared"
    )
    left_out = sum(group.left_out for group in report.groups)
    return line + (f" ({left_out} left out by the options)" if left_out else "")


def verdict_line(report: Report) -> str:
    """Return the verdict, with the reason where it could not be told."""
    by_what = " by stored checksum" if report.quick and report.verdict != "undecided" else ""
    text = VERDICTS[report.verdict] + by_what
    if report.verdict == "in_sync":
        findings = [finding for group in report.groups for finding in group.findings]
        excused = (
            ("allowed findings", sorted({finding.code for finding in findings if finding.allowed})),
            ("findings of the baseline", sorted({finding.code for finding in findings if finding.accepted})),
        )
        told = [f"{what}: {', '.join(codes)}" for what, codes in excused if codes]
        text += f" but for {' and '.join(told)}" if told else ""
    if report.verdict == "undecided":
        text += f": {why_undecided(report)}"
    elif count := len(report.unreadable):
        text += f", and {count} file{'s' * (count != 1)} could not be read"
    return text


def why_undecided(report: Report) -> Message:
    """Return why a report has no verdict."""
    if report.unreadable:
        return Undecided.UNREADABLE(count=len(report.unreadable))
    if len(report.groups) == 1 and report.groups[0].verdict == "alone":
        return Undecided.ALL_LINKS() if report.aliases else Undecided.ONE_FILE()
    alone = [group for group in report.groups if group.verdict == "alone"]
    if alone and len(alone) == len(report.groups):
        return Undecided.NO_REPLICAS()
    if alone:
        paths = names_text([_short(group.replicas[0].path) for group in alone])
        return Undecided.SOME_ALONE(count=len(alone), paths=paths)
    unknown = [diff for group in report.groups for diff in group.tensors if diff.unknown]
    if ambiguous := [diff for diff in unknown if diff.reason is Reason.AMBIGUOUS]:
        name, detail = f"{ambiguous[0].name:.80}", ambiguous[0].detail
        if len(ambiguous) == 1:
            return Undecided.AMBIGUOUS(name=name, detail=detail)
        return Undecided.MORE_AMBIGUOUS(name=name, more=len(ambiguous) - 1, detail=detail)
    if unknown:
        return Undecided.NO_CHECKSUMS(unknown=len(unknown), tensors=report.counts.tensors)
    if lonely := [group.uncompared for group in report.groups if group.uncompared]:
        return Undecided.RANKS_NOT_COMPARED(ranks=lonely[0])
    if any(group.shards for group in report.groups):
        return Undecided.ONLY_SHARDS()
    excluded = sum(group.left_out for group in report.groups)
    return Undecided.ALL_EXCLUDED(count=excluded) if excluded else Undecided.NOTHING()


def omission_lines(report: Report, name: Callable[[str], str] | None = None) -> list[str]:
    """Return a line for each reason why paths given were compared with nothing. name: writes a path."""
    name = name or _short
    lines = []
    alone = [group for group in report.groups if group.verdict == "alone"]
    if alone and len(report.groups) > 1:
        many = f"{len(alone)} checkpoint{'s' * (len(alone) > 1)}"
        paths = names_text([name(group.replicas[0].path) for group in alone[:7]], 6, len(alone))
        lines.append(f"{many} without a replica, compared with nothing: {paths}")
    if report.aliases:
        count = len(report.aliases)
        links = names_text([f"{name(alias.path)} is {name(alias.of)}" for alias in report.aliases[:7]], 6, count)
        lines.append(f"{count} path{'s' * (count > 1)} not compared, for a link leads to a checkpoint given: {links}")
    if report.skipped:
        plural = (
            "files in the folders are no checkpoints and were"
            if report.skipped > 1
            else "file is no checkpoint and was"
        )
        lines.append(f"{report.skipped} {plural} skipped")
    return lines


def cut(text: str, most: int) -> str:
    """Shorten a text to `most` characters in its middle: the ends of names tell more than their middles."""
    return text if len(text) <= most else f"{text[: most // 2 - 2]}...{text[1 - most // 2 :]}"


def spans_text(ranks: Sequence[int]) -> str:
    """Write ranks as short as a cell of a table asks: (0, 1, 2, 5) gives 0-2,5."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def clusters_text(diff: TensorDiff) -> str:
    """Write who agrees with whom: '0,2,3 | 1'; of several replica groups in each: '0 | 2; 1 | 3'."""
    apart = sets_within(diff)
    if len(apart) < 2:
        return _sets_text(diff.clusters)
    texts = [_sets_text(sets) for sets in apart[:4]]
    return "; ".join(texts) + (f"; {len(apart) - 4} more" if len(apart) > 4 else "")


def _sets_text(sets: Sequence[tuple[int, ...]]) -> str:
    shown = [spans_text(found) for found in sets[:4]]
    more = len(sets) - len(shown)
    return " | ".join(shown) + (f" | {more} more" if more > 0 else "")


def gap_cells(diff: TensorDiff) -> tuple[str, str, str, str]:
    """Return differing elements, max abs, max rel and max ULP of a tensor, or the reason it was not compared."""
    if diff.status == "not_compared":
        return one_line(f"{diff.reason}: {diff.detail}"), "", "", ""
    if diff.mismatched is None:
        return one_line(f"by {diff.reason}: {diff.detail}"), "-", "-", "-"
    differing = f"{diff.mismatched} of {diff.numel}"
    odd = sum(1 for count in diff.nonfinite.values() if count)
    if odd and odd < len(diff.nonfinite):
        differing += " (not finite on some)"
    if diff.status == "close":
        differing += one_line(f", close: {diff.tolerance}")
    absolute = "-" if diff.max_abs is None else f"{diff.max_abs:.3g}"
    relative = "-" if diff.max_rel is None else f"{diff.max_rel:.2%}"
    return differing, absolute, relative, "-" if diff.max_ulp is None else str(diff.max_ulp)


def drift_rows(report: Report) -> list[tuple[str, str, str, str]]:
    """Return run, step, gap and tensor of the largest drift at each step; steps that say the same have one row."""
    rows = []
    for (run, gap, tensor), points in groupby(report.drift, lambda point: (point.run, point.max_abs, point.tensor)):
        steps = [str(point.step) for point in points if point.step is not None]
        step = f"{steps[0]}-{steps[-1]}" if len(steps) > 1 else steps[0] if steps else "-"
        rows.append((run, step, f"{gap:.4g}", tensor or "-"))
    return rows


def bytes_text(size: int) -> str:
    """Write a size in bytes with a decimal unit: 46833547 gives 46.8 MB."""
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def kind_cell(counts: Counts) -> str:
    """Say how one kind of tensor stands in a run: '20 agree', '9/20 differ'."""
    parts = []
    if counts.different:
        parts.append(f"{counts.different}/{counts.tensors} differ")
    if counts.not_compared:
        parts.append(f"{counts.not_compared} not compared")
    if counts.close:
        parts.append(f"{counts.close} close")
    return ", ".join(parts) or (f"{counts.tensors} agree" if counts.tensors else "-")


def values_text(values: Sequence[ValueDiff]) -> str:
    """Say which Python values differ: 'lr: 0.1 on rank 0, 0.2 on rank 1'. What a rank does not have is left out."""
    shown = [value for value in values if None not in value.by_rank.values()]
    texts = [
        f"{value.name}: " + ", ".join(f"{brief(of, 40)} on rank {rank}" for rank, of in list(value.by_rank.items())[:4])
        for value in shown[:_MOST_VALUES]
    ]
    if len(shown) > _MOST_VALUES:
        texts.append(f"and {len(shown) - _MOST_VALUES} more")
    return "; ".join(texts)


def worst_first(diffs: Sequence[TensorDiff]) -> list[TensorDiff]:
    """Sort by what a reader should see first.

    Out of sync before the rest; a NaN on some ranks only; then by the size of the gap. After the weights come what
    always differs a little under DDP, running statistics, and counters, whose gaps are steps and on no scale of theirs.
    """

    def key(d: TensorDiff) -> tuple[object, ...]:
        nonfinite = len(set(d.nonfinite.values())) > 1
        late = {"bn_mean": 1, "bn_var": 1, "bn_count": 2, "optimizer_step": 2}.get(d.kind, 0)
        return not d.out_of_sync, d.status != "not_compared", not nonfinite, late, -(d.max_abs or 0)

    return sorted(diffs, key=key)


def listed(group: Group, *, shards: bool = True) -> list[TensorDiff]:
    """Return the tensors that a report lists, worst first. shards: those too of which no rank has a copy.

    Random number states are expected to differ: they are counted and not listed.
    """
    left_out = ("rng",) if shards else ("rng", "sharded")
    return worst_first([diff for diff in group.tensors if diff.reason not in left_out])


def named(ranks: Sequence[int]) -> str:
    """Name ranks in a sentence: 'ranks 0-1'."""
    return f"rank{'s' * (len(ranks) > 1)} {spans_text(ranks)}"


def suspects(finding: Finding) -> str:
    """Name the ranks of a finding: 'ranks 0-1'."""
    return named(finding.ranks)


def notes_of(group: Group) -> list[str]:
    """Return how the group was found, then its notes."""
    return ["; ".join(map(str, group.grouping)), *map(str, group.notes)]


def headline(finding: Finding) -> str:
    """Name a finding: 'SYN201 bn-local-stats (warning) on ranks 0-1'."""
    excused = ", allowed" if finding.allowed else ", accepted by the baseline" if finding.accepted else ""
    return f"{finding.code} {finding.slug} ({finding.severity}{excused}) on {suspects(finding)}"


def _short(name: str) -> str:
    return cut(one_line(name), 120)


def fixed_lines(groups: Sequence[Group]) -> list[str]:
    """Say what of the baseline is not found any more, a line for each run and code."""
    lines = []
    for group in groups:
        for fixed in group.fixed:
            names = names_text([*map(_short, fixed.names)], _MOST_FIXED)
            lines.append(
                f"fixed: {_short(group.label or group.run)} no longer has {_short(fixed.code)} on {names}; "
                f"{Hint.UPDATE_BASELINE()}"
            )
    return lines


def group_title(group: Group) -> str:
    """Name a group with its number of replicas."""
    count = len(group.replicas)
    return f"{one_line(group.name)}, {count} replica{'s' if count != 1 else ''}"
