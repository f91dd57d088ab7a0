"""Text of a failing test of checkpoints: findings and worst tensors, of bounded length."""

from __future__ import annotations

import shutil
import textwrap
from typing import TYPE_CHECKING

from syncheck.errors import brief, one_line
from syncheck.messages import PytestText
from syncheck.report import plain, words
from syncheck.report.parts import Grid

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncheck.records import Counts, Finding, Group, TensorDiff

ROWS = 10
_MOST_FINDINGS = 4
_MOST_REPLICAS = 8
_MOST = 2000  # characters of a sentence, because findings quote names from the files
_MOST_OF_A_NAME = 200
# Columns to drop on a narrow terminal, in this order.
_OPTIONAL_COLUMNS = ("kind", "max ulp", "max rel")


def terminal_width() -> int:
    """Return the columns of the terminal. Must be called before pytest captures the output."""
    width = shutil.get_terminal_size().columns
    return width if width >= 40 else 80  # pytest's rule for an unknown width


def failure_text(
    group: Group, findings: Sequence[Finding], counts: Counts, diffs: Sequence[TensorDiff], *, values: bool, width: int
) -> str:
    """Return the text of a failing item. diffs: the item's differing tensors. values: whether to list values."""
    lines: list[str] = []
    for finding in findings[:_MOST_FINDINGS]:
        lines += [*_finding(finding, width), ""]
    if len(findings) > _MOST_FINDINGS:
        lines += [f"... and {len(findings) - _MOST_FINDINGS} more findings", ""]
    if values:
        lines += [*_values(group, width), ""]
    if counts.tensors:
        lines += [f"{limit(group.name, _MOST_OF_A_NAME)}: {_counts_text(counts)}", *_tensors(diffs, width), ""]
    for replica in group.replicas[:_MOST_REPLICAS]:
        lines.append(limit(f"rank {replica.rank}: {replica.path}"))
    if len(group.replicas) > _MOST_REPLICAS:
        lines.append(f"... and {len(group.replicas) - _MOST_REPLICAS} more replicas")
    return "\n".join(lines)


def headline(findings: Sequence[Finding]) -> str:
    """Return one line for pytest's short summary."""
    first = findings[0]
    more = f" (and {', '.join(f.code for f in findings[1:4])})" if len(findings) > 1 else ""
    return limit(f"{first.code} {first.slug} on {words.ranks_label(first.ranks)}{more}: {first.evidence}")


def _counts_text(counts: Counts) -> str:
    equal = f", {counts.equal} equal" if counts.equal else ""
    close = f", {counts.close} close" if counts.close else ""
    return (
        f"{counts.tensors} tensors: {counts.identical} identical{equal}{close}, {counts.different} different, "
        f"{counts.not_compared} not compared"
    )


def limit(text: str, most: int = _MOST) -> str:
    """Escape a text with names from files, and cut it after `most` characters."""
    text = one_line(text)
    return text if len(text) <= most else f"{text[:most]}..."


def _keep_end(name: str, most: int) -> str:
    name = one_line(name)
    return name if len(name) <= most else f"...{name[3 - most :]}"


def _finding(finding: Finding, width: int) -> Iterable[str]:
    yield words.finding_title(finding)
    rows = (
        ("what", finding.evidence),
        ("why", str(finding.cause)),
        ("fix", str(finding.fix)),
        ("more", f"syncheck explain {finding.code}"),
    )
    for label, text in rows:
        yield from _wrap(limit(text), width, f"  {label:4}  ")


def _wrap(text: str, width: int, first: str) -> list[str]:
    # Names may exceed the width, because users search for names and copy them.
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
        yield from _wrap(limit(f"{limit(value.name, _MOST_OF_A_NAME)}: {shown}{more}"), width, "  ")
    if len(differing) > ROWS:
        yield f"  ... and {len(differing) - ROWS} more values"


def _tensors(diffs: Sequence[TensorDiff], width: int) -> Iterable[str]:
    if not diffs:
        return
    shown = words.sort_worst_first(diffs)[:ROWS]
    # Cut long names to keep the numbers visible. Keep the ends, which distinguish the names.
    most = min(_MOST_OF_A_NAME, max(40, width * 2 // 3))
    names = ("tensor", "kind", "ranks", "differing", "max abs", "max rel", "max ulp")
    rows = [
        (
            _keep_end(diff.name, most),
            diff.kind,
            words.clusters_text(diff),
            *(limit(cell, _MOST_OF_A_NAME) for cell in words.difference_cells(diff)),
        )
        for diff in shown
    ]
    for dropped in range(len(_OPTIONAL_COLUMNS) + 1):
        columns = [i for i, name in enumerate(names) if name not in _OPTIONAL_COLUMNS[:dropped]]
        grid = Grid(tuple(names[i] for i in columns), right=("max abs", "max rel", "max ulp"), indent=2)
        for row in rows:
            grid.add(*(row[i] for i in columns))
        lines = plain.render([grid]).splitlines()
        if max(map(len, lines)) <= width:
            break
    yield from lines
    if len(diffs) > ROWS:
        yield f"  {PytestText.MORE_TENSORS(count=len(diffs) - ROWS)}"
