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

_TOKEN = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]{0,31})\}|(\{\{|\}\}|[^{}]+)|([{}])")
_BRACES = {"{{": "{", "}}": "}"}


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
        first, last = self.literals[0], self.literals[-1]
        # Most names that do not match end here.
        if not name.startswith(first):
            return None
        # The first and the last literal enclose all values.
        remaining = name.removeprefix(first).removesuffix(last)
        texts = []
        # All values but the last end where the next literal begins.
        for literal in self.literals[1:-1]:
            # A value has at least one character. Without the literal, the values do not give the name.
            end = remaining.find(literal, 1)
            texts.append(remaining[:end])
            remaining = remaining[end + len(literal) :]
        texts.append(remaining)
        # Without placeholders, the remaining text is no value.
        values = dict(zip(self.placeholders, texts, strict=False))
        # A value is a part of a name, so it contains no dot.
        joined = "".join(values.values())
        is_valid = "." not in joined and "" not in values.values()
        # Names without one of the literals differ from the filled template.
        return values if is_valid and self.fill(values) == name else None

    def fill(self, values: Mapping[str, str]) -> str:
        """Return the name with these values of the placeholders."""
        name = self.literals[0]
        for placeholder, literal in zip(self.placeholders, self.literals[1:], strict=True):
            name += values[placeholder] + literal
        return name


@lru_cache(maxsize=1 << 14)
def parse_template(text: str) -> Template:
    """Return the parsed template. Raises ValueError with the reason for text that is not a template."""
    literals = [""]
    placeholders = []
    for placeholder, literal, brace in _TOKEN.findall(text):
        if brace:
            raise ValueError("a placeholder is a name in braces, such as {i}; literal braces are doubled")
        # The next literal begins after a placeholder.
        if placeholder:
            placeholders.append(placeholder)
            literals.append("")
        # Doubled braces stand for themselves.
        literals[-1] += _BRACES.get(literal, literal)
    # Between two placeholders, nothing shows where the first of them ends.
    if "" in literals[1:-1]:
        raise ValueError("two placeholders need a separator")
    return Template(tuple(literals), tuple(placeholders))


def escape(name: str) -> str:
    """Return the template that matches only this name."""
    return name.replace("{", "{{").replace("}", "}}")
