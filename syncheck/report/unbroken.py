"""Sentences for a terminal whose code is not broken across lines.

Spaces in code are marked until the width of the terminal is known, so that a reader can copy each command.
"""

from __future__ import annotations

from syncheck.report.long_names import write_names
from syncheck.sentences import Part
from syncheck.text import one_line

# Takes the place of a space in code. A private character cannot occur in a name, where it is escaped.
_MARK = "\uf8fe"


def write_unbroken(text: str, part: Part) -> str:
    """Write the parts of a sentence with marks that keep code on one line. `unmark` or `fit` removes them."""
    if part is Part.CODE:
        return text.replace(" ", _MARK)
    # Escapes the mark itself.
    return one_line(write_names(text, part))


def escape_marked(text: str) -> str:
    """Escape a sentence by `write_unbroken`, but not its marks."""
    return _MARK.join(map(one_line, text.split(_MARK)))


def unmark(text: str) -> str:
    """Return a sentence by `write_unbroken` without marks."""
    return text.replace(_MARK, " ")


def fit(text: str, width: int) -> str:
    """Return a sentence by `write_unbroken`, with code and names that are longer than a line on lines of their own.

    Such code has no marks. width: columns.
    """
    words = []
    for word in text.split(" "):
        if len(word) > width:
            # Between spaces, as the word was.
            word = f"\n{unmark(word)}"
        words.append(word)
    return " ".join(words).lstrip("\n")
