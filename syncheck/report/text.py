"""Reports for people at a terminal or in a log: tables and sentences, drawn by rich.

On a terminal lines are wrapped to its width; elsewhere nothing is wrapped, boxed or cut, so that `grep` finds whole
names. Names from files are never taken for markup, and control characters in them are escaped.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.console import Group as Stack
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from syncheck.errors import one_line
from syncheck.records import Counts
from syncheck.report import words
from syncheck.series import by_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from syncheck.records import Finding, Group, Report

STYLES = {"in_sync": "bold green", "out_of_sync": "bold red", "undecided": "bold yellow", "alone": "dim"}
SEVERITIES = {"error": "bold red", "warning": "bold yellow", "info": "bold cyan"}
# Wider than any line: outside a terminal nothing is wrapped.
_UNWRAPPED = 100_000


def render(parts: Sequence[RenderableType], width: int | None, color: bool) -> str:
    """Draw parts one under the other. width: columns of the terminal, None outside one. color: with ANSI codes."""
    out = io.StringIO()
    console = Console(
        file=out,
        width=width or _UNWRAPPED,
        force_terminal=color,
        color_system="truecolor" if color else None,
        no_color=not color,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
    for part in parts:
        console.print(part, soft_wrap=False)
    return "\n".join(line.rstrip() for line in out.getvalue().split("\n")) if not color else out.getvalue()


def comparison(report: Report, limit: int, boxed: bool) -> list[RenderableType]:
    """Return the parts of `syncheck compare`: each group with its findings and worst tensors, then the verdict.

    limit: rows of tensors to print a group, 0 for all. boxed: whether lines may be drawn.
    """
    parts: list[RenderableType] = []
    for group in report.groups:
        parts += _group(group, limit, boxed)
    return parts + _closing(report)


def overview(report: Report, limit: int, boxed: bool) -> list[RenderableType]:
    """Return the parts of `syncheck report`: runs x kinds, drift over steps, findings, what SyncBatchNorm closed."""
    parts: list[RenderableType] = []
    runs = by_run(report.groups)
    if runs:
        parts.append(_matrix(runs, boxed))
    if any(len(groups) > 1 for groups in runs.values()):
        parts.append(_drift(report, boxed))
    for group in (groups[-1] for groups in runs.values()):
        if group.findings:
            parts.append(_line(group))
            parts += [_finding(finding) for finding in group.findings]
            parts += [_tensors(group, limit, boxed)] if limit != 1 and _shown(group) else []
    alone = [group for group in report.groups if group.verdict == "alone"]
    if alone:
        names = words_list([group.name for group in alone])
        parts.append(Text(f"nothing to compare with, one file each: {names}\n", style="dim"))
    if report.skipped:
        parts.append(Text(f"{report.skipped} files in the folders are no checkpoints and were skipped\n", style="dim"))
    parts += [Text(closure.sentence + "\n", style="bold") for closure in report.closures]
    return parts + _closing(report)


def words_list(names: Sequence[str], most: int = 6) -> str:
    """Join names, the first few of many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return one_line(", ".join(names[:most]) + more)


def table(columns: Sequence[str], boxed: bool, right: Sequence[str] = ()) -> Table:
    """Return an empty table of the house style. right: columns of numbers, aligned to the right."""
    # Two columns between cells: every one counts on a terminal of 80.
    padding = (0, 1, 0, 0) if boxed else (0, 2, 0, 0)
    lines = box.SIMPLE_HEAD if boxed else None
    made = Table(box=lines, padding=padding, pad_edge=False, show_edge=False, header_style="bold")
    for column in columns:
        made.add_column(
            column,
            overflow="fold",
            justify="right" if column in right else "left",
            no_wrap=not boxed,
            # A header of one word is never broken.
            min_width=None if " " in column else len(column),
        )
    return made


def _indent(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 1, 2), expand=False)


def _line(group: Group) -> Text:
    return Text.assemble(
        (words.group_title(group), "bold"), ": ", (words.VERDICTS[group.verdict], STYLES[group.verdict])
    )


