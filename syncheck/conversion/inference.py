"""Infer a map of names from data: equal tensors, and equal rows in tensors of another shape.

Two tensors belong together if their data is equal, so an inferred map never pairs tensors by their shapes or positions
alone. Several tensors with equal data, such as norms with their initial value, are ambiguous.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from syncheck.conversion.name_maps import NameMap, Rule
from syncheck.conversion.recognition import HEAD_SIZES
from syncheck.conversion.rows import MOST_ROWS, digest_rows
from syncheck.errors import UsageError
from syncheck.kernel.blocks import has_elements
from syncheck.logical import views
from syncheck.messages import Note, Refusal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.kernel.blocks import Files
    from syncheck.messages import Message
    from syncheck.snapshots import Tensor

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_LETTERS = "ijklmn"
# Limit of equal rows of a model: more of them do not identify a tensor.
_MOST_EQUAL = 64


@dataclass(slots=True)
class Inferred:
    """A map from data.

    variables: the size of a head, if rows were permuted. ambiguous: names of A and of B. applies: whether few names of
    the models are equal. Otherwise they have one naming, and a tensor with another name is a mistake.
    """

    map: NameMap
    variables: dict[str, int] = field(default_factory=dict)
    ambiguous: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    applies: bool = True


def infer_map(models: Sequence[Mapping[str, Tensor]], files: Files) -> Inferred | None:
    """Return a map between the tensors that only one of two models has; None if no data is equal.

    models: tensors by name. Reads all of these tensors once, and transposed matrices twice.
    """
    left = [
        {
            name: tensor
            for name, tensor in own.items()
            if name not in other and has_elements(tensor) and tensor.numel and tensor.shape[:1] <= (MOST_ROWS,)
        }
        for own, other in (models, models[::-1])
    ]
    if not left[0] or not left[1]:
        return None
    rows = [{name: digest_rows(t, files, t.shape[0] if t.shape else 1) for name, t in own.items()} for own in left]
    found: dict[str, Rule] = {}
    variables: dict[str, int] = {}
    ambiguous = _pair_equal(rows, left, found)
    for own, other in ((1, 0), (0, 1)):
        _join_parts(rows[own], rows[other], found, variables)
    _pair_transposed(left, rows, found, files)
    _unstack(left, rows, found, files)
    if not found and not any(ambiguous):
        return None
    applies = 2 * len(models[0].keys() & models[1].keys()) < min(map(len, models))
    return Inferred(NameMap("an inferred map", tuple(_generalize(found))), variables, ambiguous, applies)


def _pair_equal(
    rows: Sequence[Mapping[str, Sequence[bytes]]], left: Sequence[Mapping[str, Tensor]], found: dict[str, Rule]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Add a rename for each tensor of B that equals a tensor of A. Return the names of ambiguous tensors.

    If several tensors have equal data, tensors with the same numbers in their names belong together, or tensors with
    the same numbers and the same ends of their names.
    """
    groups: dict[tuple[bytes, tuple[int, ...], str], tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for side in (0, 1):
        for name, digests in rows[side].items():
            tensor = left[side][name]
            groups[b"".join(digests), tensor.shape, tensor.dtype][side].append(name)
    ambiguous: tuple[list[str], list[str]] = ([], [])
    for ours, theirs in groups.values():
        if not ours or not theirs:
            continue
        for key in (lambda _: "", _NUMBER.findall, _read_end):
            a, b = ({str(key(name)): name for name in names} for names in (ours, theirs))
            if a.keys() == b.keys() and len(a) == len(ours) == len(theirs):
                found |= {b[key]: Rule(b[key], (a[key],)) for key in a}
                break
        else:
            ambiguous[0].extend(ours)
            ambiguous[1].extend(theirs)
    return tuple(ambiguous[0]), tuple(ambiguous[1])


def _read_end(name: str) -> tuple[list[str], list[str]]:
    """Return the numbers in a name and its last two parts."""
    return _NUMBER.findall(name), name.split(".")[-2:]


def _join_parts(
    joined: Mapping[str, Sequence[bytes]],
    parts: Mapping[str, Sequence[bytes]],
    found: dict[str, Rule],
    variables: dict[str, int],
) -> None:
    """Add a rule for each tensor of one model whose rows are those of tensors of the other model."""
    used = {name for rule in found.values() for name in (rule.name, *rule.parts)}
    places: dict[bytes, list[tuple[str, int]]] = defaultdict(list)
    for name, digests in parts.items():
        if name not in used:
            for i, digest in enumerate(digests):
                places[digest].append((name, i))
    for name, digests in joined.items():
        if name in used:
            continue
        # The rows of each part, as positions in the joined tensor.
        positions: dict[str, dict[int, int]] = defaultdict(dict)
        candidates = {part for digest in digests for part, _ in places.get(digest, ())[:_MOST_EQUAL]}
        for at, digest in enumerate(digests):
            for part, i in places.get(digest, ())[:_MOST_EQUAL]:
                positions[part].setdefault(i, at)
        whole = [part for part in candidates if len(positions[part]) == len(parts[part])]
        rule = _make_rule(
            name, len(digests), {p: [positions[p][i] for i in range(len(parts[p]))] for p in whole}, variables
        )
        if rule is not None:
            found[name] = rule
            for part in rule.parts:
                for digest in parts[part]:
                    places[digest] = [place for place in places[digest] if place[0] != part]


def _make_rule(name: str, length: int, parts: Mapping[str, Sequence[int]], variables: dict[str, int]) -> Rule | None:
    """Return the rule for a tensor of so many rows; None if its parts do not alternate in groups.

    parts: the rows of each part, as positions in the tensor.
    """
    if not parts:
        return None
    order = sorted(parts, key=lambda part: parts[part][0])
    sizes = [len(parts[part]) for part in order]
    total = sum(sizes)
    if len(order) == 1 and total <= length and [*parts[order[0]]] == [*range(total)]:
        return Rule(name, (order[0],), pad=total < length)
    if total != length:
        return None
    if len(order) == 1:
        for head in HEAD_SIZES:
            half = head // 2
            if length % head == 0 and all(
                at == i - i % head + 2 * (i % half) + i % head // half for i, at in enumerate(parts[order[0]])
            ):
                variables["head_dim"] = head
                return Rule(name, (order[0],), rotary=True)
        return None
    first = parts[order[0]]
    run = next((i for i in range(1, len(first)) if first[i] != first[i - 1] + 1), len(first))
    groups = len(first) // run
    if any(size % groups for size in sizes) or len(first) % run:
        return None
    begin = 0
    for part, size in zip(order, sizes, strict=True):
        step = size // groups
        if any(at != i // step * (total // groups) + begin + i % step for i, at in enumerate(parts[part])):
            return None
        begin += step
    unit = math.gcd(*sizes)
    shares = tuple(size // unit for size in sizes)
    return Rule(name, tuple(order), sizes=() if len(set(shares)) == 1 else shares, groups=groups)


def _pair_transposed(
    left: Sequence[Mapping[str, Tensor]],
    rows: Sequence[Mapping[str, Sequence[bytes]]],
    found: dict[str, Rule],
    files: Files,
) -> None:
    """Add a rule for each transposed matrix."""
    used = {name for rule in found.values() for name in (rule.name, *rule.parts)}
    contents = {b"".join(digests): name for name, digests in rows[1].items() if name not in used}
    shapes = {left[1][name].shape for name in contents.values()}
    for name, tensor in left[0].items():
        if (
            name not in used
            and len(tensor.shape) == 2
            and tensor.shape[::-1] in shapes
            and tensor.shape[1] <= MOST_ROWS
        ):
            columns = digest_rows(views.permute(tensor, (1, 0)), files, tensor.shape[1])
            other = contents.get(b"".join(columns))
            if other is not None:
                found.setdefault(other, Rule(other, (name,), transpose=True))


def _unstack(
    left: Sequence[Mapping[str, Tensor]],
    rows: Sequence[Mapping[str, Sequence[bytes]]],
    found: dict[str, Rule],
    files: Files,
) -> None:
    """Add a rule for each tensor with the tensors of the other model in the order of their numbers."""
    used = {name for rule in found.values() for name in (rule.name, *rule.parts)}
    for stacks, others in ((1, 0), (0, 1)):
        wanted = {left[stacks][name].shape[1:] for name in left[stacks] if name not in used}
        single = {
            digest_rows(tensor, files, 1)[0]: name
            for name, tensor in left[others].items()
            if name not in used and tensor.shape in wanted
        }
        for name, digests in rows[stacks].items():
            parts = [single.get(digest, "") for digest in digests]
            templates = {_number_last(part, i) for i, part in enumerate(parts)}
            if name not in used and len(parts) > 1 and len(templates) == 1 and "" not in templates:
                found[name] = Rule(name, (templates.pop(),))


def _number_last(name: str, number: int) -> str:
    """Replace the last number of a name, if it is this number, by a placeholder; else return ""."""
    numbers = [*_NUMBER.finditer(name)]
    if not numbers or int(numbers[-1][0]) != number:
        return ""
    return f"{name[: numbers[-1].start()]}{{e}}{name[numbers[-1].end() :]}"


def _generalize(found: Mapping[str, Rule]) -> Iterable[Rule]:
    """Return one rule with placeholders for all layers with the same rule, and single rules for exceptions."""
    general: dict[str, dict[Rule, list[Rule]]] = defaultdict(lambda: defaultdict(list))
    for rule in found.values():
        wide = _replace_numbers(rule)
        general[wide.name][wide].append(rule)
    for candidates in general.values():
        if len(candidates) == 1:
            yield from candidates
        else:
            yield from (rule for rules in candidates.values() for rule in rules)


def _replace_numbers(rule: Rule) -> Rule:
    """Return a rule with placeholders, if each number of the name is in each part once."""
    numbers = _NUMBER.findall(rule.name)
    kept = all(sorted(_NUMBER.findall(part)) == sorted(numbers) for part in rule.parts)
    if len(set(numbers)) < len(numbers) or len(numbers) > len(_LETTERS) or not kept:
        return rule
    letters = dict(zip(numbers, _LETTERS, strict=False))

    def widen(name: str) -> str:
        return _NUMBER.sub(lambda match: f"{{{letters[match[0]]}}}", name)

    return replace(rule, name=widen(rule.name), parts=tuple(map(widen, rule.parts)))


def extend_map(names: NameMap | None, inferred: Inferred) -> NameMap:
    """Return a known map together with the inferred one."""
    if names is None:
        return inferred.map
    return NameMap(f"{names.title} and an inferred map", (*names.rules, *inferred.map.rules), names.tied)


def mark_ambiguous(models: Sequence[Mapping[str, Tensor]], inferred: Inferred) -> list[Mapping[str, Tensor]]:
    """Return the models with all ambiguous tensors under the names of A, and refused: they are never "in sync"."""
    names = inferred.ambiguous
    if not names[0]:
        return list(models)
    marked = [{name: t for name, t in own.items() if name not in set(names[i])} for i, own in enumerate(models)]
    for name in names[0]:
        refused = replace(models[0][name], name=name, refused=Refusal.AMBIGUOUS_NAME())
        marked[0][name] = marked[1][name] = refused
    return [*marked]


def describe_inferred(inferred: Inferred) -> list[Message]:
    """Return notes with the rules and the ambiguous tensors."""
    notes: list[Message] = []
    if rules := inferred.map.rules:
        sentence = Note.INFERRED if inferred.applies else Note.PROPOSED
        notes += [sentence(), *(Note.RULE(name=rule.name, parts=describe_rule(rule)) for rule in rules)]
    if inferred.applies and (names := inferred.ambiguous[0]):
        notes.append(Note.AMBIGUOUS_MAP(count=len(names), names=names))
    return notes


def describe_rule(rule: Rule) -> str:
    """Return the operations of a rule on its parts, as in a formula."""
    joined = " + ".join(rule.parts)
    settings = [
        f"{key}={getattr(rule, key)}" for key in ("sizes", "groups") if getattr(rule, key) != getattr(Rule(""), key)
    ]
    settings += [key for key in ("transpose", "rotary", "pad") if getattr(rule, key)]
    return f"{joined} ({', '.join(settings)})" if settings else joined


def write_map(path: str, names: NameMap) -> None:
    """Write a map as TOML. Raises UsageError if the file cannot be written."""
    lines = []
    if names.tied:
        lines += [f"tied = {json.dumps([list(pair) for pair in names.tied])}", ""]
    for rule in names.rules:
        lines += ["[[rule]]", f"name = {json.dumps(rule.name)}", f"parts = {json.dumps(list(rule.parts))}"]
        plain = Rule(rule.name)
        for key in ("dim", "sizes", "groups", "transpose", "rotary", "pad", "beside"):
            value = getattr(rule, key)
            if value != getattr(plain, key):
                lines.append(f"{key} = {json.dumps(list(value) if isinstance(value, tuple) else value)}")
        lines.append("")
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n".join(lines))
    except OSError as error:
        raise UsageError(f"--write-map: {path}: {error.strerror}; choose a path that can be written") from None
