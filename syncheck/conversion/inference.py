"""Infer a map of names from data.

An inferred map is a proposal: equal data shows which tensors belong together, but not whether they should, so a verdict
that rests on it is undecided until the user accepts the map.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from syncheck.conversion.casts import convert
from syncheck.conversion.contradictions import find_contradictions
from syncheck.conversion.divided_groups import find_divided_groups
from syncheck.conversion.general_rules import make_rules
from syncheck.conversion.guesses import Guesses
from syncheck.conversion.layer_marks import mark_names
from syncheck.conversion.layer_rules import assign_parts
from syncheck.conversion.map_files import describe_rule
from syncheck.conversion.name_maps import NameMap, Rule, is_stack_rule
from syncheck.conversion.numbering import MARK, unmark
from syncheck.conversion.pairings import Candidates, find_pairings
from syncheck.conversion.part_names import find_stated_order
from syncheck.conversion.recognition import is_readable
from syncheck.conversion.rows import MOST_ROWS
from syncheck.conversion.templates import parse_template
from syncheck.messages import Note, Refusal, note_if
from syncheck.tensors.blocks import has_elements
from syncheck.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from syncheck.conversion.layer_rules import Assignment
    from syncheck.messages import Message
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files

# Limit of the rules in a report; a file has all of them.
_MOST_PRINTED = 64


@dataclass(slots=True)
class Inferred:
    """A map from data."""

    map: NameMap
    variables: dict[str, int] = field(default_factory=dict)
    """The size of a head, if rows were permuted."""
    guessed: tuple[Rule, ...] = ()
    """Rules of the map for tensors with equal data, whose pairs only their names suggest."""
    contradicted: dict[Rule, str] = field(default_factory=dict)
    """Rules that names or groups refute, with a tensor whose rule contradicts them, empty for their own name."""
    ambiguous: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """Names of A and of B with equal data, whose pairs nothing shows."""
    prefix: Message | None = None
    """A note, if the names of one model are those of the other one with a prefix."""
    applies: bool = True
    """Whether few names of the models are equal. Otherwise they have one naming, and another name is a mistake."""


def infer_map(models: Sequence[Mapping[str, Tensor]], files: Files) -> Inferred | None:
    """Return a map between the tensors that only one of two models has; None if no data is equal.

    models: tensors by name. Reads all of these tensors once or twice.
    """
    only_a = _list_candidates(models[0], models[1])
    only_b = _list_candidates(models[1], models[0])
    # If one model has no other names, there is nothing to pair.
    if 0 in (len(only_a), len(only_b)):
        return None
    candidates = find_pairings([mark_names(only_a), mark_names(only_b)], files)
    _pair_converted(candidates, files)
    assignment = assign_parts(candidates)
    guesses = Guesses(assignment, candidates)
    names = NameMap("an inferred map", tuple(make_rules(assignment.list_pairings(), candidates.tensors)))
    if not names.rules and not guesses.ambiguous[0]:
        return None
    tied = tuple((_map_copy(unmark(copy), names), unmark(stored_once)) for copy, stored_once in guesses.tied)
    ambiguous_a, ambiguous_b = guesses.ambiguous
    variables = _find_head_dim(assignment)
    contradicted = _list_contradicted(names, assignment, guesses, (only_a, only_b))
    contradicted |= find_divided_groups(names, (only_a, only_b), variables, files)

    # Models with many equal names have one naming.
    shared_names = models[0].keys() & models[1].keys()
    least_names = min(len(models[0]), len(models[1]))
    return Inferred(
        replace(names, tied=tied),
        variables=variables,
        guessed=_list_guessed(names, guesses),
        contradicted=contradicted,
        ambiguous=(_unmark_all(ambiguous_a), _unmark_all(ambiguous_b)),
        prefix=_find_prefix(models),
        applies=2 * len(shared_names) < least_names,
    )


def _find_prefix(models: Sequence[Iterable[str]]) -> Message | None:
    """Return a note if all names that differ are the names of the other model with a prefix, else None."""
    names_a, names_b = set(models[0]), set(models[1])
    only_a, only_b = sorted(names_a - names_b), sorted(names_b - names_a)
    shorter, longer, sides = only_a, only_b, ("A", "B")
    if len(only_a[0]) > len(only_b[0]):
        shorter, longer, sides = only_b, only_a, ("B", "A")
    # A prefix keeps the order of names.
    prefix = longer[0].removesuffix(shorter[0])
    if longer != [prefix + name for name in shorter]:
        return None
    return Note.PREFIX(
        count=len(longer),
        longer=sides[1],
        shorter=sides[0],
        prefix=prefix,
    )


def _map_copy(name: str, names: NameMap) -> str:
    """Return the name of a copy after a map: the rule of its layer may match the copy too."""
    match = names.find_rule(name)
    if match is None:
        return name
    rule, values = match
    return parse_template(rule.parts[0]).fill(values)


def _find_head_dim(assignment: Assignment) -> dict[str, int]:
    """Return the size of a head as a variable, if rows were permuted: a model has one size."""
    for pairing in assignment.list_pairings():
        # 0 is the size of layouts that are not rotary.
        if pairing.layout.head_dim:
            return {"head_dim": pairing.layout.head_dim}
    return {}


def _unmark_all(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names without marks."""
    return tuple(unmark(name) for name in names)


