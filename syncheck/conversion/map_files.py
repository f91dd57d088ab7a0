"""Read and write maps of names: TOML files, and the maps of this package."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, Any

from syncheck.conversion.name_maps import VARIABLES, NameMap, Rule, is_size
from syncheck.conversion.templates import parse_template
from syncheck.errors import UsageError, brief

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# Limits of a file that may come from anywhere. The largest map of this package has 60 rules in 8 kB.
_MOST_BYTES, _MOST_RULES, _MOST_PARTS, _MOST_LETTERS, _MOST_PLACEHOLDERS = 1 << 24, 1 << 16, 256, 1024, 8
# The modules with a row for each token of a vocabulary: embeddings and output layers.
_VOCABULARY = re.compile("embed|token|vocab|wte|shared|head|output|decoder|logits|classifier|cls|score")


def list_built_in() -> tuple[str, ...]:
    """Return the names of the maps of this package."""
    folder = resources.files(__package__) / "maps"
    names = []
    for file in folder.iterdir():
        if file.name.endswith(".toml"):
            names.append(file.name.removesuffix(".toml"))
    return tuple(sorted(names))


def read_map(source: str) -> NameMap:
    """Read a map: the name of a map of this package, or the path of a TOML file.

    Raises UsageError for an unknown name, and for a file that is not a map.
    """
    built_in = list_built_in()
    if source in built_in:
        file = resources.files(__package__) / "maps" / f"{source}.toml"
        return _parse(file.read_text(encoding="utf-8"), source, built_in=True)
    if not source.endswith(".toml"):
        raise UsageError(f"{source}: no such map; pass one of {', '.join(built_in)}, or a TOML file")
    return _parse(_read_text(source), source)


def _read_text(path: str) -> str:
    """Return the text of a file. Raises UsageError for other files, and for a file that is too large."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; pass a TOML file with a map") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not a text file; pass a TOML file with a map") from None
    _require(len(text) <= _MOST_BYTES, path, f"more than {_MOST_BYTES} characters; pass a TOML file with a map")
    return text


def _require(condition: bool, location: str, problem: str) -> None:
    """Raise UsageError with the location and the problem if a condition of maps is not true."""
    if not condition:
        raise UsageError(f"{location}: {problem}")


def _limit(count: int, most: int, unit: str, location: str) -> None:
    """Raise UsageError for more than a number of rules, parts or other units."""
    _require(count <= most, location, f"{count} {unit}; at most {most} are allowed")


