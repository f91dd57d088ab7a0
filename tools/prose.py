"""Measure how plain the English of documents and code is.

    python tools/prose.py --max --strings syncheck train docs README.md    # exit code 1 above a limit
    python tools/prose.py --list 40 syncheck/cli    # the densest sentences, to rewrite first

The script counts words that plain technical English seldom needs, per 1,000 words of text. In Python files, the text is
docstrings and comments, and with `--strings` also string literals of at least five words, such as messages. In Markdown
files, it is everything except code blocks, inline code and link targets.

A high rate is a symptom. Rewrite the sentence with a noun and a verb instead of replacing the counted word.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class Measure(NamedTuple):
    """A pattern to count, and the limit of its rate per 1,000 words."""

    pattern: re.Pattern[str]
    limit: float


_PRONOUNS = (
    r"\b(?:those|these|others|ones|such)\b"
    # "one" and "none" are pronouns before punctuation and before these words; "one rank" is a number.
    r"|\b(?:one|none)\b(?=\s*(?:[.,;:)]|of\b|that\b|which\b|who\b|for\b|in\b|is\b|has\b|and\b|$))"
)
# The limits are about twice the highest rates of structlog, pip-audit, pre-commit, pytest-xdist, Accelerate and
# torchmetrics.
MEASURES = {
    "what": Measure(re.compile(r"\bwhat\b", re.IGNORECASE), 1.5),
    "where": Measure(re.compile(r"\bwhere\b", re.IGNORECASE), 2.5),
    "tell/say": Measure(re.compile(r"\b(?:tell|tells|told|telling|say|says|said|saying)\b", re.IGNORECASE), 1.5),
    "that": Measure(re.compile(r"\bthat\b", re.IGNORECASE), 13.0),
    "pronouns": Measure(re.compile(_PRONOUNS, re.IGNORECASE), 5.0),
    "fronted of": Measure(re.compile(r"(?:^|[.;:]\s+)Of\b"), 0.1),
    "for = because": Measure(
        re.compile(r", for (?:it|they|the|a|an|this|that|there|each|all|no)\b", re.IGNORECASE), 0.1
    ),
}
# "that" is frequent in plain English too, so it does not make a sentence dense.
_DENSE = {name: measure for name, measure in MEASURES.items() if name != "that"}
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
_DIRECTIVE = re.compile(r"#\s*(?:noqa|type:|ruff|!|pragma)")
_SHORTEST_MESSAGE = 5  # words; shorter literals are mostly keys and names
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Passage(NamedTuple):
    """A docstring, comment, message, or line of Markdown, and its location."""

    path: Path
    line: int
    text: str

    def count_words(self) -> int:
        """Return the number of words."""
        return len(_WORD.findall(self.text))


def read_passages(paths: Iterable[Path], *, strings: bool = False) -> list[Passage]:
    """Return the passages of Python and Markdown files. paths: files and folders. strings: include string literals."""
    passages: list[Passage] = []
    for root in paths:
        for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
            if path.suffix == ".py":
                passages += _read_python(path, strings=strings)
            elif path.suffix == ".md":
                passages += _read_markdown(path)
    return passages


def _read_python(path: Path, *, strings: bool) -> Iterator[Passage]:
    source = path.read_text(encoding="utf-8", errors="replace")
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:
        return  # a file that a test damages on purpose
    docstrings = set()
    for node in nodes:
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            statement = node.body[0]
            assert isinstance(statement, ast.Expr)
            docstrings.add(id(statement.value))
            yield Passage(path, statement.lineno, text)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not _DIRECTIVE.match(token.string):
            yield Passage(path, token.start[0], token.string.lstrip("# "))
    for node in nodes if strings else ():
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and id(node) not in docstrings:
            passage = Passage(path, node.lineno, _literal_text(node))
            if passage.count_words() >= _SHORTEST_MESSAGE:
                yield passage


def _literal_text(node: ast.Constant | ast.JoinedStr) -> str:
    """Return the text of a string literal, with a placeholder for each value of an f-string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)


def _read_markdown(path: Path) -> Iterator[Passage]:
    fenced = False
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and line.strip() and not line.startswith("    "):
            # Each cell of a table counts as a sentence.
            yield Passage(path, number, re.sub(r"`[^`]*`|\]\([^)]*\)", " ", line.replace("|", " . ")))


def measure_rates(passages: Sequence[Passage]) -> dict[str, float]:
    """Return the rate of each measure per 1,000 words. Raises ValueError without any word."""
    words = sum(passage.count_words() for passage in passages)
    if not words:
        raise ValueError("no text found")
    return {
        name: 1000 * sum(_count(measure, passage.text) for passage in passages) / words
        for name, measure in MEASURES.items()
    }


def find_exceeded(rates: dict[str, float]) -> list[str]:
    """Return the measures whose rate is above the limit."""
    return [name for name, rate in rates.items() if rate > MEASURES[name].limit]


def find_dense_sentences(passages: Iterable[Passage], most: int) -> list[Passage]:
    """Return the sentences with the most matches per word: at least two matches, and at least six words."""
    found: list[tuple[float, Passage]] = []
    for passage in passages:
        for text in re.split(r"(?<=[.;:])\s+", passage.text.replace("\n", " ")):
            sentence = passage._replace(text=text)
            words, matches = sentence.count_words(), sum(_count(measure, text) for measure in _DENSE.values())
            if words >= 6 and matches >= 2:
                found.append((matches / words, sentence))
    found.sort(key=lambda item: item[0], reverse=True)
    return [sentence for _, sentence in found[:most]]


def _count(measure: Measure, text: str) -> int:
    return len(measure.pattern.findall(text))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the rates, and return the exit code: 1 if a limit is exceeded and `--max` was given, otherwise 0."""
    parser = argparse.ArgumentParser(
        description="Measure how plain the English of documents and code is.", allow_abbrev=False
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="Python and Markdown files, and folders")
    parser.add_argument("--max", action="store_true", help="exit with 1 if a rate exceeds its limit")
    parser.add_argument("--strings", action="store_true", help="include string literals of at least five words")
    parser.add_argument("--list", type=int, default=0, metavar="N", help="print the N densest sentences")
    given = parser.parse_args(arguments)
    passages = read_passages(given.paths, strings=given.strings)
    try:
        rates = measure_rates(passages)
    except ValueError as error:
        parser.error(str(error))
    for path, line, text in find_dense_sentences(passages, given.list):
        print(f"{path}:{line}: {text[:200]}")
    exceeded = find_exceeded(rates)
    words = sum(passage.count_words() for passage in passages)
    listed = ", ".join(f"{name} {rate:.1f}{'!' if name in exceeded else ''}" for name, rate in rates.items())
    print(f"{words} words; per 1,000: {listed}")
    return 1 if given.max and exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
