"""Find pairings of an inferred map that the names of the tensors refute.

Equal data shows that a map is possible. If a conversion exchanges two tensors in every layer, a map with the exchanged
names fits the data, but other names of the same models contradict it:

- the bias of a module, or its running statistics, follow the other order: `x.weight = b.weight` and `x.bias = a.bias`;
- the names state two roles, in any spelling: `attn.q = self.key`;
- both models have both names, apart from a prefix or a renamed module: `x.q = a.o`, and `x.o` and `a.q` exist.

Tensors with equal data prove no exchange, so pairs that were guessed by name contradict nothing.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from typing import TYPE_CHECKING

from syncheck.conversion.numbering import unmark
from syncheck.conversion.roles import have_other_roles

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from syncheck.conversion.pairings import Pairing

    # The text of a name before and after some words.
    Context = tuple[str, str]
    # The whole tensor that contains a part, and the position of the part.
    Place = tuple[str, int]

# One to three words between dots, without numbers, which count layers and have a rule of their own.
_WORDS = [rf"(?<=\.)(?=((?:(?![0-9]+\.)[^.]+\.){{{count}}}))" for count in (1, 2, 3)]
# Limits of the words in one text that are exchanged, as a layer has fewer modules, and of the letters and the words of
# a name. Longer names come from no library.
_MOST_WORDS, _MOST_LETTERS, _MOST_WORDS_OF_NAME = 64, 256, 32


def find_contradictions(
    pairings: Sequence[Pairing], guessed: Collection[Pairing], models: Sequence[Collection[str]]
) -> dict[str, str]:
    """Return the stored tensors of the pairings that names refute.

    The value is the stored tensor of the same module that has parts of other modules, and empty if the name itself is
    refuted.

    pairings: all pairings of two models.
    guessed: the pairings that no data shows.
    models: the names of the tensors of A and B that may be paired.
    """
    # The parts of a stack have numbers instead of names.
    links = {pairing: _Link(pairing) for pairing in pairings if not pairing.layout.stacked}
    proven = [links[pairing] for pairing in links if pairing not in guessed]
    names_a, names_b = models
    divided = dict(_find_divided_modules(proven, links.values()))
    return divided | dict.fromkeys(_find_exchanged_names(proven, names_a, names_b), "")


class _Link:
    """A pairing with names without marks; a pair of single tensors is stored by B."""

    def __init__(self, pairing: Pairing) -> None:
        # The name in the pairing; `whole` is the name of the tensor that has the parts.
        self.stored = unmark(pairing.stored)
        self.side = pairing.side
        self.whole = self.stored
        self.parts = tuple(map(unmark, pairing.parts))
        if self.side == 0 and len(self.parts) == 1:
            self.side, self.whole, self.parts = 1, self.parts[0], (self.stored,)


def _find_module(name: str) -> str:
    """Return the name of the module of a tensor."""
    module, _, _ = name.rpartition(".")
    return module


def _find_divided_modules(proven: Iterable[_Link], links: Iterable[_Link]) -> Iterator[tuple[str, str]]:
    """Yield tensors of one module whose parts are in exchanged modules: the stored names of both."""
    places: dict[tuple[int, str], Place] = {}
    for link in links:
        for position, part in enumerate(link.parts):
            places[link.side, part] = (link.whole, position)

    # The first tensor of each module, with as many parts as the tensors that are compared with it.
    first_links: dict[tuple[int, str, int], _Link] = {}
    for link in proven:
        module = _find_module(link.whole)
        first_link = first_links.setdefault((link.side, module, len(link.parts)), link)
        if _are_divided(first_link, link, places):
            yield first_link.stored, link.stored
            yield link.stored, first_link.stored


def _are_divided(link: _Link, sibling: _Link, places: Mapping[tuple[int, str], Place]) -> bool:
    """Whether two tensors of a module, with as many parts, have parts of exchanged modules. places: of all parts."""
    for position, (part, sibling_part) in enumerate(zip(link.parts, sibling.parts, strict=True)):
        module, _, last = part.rpartition(".")
        sibling_module, _, sibling_last = sibling_part.rpartition(".")
        # A module without the other tensor is no part of both.
        place = places.get((link.side, f"{module}.{sibling_last}"), (sibling.whole, position))
        sibling_place = places.get((link.side, f"{sibling_module}.{last}"), (link.whole, position))
        if _is_misplaced(place, sibling, position) and _is_misplaced(sibling_place, link, position):
            return True
    return False


def _is_misplaced(place: Place, link: _Link, position: int) -> bool:
    """Whether a part is neither at its position in a tensor, nor in another tensor of the same module.

    A module of the other model may hold several modules as a whole.
    """
    whole, found_position = place
    if whole == link.whole:
        return found_position != position
    return _find_module(whole) != _find_module(link.whole)


def _find_exchanged_names(links: Iterable[_Link], names_a: Collection[str], names_b: Collection[str]) -> Iterator[str]:
    """Yield the stored names of single tensors whose names the other model exchanges. names_a, names_b: all names."""
    prefix_a, prefix_b = _find_prefix(names_a, names_b), _find_prefix(names_b, names_a)
    texts_of_a = set(map(_join_words, names_a))
    words_by_context: dict[Context, dict[str, None]] = defaultdict(dict)
    for name in names_b:
        for context, words in _list_contexts(name):
            words_by_context[context][words] = None

    for link in links:
        # The name of a fused tensor is not exchanged with a part.
        if len(link.parts) > 1:
            continue
        name_a, name_b = link.parts[0], link.whole
        # Without the words of the other name, the name stays as it is.
        exchanged = set(_exchange_words(name_a, name_b, words_by_context)) - {_join_words(name_a)}
        refutations = (
            _has_other_partner(name_a, name_b, prefix_b, names_b),
            _has_other_partner(name_b, name_a, prefix_a, names_a),
            not texts_of_a.isdisjoint(exchanged),
            have_other_roles(name_a, name_b),
        )
        if any(refutations):
            yield link.stored


def _find_prefix(longer: Collection[str], shorter: Collection[str]) -> str:
    """Return what most names of a model have in front of the names of the other model, empty if they have nothing.

    longer: the names with the prefix.
    shorter: the names without it.
    """
    # A prefix keeps the order of names.
    prefix = min(longer).removesuffix(min(shorter))
    agreeing_names = set(map(prefix.__add__, shorter)).intersection(longer)
    has_prefix = 2 * len(agreeing_names) > max(len(longer), len(shorter))
    return prefix if has_prefix else ""


def _has_other_partner(name: str, partner: str, prefix: str, partner_names: Collection[str]) -> bool:
    """Whether a name with the prefix of the other model is the name of another tensor than its partner.

    partner_names: the names of the other model. They are not the names of this model, which have no prefix.
    """
    expected = prefix + name
    return expected in partner_names and expected != partner


def _join_words(name: str) -> str:
    """Return the words of a name, each between dots: `.mlp.up.proj.weight.` for `mlp.up_proj.weight`.

    Words have no numbers, because names with other numbers, like `w1` and `w2`, may have any meaning.
    """
    words = re.sub(r"[._/]", ".", name)
    text = re.sub(r"(?<=[^\W\d])[0-9]+", "", words)
    return f".{text}."


def _list_contexts(name: str) -> Iterator[tuple[Context, str]]:
    """Yield the text around some words of a name, and these words. Numbers are in the text around."""
    text = _join_words(name)[:_MOST_LETTERS]
    for pattern in _WORDS:
        for match in itertools.islice(re.finditer(pattern, text), _MOST_WORDS_OF_NAME):
            start, end = match.span(1)
            yield (text[:start], text[end:]), match[1]


def _exchange_words(name_a: str, name_b: str, words_by_context: Mapping[Context, Iterable[str]]) -> Iterator[str]:
    """Yield the words of the names that A has if it has the name of B, and B has the name of A.

    words_by_context: the words that names of B have in each text.
    """
    text_a = _join_words(name_a)
    for context, own_words in _list_contexts(name_b):
        for other_words in itertools.islice(words_by_context[context], _MOST_WORDS):
            yield text_a.replace(f".{other_words}", f".{own_words}")
