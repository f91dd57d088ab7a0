"""Read and write maps of names: TOML files, and the maps of this package."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, TypeGuard

from syncheck.conversion.name_maps import MOST_PARTS, VARIABLES, NameMap, Rule
from syncheck.conversion.templates import parse_template
from syncheck.conversion.vocabularies import has_vocabulary
from syncheck.errors import UsageError
from syncheck.readers import outputs
from syncheck.settings.files import is_setting, is_size
from syncheck.suggestions import suggest
from syncheck.text import brief

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

# Limits of a file that may come from anywhere. The largest map of this package has 60 rules in 8 kB, and an inferred
# map has the names of the files, of any length.
_MOST_BYTES, _MOST_RULES, _MOST_LETTERS = 1 << 24, 1 << 16, 1 << 20


@cache
def list_built_in() -> tuple[str, ...]:
    """Return the names of the maps of this package."""
    folder = resources.files(__package__) / "maps"
    file_names = sorted(file.name for file in folder.iterdir())
    return tuple(name.removesuffix(".toml") for name in file_names if name.endswith(".toml"))


def read_map(source: str) -> NameMap:
    """Read a map: the name of a map of this package, or the path of a TOML file.

    Raises UsageError for an unknown name, and for a file that is not a map.
    """
    built_in = list_built_in()
    if source in built_in:
        return _read_built_in(source)
    is_file = source.endswith(".toml")
    known_maps = ", ".join(built_in)
    _require(is_file, f"{source}: no such map; pass one of {known_maps}, or a TOML file{suggest(source, built_in)}")
    return _parse(_read_text(source), source)


@cache
def _read_built_in(title: str) -> NameMap:
    """Return a map of this package, which is read once for all models."""
    path = resources.files(__package__) / "maps" / f"{title}.toml"
    return _parse(path.read_text(encoding="utf-8"), title, built_in=True)


def _require(is_valid: bool, problem: str) -> None:
    """Raise UsageError if a condition of valid maps is false."""
    if not is_valid:
        raise UsageError(problem)


def _require_value(is_valid: bool, setting: str, value: object, problem: str) -> None:
    """Raise UsageError if a value of a setting is not valid, whose text is made only then."""
    if not is_valid:
        raise UsageError(f"{setting}: {brief(value)} {problem}")


def _read_text(path: str) -> str:
    """Return the content of a file of a user. Raises UsageError if it cannot be a map."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; pass a TOML file with a map") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not a text file; pass a TOML file with a map") from None
    _require_length(text, path)
    return text


def _require_length(text: str, path: str) -> None:
    """Raise UsageError if a text is too long for a map. path: of its file."""
    _require(len(text) <= _MOST_BYTES, f"{path}: more than {_MOST_BYTES} characters; pass a TOML file with a map")


