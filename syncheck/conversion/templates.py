"""Templates of names: literal text with placeholders, as in `layers.{i}.attn.weight`.

A placeholder stands for at least one character of one part of a name, so it contains no dot. Braces of a name are
doubled: `{{` and `}}`. Names come from files, so they are never formatted and never become a regular expression:
matching takes time proportional to the length of the name.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from syncheck.frozen import record

if TYPE_CHECKING:
    from collections.abc import Mapping

# Limit of the placeholders of one template: more than any name of a model has.
MOST_PLACEHOLDERS = 8
# A literal up to the next placeholder, a placeholder, or a brace that belongs to neither.
_TOKEN = re.compile(r"((?:[^{}]|\{\{|\}\})+)|\{([A-Za-z_][A-Za-z0-9_]{0,31})\}|[{}]")


@record
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
        # Most names do not match, which their start tells.
        if not name.startswith(self.literals[0]):
            return None
        first, *separators, last = self.literals
        values_text = name[len(first) : len(name) - len(last)]
        # The literals at both ends may not overlap.
        if name != first + values_text + last:
            return None

        values = []
        for separator in separators:
            # A value has at least one character, so its separator cannot begin at this character.
            begin = values_text[:1]
            end, _, values_text = values_text[1:].partition(separator)
            values.append(begin + end)
        # Without a separator, no text remains for the last value.
        values.append(values_text)
        if not all(values) or "." in "".join(values):
            return None
        return dict(zip(self.placeholders, values, strict=True))

    def fill(self, values: Mapping[str, str]) -> str:
        """Return the name with these values of the placeholders."""
        segments = [self.literals[0]]
        for placeholder, literal in zip(self.placeholders, self.literals[1:], strict=True):
            segments += [values[placeholder], literal]
        return "".join(segments)


@lru_cache(maxsize=1 << 14)
def parse_template(text: str) -> Template:
    """Return the parsed template. Raises ValueError with the reason for text that is not a template."""
    literals = [""]
    placeholders: list[str] = []
    for token in _TOKEN.finditer(text):
        literal, placeholder = token.groups()
        if literal:
            literals[-1] = _unescape(literal)
        elif placeholder:
            placeholders.append(placeholder)
            # Between two placeholders, nothing shows where the first of them ends.
            if "" in literals[1:]:
                raise ValueError("two placeholders need a separator")
            literals.append("")
        else:
            raise ValueError("a placeholder is a name in braces, like {i}; literal braces are doubled")

    if len(placeholders) > MOST_PLACEHOLDERS:
        raise ValueError(f"{len(placeholders)} placeholders; at most {MOST_PLACEHOLDERS} are allowed")
    return Template(tuple(literals), tuple(placeholders))


def escape(name: str) -> str:
    """Return the template that matches only this name."""
    return name.replace("{", "{{").replace("}", "}}")


def _unescape(literal: str) -> str:
    """Return the text of a name that a literal matches."""
    return literal.replace("{{", "{").replace("}}", "}")
