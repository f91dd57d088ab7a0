"""A report in GitHub's Markdown: the text of a pull request comment or of a job summary.

Names in files are untrusted: a name must not notify anybody (`@team`), reference an issue (`#1`), link, load an image
or break a table. GitHub finds mentions and references in the rendered text, so Markdown escapes do not prevent them,
but code spans do: https://github.github.com/gfm/#code-spans. Therefore all names, and all words with a possible special
meaning, are code spans.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

from syncheck.diagnose.series import step_order
from syncheck.report import words
from syncheck.text import logged, names_text, one_line, shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from syncheck.records import Finding, Group, Report, TensorDiff

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
_MOST_PIECES = 8
_MOST_PLACES = 3

# Words without special characters of Markdown.
_PLAIN = re.compile(r"(?:[^\W_]|[.,;:()'\"%/=+?-])+")
# Words converted by GitHub nevertheless: a URL, :emoji:, GH-1, a commit hash.
_CONVERTED = re.compile(r":/|www\.|:\S+:|gh-\d|\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,40}\b", re.IGNORECASE)
_OPENING, _CLOSING = "(\"'", ".,;:\"'"


def render(report: Report) -> str:
    """Return the page, at most MOST characters long, with the number of omitted groups.

    Groups out of sync are shown with findings and worst tensors; for a run with several steps, the last step only. If
    the page would be too long, tables are omitted first, then findings.
    """
    head, tail = _head(report), _tail(report)
    room = MOST - len(_join_blocks([*head, *tail])) - 200  # for the line on omitted groups
    last_steps, earlier_steps = _groups_to_show(report)
    waiting = [(group, _RENDERERS) for group in last_steps] + [(group, _RENDERERS[-1:]) for group in earlier_steps]
    body: list[str] = []
    used = 0
    # Do not retry a renderer after its text was too long, because there may be thousands of groups.
    too_long: set[Renderer] = set()
    for group, renderers in waiting:
        for render_group, share in renderers:
            if render_group not in too_long and used + len(block := render_group(group)) + 2 <= share * room:
                used += len(block) + 2
                body.append(block)
                break
            too_long.add(render_group)
    if len(body) < len(waiting):
        hidden = len(waiting) - len(body)
        body.append(f"... and {hidden} more groups, omitted to keep the comment short; the .json report lists all.")
    return _join_blocks([*head, *body, *tail]) + "\n"


def _join_blocks(blocks: Sequence[str]) -> str:
    """Join blocks with blank lines, and items of a list without."""
    text = blocks[0]
    for before, block in pairwise(blocks):
        text += ("\n" if before.startswith("- ") and block.startswith("- ") else "\n\n") + block
    return text


def _head(report: Report) -> list[str]:
    closures = [f"**{text(closure.sentence)}**" for closure in report.closures[:_MOST_ITEMS]]
    fixed = [f"- {text(line)}" for line in words.fixed_lines(report.groups)]
    more = [f"- and {len(fixed) - _MOST_ITEMS} more"] if len(fixed) > _MOST_ITEMS else []
    fixed_list = ["\n".join([*fixed[:_MOST_ITEMS], *more])] if fixed else []
    facts = [f"**{text(fact)}**" for fact in words.first_lines(report)]
    return [
        f"## syncheck: {text(words.verdict_line(report))}",
        *facts,
        words.counts_line(report),
        *fixed_list,
        *closures,
    ]


def _tail(report: Report) -> list[str]:
    """Return the lists of unreadable files, replicas in sync and uncompared files."""
    unreadable = [f"{name(file.path)}: {text(file.reason)}" for file in report.unreadable[:_MOST_ITEMS]]
    if len(report.unreadable) > _MOST_ITEMS:
        unreadable.append(f"and {len(report.unreadable) - _MOST_ITEMS} more")
    in_sync = [group.name for group in report.groups if not _has_section(group) and group.verdict == "in_sync"]
    return [
        *(["Unreadable files:\n\n" + "\n".join(f"- {line}" for line in unreadable)] if unreadable else []),
        *([f"In sync: {names_text([*map(name, in_sync)], _MOST_ITEMS)}"] if in_sync else []),
        *words.omission_lines(report, name),
    ]


def _has_section(group: Group) -> bool:
    return group.verdict in ("out_of_sync", "undecided") or bool(group.findings)


def _groups_to_show(report: Report) -> tuple[list[Group], list[Group]]:
    """Return the groups with a section: at the last step of each run, and at earlier steps."""
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
    return _with_findings(group) + (f"\n\n{table}" if table else "")


def _with_findings(group: Group) -> str:
    files = [f"{name(replica.path)} ({words.replica_title(replica)})" for replica in group.replicas[:4]]
    notes = "".join(f"; {text(note)}" for note in words.note_lines(group)[:4])
    blocks = [
        f"### {_title(group)}",
        f"Files: {names_text(files, 4, len(group.replicas))}{notes}",
        *map(_finding, group.findings),
    ]
    return _join_blocks(blocks)


def _on_one_line(group: Group) -> str:
    codes = "".join(f", {finding.code}" for finding in group.findings[:_MOST_ITEMS])
    return f"- {_title(group)}{codes}"


# From long to short, with the largest share of the page in use afterwards; the rest is reserved for shorter texts.
_RENDERERS: tuple[tuple[Renderer, float], ...] = ((_with_table, 0.6), (_with_findings, 0.8), (_on_one_line, 1.0))


def _finding(finding: Finding) -> str:
    rows = "".join(f"- **{label.capitalize()}:** {text(of)}\n" for label, of in words.finding_rows(finding))
    return f"#### {text(words.finding_title(finding))}\n\n{rows}- **More:** `syncheck explain {finding.code}`"


def _table(group: Group) -> str:
    """Return the table of worst tensors; empty if there are none."""
    diffs = words.tensors_to_list(group)
    if not diffs:
        return ""
    titles = words.columns(group)
    lines = [
        f"| {' | '.join(titles)} |",
        f"|{'|'.join('--:' if title in words.NUMBERS else '---' for title in titles)}|",
        *(_row(diff, group) for diff in diffs[:MOST_ROWS]),
    ]
    table = "\n".join([*lines, *(f"\n{text(line)}" for line in words.place_lines(diffs[:_MOST_PLACES], group))])
    if len(diffs) > MOST_ROWS:
        table += f"\n\n... and {len(diffs) - MOST_ROWS} more; the .json report lists all."
    if len(diffs) <= _OPEN_ROWS:
        return table
    # The blank lines end the HTML block; otherwise the table would not be parsed as Markdown.
    return f"<details><summary>{len(diffs)} tensors, worst first</summary>\n\n{table}\n\n</details>"


def _row(diff: TensorDiff, group: Group) -> str:
    row = dict(zip(words.columns(group), words.cells(diff, group), strict=True))
    row |= {"tensor": name(diff.name), "kind": text(diff.kind), "differing": text(row["differing"])}
    if ranks := row.get("ranks"):
        row["ranks"] = (ranks if len(ranks) <= _MOST_CELL else f"{ranks[:_MOST_CELL]}...").replace("|", "\\|")
    return f"| {' | '.join(row.values())} |"


def name(raw: str) -> str:
    """Return a name from a file as a code span, shortened in its middle."""
    # Code spans end at backticks and table cells at bars, so both are escaped like control characters.
    escaped = shorten(logged(one_line(raw)).replace("`", "\\x60").replace("|", "\\x7c"), _MOST_NAME)
    return f"`{escaped}`" if escaped.strip() else "`(blank)`"


def text(raw: str) -> str:
    """Return a sentence with names from files, in which words with a possible special meaning are code spans."""
    escaped: list[str] = []
    room = _MOST_TEXT
    for word in _join_brackets(one_line(raw).split()):
        escaped.append(_word(word))
        room -= len(escaped[-1]) + 1
        if room < 0:
            return " ".join([*escaped[:-1], "..."])
    return " ".join(escaped)


def _join_brackets(pieces: Sequence[str]) -> Iterator[str]:
    """Join the pieces of an expression in brackets into one code span: call(a, b=c_d), weight_1[0, 2]."""
    start = 0
    while start < len(pieces):
        end = start + 1
        if not _is_plain(pieces[start]):
            # Limit the number of pieces, because an open bracket would join a whole sentence.
            for candidate in range(end, min(start + _MOST_PIECES, len(pieces)) + 1):
                if _is_balanced(" ".join(pieces[start:candidate]).lstrip(_OPENING)):
                    end = candidate
                    break
        yield " ".join(pieces[start:end])
        start = end


def _is_balanced(piece: str) -> bool:
    return all(piece.count(opening) <= piece.count(closing) for opening, closing in ("()", "[]"))


def _is_plain(word: str) -> bool:
    return len(word) <= _MOST_NAME and _PLAIN.fullmatch(word) is not None and not _CONVERTED.search(word)


def _word(word: str) -> str:
    if _is_plain(word):
        return word
    core = word.lstrip(_OPENING)
    before = word[: len(word) - len(core)]
    span = core.rstrip(_CLOSING)
    # A closing parenthesis without an opening one in the word belongs to the sentence: "(rank.0)", but "call(x)".
    while span.endswith(")") and span.count(")") > span.count("("):
        span = span[:-1].rstrip(_CLOSING)
    return f"{before}{name(span)}{core[len(span) :]}"
