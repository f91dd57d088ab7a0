"""Words for ranks, names and numbers: text from files becomes short, printable and unique."""

from __future__ import annotations

import pytest

from syncheck.text import group_ranks, make_unique_name, number_text, shorten


@pytest.mark.parametrize(
    ("text", "most", "short"),
    [
        ("layer.weight", 12, "layer.weight"),
        ("0123456789abcdef", 10, "012...cdef"),
        ("a\nb", 10, "a\\nb"),
        ("", 10, ""),
    ],
)
def test_long_text_keeps_both_ends(text: str, most: int, short: str) -> None:
    """A long text loses its middle, and line breaks are escaped."""
    assert shorten(text, most) == short


@pytest.mark.parametrize("most", [10, 11, 120, 400])
def test_huge_text_of_escapes_is_bounded(most: int) -> None:
    """A text of a million control characters becomes one printable line of the maximum length, in bounded time."""
    line = shorten("\x00" * 10**6, most)
    assert len(line) == most
    assert line.isprintable()


def test_repeated_names_get_numbers() -> None:
    """A name that is taken gets the first free number, also if a numbered name is taken."""
    assert make_unique_name("a", {"b"}) == "a"
    assert make_unique_name("a", {"a", "a#2"}) == "a#3"
    assert make_unique_name("a", {"a"}, "-", first=7) == "a-7"


def test_ranks_of_each_value() -> None:
    """Values come in the order of their first rank."""
    assert group_ranks({0: "x", 2: "y", 1: "x"}) == {"x": [0, 1], "y": [2]}


@pytest.mark.parametrize(
    ("number", "digits", "text"),
    [
        (1.000001, 6, "1.000001"),
        (-0.99999999, 3, "-0.99999999"),
        (1.0, 6, "1"),
        (0.99912, 3, "0.999"),
        (2.0000001, 6, "2"),
        (float("inf"), 6, "inf"),
    ],
)
def test_numbers_other_than_1_differ_from_it(number: float, digits: int, text: str) -> None:
    """A factor of 1 would be no difference. All other numbers have the digits that they should have."""
    assert number_text(number, digits) == text
