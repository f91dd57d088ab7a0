"""Code in the sentences of a finding is on one line of a terminal, and unmarked everywhere."""

from __future__ import annotations

import pytest

from syncheck.report import plain, terminal
from syncheck.report.parts import Labels
from syncheck.report.unbroken import escape_marked, write_unbroken
from syncheck.sentences import Sentence

CODE = "for b in model.buffers(): dist.broadcast(b, 0)"


class Text(Sentence):
    """A fix with code and a name of a file."""

    FIX = (
        "Call eval, then, on every rank and before saving: `for b in model.buffers(): dist.broadcast(b, 0)`. See "
        "{name:name}."
    )


def draw(width: int, name: str = "a.pth") -> list[str]:
    """Return the lines on a terminal."""
    sentence = escape_marked(Text.FIX(name=name).render(write_unbroken))
    return terminal.render([Labels((("fix", sentence),), indent=4)], width, color=False).splitlines()


@pytest.mark.parametrize("width", range(len(CODE) + 11, 121))
def test_code_that_fits_is_on_one_line(width: int) -> None:
    """At every width with room for the code, a line has all of it, and no line is longer than the terminal."""
    lines = draw(width)
    assert sum(CODE in line for line in lines) == 1
    assert max(map(len, lines)) <= width
    assert " ".join(" ".join(lines).split()).startswith("fix Call eval, then, on every rank")


def test_longer_code_starts_a_line() -> None:
    """Code that is longer than a line is broken at its spaces, from the start of a line."""
    lines = draw(40)
    assert any(line.strip().startswith("for b in model.buffers():") for line in lines)
    assert max(map(len, lines)) <= 40
    assert CODE in " ".join(" ".join(lines).split())


def test_no_mark_is_printed() -> None:
    """A pipe gets the sentence in one line, and the mark in a name of a file is escaped."""
    name = "a\uf8feb"
    sentence = escape_marked(Text.FIX(name=name).render(write_unbroken))
    printed = plain.render([Labels((("fix", sentence),))])
    assert CODE in printed
    assert r"a\uf8feb" in printed
    assert "\uf8fe" not in printed + "".join(draw(80, name))