def _group(group: Group, limit: int, boxed: bool) -> list[RenderableType]:
    about = [
        Text(one_line(f"rank {r.rank}: {r.path} ({r.format}, {r.tensors} tensors, {words.bytes_text(r.bytes)})"))
        for r in group.replicas[:8]
    ]
    if len(group.replicas) > 8:
        about.append(Text(f"... and {len(group.replicas) - 8} more replicas"))
    about += [Text(one_line(note), style="dim") for note in group.notes]
    parts: list[RenderableType] = [_line(group), _indent(Stack(*about))]
    if group.verdict == "alone":
        return parts
    if group.kinds:
        parts.append(_indent(_kinds(group, boxed)))
    parts += [_finding(finding) for finding in group.findings]
    values = [diff for diff in group.values if None not in diff.by_rank.values()]
    if values:
        lines = [
            f"{v.name}: " + ", ".join(f"{value!r:.40} on rank {rank}" for rank, value in list(v.by_rank.items())[:4])
            for v in values[:5]
        ]
        parts.append(_indent(Text(one_line("values that differ: " + "; ".join(lines)), style="dim")))
    return parts + ([_tensors(group, limit, boxed)] if _shown(group) else [])


def _kinds(group: Group, boxed: bool) -> Table:
    columns = ("tensors", "identical", "equal", "close", "different", "not compared")
    made = table(("kind", *columns), boxed, right=columns)
    for kind, counts in group.kinds.items():
        numbers = (
            counts.tensors,
            counts.identical,
            counts.equal,
            counts.close,
            counts.different,
            counts.not_compared,
        )
        style = "red" if counts.different else None
        made.add_row(kind, *(str(number) for number in numbers), style=style)
    return made


def _finding(finding: Finding) -> RenderableType:
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="dim")
    lines.add_column(overflow="fold")
    # In the order of a doctor's letter.
    for label, text in (("what", finding.evidence), ("why", finding.cause), ("fix", finding.fix)):
        lines.add_row(label, Text(one_line(text)))
    lines.add_row("more", Text(f"syncheck explain {finding.code}"))
    return _indent(
        Stack(Text(words.headline(finding), style=SEVERITIES[finding.severity]), Padding(lines, (0, 0, 0, 2)))
    )


def _shown(group: Group) -> list[Any]:
    return words.worst_first([d for d in group.tensors if d.status != "not_compared" or d.reason != "rng"])


def _tensors(group: Group, limit: int, boxed: bool) -> RenderableType:
    made = table(
        ("tensor", "kind", "ranks", "differing", "max abs", "max rel", "max ulp"),
        boxed,
        right=("max abs", "max rel", "max ulp"),
    )
    shown = _shown(group)
    for diff in shown[: limit or None]:
        made.add_row(Text(one_line(diff.name)), diff.kind, words.clusters_text(diff), *words.gap_cells(diff))
    more = len(shown) - limit
    rest = [Text(f"... and {more} more; -n 0 shows all", style="dim")] if limit and more > 0 else []
    return _indent(Stack(made, *rest))


def _matrix(runs: dict[str, tuple[Group, ...]], boxed: bool) -> RenderableType:
    last = [groups[-1] for groups in runs.values()]
    kinds = list(dict.fromkeys(kind for group in last for kind in group.kinds))
    made = table(("run", *kinds, "verdict"), boxed)
    for group in last:
        cells = [
            Text(words.kind_cell(c), style="red" if c.different else "")
            for c in (group.kinds.get(k, Counts()) for k in kinds)
        ]
        verdict = Text(words.VERDICTS[group.verdict], style=STYLES[group.verdict])
        made.add_row(Text(one_line(group.name)), *cells, verdict)
    return Padding(made, (0, 0, 1, 0), expand=False)


def _drift(report: Report, boxed: bool) -> RenderableType:
    made = table(("run", "step", "largest drift of a running statistic", "tensor"), boxed, right=("step",))
    for point in report.drift:
        step = "-" if point.step is None else str(point.step)
        made.add_row(Text(one_line(point.run)), step, f"{point.max_abs:.4g}", Text(one_line(point.tensor or "-")))
    return Padding(made, (0, 0, 1, 0), expand=False)


def _closing(report: Report) -> list[RenderableType]:
    return [
        Text(words.verdict_line(report), style=STYLES[report.verdict]),
        Text(words.counts_line(report)),
    ]
