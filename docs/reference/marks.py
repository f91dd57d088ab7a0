"""Texts of the code as Markdown."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_CODE = re.compile(r"(`[^`]*`)")
_COMMENT = re.compile(r"(\S) +# ")  # `ruff format` has two spaces before it, in Markdown too
# Inside a word an underscore means nothing to Markdown.
_STEERS = re.compile(r"[*<>\[\]|]|(?<!\w)_|_(?!\w)")


def escaped(text: str) -> str:
    """Escape what Markdown would take for markup, outside of `code`."""
    parts = _CODE.split(text)
    return "".join(part if i % 2 else _STEERS.sub(r"\\\g<0>", part) for i, part in enumerate(parts))


def cell(text: str) -> str:
    """Write a text for a cell of a table, where a bar ends the cell in code too."""
    parts = _CODE.split(" ".join(text.split()))
    return "".join(part.replace("|", "\\|") if i % 2 else escaped(part) for i, part in enumerate(parts))


def code(text: str) -> str:
    """Write a text as code, for a cell of a table too."""
    return f"`{text}`".replace("|", "\\|")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. rows: of cells that are escaped already."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def phrase(text: str) -> str:
    """Write what is said of a field for a cell: it begins with a capital, and one sentence alone has no full stop."""
    text = text.rstrip(";")
    text = text if ". " in text else text.removesuffix(".")
    return cell(text[:1].upper() + text[1:])


def paragraphs(text: str, names: Iterable[str] = ()) -> str:
    """Write a docstring: its paragraphs escaped, its indented lines as they are.

    names: of arguments or fields; what the text says of each, as in `step, epoch: steps done.`, becomes an item.
    """
    made: list[str] = []
    for paragraph in text.strip("\n").split("\n\n"):
        lines = paragraph.split("\n")
        if all(line.startswith("    ") or not line for line in lines):
            program = "\n".join(_COMMENT.sub(r"\1  # ", line[4:]) for line in lines)
            made.append(f"```python\n{program}\n```")
            continue
        for said, says in items(" ".join(line.strip() for line in lines), names):
            item = f"- {', '.join(f'`{name}`' for name in said)}: {escaped(says)}" if said else escaped(says)
            follows = bool(made) and bool(said) and made[-1].startswith("- ")
            made[-1:] = [f"{made[-1]}\n{item}"] if follows else [*made[-1:], item]
    # A program with an empty line in it is one program.
    return "\n\n".join(made).replace("\n```\n\n```python\n", "\n\n")


def items(text: str, names: Iterable[str]) -> list[tuple[tuple[str, ...], str]]:
    """Take a paragraph apart into what it says of names, and the rest under no name; `Raises ...` is rest again."""
    one = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    if not one:
        return [((), text)]
    named = rf"(?:{one})(?:(?:, | and )(?:{one}))*(?: \(both\))?(?:, (?:{one}))*"
    begins = re.compile(rf"(?:^|(?<=[.;] ))({named}): |(?<=\. )(?=Returns |Raises )")
    found: list[tuple[tuple[str, ...], str]] = []
    last, said = 0, ()
    for match in begins.finditer(text):
        if text[last : match.start()].strip():
            found.append((said, text[last : match.start()].strip()))
        said = tuple(re.findall(rf"\b(?:{one})\b", match[1])) if match[1] else ()
        last = match.end()
    return [*found, (said, text[last:].strip())]


def told(text: str, fields: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Take out of a class's docstring what it says of its fields; returns the rest, and that by field."""
    of_fields: dict[str, str] = dict.fromkeys(fields, "")
    kept = []
    for paragraph in text.split("\n\n"):
        if paragraph.startswith("    "):
            kept.append(paragraph)
            continue
        rest = []
        for said, says in items(" ".join(paragraph.split()), fields):
            of_fields |= dict.fromkeys(said, says)
            rest += [] if said else [says]
        kept += [" ".join(rest)] if rest else []
    return "\n\n".join(kept), of_fields
