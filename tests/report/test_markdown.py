"""Markdown reports: content, escaping of hostile names, and length."""

from __future__ import annotations

import re
from dataclasses import replace
from string import Formatter
from typing import TYPE_CHECKING

import numpy as np
import pytest
from markdown_it import MarkdownIt  # a dependency of rich
from support.checkpoints import changed, network, save_pth
from support.hostile_names import shorten
from support.hostile_report import HOSTILE, hostile
from support.listings import find_all, find_texts, is_printable, list_fields, list_names
from support.real_runs import compare_real_runs

import syncheck
from syncheck.diagnose.rules import list_rules
from syncheck.report import finding_text, markdown, words
from syncheck.sentences import Sentence

if TYPE_CHECKING:
    from pathlib import Path

    from markdown_it.token import Token


def parse(page: str) -> list[Token]:
    """Return all tokens of a page, including tokens inside paragraphs and cells."""
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(page)
    return [inner for token in tokens for inner in [token, *(token.children or [])]]


def test_a_real_comparison() -> None:
    """A well-formed page contains verdict, counts, closures, findings and worst tensors."""
    report = compare_real_runs()
    page = markdown.render(report)
    closure = report.closures[0].message.render(markdown.write)
    assert page.startswith(f"## syncheck: OUT OF SYNC\n\n{words.counts_line(report)}\n\n**{closure}**")
    for group in report.groups:
        for finding in group.findings:
            assert f"{finding.code}" in page
            assert group.step != 12 or f"#### {finding_text.finding_title(finding)}\n" in page
    tokens = parse(page)
    spans = set(list_fields(find_all(tokens, type="code_inline"), "content"))
    (local,) = (group for group in report.groups if group.findings[:1] and group.findings[0].code == "SYN201")
    assert len(local.tensors) > 10
    assert set(list_names(local.tensors)) < spans
    assert "model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)" in spans
    assert list_fields(tokens, "type").count("table_open") == page.count("<details>") == page.count("</details>") == 2
    # The last step of a run has a section, the other steps a line.
    assert page.count("### `ddp-nobufsync") == 1
    assert re.findall(r"^- `ddp-nobufsync step (\d+)`, 2 replicas: OUT OF SYNC, SYN202$", page, re.MULTILINE) == [
        "2",
        "5",
    ]
    assert "ddp-syncbn step 12" in spans


def test_a_comparison_in_sync_is_short(tmp_path: Path) -> None:
    """A page of replicas in sync has the verdict, the counts and the names of the groups."""
    for rank in range(2):
        save_pth(tmp_path / f"rank{rank}.pth", network())
    report = syncheck.compare(tmp_path)
    head, counts, names = markdown.render(report).rstrip("\n").split("\n\n")
    assert (head, counts) == ("## syncheck: IN SYNC", words.counts_line(report))
    assert f"`{report.groups[0].name}`" in names


def test_short_tables_are_open_and_long_ones_folded(tmp_path: Path) -> None:
    """Up to five tensors are visible, more are folded, and tensors beyond the limit are counted."""
    for tensors, folded, more in (
        (5, False, ""),
        (6, True, ""),
        (40, True, "... and 10 more"),
    ):
        for rank in range(2):
            tree = {f"w_{i}": np.full(2, rank * i, np.float32) for i in range(1, tensors + 1)}
            save_pth(tmp_path / f"{tensors}_rank{rank}.pth", tree)
        page = markdown.render(syncheck.compare(tmp_path / f"{tensors}_rank?.pth"))
        assert (f"<summary>{tensors} tensors" in page) == folded
        assert (more or "... and") in page if more else "... and" not in page
        rows = re.findall(r"^\| `w_(\d+)` \|", page, re.MULTILINE)
        assert rows == [str(i) for i in range(tensors, max(0, tensors - 30), -1)]


def test_allowed_findings_and_unreadable_files(tmp_path: Path) -> None:
    """The page contains allowed findings and unreadable files."""
    for rank in range(2):
        save_pth(tmp_path / f"rank{rank}.pth", changed(network(), "running_mean", by=rank))
    allowed = markdown.render(syncheck.compare(tmp_path, options=syncheck.Options(allow=("SYN201",))))
    assert re.match("## syncheck: IN SYNC, .*SYN201", allowed)
    assert "#### SYN201 bn-local-stats (warning, consistent, allowed) on ranks 0-1" in allowed
    (tmp_path / "rank2.pth").write_text("no checkpoint")
    page = markdown.render(syncheck.compare(tmp_path))
    assert re.match("## syncheck: OUT OF SYNC, .*1 file", page)
    assert re.search(r"\n- `[^`]*rank2\.pth`: ", page)


@pytest.mark.parametrize("name", HOSTILE, ids=shorten)
def test_names_are_escaped(name: str) -> None:
    """With every hostile name the page has the same blocks, and special characters are in code spans only."""
    page = markdown.render(hostile(name))
    assert is_printable(page)
    tokens, calm = parse(page), parse(markdown.render(hostile("calm")))
    inner = {"text", "code_inline"}
    # No additional heading, list, table, rule or paragraph.
    assert [t.type for t in tokens if t.type not in inner] == [t.type for t in calm if t.type not in inner]
    assert [t.content for t in tokens if t.type.startswith("html")] == [
        t.content for t in calm if t.type.startswith("html")
    ]
    bare = "\n".join(list_fields(find_all(tokens, type="text"), "content"))
    assert not re.search(r"[@#<>`\[\]\\*_~$&]|://|www\.|\bGH-\d|:\w+:|\b4f0c", bare.replace("0 | 1", "")), bare
    rows = find_texts(page.splitlines(), start="|")
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {8}


