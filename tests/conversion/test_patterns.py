"""Patterns of modules match as `re` does in PEFT, in bounded time."""

from __future__ import annotations

import random
import re
import time
import warnings

import pytest

from syncheck.conversion.patterns import Budget, UnsupportedPatternError, find_pattern, find_segment_ends, matches_whole

TOKENS = (
    r"model layers q_proj \. . \d \w \s \D [0-9] [^a-c] []a] [a-] [\d_] ( ) (?: | * + ? {2} {1,3} {,2} {2,} *? +? ?? ^ "
    r"$ 1 0 23 a b _ - [.a] \- } ] {"
).split()
NAMES = (
    "model.layers.0.self_attn.q_proj", "model.layers.10.q_proj", "a", "b.a", "aab", "q_proj", "", "x-y.a-b", "a.\nb",
    "ab\n", "é.a1", "module", "0.1.23", "model.layers.1.mlp.experts.3.w1",
)  # fmt: skip


def match_with_re(patterns: list[str], name: str) -> str | None:
    """Return the first pattern that matches, as PEFT's get_pattern_key does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about possible set operations in a class
        return next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", name)), None)


def test_random_patterns_match_as_in_re() -> None:
    """Supported patterns have the result of `re`, also for unusual names, and an invalid pattern is never supported."""
    draw = random.Random(1)
    supported, matching = 0, 0
    for _ in range(6000):
        patterns = ["".join(draw.choices(TOKENS, k=draw.randint(1, 6))) for _ in range(draw.randint(1, 2))]
        name = draw.choice(NAMES)
        try:
            pattern = find_pattern(patterns, name, Budget())
        except UnsupportedPatternError:
            continue
        assert pattern == match_with_re(patterns, name), (patterns, name)
        supported, matching = supported + 1, matching + (pattern is not None)
    assert supported > 1000
    assert matching > 80


@pytest.mark.parametrize(
    "pattern",
    [r"(a*)*b", r"(a|a)*b", r"(a+)+$x", r"(.*)*(.*)*(.*)*x", r"(a|b|ab)*c" * 20, r"((a{0,900}){0,900}){0,900}b",
     "(" * 5000, "a" * 5000, "(?:" * 300 + ")" * 300, r"(\w+\.)*" * 100 + "x"],
)  # fmt: skip
def test_time_is_bounded(pattern: str) -> None:
    """Patterns with exponential time in `re` take a moment, or are refused."""
    started = time.monotonic()
    for name in ("a" * 40, "a" * 1000, "a." * 500):
        try:
            assert find_pattern([pattern], name, Budget()) is None
        except UnsupportedPatternError:
            continue
    assert time.monotonic() - started < 5


def test_the_budget_is_for_all_modules() -> None:
    """Many patterns and modules stop at the budget."""
    budget, patterns = Budget(3000), [rf"layers\.{i}\..*" for i in range(100)]
    assert find_pattern(patterns, "model.layers.7.q", budget) == patterns[7]
    with pytest.raises(UnsupportedPatternError):
        find_pattern(patterns * 10, "model.layers.x.q", budget)


@pytest.mark.parametrize(
    "pattern", ["(?i)a", "(?=a)", "(?!a)", r"(a)\1", r"\ba", "a*+", "(?>a)", r"\Z", "a{", "(", "[a"]
)
def test_other_constructs_are_refused(pattern: str) -> None:
    """What is not supported is refused, unless an earlier pattern matches."""
    with pytest.raises(UnsupportedPatternError):
        find_pattern([pattern], "a", Budget())
    assert find_pattern(["a", pattern], "model.a", Budget()) == "a"


@pytest.mark.slow
def test_whole_names_and_starts_as_in_re() -> None:
    """Random patterns match whole names as `re.fullmatch` does, and the ends of matches are those of `re`."""
    draw = random.Random(3)
    compared, matching = 0, 0
    for _ in range(4000):
        pattern = "".join(draw.choices(TOKENS, k=draw.randint(1, 5)))
        name = draw.choice(NAMES)
        try:
            is_match = matches_whole(pattern, name, Budget())
            ends = find_segment_ends(pattern, name, Budget())
        except UnsupportedPatternError:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert is_match == (re.fullmatch(pattern, name) is not None), (pattern, name)
            # The rest of the name is a literal of the expression, so that `re` finds a match with this end.
            expected = [
                end
                for end in range(len(name) + 1)
                if re.match(rf"(?:^|.*?\.)(?:{pattern})(?<=\A[\s\S]{{{end}}})", name) is not None
            ]
        assert ends == expected, (pattern, name)
        compared, matching = compared + 1, matching + is_match
    assert compared > 1000
    assert matching > 15


def test_digits_of_other_alphabets() -> None:
    """`re` takes braces with other digits as literals, so they are no quantifier; numbers in ASCII are."""
    assert re.fullmatch("a{\u0663}", "aaa") is None
    with pytest.raises(UnsupportedPatternError):
        find_pattern(["a{\u0663}"], "aaa", Budget())
    with pytest.raises(UnsupportedPatternError):
        matches_whole("a{1,\u0663}", "aaa", Budget())
    assert find_pattern(["a{3}"], "aaa", Budget()) == "a{3}"
    # Such a digit is one of the characters of a category.
    assert matches_whole(r"\d", "\u0663", Budget())