def _parse(text: str, title: str, *, built_in: bool = False) -> NameMap:
    """Return the map in a TOML text. Raises UsageError if it is not a map."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{title}: not a TOML file: {error}") from None
    # Thousands of nested lists, or a number with thousands of digits.
    except (RecursionError, ValueError):
        raise UsageError(f"{title}: nested too deeply, or a number is too large; a map has neither") from None
    known_keys = f"[[rule]] tables, `tied`, `prefix`, and {', '.join(VARIABLES)}"
    for key in table:
        if key not in ("rule", "tied", "prefix", *VARIABLES):
            raise UsageError(f"{title}: key {brief(key)}; a map contains {known_keys}")
    rows, tied, prefix = table.get("rule", []), table.get("tied", []), table.get("prefix", "")
    are_tables = _is_list(rows, _is_table)
    _require(are_tables, f"{title}: `rule` is no array of tables; a map contains [[rule]] tables and `tied`")
    _require(_is_list(tied, _is_pair), f"{title}: tied: must be a list of pairs of names")
    is_literal = isinstance(prefix, str) and not set("{}") & set(prefix)
    _require(is_literal, f"{title}: prefix: must be the start of names, without placeholders")
    _require(len(rows) <= _MOST_RULES, f"{title}: {len(rows)} rules; at most {_MOST_RULES} are allowed")
    rules = [_parse_rule(row, f"{title}: rule {number}") for number, row in enumerate(rows, 1)]
    pairs = [(first, second) for first, second in tied]
    return NameMap(
        title,
        rules=tuple(rules),
        tied=tuple(pairs),
        variables=_parse_variables(table, title),
        built_in=built_in,
        prefix=prefix,
    )


def _parse_variables(table: Mapping[str, Any], title: str) -> tuple[tuple[str, int], ...]:
    """Return the numbers of heads and their size, as far as a map states them. Raises UsageError for other values."""
    variables = {name: table[name] for name in VARIABLES if name in table}
    for name, value in variables.items():
        problem = "is not a number of heads, or the size of a head"
        _require_value(
            is_setting(value),
            setting=f"{title}: {name}",
            value=value,
            problem=problem,
        )
    return tuple(variables.items())


def _parse_rule(row: Mapping[str, Any], label: str) -> Rule:
    """Return a rule. Raises UsageError if it is not valid. label: the file and the number of the rule."""
    unknown_keys = row.keys() - _CHECKS.keys()
    if unknown_keys:
        keys = ", ".join(sorted(_CHECKS))
        raise UsageError(f"{label}: unknown key {brief(min(unknown_keys))}; known keys: {keys}")
    settings: dict[str, Any] = {}
    # Every rule has a name.
    for key, value in {"name": None, **row}.items():
        is_valid = _CHECKS[key]
        _require_value(
            is_valid(value),
            setting=f"{label}: {key}",
            value=value,
            problem="is not valid; see docs/same-model.md",
        )
        # Rules are compared and counted, which lists cannot be.
        settings[key] = tuple(value) if isinstance(value, list) else value
    rule = Rule(**settings)
    _check_rule(rule, label)
    return rule


def _is_list(value: object, is_item: Callable[[object], bool]) -> TypeGuard[list[Any]]:
    """Whether a value is a list of valid items."""
    return isinstance(value, list) and all(map(is_item, value))


def _is_table(value: object) -> bool:
    return isinstance(value, dict)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _are_names(value: object) -> bool:
    return _is_list(value, _is_name)


def _is_pair(value: object) -> bool:
    return _is_list(value, _is_name) and len(value) == 2


def _is_dim(value: object) -> bool:
    return is_size(value, 0)


def _is_share(value: object) -> bool:
    return is_size(value) or value in VARIABLES


def _are_shares(value: object) -> bool:
    return _is_list(value, _is_share)


def _is_group_count(value: object) -> bool:
    return _is_share(value) or value == "rows"


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_padding(value: object) -> bool:
    return _is_flag(value) or is_size(value, 2)


# The keys of a rule in the order of a written map, and whether a value is valid.
_CHECKS: dict[str, Callable[[object], bool]] = {
    "name": _is_name,
    "parts": _are_names,
    "dim": _is_dim,
    "sizes": _are_shares,
    "groups": _is_group_count,
    "transpose": _is_flag,
    "rotary": _is_flag,
    "pad": _is_padding,
    "beside": _is_text,
}


def _check_rule(rule: Rule, label: str) -> None:
    """Raise UsageError for a rule that contradicts itself. label: the file and the number of the rule."""
    count = len(rule.parts)
    _require(len(rule.shares) == count, f"{label}: sizes: must have one size for each of the {count} parts")
    _require(count <= MOST_PARTS, f"{label}: parts: {count} parts; at most {MOST_PARTS} are allowed")
    # A part that is named twice would replace the first of both, which would never be compared.
    for part, occurrences in Counter(rule.parts).items():
        problem = "is named twice; each part needs a name of its own"
        _require_value(
            occurrences == 1,
            setting=f"{label}: parts",
            value=part,
            problem=problem,
        )
    _check_placeholders(rule, label)
    # Only the rows of a vocabulary are padded.
    may_be_padded = not rule.pad or any(map(has_vocabulary, (rule.name, *rule.parts)))
    problem = "is not the name of an embedding or output layer; remove it"
    _require_value(
        may_be_padded,
        setting=f"{label}: pad",
        value=rule.name,
        problem=problem,
    )


def _check_placeholders(rule: Rule, label: str) -> None:
    """Raise UsageError for names of a rule that are not valid or have other placeholders."""
    placeholders = set(_read_placeholders(rule.name, f"{label}: name"))
    _read_placeholders(rule.beside, f"{label}: beside")
    # The placeholders that count the first dimension of a stack.
    index_placeholders = set()
    for part in rule.parts:
        further_placeholders = set(_read_placeholders(part, f"{label}: parts")) - placeholders
        index_placeholders.add(frozenset(further_placeholders))
    # Either all parts have the same size, or no part has a size.
    most_of_part = max(map(len, index_placeholders), default=0)
    is_valid = max(len(index_placeholders), most_of_part) <= 1
    _require(is_valid, f"{label}: parts: all must have the placeholders of the name, and at most one more")


def _read_placeholders(text: str, label: str) -> tuple[str, ...]:
    """Return the placeholders of a template. Raises UsageError if it is not valid."""
    _require(len(text) <= _MOST_LETTERS, f"{label}: {len(text)} characters; at most {_MOST_LETTERS} are allowed")
    try:
        names = parse_template(text).placeholders
    except ValueError as error:
        raise UsageError(f"{label}: {brief(text)}: {error}") from None
    if len(set(names)) < len(names):
        raise UsageError(f"{label}: {brief(text)}: each placeholder may occur once")
    return names


def _list_settings(rule: Rule) -> dict[str, Any]:
    """Return the settings of a rule that differ from their defaults, without its names."""
    plain = Rule(rule.name, rule.parts)
    return {key: getattr(rule, key) for key in _CHECKS if getattr(rule, key) != getattr(plain, key)}


def describe_rule(rule: Rule) -> str:
    """Return the operations of a rule on its parts, as in a formula."""
    settings = [_describe_setting(key, value) for key, value in _list_settings(rule).items()]
    joined = " + ".join(rule.parts)
    return f"{joined} ({', '.join(settings)})" if settings else joined


def _describe_setting(key: str, value: object) -> str:
    """Return a setting of a rule, as in a call of a function."""
    # Flags are off by default.
    if value is True:
        return key
    text = list(value) if isinstance(value, tuple) else value
    return f"{key}={text}"


def write_map(path: str, names: NameMap, guessed: Collection[Rule] = (), contradicted: Collection[Rule] = ()) -> None:
    """Write a map as TOML.

    guessed: rules that no data shows, which get a comment.
    contradicted: rules that names contradict, which get a comment, too.
    Raises OptionError if the file cannot be written, or would replace an input or a checkpoint, and UsageError if
    `read_map` would refuse it.
    """
    lines = [f"{name} = {number}" for name, number in names.variables]
    if lines:
        lines.append("")
    if names.prefix:
        lines += [f"prefix = {_to_toml(names.prefix)}", ""]
    if names.tied:
        lines += [f"tied = {_to_toml(names.tied)}", ""]
    for rule in names.rules:
        if rule in guessed:
            lines.append("# A guess: several tensors have equal data, so only their names show this pair.")
        if rule in contradicted:
            lines.append("# The name of this rule, or another rule of its module, contradicts it. B may be wrong.")
        settings = {
            "name": rule.name,
            "parts": rule.parts,
            **_list_settings(rule),
        }
        lines.append("[[rule]]")
        lines += [f"{key} = {_to_toml(value)}" for key, value in settings.items()]
        lines.append("")
    text = "\n".join(lines)
    # A map beyond the limits would be refused only in the next run.
    _require_length(text, path)
    _parse(text, path)
    outputs.write(path, text, outputs.MAP)


def _to_toml(value: object) -> str:
    r"""Return a string, a list, a number or a flag in TOML.

    TOML's strings are JSON's, with two exceptions. TOML has no surrogates, so pairs are written as characters, and a
    single surrogate cannot be written. TOML requires that DEL is escaped.
    """
    if isinstance(value, tuple):
        value = [list(item) if isinstance(item, tuple) else item for item in value]
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
