"""Read and write maps of names: TOML files, and the maps of this package."""

from __future__ import annotations

import json
import tomllib
from dataclasses import fields
from importlib import resources
from typing import TYPE_CHECKING, Any

from syncheck import outputs
from syncheck.conversion.name_maps import VARIABLES, NameMap, Rule, is_size
from syncheck.conversion.templates import parse_template
from syncheck.conversion.vocabularies import has_vocabulary
from syncheck.errors import UsageError, brief

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# Limits of a file that may come from anywhere. The largest map of this package has 60 rules in 8 kB.
_MOST_BYTES, _MOST_RULES, _MOST_PARTS, _MOST_LETTERS = 1 << 24, 1 << 16, 256, 1024


def list_built_in() -> tuple[str, ...]:
    """Return the names of the maps of this package."""
    folder = resources.files(__package__) / "maps"
    return tuple(sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml")))


def read_map(source: str) -> NameMap:
    """Read a map: the name of a map of this package, or the path of a TOML file.

    Raises UsageError for an unknown name, and for a file that is not a map.
    """
    if source in list_built_in():
        text = (resources.files(__package__) / "maps" / f"{source}.toml").read_text(encoding="utf-8")
        return _parse(text, source, built_in=True)
    if not source.endswith(".toml"):
        raise UsageError(f"{source}: no such map; pass one of {', '.join(list_built_in())}, or a TOML file")
    try:
        with open(source, encoding="utf-8") as file:
            text = file.read(_MOST_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UsageError(f"{source}: {problem}; pass a TOML file with a map") from None
    if len(text) > _MOST_BYTES:
        raise UsageError(f"{source}: more than {_MOST_BYTES} characters; pass a TOML file with a map")
    return _parse(text, source)


def _parse(text: str, title: str, *, built_in: bool = False) -> NameMap:
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{title}: not a TOML file: {error}") from None
    except (RecursionError, ValueError):  # thousands of nested lists, or a number with thousands of digits
        raise UsageError(f"{title}: nested too deeply, or a number is too large; a map has neither") from None
    unknown = [key for key in table if key not in ("rule", "tied")]
    rows, tied = table.get("rule", []), table.get("tied", [])
    if unknown or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        problem = f"key {brief(unknown[0])}" if unknown else "`rule` is no array of tables"
        raise UsageError(f"{title}: {problem}; a map contains [[rule]] tables and `tied`")
    if not isinstance(tied, list) or not all(_are_names(pair) and len(pair) == 2 for pair in tied):
        raise UsageError(f"{title}: tied: must be a list of pairs of names")
    if len(rows) > _MOST_RULES:
        raise UsageError(f"{title}: {len(rows)} rules; at most {_MOST_RULES} are allowed")
    rules = tuple(_parse_rule(row, f"{title}: rule {i}") for i, row in enumerate(rows, 1))
    return NameMap(title, rules, tuple((first, second) for first, second in tied), built_in=built_in)


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) and item for item in value)


