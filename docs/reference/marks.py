"""Convert docstrings and help texts to Markdown."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_CODE = re.compile(r"(`[^`]*`)")
_COMMENT = re.compile(r"(\S) +# ")  # `ruff format` puts two spaces before a comment, in Markdown too
# An underscore inside a word is no markup.
_STEERS = re.compile(r"[*<>\[\]|]|(?<!\w)_|_(?!\w)")


def escaped(text: str) -> str:
    """Escape Markdown markup, except inside `code`."""
    parts = _CODE.split(text)
    return "".join(part if i % 2 else _STEERS.sub(r"\\\g<0>", part) for i, part in enumerate(parts))


def cell(text: str) -> str:
    """Escape a text for a table cell. A bar ends a cell even inside `code`, so it is escaped there too."""
    parts = _CODE.split(" ".join(text.split()))
    return "".join(part.replace("|", "\\|") if i % 2 else escaped(part) for i, part in enumerate(parts))


def code(text: str) -> str:
    """Format a text as code; the result is also valid in a table cell."""
    return f"`{text}`".replace("|", "\\|")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. rows: escaped cells."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def phrase(text: str) -> str:
    """Format the meaning of a field for a cell: a capital first, and no full stop after a single sentence."""
    text = text.rstrip(";")
    text = text if ". " in text else text.removesuffix(".")
    return cell(text[:1].upper() + text[1:])


def paragraphs(text: str, names: Iterable[str] = ()) -> str:
    """Convert a docstring: paragraphs are escaped, indented lines become code blocks.

    names: arguments or fields; their descriptions (`step, epoch: completed steps.`) become list items.
    """
    made: list[str] = []
    for paragraph in text.strip("\n").split("\n\n"):
        lines = paragraph.split("\n")
        if all(line.startswith("    ") or not line for line in lines):
            program = "\n".join(_COMMENT.sub(r"\1  # ", line[4:]) for line in lines)
            made.append(f"```python\n{program}\n```")
            continue
        for described, meaning in split_items(" ".join(line.strip() for line in lines), names):
            listed = ", ".join(f"`{name}`" for name in described)
            item = f"- {listed}: {escaped(meaning)}" if described else escaped(meaning)
            follows = bool(made) and bool(described) and made[-1].startswith("- ")
            made[-1:] = [f"{made[-1]}\n{item}"] if follows else [*made[-1:], item]
    # An empty line does not end a program.
    return "\n\n".join(made).replace("\n```\n\n```python\n", "\n\n")


def split_items(text: str, names: Iterable[str]) -> list[tuple[tuple[str, ...], str]]:
    """Split a paragraph into descriptions of names and text without a name (`Raises ...`)."""
    one = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    if not one:
        return [((), text)]
    named = rf"(?:{one})(?:(?:, | and )(?:{one}))*(?: \(both\))?(?:, (?:{one}))*"
    begins = re.compile(rf"(?:^|(?<=[.;] ))({named}): |(?<=\. )(?=Returns |Raises )")
    found: list[tuple[tuple[str, ...], str]] = []
    last, described = 0, ()
    for match in begins.finditer(text):
        if text[last : match.start()].strip():
            found.append((described, text[last : match.start()].strip()))
        described = tuple(re.findall(rf"\b(?:{one})\b", match[1])) if match[1] else ()
        last = match.end()
    return [*found, (described, text[last:].strip())]


def split_fields(text: str, fields: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Split the docstring of a class into the text and the descriptions of its fields."""
    of_fields: dict[str, str] = dict.fromkeys(fields, "")
    kept = []
    for paragraph in text.split("\n\n"):
        if paragraph.startswith("    "):
            kept.append(paragraph)
            continue
        rest = []
        for described, meaning in split_items(" ".join(paragraph.split()), fields):
            of_fields |= dict.fromkeys(described, meaning)
            rest += [] if described else [meaning]
        kept += [" ".join(rest)] if rest else []
    return "\n\n".join(kept), of_fields
