"""A report in GitHub's Markdown: the text of a pull request comment or of a job summary.

Names in files are untrusted: a name must not notify anybody (`@team`), reference an issue (`#1`), link, load an image
or break a table. GitHub finds mentions and references in the rendered text, so Markdown escapes do not prevent them,
but code spans do: https://github.github.com/gfm/#code-spans. Therefore all names are code spans, and in other texts
from files, all words with a possible special meaning.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

from syncheck.diagnose.series import step_order
from syncheck.report import finding_text, tables, words
from syncheck.report.selections import Item, find_groups, list_codes, write_first
from syncheck.sentences import Part
from syncheck.text import logged, names_text, one_line, shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from syncheck.records import Finding, Group, Report, TensorDiff, Unreadable

    Renderer = Callable[[Group], str]

# Characters. GitHub's limit for a comment is 65,536; the rest is reserved for additions by users.
MOST = 60_000
MOST_ROWS = 30
# Longer tables are folded.
_OPEN_ROWS = 5
_MOST_ITEMS = 10
_MOST_NAME = 200
_MOST_TEXT = 1_000
_MOST_CELL = 80
_MOST_PLACES = 3
_MOST_FILES = 4
_MOST_NOTES = 4
# The line below a column of numbers aligns it to the right.
_COLUMN_RULES = dict.fromkeys(tables.NUMBERS, "--:")
# For the line on omitted groups.
_RESERVED = 200

# Words without special characters of Markdown.
_PLAIN = re.compile(r"(?:[^\W_]|[.,;:()'\"%/=+?-])+")
# Words converted by GitHub nevertheless: a URL, :emoji:, GH-1, a commit hash.
_CONVERTED = re.compile(r":/|www\.|:\S+:|gh-\d|\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,40}\b", re.IGNORECASE)
# A word, or a name with an index or a shape: weight[0, 2].
_WORD = re.compile(r"[^\s\[]*\[[\d, ]{1,100}\]\S*|\S+")
_SPECIAL = re.compile(r"[\\`*_\[\]<|~]")
_OPENING, _CLOSING = "(\"'", ".,;:\"'"


def render(report: Report) -> str:
    """Return the page, at most MOST characters long, with the number of omitted groups.

    Groups out of sync are shown with findings and worst tensors; for a run with several steps, the last step only. If
    the page would be too long, tables are omitted first, then findings.
    """
    head, tail = _head(report), _tail(report)
    room = MOST - len(_join_blocks([*head, *tail])) - _RESERVED
    body = _render_groups(report, room)
    return _join_blocks([*head, *body, *tail]) + "\n"


def _render_groups(report: Report, room: int) -> list[str]:
    """Return the blocks of groups that fit into `room` characters, and the number of the other groups."""
    last_steps, earlier_steps = _groups_with_section(report)
    page = _Page(room)
    for group in last_steps:
        page.add(group, _RENDERERS)

    for group in earlier_steps:
        page.add(group, _RENDERERS[-1:])

    hidden = len(last_steps) + len(earlier_steps) - len(page.blocks)
    if not hidden:
        return page.blocks

    note = f"... and {hidden} more groups, omitted to keep the comment short; the .json report lists all."
    return [*page.blocks, note]


class _Page:
    """The blocks of groups, of limited length. room: characters."""

    def __init__(self, room: int) -> None:
        self.blocks: list[str] = []
        self._room = room
        self._used = 0
        self._too_long: set[Renderer] = set()

    def add(self, group: Group, renderers: Iterable[tuple[Renderer, float]]) -> None:
        """Add a group in the longest text that fits."""
        for render_group, share in renderers:
            # Do not retry a renderer after its text was too long, because there may be thousands of groups.
            if render_group in self._too_long:
                continue
            block = render_group(group)
            used = self._used + len(block) + len("\n\n")
            if used <= share * self._room:
                self._used = used
                self.blocks.append(block)
                return
            self._too_long.add(render_group)


def _join_blocks(blocks: Sequence[str]) -> str:
    """Join blocks with blank lines, and items of a list without."""
    joined = blocks[0]
    for before, block in pairwise(blocks):
        are_items = before.startswith("- ") and block.startswith("- ")
        joined += f"\n{block}" if are_items else f"\n\n{block}"
    return joined


def _list(items: Sequence[Item], write_item: Callable[[Item], str] = str) -> str:
    """Return the first items as a list, with the number of further items."""
    texts = write_first(items, _MOST_ITEMS, write_item)
    return "- " + "\n- ".join(texts)


def _head(report: Report) -> list[str]:
    blocks = [f"## syncheck: {words.verdict_line(report, write)}"]
    blocks += [_bold(line) for line in words.first_lines(report, write)]
    blocks.append(words.counts_line(report))
    fixed = words.fixed_lines(report.groups, write)
    if fixed:
        blocks.append(_list(fixed))

    for closure in report.closures[:_MOST_ITEMS]:
        blocks.append(_bold(closure.message.render(write)))

    return blocks


def _bold(line: str) -> str:
    return f"**{line}**"


def _tail(report: Report) -> list[str]:
    """Return the lists of unreadable files and replicas in sync, the scope of the check, and uncompared files."""
    blocks = []
    if report.unreadable:
        blocks.append(f"Unreadable files:\n\n{_list(report.unreadable, _unreadable_file)}")

    names_in_sync = []
    for group in find_groups(report.groups, "in_sync"):
        if not group.findings:
            names_in_sync.append(name(group.name))

    if names_in_sync:
        blocks.append(f"In sync: {names_text(names_in_sync, _MOST_ITEMS)}")

    return [*blocks, *words.scope_lines(report, write), *words.omission_lines(report, write)]


def _unreadable_file(file: Unreadable) -> str:
    return f"{name(file.path)}: {text(file.reason)}"


def _has_section(group: Group) -> bool:
    return group.verdict in ("out_of_sync", "undecided") or bool(group.findings)


def _groups_with_section(report: Report) -> tuple[list[Group], list[Group]]:
    """Return the groups with a section: at the last step of each run, and at earlier steps."""
    groups: list[Group] = []
    last_step: dict[str, int] = {}
    for group in report.groups:
        if not _has_section(group):
            continue
        groups.append(group)
        last_step[group.run] = max(step_order(group), last_step.get(group.run, -1))

    last_steps: list[Group] = []
    earlier_steps: list[Group] = []
    for group in groups:
        if step_order(group) == last_step[group.run]:
            last_steps.append(group)
        else:
            earlier_steps.append(group)

    return last_steps, earlier_steps


def _title(group: Group) -> str:
    return f"{name(group.name)}{words.replica_count(group)}: {words.VERDICTS[group.verdict]}"


def _with_table(group: Group) -> str:
    findings, table = _with_findings(group), _table(group)
    # A group with findings on Python values only has no table.
    if not table:
        return findings
    return f"{findings}\n\n{table}"


def _with_findings(group: Group) -> str:
    files = []
    for replica in group.replicas[:_MOST_FILES]:
        files.append(f"{name(replica.path)} ({words.replica_title(replica)})")
    texts = [names_text(files, _MOST_FILES, len(group.replicas)), *words.note_lines(group, write)[:_MOST_NOTES]]
    blocks = [f"### {_title(group)}", f"Files: {'; '.join(texts)}"]
    blocks += [_finding(finding, group) for finding in group.findings]
    return _join_blocks(blocks)


def _on_one_line(group: Group) -> str:
    # A file of events may have any text as a code.
    codes = [text(code) for code in list_codes(group.findings)[:_MOST_ITEMS]]
    return f"- {', '.join([_title(group), *codes])}"


# From long to short, with the largest share of the page in use afterwards; the rest is reserved for shorter texts.
_RENDERERS: tuple[tuple[Renderer, float], ...] = ((_with_table, 0.6), (_with_findings, 0.8), (_on_one_line, 1.0))


def _finding(finding: Finding, group: Group) -> str:
    lines = [f"#### {finding_text.finding_title(finding, write)}", ""]
    for label, sentence in finding_text.finding_rows(finding, group, write):
        lines.append(f"- **{label.capitalize()}:** {sentence}")
    lines.append(f"- **More:** {name(f'syncheck explain {finding.code}')}")
    return "\n".join(lines)


def _table(group: Group) -> str:
    """Return the table of worst tensors; empty if there are none."""
    diffs = tables.tensors_to_list(group)
    if not diffs:
        return ""

    titles = tables.columns(group)
    rules = [_COLUMN_RULES.get(title, "---") for title in titles]
    lines = [_table_line(titles), f"|{'|'.join(rules)}|"]
    lines += [_row(diff, group) for diff in diffs[:MOST_ROWS]]
    for place_line in tables.place_lines(diffs[:_MOST_PLACES], group, write):
        lines += ["", place_line]

    if len(diffs) > MOST_ROWS:
        lines += ["", f"... and {len(diffs) - MOST_ROWS} more; the .json report lists all."]

    table = "\n".join(lines)
    if len(diffs) <= _OPEN_ROWS:
        return table

    # The blank lines end the HTML block; otherwise the table would not be parsed as Markdown.
    return f"<details><summary>{len(diffs)} tensors, worst first</summary>\n\n{table}\n\n</details>"


def _row(diff: TensorDiff, group: Group) -> str:
    _, _, location, differing, *numbers = tables.cells(diff, group, write)
    if len(location) > _MOST_CELL:
        location = f"{location[:_MOST_CELL]}..."
    # A bar ends a cell, also in a code span.
    location = location.replace("|", "\\|")
    return _table_line([name(diff.name), text(diff.kind), location, differing, *numbers])


def _table_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write(raw: str, part: Part) -> str:
    """Write a part of a sentence: names and code as code spans."""
    if part is Part.WORDS:
        return _SPECIAL.sub(r"\\\g<0>", raw)
    if part is Part.TEXT:
        return text(raw)
    return name(raw)


def name(raw: str) -> str:
    """Return a name from a file as a code span, shortened in its middle."""
    # Code spans end at backticks and table cells at bars, so both are escaped like control characters.
    escaped = logged(one_line(raw)).replace("`", "\\x60").replace("|", "\\x7c")
    shortened = shorten(escaped, _MOST_NAME)
    return f"`{shortened}`" if shortened.strip() else "`(blank)`"


def text(raw: str) -> str:
    """Return a text from a file, in which words with a possible special meaning are code spans."""
    escaped: list[str] = []
    room = _MOST_TEXT
    for match in _WORD.finditer(one_line(raw)):
        escaped.append(_word(match[0]))
        room -= len(escaped[-1]) + 1
        if room < 0:
            return " ".join([*escaped[:-1], "..."])

    return " ".join(escaped)


def _word(word: str) -> str:
    if len(word) <= _MOST_NAME and _PLAIN.fullmatch(word) and not _CONVERTED.search(word):
        return word

    without_opening = word.lstrip(_OPENING)
    span = without_opening.rstrip(_CLOSING)
    # A closing parenthesis without an opening one in the word belongs to the sentence: "(rank.0)", but "call(x)".
    while span.endswith(")") and span.count(")") > span.count("("):
        span = span[:-1].rstrip(_CLOSING)

    opening = word[: len(word) - len(without_opening)]
    return f"{opening}{name(span)}{without_opening[len(span) :]}"
