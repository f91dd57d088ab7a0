"""What a failing item on checkpoints prints: the findings, then the worst tensors, as plain text of bounded length."""

from __future__ import annotations

import shutil
import textwrap
from typing import TYPE_CHECKING

from syncheck.errors import brief, one_line
from syncheck.report import plain, words
from syncheck.report.parts import Grid

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncheck.records import Counts, Finding, Group, TensorDiff

ROWS = 10
_MOST_FINDINGS = 4
_MOST_REPLICAS = 8
_MOST = 2000  # characters of a sentence; findings quote names from the files
_MOST_OF_A_NAME = 200
# In the order in which columns go where the terminal is too narrow for all.
_DISPENSABLE = ("kind", "max ulp", "max rel")


def terminal_width() -> int:
    """Return the columns to print in; to be asked before pytest captures, for then no terminal can be seen."""
    width = shutil.get_terminal_size().columns
    return width if width >= 40 else 80  # pytest's own rule for terminals that do not tell


def failure(
    group: Group, findings: Sequence[Finding], counts: Counts, mine: Sequence[TensorDiff], *, values: bool, width: int
) -> str:
    """Return what to print for an item. findings: those to tell. mine: its tensors that are not identical."""
    lines: list[str] = []
    for finding in findings[:_MOST_FINDINGS]:
        lines += [*_finding(finding, width), ""]
    if len(findings) > _MOST_FINDINGS:
        lines += [f"... and {len(findings) - _MOST_FINDINGS} more findings", ""]
    if values:
        lines += [*_values(group, width), ""]
    if counts.tensors:
        lines += [f"{bounded(group.name, _MOST_OF_A_NAME)}: {counted(counts)}", *_tensors(mine, width), ""]
    for replica in group.replicas[:_MOST_REPLICAS]:
        lines.append(bounded(f"rank {replica.rank}: {replica.path}"))
    if len(group.replicas) > _MOST_REPLICAS:
        lines.append(f"... and {len(group.replicas) - _MOST_REPLICAS} more replicas")
    return "\n".join(lines)


def headline(findings: Sequence[Finding]) -> str:
    """Return one line for pytest's short summary."""
    first = findings[0]
    more = f" (and {', '.join(f.code for f in findings[1:4])})" if len(findings) > 1 else ""
    return bounded(f"{first.code} {first.slug} on {words.suspects(first)}{more}: {first.evidence}")


def counted(counts: Counts) -> str:
    """Say how many tensors ended how; what was not compared is always said."""
    equal = f", {counts.equal} equal" if counts.equal else ""
    close = f", {counts.close} close" if counts.close else ""
    return (
        f"{counts.tensors} tensors: {counts.identical} identical{equal}{close}, {counts.different} different, "
        f"{counts.not_compared} not compared"
    )


def bounded(text: str, most: int = _MOST) -> str:
    """Escape and cut what holds names from files."""
    text = one_line(text)
    return text if len(text) <= most else f"{text[:most]}..."


def _ending(name: str, most: int) -> str:
    name = one_line(name)
    return name if len(name) <= most else f"...{name[3 - most :]}"


def _finding(finding: Finding, width: int) -> Iterable[str]:
    yield words.headline(finding)
    rows = (
        ("what", finding.evidence),
        ("why", str(finding.cause)),
        ("fix", str(finding.fix)),
        ("more", f"syncheck explain {finding.code}"),
    )
    for label, text in rows:
        yield from _wrapped(bounded(text), width, f"  {label:4}  ")


def _wrapped(text: str, width: int, first: str) -> list[str]:
    # Whole names: a long one may pass the edge, but can be searched for and copied.
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _values(group: Group, width: int) -> Iterable[str]:
    differing = [value for value in group.values if value.counts]
    for value in differing[:ROWS]:
        shown = ", ".join(f"{brief(of, 40)} on rank {rank}" for rank, of in list(value.by_rank.items())[:4])
        more = ", ..." if len(value.by_rank) > 4 else ""
        yield from _wrapped(bounded(f"{bounded(value.name, _MOST_OF_A_NAME)}: {shown}{more}"), width, "  ")
    if len(differing) > ROWS:
        yield f"  ... and {len(differing) - ROWS} more values"


def _tensors(mine: Sequence[TensorDiff], width: int) -> Iterable[str]:
    if not mine:
        return
    shown = words.worst_first(mine)[:ROWS]
    # One long name must not push every row's numbers out of sight. Where names differ is mostly at their end.
    most = min(_MOST_OF_A_NAME, max(40, width * 2 // 3))
    names = ("tensor", "kind", "ranks", "differing", "max abs", "max rel", "max ulp")
    rows = [
        (
            _ending(diff.name, most),
            diff.kind,
            words.clusters_text(diff),
            *(bounded(cell, _MOST_OF_A_NAME) for cell in words.gap_cells(diff)),
        )
        for diff in shown
    ]
    for left_out in range(len(_DISPENSABLE) + 1):
        columns = [i for i, name in enumerate(names) if name not in _DISPENSABLE[:left_out]]
        grid = Grid(tuple(names[i] for i in columns), right=("max abs", "max rel", "max ulp"), indent=2)
        for row in rows:
            grid.add(*(row[i] for i in columns))
        drawn = plain.render([grid]).splitlines()
        if max(map(len, drawn)) <= width:
            break
    yield from drawn
    if len(mine) > ROWS:
        yield f"  ... and {len(mine) - ROWS} more; --syncheck-output FILE.html lists all"