def _parse(text: str, title: str, *, built_in: bool = False) -> NameMap:
    """Return the map in a text. Raises UsageError if it is not a map."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{title}: not a TOML file: {error}") from None
    # Thousands of nested lists, or a number with thousands of digits.
    except (RecursionError, ValueError):
        raise UsageError(f"{title}: nested too deeply, or a number is too large; a map has neither") from None
    unknown = min(table.keys() - {"rule", "tied"}, default=None)
    _require(unknown is None, title, f"key {brief(unknown)}; a map contains [[rule]] tables and `tied`")
    rows, pairs = table.get("rule", []), table.get("tied", [])
    is_table = _is_list(rows, dict)
    _require(is_table, title, "`rule` is no array of tables; a map contains [[rule]] tables and `tied`")
    _require(_is_list(pairs, list), title, "tied: must be a list of pairs of names")

    _limit(len(rows), _MOST_RULES, "rules", title)
    rules = []
    for number, row in enumerate(rows, 1):
        location = f"{title}: rule {number}"
        rule = _parse_rule(row, location)
        _check_rule(rule, location)
        rules.append(rule)
    tied = []
    for pair in pairs:
        is_pair = _are_names(pair) and len(pair) == 2
        _require(is_pair, title, "tied: must be a list of pairs of names")
        tied.append((pair[0], pair[1]))
    return NameMap(title, tuple(rules), tuple(tied), built_in=built_in)


def _parse_rule(row: Mapping[str, Any], location: str) -> Rule:
    """Return a rule. Raises UsageError for an unknown key, and for a value of another type."""
    unknown = min(row.keys() - _CHECKS.keys(), default=None)
    keys = ", ".join(sorted(_CHECKS))
    _require(unknown is None, location, f"unknown key {brief(unknown)}; known keys: {keys}")
    cells: dict[str, Any] = {}
    # A rule without a name has an invalid name.
    for key, value in {"name": None, **row}.items():
        is_valid = _CHECKS[key]
        _require(is_valid(value), location, f"{key}: {brief(value)} is not valid; see docs/same-model.md")
        cells[key] = tuple(value) if isinstance(value, list) else value
    return Rule(**cells)


def _is_list(value: object, kind: type) -> bool:
    """Whether a value is a list of items of one type."""
    return isinstance(value, list) and {type(item) for item in value} <= {kind}


def _are_names(value: Any) -> bool:
    """Whether a value is a list of texts that are not empty."""
    return _is_list(value, str) and "" not in value


def _is_name(value: object) -> bool:
    return _are_names([value])


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_share(value: object, variables: Sequence[str] = VARIABLES) -> bool:
    """Whether a value is a number or one of these variables."""
    return is_size(value) or value in variables


def _are_shares(value: Any) -> bool:
    """Whether a value is a list of sizes of parts."""
    return isinstance(value, list) and all(_is_share(share) for share in value)


def _is_padding(value: object) -> bool:
    """Whether a value states the multiple of padded rows. One row is no multiple."""
    return isinstance(value, bool) or is_size(value, 2)


# Whether a value is valid, by key of a rule.
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "name": _is_name,
    "parts": _are_names,
    "dim": partial(is_size, least=0),
    "sizes": _are_shares,
    "groups": partial(_is_share, variables=(*VARIABLES, "rows")),
    "transpose": _is_flag,
    "rotary": _is_flag,
    "pad": _is_padding,
    "beside": _is_text,
}


def _check_rule(rule: Rule, location: str) -> None:
    """Raise UsageError for a rule that contradicts itself."""
    count = len(rule.parts)
    _limit(count, _MOST_PARTS, "parts", f"{location}: parts")
    is_complete = len(rule.sizes) in (0, count)
    _require(is_complete, location, f"sizes: must have one size for each of the {count} parts")
    # A part that is named twice would replace the first of both, which would never be compared.
    for part, times in Counter(rule.parts).items():
        problem = f"parts: {brief(part)} is named twice; each part needs a name of its own"
        _require(times == 1, location, problem)

    _read_placeholders(rule.beside, f"{location}: beside")
    in_name = _read_placeholders(rule.name, f"{location}: name")
    in_parts = [_read_placeholders(part, f"{location}: parts") for part in rule.parts]
    # The only further placeholder is the index of a stack, which all parts have.
    further = {placeholders - in_name for placeholders in in_parts}
    index_names = frozenset().union(*further)
    is_consistent = len(further) <= 1 and len(index_names) <= 1
    problem = "parts: all must have the placeholders of the name, and at most one more"
    _require(is_consistent, location, problem)

    # Only vocabularies are padded, so other tensors with more rows differ.
    modules = [name.split(".")[-2:][0] for name in (rule.name, *rule.parts)]
    vocabulary = _VOCABULARY.search(" ".join(modules))
    is_padding = not rule.pad or vocabulary is not None
    name = brief(rule.name)
    _require(is_padding, location, f"pad: {name} is not the name of an embedding or output layer; remove it")


def _read_placeholders(text: str, location: str) -> frozenset[str]:
    """Return the placeholders of a template. Raises UsageError if it is not valid."""
    _limit(len(text), _MOST_LETTERS, "characters", location)
    try:
        names = parse_template(text).placeholders
    except ValueError as error:
        raise UsageError(f"{location}: {brief(text)}: {error}") from None
    _limit(len(names), _MOST_PLACEHOLDERS, "placeholders", location)
    unique = frozenset(names)
    _require(len(unique) == len(names), location, f"{brief(text)}: each placeholder may occur once")
    return unique


def describe_rule(rule: Rule) -> str:
    """Return the operations of a rule on its parts, as in a formula."""
    plain = Rule("")
    settings = []
    for key in ("sizes", "groups", "pad", "transpose", "rotary"):
        value = getattr(rule, key)
        # The defaults are not mentioned.
        if value != getattr(plain, key):
            settings.append(f"{key} = {json.dumps(value)}")
    joined = " + ".join(rule.parts)
    if settings:
        joined += f" ({', '.join(settings)})"
    return joined


def write_map(path: str, names: NameMap, guessed: Sequence[Rule] = ()) -> None:
    """Write a map as TOML.

    guessed: rules that no data shows, which get a comment.
    Raises UsageError if the file cannot be written.
    """
    lines = []
    if names.tied:
        lines += [f"tied = {json.dumps([list(pair) for pair in names.tied])}", ""]
    plain = Rule("")
    for rule in names.rules:
        if rule in guessed:
            lines.append("# A guess: several tensors have equal data, so only their names show this pair.")
        lines += ["[[rule]]", f"name = {json.dumps(rule.name)}", f"parts = {json.dumps(list(rule.parts))}"]
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