def _list_guessed(names: NameMap, guesses: Guesses) -> tuple[Rule, ...]:
    """Return the rules of a map for pairings that no data shows."""
    stored_names = [pairing.stored for pairing in guesses.pairings]
    # A stack whose parts do not count from 0 has no rule.
    return tuple(dict.fromkeys(match.rule for match in names.match_names(_unmark_all(stored_names))))


def _list_contradicted(
    names: NameMap, assignment: Assignment, guesses: Guesses, models: Sequence[Collection[str]]
) -> dict[Rule, str]:
    """Return the rules of a map that names refute, as in `Inferred`. models: the names that only A or B has."""
    siblings = find_contradictions(assignment.list_pairings(), set(guesses.pairings), models)
    contradicted: dict[Rule, str] = {}
    for match in names.match_names(siblings):
        contradicted.setdefault(match.rule, siblings[match.name])
    # A fused name states the order of its parts. Guessed parts have equal data.
    guessed_rules = _list_guessed(names, guesses)
    for rule in names.rules:
        if find_stated_order(rule) and rule not in guessed_rules:
            contradicted.setdefault(rule, "")
    return contradicted


def _list_candidates(model: Mapping[str, Tensor], partner_model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that the partner lacks and whose data can be compared."""
    # Equal names show a pair without an inference.
    only_names = model.keys() - partner_model.keys()
    return {name: model[name] for name in model if name in only_names and _can_be_paired(name, model[name])}


def _can_be_paired(name: str, tensor: Tensor) -> bool:
    """Whether a tensor has rows that can be read, and not too many of them, and a name that can get marks."""
    has_few_rows = tensor.shape[:1] <= (MOST_ROWS,)
    conditions = (MARK not in name, has_few_rows, tensor.numel > 0, has_elements(tensor))
    return all(conditions)


def _pair_converted(candidates: Candidates, files: Files) -> None:
    """Pair tensors that are equal after a conversion to a dtype of the other model.

    Only tensors without a pair are converted: a pair in another dtype is a difference if equal data exists.
    """
    unused_a, unused_b = candidates.unused_tensors(0), candidates.unused_tensors(1)
    converted_a = _convert_tensors(unused_a, unused_b, files)
    converted_b = _convert_tensors(unused_b, unused_a, files)
    if not converted_a and not converted_b:
        return
    converted = find_pairings([unused_a | converted_a, unused_b | converted_b], files)
    for pairing in converted.pairings:
        candidates.add(pairing)
    for names_a, names_b in converted.ambiguous:
        candidates.add_ambiguous(names_a, names_b)


def _convert_tensors(tensors: Mapping[str, Tensor], partners: Mapping[str, Tensor], files: Files) -> dict[str, Tensor]:
    """Return tensors in the most frequent narrower dtype of the other model, as far as it has one."""
    dtypes = Counter(tensor.dtype for tensor in partners.values() if is_readable(tensor))
    readable = {name: tensor for name, tensor in tensors.items() if is_readable(tensor)}
    converted = {}
    for name, tensor in readable.items():
        # A narrower dtype follows from a wider one, and the wider one does not follow from it.
        size = DTYPES[tensor.dtype].size
        narrower = [dtype for dtype, _ in dtypes.most_common() if DTYPES[dtype].size < size]
        if narrower:
            converted[name] = convert(tensor, (narrower[0],), files)
    return converted


def extend_map(names: NameMap | None, inferred: Inferred) -> NameMap:
    """Return a known map together with the inferred one."""
    if names is None:
        return inferred.map
    # The known rules come first, so the inferred ones are for tensors without a known rule.
    title = f"{names.title} and an inferred map"
    tied = (*names.tied, *inferred.map.tied)
    return NameMap(
        title,
        rules=(*names.rules, *inferred.map.rules),
        tied=tied,
        built_in=names.built_in,
    )


def separate_stacks(inferred: Inferred) -> tuple[Inferred | None, Inferred | None]:
    """Return the part of an inferred map that applies, and the part that is a proposal only.

    In models of one naming, another name is a mistake, but stacks and separate experts have other names by necessity.
    """
    if inferred.applies:
        return inferred, None
    stack_rules: list[Rule] = []
    other_rules: list[Rule] = []
    for rule in inferred.map.rules:
        rules = stack_rules if is_stack_rule(rule) else other_rules
        rules.append(rule)
    if not stack_rules:
        return None, inferred
    stacks = Inferred(
        replace(inferred.map, rules=tuple(stack_rules), tied=()),
        variables=inferred.variables,
    )
    remaining = replace(inferred.map, rules=tuple(other_rules))
    return stacks, replace(inferred, map=remaining)


def mark_ambiguous(models: Sequence[Mapping[str, Tensor]], inferred: Inferred) -> list[Mapping[str, Tensor]]:
    """Return the models with all ambiguous tensors under the names of A, and refused: they are never "in sync"."""
    names_a, names_b = inferred.ambiguous
    marked_a, marked_b = dict(models[0]), dict(models[1])
    # The names of B would be missing in A.
    for name in names_b:
        marked_b.pop(name, None)
    for name in names_a:
        refused = replace(marked_a[name], name=name, refused=Refusal.AMBIGUOUS_NAME())
        marked_a[name] = marked_b[name] = refused
    return [marked_a, marked_b]


def describe_inferred(inferred: Inferred, path: str | None = None) -> list[Message]:
    """Return notes with the rules and the ambiguous tensors. path: of the file that gets the map, if there is one."""
    notes: list[Message] = []
    if inferred.map.rules:
        sentence = Note.INFERRED if inferred.applies else Note.PROPOSED
        saved = Note.SAVES_MAP() if path is None else Note.SAVED_MAP(file=path)
        notes.append(sentence(saved=saved))
        notes += _list_rules(inferred)
    if inferred.prefix is not None:
        notes.append(inferred.prefix)
    guessed_names = tuple(rule.name for rule in inferred.guessed)
    guessed_note = Note.GUESSED_RULES(count=len(guessed_names), names=guessed_names)
    ambiguous_names, _ = inferred.ambiguous
    ambiguous_note = Note.AMBIGUOUS_MAP(count=len(ambiguous_names), names=ambiguous_names)
    return [
        *notes,
        *note_if(guessed_names, guessed_note),
        # A map that does not apply leaves all tensors under their names.
        *note_if(inferred.applies and ambiguous_names, ambiguous_note),
    ]


def _list_rules(inferred: Inferred) -> list[Message]:
    """Return notes with the first rules of a map: a report is read by people, and `--write-map` writes all rules."""
    names = inferred.map
    # Rules that names refute are always printed.
    rules = dict.fromkeys((*inferred.contradicted, *names.rules))
    notes = [mark_rule(rule, inferred.contradicted) for rule in list(rules)[:_MOST_PRINTED]]
    if len(names.rules) > _MOST_PRINTED:
        notes.append(Note.MORE_RULES(count=len(names.rules) - _MOST_PRINTED))
    notes += [Note.COPY_RULE(name=copy, copied=stored_once) for copy, stored_once in names.tied[:_MOST_PRINTED]]
    return notes


def mark_rule(rule: Rule, contradicted: Mapping[Rule, str]) -> Message:
    """Return a note with a rule, and with a mark if names refute it. contradicted: see `Inferred`."""
    stated_order, sibling = find_stated_order(rule), contradicted.get(rule, "")
    sentence = Note.RULE
    if stated_order:
        sentence = Note.CONTRADICTING_RULE
    elif sibling:
        sentence = Note.DIVIDED_RULE
    elif rule in contradicted:
        sentence = Note.REFUTED_RULE
    return sentence(
        name=rule.name,
        parts=describe_rule(rule),
        order=stated_order,
        sibling=sibling,
    )
