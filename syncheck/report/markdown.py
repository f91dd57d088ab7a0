"""A report in GitHub's markdown, for a comment on a pull request or a job's summary.

Texts from files are not to be trusted: a name must not notify anybody (`@team`), refer to an issue (`#1`), link, load
a picture or break a table. GitHub looks for all of these in rendered text, so no escape stops them; in a code span it
looks for none: https://github.github.com/gfm/#code-spans. So every name, and every word that could be more than a
word, stands in one.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

from syncheck.errors import logged, one_line
from syncheck.messages import names_text
from syncheck.report import when, words
from syncheck.series import step_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from syncheck.records import Finding, Group, Report, TensorDiff

    Drawing = Callable[[Group], str]

# Characters. GitHub refuses a comment of more than 65,536; what is left is for those who add lines of their own.
MOST = 60_000
MOST_ROWS = 30
# A longer table is folded.
_OPEN_ROWS = 5
_MOST_ITEMS = 10
_MOST_NAME = 200
_MOST_TEXT = 1_000
_MOST_CELL = 80
_MOST_PIECES = 8

# A word that is only a word: no character of it means anything to markdown or GitHub,
_PLAIN = re.compile(r"(?:[^\W_]|[.,;:()'\"%/=+?-])+")
# and it is nothing that GitHub links or draws all the same: an address, :emoji:, GH-1, a commit.
_MEANT = re.compile(r":/|www\.|:\S+:|gh-\d|\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,40}\b", re.IGNORECASE)
_OPENING, _CLOSING = "(\"'", ".,;:\"'"


def render(report: Report) -> str:
    """Return the page, of at most MOST characters; what is left out is counted on it.

    A group out of sync stands with its findings and worst tensors, of a run with several steps the last one. Where the
    room ends, tables go first, then findings.
    """
    head, tail = _head(report), _tail(report)
    room = MOST - len(_joined([*head, *tail])) - 200  # for the line on groups left out
    full, brief = _shown(report)
    waiting = [(group, _DRAWINGS) for group in full] + [(group, _DRAWINGS[-1:]) for group in brief]
    body: list[str] = []
    used = 0
    # What had no room once is not tried again: thousands of groups would be drawn for nothing.
    too_long: set[Drawing] = set()
    for group, drawings in waiting:
        for draw, share in drawings:
            if draw not in too_long and used + len(drawn := draw(group)) + 2 <= share * room:
                used += len(drawn) + 2
                body.append(drawn)
                break
            too_long.add(draw)
    if len(body) < len(waiting):
        hidden = len(waiting) - len(body)
        body.append(f"... and {hidden} more groups, for which a comment has no room; the .json report has all.")
    return _joined([*head, *body, *tail]) + "\n"


def _joined(blocks: Sequence[str]) -> str:
    """Put a blank line between blocks, but none inside a list."""
    drawn = blocks[0]
    for before, block in pairwise(blocks):
        drawn += ("\n" if before.startswith("- ") and block.startswith("- ") else "\n\n") + block
    return drawn


def _head(report: Report) -> list[str]:
    closures = [f"**{text(closure.sentence)}**" for closure in report.closures[:_MOST_ITEMS]]
    fixed = [f"- {text(told)}" for told in words.fixed_lines(report.groups)]
    more = [f"- and {len(fixed) - _MOST_ITEMS} more"] if len(fixed) > _MOST_ITEMS else []
    told = ["\n".join([*fixed[:_MOST_ITEMS], *more])] if fixed else []
    return [f"## syncheck: {text(words.verdict_line(report))}", words.counts_line(report), *told, *closures]


def _tail(report: Report) -> list[str]:
    """Return what needs a line only: replicas in sync, files with none to compare with, files not read."""
    unread = [f"{name(file.path)}: {text(file.reason)}" for file in report.unreadable[:_MOST_ITEMS]]
    if len(report.unreadable) > _MOST_ITEMS:
        unread.append(f"and {len(report.unreadable) - _MOST_ITEMS} more")
    in_sync = [group.name for group in report.groups if not _has_section(group) and group.verdict == "in_sync"]
    return [
        *(["Not read:\n\n" + "\n".join(f"- {line}" for line in unread)] if unread else []),
        *([f"In sync: {_listed(in_sync)}"] if in_sync else []),
        *words.omission_lines(report, name),
    ]


def _has_section(group: Group) -> bool:
    return group.verdict in ("out_of_sync", "undecided") or bool(group.findings)


def _shown(report: Report) -> tuple[list[Group], list[Group]]:
    """Return the groups that a reader must see: those of the last step of each run, and those of the steps before."""
    shown = [group for group in report.groups if _has_section(group)]
    last: dict[str, int] = {}
    for group in shown:
        last[group.run] = max(step_order(group), last.get(group.run, -1))
    return (
        [group for group in shown if step_order(group) == last[group.run]],
        [group for group in shown if step_order(group) < last[group.run]],
    )


def _title(group: Group) -> str:
    replicas = words.group_title(group).removeprefix(one_line(group.name))
    return f"{name(group.name)}{replicas}: {words.VERDICTS[group.verdict]}"


def _with_table(group: Group) -> str:
    table = _table(group)
    return _with_findings(group) + ("" if table is None else f"\n\n{table}")


def _with_findings(group: Group) -> str:
    files = [f"{name(replica.path)} (rank {replica.rank})" for replica in group.replicas[:4]]
    more = f" and {len(group.replicas) - len(files)} more" if len(group.replicas) > len(files) else ""
    notes = "".join(f"; {text(note)}" for note in words.notes_of(group)[:4])
    blocks = [f"### {_title(group)}", f"Files: {', '.join(files)}{more}{notes}", *map(_finding, group.findings)]
    return _joined(blocks)


def _on_one_line(group: Group) -> str:
    codes = "".join(f", {finding.code}" for finding in group.findings[:_MOST_ITEMS])
    return f"- {_title(group)}{codes}"


# From the longest to the shortest; up to which share of the page each may be used, so that the next has room too.
_DRAWINGS: tuple[tuple[Drawing, float], ...] = ((_with_table, 0.6), (_with_findings, 0.8), (_on_one_line, 1.0))


def _finding(finding: Finding) -> str:
    since = f"- **When:** {text(when.sentence(finding))}\n" if finding.history is not None else ""
    return (
        f"#### {text(words.headline(finding))}\n\n"
        f"- **What:** {text(finding.evidence)}\n"
        f"{since}"
        f"- **Why:** {text(str(finding.cause))}\n"
        f"- **Fix:** {text(str(finding.fix))}\n"
        f"- **More:** `syncheck explain {finding.code}`"
    )


def _table(group: Group) -> str | None:
    found = words.listed(group)
    if not found:
        return None
    lines = [
        "| tensor | kind | ranks | differing | max abs | max rel | max ulp |",
        "|---|---|---|---|--:|--:|--:|",
        *(_row(diff) for diff in found[:MOST_ROWS]),
    ]
    table = "\n".join(lines)
    if len(found) > MOST_ROWS:
        table += f"\n\n... and {len(found) - MOST_ROWS} more; the .json report has all."
    if len(found) <= _OPEN_ROWS:
        return table
    # The blank lines end the HTML block, so that the table is read as markdown.
    return f"<details><summary>{len(found)} tensors, worst first</summary>\n\n{table}\n\n</details>"


def _row(diff: TensorDiff) -> str:
    differing, *gaps = words.gap_cells(diff)
    ranks = words.clusters_text(diff)
    ranks = (ranks if len(ranks) <= _MOST_CELL else f"{ranks[:_MOST_CELL]}...").replace("|", "\\|")
    return f"| {' | '.join([name(diff.name), text(diff.kind), ranks, text(differing), *gaps])} |"


def _listed(names: Sequence[str]) -> str:
    return names_text([*map(name, names)], _MOST_ITEMS)


def name(given: str) -> str:
    """Return a name from a file as a code span on one line, long ones without their middle."""
    # Inside a span only a backtick means anything, and in a table a bar; both are written as control characters are.
    escaped = words.cut(logged(one_line(given)).replace("`", "\\x60").replace("|", "\\x7c"), _MOST_NAME)
    return f"`{escaped}`" if escaped.strip() else "`(blank)`"


def text(given: str) -> str:
    """Return a sentence that may hold names from files: words that could be more than words become code spans."""
    done: list[str] = []
    room = _MOST_TEXT
    for word in _whole(one_line(given).split()):
        done.append(_word(word))
        room -= len(done[-1]) + 1
        if room < 0:
            return " ".join([*done[:-1], "..."])
    return " ".join(done)


def _whole(split: Sequence[str]) -> Iterator[str]:
    """Put together what brackets hold together and code spans would take apart: call(a, b=c_d), weight_1[0, 2]."""
    at = 0
    while at < len(split):
        end = at + 1
        if not _is_plain(split[at]):
            # Not far: a bracket that is never closed may not swallow a sentence.
            for after in range(end, min(at + _MOST_PIECES, len(split)) + 1):
                if _closed(" ".join(split[at:after]).lstrip(_OPENING)):
                    end = after
                    break
        yield " ".join(split[at:end])
        at = end


def _closed(piece: str) -> bool:
    return all(piece.count(opening) <= piece.count(closing) for opening, closing in ("()", "[]"))


def _is_plain(word: str) -> bool:
    return len(word) <= _MOST_NAME and _PLAIN.fullmatch(word) is not None and not _MEANT.search(word)


def _word(word: str) -> str:
    if _is_plain(word):
        return word
    core = word.lstrip(_OPENING)
    before = word[: len(word) - len(core)]
    kept = core.rstrip(_CLOSING)
    # A closing parenthesis belongs to the sentence if what opened it does: (rank.0) and call(x) end alike.
    while kept.endswith(")") and kept.count(")") > kept.count("("):
        kept = kept[:-1].rstrip(_CLOSING)
    return f"{before}{name(kept)}{core[len(kept) :]}"
