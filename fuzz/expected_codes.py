"""The oracle of `python -m fuzz diff`: the right exit codes of a pair, from what is known about its mutation.

It shares no code with syncheck. The rules are those of docs/same-model.md:

- Equal names and equal bytes are in sync, exit code 0. Any real difference is 1.
- Equality under an inferred map is 2. It is 0 with a right map or with --accept-inferred.
- A difference under an inferred map, or under a wrong map, is 1 or 2, never 0.
- An option accepts exactly the difference that its name states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from fuzz.model_mutations import ANY_DIFFERENCE

if TYPE_CHECKING:
    from fuzz.pairs import Pair

Answer = TypeVar("Answer")
# A word, the traits that a pair must have, and the answer. The first row that applies gives the answer.
Row = tuple[str, frozenset[str], Answer]

Codes = frozenset[int]
IN_SYNC, DIFFERENT, UNDECIDED = frozenset({0}), frozenset({1}), frozenset({2})
NEVER_0 = DIFFERENT | UNDECIDED
NEVER_1 = IN_SYNC | UNDECIDED
ANY = NEVER_0 | IN_SYNC
ANY_WORD = "*"


def _traits(*names: str) -> frozenset[str]:
    return frozenset(names)


# The columns of the table below, by what differs: nothing after the options; what an option may accept; what one rule
# for all layers may explain; and any other difference.
EQUAL, ACCEPTABLE, EXPLICABLE, OTHER = range(4)
COLUMNS: tuple[Row[int], ...] = (
    ("nothing", _traits(), EQUAL),
    ("optimizer", _traits("--only-params"), EQUAL),
    # Files without metadata do not distinguish every buffer from a parameter.
    ("buffers", _traits("--only-params"), ACCEPTABLE),
    ("optimizer", _traits("--subset", "mutated A"), EQUAL),
    # B is the copy. Whether A may be a conversion of B is not specified.
    ("cast", _traits("right --cast", "mutated B"), EQUAL),
    ("cast", _traits("--cast"), ACCEPTABLE),
    (ANY_WORD, _traits("allowed code"), ACCEPTABLE),
    (ANY_WORD, _traits("consistent"), EXPLICABLE),
    (ANY_WORD, _traits(), OTHER),
)
# The right codes for each column, by the relation of the names.
CODES: tuple[Row[tuple[Codes, ...]], ...] = (
    (ANY_WORD, _traits("shard missing"), (UNDECIDED,) * 4),
    ("renamed", _traits("wrong map"), (NEVER_0,) * 4),
    ("renamed", _traits("incomplete map"), (NEVER_0,) * 4),
    # One name of many is a mistake, and no map is applied.
    ("one name", _traits(), (NEVER_0,) * 4),
    # The existing rules may remove the name of a first container, but not of a second one.
    ("prefix", _traits("--accept-inferred"), (ANY, ANY, ANY, NEVER_0)),
    ("prefix", _traits(), (ANY, ANY, NEVER_0, NEVER_0)),
    ("second prefix", _traits("--accept-inferred"), (ANY, ANY, ANY, NEVER_0)),
    ("second prefix", _traits(), (NEVER_0,) * 4),
    # Several roles have equal data, so their pairs may be undetermined.
    ("renamed", _traits("--accept-inferred", "ambiguous"), (NEVER_1, ANY, ANY, NEVER_0)),
    ("renamed", _traits("--accept-inferred"), (IN_SYNC, ANY, ANY, NEVER_0)),
    # Fused parts of another size cannot be divided.
    ("renamed", _traits("right map", "fused"), (IN_SYNC, ANY, NEVER_0, NEVER_0)),
    ("renamed", _traits("right map", "copy of a rank differs"), (NEVER_0,) * 4),
    ("renamed", _traits("right map"), (IN_SYNC, ANY, DIFFERENT, DIFFERENT)),
    ("renamed", _traits(), (UNDECIDED, NEVER_0, NEVER_0, NEVER_0)),
    # Names are equal. A side that is not one finite model may be refused, and so may an option that accepts too little.
    (ANY_WORD, _traits("copy of a rank differs"), (NEVER_0, ANY, NEVER_0, NEVER_0)),
    (ANY_WORD, _traits("adapter with NaN"), (NEVER_0,) * 4),
    (ANY_WORD, _traits("--subset"), (IN_SYNC, ANY, NEVER_0, NEVER_0)),
    (ANY_WORD, _traits(), (IN_SYNC, ANY, DIFFERENT, DIFFERENT)),
)


def list_right_codes(pair: Pair) -> Codes:
    """Return the right exit codes of a pair."""
    traits = list_traits(pair)
    column = _look_up(COLUMNS, pair.change, traits)
    return _look_up(CODES, pair.relation, traits)[column]


def list_traits(pair: Pair) -> frozenset[str]:
    """Return the traits of a pair, as the tables name them."""
    options = pair.options
    conditions = {
        "ambiguous": pair.is_ambiguous,
        "fused": pair.is_fused,
        "consistent": pair.effect.is_consistent,
        "--cast": options.cast is not None,
        "right --cast": options.cast == pair.effect.cast,
        "allowed code": options.allow in pair.effect.codes | ANY_DIFFERENCE,
    }
    traits = {name for name, holds in conditions.items() if holds}
    traits |= {pair.kind, f"mutated {pair.mutated_side}", f"{options.map} map"}
    return frozenset(traits | options.flags)


def _look_up(table: tuple[Row[Answer], ...], word: str, traits: frozenset[str]) -> Answer:
    """Return the answer of the first row for a word and for traits that the pair has."""
    for row_word, row_traits, answer in table:
        # An empty set of traits applies to every pair.
        if row_word in (word, ANY_WORD) and row_traits <= traits:
            return answer
    raise LookupError(word)
