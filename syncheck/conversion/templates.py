"""Templates of names: literal text with placeholders, as in `layers.{i}.attn.weight`.

A placeholder stands for at least one character of one part of a name, so it contains no dot. Braces of a name are
doubled: `{{` and `}}`. Names come from files, so they are never formatted and never become a regular expression:
matching takes time proportional to the length of the name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# Limit of the placeholders of one template: more than any name of a model has.
MOST_PLACEHOLDERS = 8
_TOKEN = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_]{0,31})\}|[{}]")


@dataclass(frozen=True, slots=True)
class Template:
    """A parsed template.

    literals: the text before, between and after the placeholders.
    placeholders: their names, one fewer than literals.
    """

    literals: tuple[str, ...]
    placeholders: tuple[str, ...]

    def match(self, name: str) -> dict[str, str] | None:
        """Return the values of the placeholders if the whole name matches, else None.

        Each value is as short as possible.
        """
        if not self.placeholders:
            return {} if name == self.literals[0] else None
        first, last = self.literals[0], self.literals[-1]
        if not name.startswith(first) or not name.endswith(last):
            return None
        values: dict[str, str] = {}
        start, end = len(first), len(name) - len(last)
        # All placeholders but the last end where the next literal begins.
        for placeholder, literal in zip(self.placeholders, self.literals[1:-1], strict=False):
            stop = name.find(literal, start + 1, end)
            values[placeholder] = name[start : max(start, stop)]
            start = stop + len(literal)
        values[self.placeholders[-1]] = name[start:end]
        for value in values.values():
            if not value or "." in value:
                return None
        return values

    def fill(self, values: Mapping[str, str]) -> str:
        """Return the name with these values of the placeholders."""
        pieces = [self.literals[0]]
        for placeholder, literal in zip(self.placeholders, self.literals[1:], strict=True):
            pieces += [values[placeholder], literal]
        return "".join(pieces)


@lru_cache(maxsize=1 << 14)
def parse_template(text: str) -> Template:
    """Return the parsed template. Raises ValueError with the reason for text that is not a template."""
    literals = [""]
    placeholders: list[str] = []
    start = 0
    for token in _TOKEN.finditer(text):
        literals[-1] += text[start : token.start()]
        start = token.end()
        if token[0] in ("{{", "}}"):
            literals[-1] += token[0][0]
            continue
        if not token[1]:
            raise ValueError("a placeholder is a name in braces, such as {i}; literal braces are doubled")
        # Between two placeholders, nothing shows where the first of them ends.
        if placeholders and not literals[-1]:
            raise ValueError("two placeholders need a separator")
        placeholders.append(token[1])
        literals.append("")
    literals[-1] += text[start:]
    if len(placeholders) > MOST_PLACEHOLDERS:
        raise ValueError(f"{len(placeholders)} placeholders; at most {MOST_PLACEHOLDERS} are allowed")
    return Template(tuple(literals), tuple(placeholders))


def escape(name: str) -> str:
    """Return the template that matches only this name."""
    return name.replace("{", "{{").replace("}", "}}")
