"""Compare the order of the parts of a fused tensor with the order that its name states: `gate_up`, `wqkv`, `w13`."""

from __future__ import annotations

import itertools
import re
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.conversion.name_maps import Rule

# The number of orders grows fast.
_MOST_PARTS = 4


def find_stated_order(rule: Rule) -> tuple[str, ...]:
    """Return the labels of the parts in the order of the fused name, if it contradicts the rule; else ()."""
    if not 1 < len(rule.parts) <= _MOST_PARTS:
        return ()
    labels = list_labels(rule.parts)
    if not labels:
        return ()
    components = rule.name.lower().split(".")
    # The first permutation is the order of the rule.
    for order in itertools.permutations(labels):
        spellings = _spell_order(order)
        if any(_has_spelling(component, spellings) for component in components):
            return order if order != labels else ()
    return ()


def list_labels(parts: Sequence[str]) -> tuple[str, ...]:
    """Return the words that distinguish the names of parts: `gate` and `up` for `gate_proj` and `up_proj`.

    Empty if two parts have one label, or a part has none.
    """
    common_words = set(_split_words(parts[0])).intersection(*map(_split_words, parts))
    labels = []
    for part in parts:
        own_words = [word for word in _split_words(part) if word not in common_words]
        label = "_".join(own_words)
        # `w1` and `w3` are joined in `w13`.
        labels.append(re.sub(r"^w(?=\d$)", "", label))
    are_distinct = len(set(labels) - {""}) == len(parts)
    return tuple(labels) if are_distinct else ()


def _split_words(name: str) -> list[str]:
    """Return the words of a name: `mlp`, `gate`, `proj` and `weight` of `mlp.gate_proj.weight`."""
    return re.split(r"[._]", name.lower())


class _Spellings(NamedTuple):
    """How a component of a fused name may state an order of its parts."""

    words: str
    """`gate_up` in `gate_up_proj`."""
    ends: tuple[str, ...]
    """Ends of a word: `13` in `w13`, `qkv` in `wqkv`."""
    initials: str
    """The first letters of the words of a component: `qkv` for `query_key_value`."""


def _spell_order(labels: Sequence[str]) -> _Spellings:
    """Return the spellings of an order. Labels with equal first letters have no initials."""
    first_letters = list(map(itemgetter(0), labels))
    initials = "".join(first_letters)
    if len(set(first_letters)) < len(labels):
        initials = "\0"  # no name has it
    return _Spellings("_".join(labels), ("".join(labels), initials), initials)


def _has_spelling(component: str, spellings: _Spellings) -> bool:
    """Whether a component of a name states the order."""
    if f"_{spellings.words}_" in f"_{component}_":
        return True
    initials = re.sub(r"(?<=[^_])[^_]+|_", "", component)
    if spellings.initials in initials:
        return True
    return any(word.endswith(spellings.ends) for word in component.split("_"))