def test_the_bare_text_check_can_fail() -> None:
    """The test above detects a mention that is not escaped."""
    tokens = parse("- **What:** a @team `b`")
    assert [token.content for token in tokens if token.type == "text" and "@" in token.content] == [" a @team "]


def test_long_names_are_shortened_in_the_middle() -> None:
    """Plain names are unchanged, backticks and bars are escaped, and long names keep both ends."""
    assert markdown.name("layer1.0.bn1.running_mean") == "`layer1.0.bn1.running_mean`"
    assert markdown.name("a`b|c") == r"`a\x60b\x7cc`"
    long = markdown.name("first." + "x" * 500 + ".last")
    assert len(long) == 202
    assert long.startswith("`first.x")
    assert long.endswith("x.last`")
    assert markdown.name("") == "`(blank)`"


class Example(Sentence):
    """A sentence with every part."""

    ALL = (
        "[call] `dist.all_reduce(bad, op=MAX)` for {name:name} and {names:names 2}, with {text}; {prefix:quoted} and "
        "{values:by_rank} by {allow:option=SYN201} ({pattern!r}, {shapes:on_ranks})"
    )


def test_names_and_code_are_spans() -> None:
    """Names, values, code and options are code spans of their own; the words of the sentence are escaped."""
    message = Example.ALL(
        name="a plain name",
        names=("w", "x @team", "y"),
        text="a file with @team in it",
        prefix="module.",
        values={0: "adam", 1: 0.5},
        pattern="(.*)_rank",
        shapes=(((4, 3), (0,)), ((3, 4), (1,))),
    )
    assert message.render(markdown.write) == (
        r"\[call\] `dist.all_reduce(bad, op=MAX)` for `a plain name` and `w`, `x @team` and 1 more, with a file with "
        "`@team` in it; `module.` and `'adam'` on rank 0 and 0.5 on rank 1 by `allow='SYN201'` (`'(.*)_rank'`, "
        "`[4, 3]` on rank 0 and `[3, 4]` on rank 1)"
    )


def test_code_in_sentences_is_between_backticks() -> None:
    """Every template has pairs of backticks, so that the code in it is a code span."""
    for rule in list_rules():
        for sentence in rule.sentences:
            pieces = [literal for literal, *_ in Formatter().parse(sentence.value)]
            assert not [piece for piece in pieces if piece.count("`") % 2], sentence


def test_other_texts_stay_sentences() -> None:
    """In texts from files, only words with special characters become code spans, without punctuation."""
    assert markdown.text("All 23 agree; see running_mean (in bn_1), x@y.") == (
        "All 23 agree; see `running_mean` (in `bn_1`), `x@y`."
    )
    assert markdown.text("call convert_it(model).") == "call `convert_it(model)`."
    assert markdown.text("rank 0's, at 50%: a/b --allow SYN201") == "rank 0's, at 50%: a/b --allow SYN201"


@pytest.mark.parametrize(
    "name", ["x" * 5000, "_ " * 5000, "`" * 5000, "\x00" * 5000, "\u4e2d|" * 3000, "(" * 5000 + "@a", "calm"]
)
@pytest.mark.parametrize("groups", [1, 30, 800])
def test_a_page_fits_into_a_comment(name: str, groups: int) -> None:
    """With many groups, findings, tensors and long names, the page fits and contains verdict, counts and omissions."""
    first = hostile(name)
    diffs = first.groups[0].tensors * 1000
    scattered = tuple(tuple(range(i, 2048, 4)) for i in range(4))
    diffs = tuple(replace(diff, clusters=scattered) for diff in diffs)
    finding = replace(first.groups[0].findings[0], ranks=scattered[0])
    bad = [
        replace(first.groups[0], run=f"{i}", name=f"{i}{name}", tensors=diffs, findings=(finding,) * 8)
        for i in range(groups)
    ]
    alone, in_sync = replace(first.groups[3]), first.groups[2]
    report = replace(
        first,
        groups=(*bad, *[alone] * groups, *[in_sync] * groups),
        unreadable=first.unreadable * groups,
        closures=first.closures * groups,
    )
    page = markdown.render(report)
    assert len(page) <= markdown.MOST
    assert page.startswith("## syncheck: OUT OF SYNC, and ")
    assert words.counts_line(report) in page
    assert "SYN201" in page
    drawn = len(re.findall(r"^(?:### |- )`\d+.*: OUT OF SYNC", page, re.MULTILINE))
    hidden = re.search(r"\.\.\. and (\d+) more groups", page)
    assert drawn + (int(hidden[1]) if hidden else 0) == groups
    assert (hidden is None) <= (groups <= 30)
    # With harmless names there is room for the table, even with long lists of ranks.
    assert (name == "calm") <= ("| tensor |" in page)
    if groups > 10:
        assert f"\n- and {groups - 10} more\n" in page
        assert page.count(f" and {groups - 10} more\n") == 2
        assert page.count(f" and {groups - 6} more\n") == 1