def _parse_rule(row: Mapping[str, Any], place: str) -> Rule:
    known = {part.name for part in fields(Rule)}
    if unknown := row.keys() - known:
        raise UsageError(f"{place}: unknown key {brief(min(unknown))}; known keys: {', '.join(sorted(known))}")
    checks: dict[str, Callable[[Any], object]] = {
        "name": lambda value: isinstance(value, str) and value,
        "beside": lambda value: isinstance(value, str),
        "parts": _are_names,
        "dim": lambda value: is_size(value, 0),
        "sizes": lambda value: isinstance(value, list) and all(is_size(v) or v in VARIABLES for v in value),
        "groups": lambda value: is_size(value) or value in (*VARIABLES, "rows"),
        "pad": lambda value: isinstance(value, bool) or is_size(value, 2),
    }
    for key, value in {"name": None, **row}.items():
        check = checks.get(key, _is_flag)
        if not check(value):
            raise UsageError(f"{place}: {key}: {brief(value)} is not valid; see docs/same-model.md")
    cells: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    rule = Rule(**cells)
    _check_rule(rule, place)
    return rule


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _check_rule(rule: Rule, place: str) -> None:
    """Raise UsageError for a rule that contradicts itself."""
    if rule.sizes and len(rule.sizes) != len(rule.parts):
        raise UsageError(f"{place}: sizes: must have one size for each of the {len(rule.parts)} parts")
    if len(rule.parts) > _MOST_PARTS:
        raise UsageError(f"{place}: parts: {len(rule.parts)} parts; at most {_MOST_PARTS} are allowed")
    # A part that is named twice would replace the first of both, which would never be compared.
    repeated = [part for part in rule.parts if rule.parts.count(part) > 1]
    if repeated:
        raise UsageError(f"{place}: parts: {brief(repeated[0])} is named twice; each part needs a name of its own")
    placeholders = _read_placeholders(rule.name, f"{place}: name")
    if rule.beside:
        _read_placeholders(rule.beside, f"{place}: beside")
    counted = []
    for part in rule.parts:
        inner = set(_read_placeholders(part, f"{place}: parts")) - set(placeholders)
        counted.append(inner)
    if any(names != counted[0] or len(names) > 1 for names in counted):
        raise UsageError(f"{place}: parts: all must have the placeholders of the name, and at most one more")
    if rule.pad and not any(map(has_vocabulary, (rule.name, *rule.parts))):
        raise UsageError(f"{place}: pad: {brief(rule.name)} is not the name of an embedding or output layer; remove it")


def _read_placeholders(text: str, place: str) -> tuple[str, ...]:
    """Return the placeholders of a template. Raises UsageError if it is not valid."""
    if len(text) > _MOST_LETTERS:
        raise UsageError(f"{place}: {len(text)} characters; at most {_MOST_LETTERS} are allowed")
    try:
        names = parse_template(text).placeholders
    except ValueError as error:
        raise UsageError(f"{place}: {brief(text)}: {error}") from None
    if len(set(names)) != len(names):
        raise UsageError(f"{place}: {brief(text)}: each placeholder may occur once")
    return names


def describe_rule(rule: Rule) -> str:
    """Return the operations of a rule on its parts, as in a formula."""
    joined = " + ".join(rule.parts)
    plain = Rule("")
    settings = []
    for key in ("sizes", "groups", "pad"):
        value = getattr(rule, key)
        if value != getattr(plain, key):
            settings.append(f"{key}={list(value) if isinstance(value, tuple) else value}")
    settings += [key for key in ("transpose", "rotary") if getattr(rule, key)]
    return f"{joined} ({', '.join(settings)})" if settings else joined


def write_map(path: str, names: NameMap, guessed: Sequence[Rule] = ()) -> None:
    """Write a map as TOML.

    guessed: rules that no data shows, which get a comment.
    Raises OptionError if the file cannot be written, or would replace an input or a checkpoint.
    """
    lines = []
    if names.tied:
        lines += [f"tied = {_to_toml(names.tied)}", ""]
    plain = Rule("")
    for rule in names.rules:
        if rule in guessed:
            lines.append("# A guess: several tensors have equal data, so only their names show this pair.")
        lines += ["[[rule]]", f"name = {_to_toml(rule.name)}", f"parts = {_to_toml(rule.parts)}"]
        for key in ("dim", "sizes", "groups", "transpose", "rotary", "pad", "beside"):
            value = getattr(rule, key)
            if value != getattr(plain, key):
                lines.append(f"{key} = {_to_toml(value)}")
        lines.append("")
    outputs.write(path, "\n".join(lines), outputs.MAP)


def _to_toml(value: object) -> str:
    r"""Return a string, a list, a number or a flag in TOML.

    TOML's strings are JSON's, with two exceptions. TOML has no surrogates, so pairs are written as characters, and a
    single surrogate cannot be written. TOML requires that DEL is escaped.
    """
    if isinstance(value, tuple):
        value = [list(item) if isinstance(item, tuple) else item for item in value]
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
