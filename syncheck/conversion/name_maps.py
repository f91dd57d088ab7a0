"""Maps of names: bring the tensors of two models to one set of names and layouts.

A map is a table of rules. Each rule divides a stored tensor into its *parts*: the tensors of the same data in the files
that divide it most, which are those of Hugging Face for language models. All rules apply to both models, so a table
with the names of several libraries maps each of them to each other. Parts are views: no data is read or copied.

Every operation is documented at its field of `Rule`; docs/same-model.md explains the file format.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from typing import TYPE_CHECKING, Any

from syncheck.errors import UsageError, brief
from syncheck.logical import views
from syncheck.messages import Note

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from syncheck.messages import Message
    from syncheck.snapshots import Tensor

VARIABLES = ("heads", "kv_heads", "head_dim")
_PLACEHOLDER = re.compile(r"\\\{(\w+)\\\}")
# Limits of the parts of one stored tensor, and of its groups of heads: more than any model has.
_MOST_PARTS, _MOST_GROUPS = 1 << 14, 1 << 12
_MOST_JSON = 1 << 20  # bytes
# Limit of heads and sizes in a configuration, more than any model has: JSON integers have no upper limit.
_MOST_SETTING = 1 << 24


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of a map. Lengths are in elements of the dimension, dimensions count from 0."""

    name: str
    """The name of the stored tensor. `{x}` is a part of the name without dots, which keeps its value in `parts`."""
    parts: tuple[str, ...] = ()
    """The names of its parts; none: the tensor is ignored. With a placeholder that only the parts contain, the tensor
    is a stack, and its first dimension counts the placeholder from 0."""
    dim: int = 0
    """The dimension along which the parts are joined."""
    sizes: tuple[int | str, ...] = ()
    """The shares of the parts: numbers or variables; equal shares by default."""
    groups: int | str = 1
    """The parts alternate in so many groups: a number, a variable, or "rows" for single rows."""
    transpose: bool = False
    """Whether the last two dimensions are exchanged."""
    rotary: bool = False
    """Whether the rows of each head alternate between its halves, as in Meta's code for rotary embeddings."""
    pad: bool = False
    """Whether dimension 0 may have more rows than in the other model, as vocabularies do. The rest is ignored."""
    beside: str = ""
    """The rule applies only to models with a tensor of this name, which shows the library."""

    def match(self, name: str) -> dict[str, str] | None:
        """Return the values of the placeholders of a name, None if the rule does not apply to it."""
        found = _compile(self.name).fullmatch(name)
        return found.groupdict() if found else None

    @property
    def variables(self) -> frozenset[str]:
        """The variables of the rule."""
        used = {value for value in (*self.sizes, self.groups) if isinstance(value, str)} - {"rows"}
        return frozenset(used | ({"head_dim"} if self.rotary else set()))


_PATTERNS: dict[str, re.Pattern[str]] = {}


def _compile(template: str) -> re.Pattern[str]:
    if template not in _PATTERNS:
        _PATTERNS[template] = re.compile(_PLACEHOLDER.sub(r"(?P<\1>[^.]+?)", re.escape(template)))
    return _PATTERNS[template]


@dataclass(frozen=True, slots=True)
class NameMap:
    """A table of rules. title: its name or file. tied: pairs of names; a model without the first uses the second."""

    title: str
    rules: tuple[Rule, ...]
    tied: tuple[tuple[str, str], ...] = ()

    def find_rule(self, name: str) -> tuple[Rule, dict[str, str]] | None:
        """Return the first rule for a stored tensor, and the values of the placeholders."""
        for rule in self.rules:
            values = rule.match(name)
            if values is not None:
                return rule, values
        return None

    def select_rules(self, model: Mapping[str, Tensor]) -> NameMap:
        """Return the map with the rules that apply to a model."""
        present = {
            rule.beside: any(_compile(rule.beside).fullmatch(name) for name in model)
            for rule in self.rules
            if rule.beside
        }
        return replace(self, rules=tuple(rule for rule in self.rules if present.get(rule.beside, True)))


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
        return _parse(text, source)
    if not source.endswith(".toml"):
        raise UsageError(f"{source}: no such map; pass one of {', '.join(list_built_in())}, or a TOML file")
    try:
        with open(source, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UsageError(f"{source}: {problem}; pass a TOML file with a map") from None
    return _parse(text, source)


def _parse(text: str, title: str) -> NameMap:
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{title}: not a TOML file: {error}") from None
    unknown = [key for key in table if key not in ("rule", "tied")]
    rows, tied = table.get("rule", []), table.get("tied", [])
    if unknown or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        found = f"key {brief(unknown[0])}" if unknown else "`rule` is no array of tables"
        raise UsageError(f"{title}: {found}; a map contains [[rule]] tables and `tied`")
    if not isinstance(tied, list) or not all(_are_names(pair) and len(pair) == 2 for pair in tied):
        raise UsageError(f"{title}: tied: must be a list of pairs of names")
    rules = tuple(_parse_rule(row, f"{title}: rule {i}") for i, row in enumerate(rows, 1))
    return NameMap(title, rules, tuple((first, second) for first, second in tied))


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
        "dim": lambda value: _is_size(value, 0),
        "sizes": lambda value: isinstance(value, list) and all(_is_size(v) or v in VARIABLES for v in value),
        "groups": lambda value: _is_size(value) or value in (*VARIABLES, "rows"),
    }
    for key, value in {"name": None, **row}.items():
        if not checks.get(key, _is_flag)(value):
            raise UsageError(f"{place}: {key}: {brief(value)} is not valid; see docs/same-model.md")
    cells: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    rule = Rule(**cells)
    if rule.sizes and len(rule.sizes) != len(rule.parts):
        raise UsageError(f"{place}: sizes: must have one size for each of the {len(rule.parts)} parts")
    given = _PLACEHOLDER.findall(re.escape(rule.name))
    if len(set(given)) != len(given):
        raise UsageError(f"{place}: name: each placeholder may occur once")
    inner = [set(_PLACEHOLDER.findall(re.escape(part))) - set(given) for part in rule.parts]
    if any(names != inner[0] or len(names) > 1 for names in inner):
        raise UsageError(f"{place}: parts: all must have the placeholders of the name, and at most one more")
    return rule


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_size(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(slots=True)
class Mapped:
    """A model after a map. tensors: views by name. stored: the stored tensor of each view."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    stored: dict[str, Tensor] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)
    """Stored tensors without a fitting rule, or with an unknown variable; they keep their names."""
    padded: set[str] = field(default_factory=set)
    """Parts whose rows may have padding."""
    missing: set[str] = field(default_factory=set)
    """Unknown variables."""


def apply_map(
    names: NameMap, models: Sequence[Mapping[str, Tensor]], variables: Mapping[str, int]
) -> tuple[list[Mapped], list[Message]]:
    """Return two models with equal names, as far as the map goes, and notes.

    models: tensors by name. A tensor of both models keeps its name if its shapes are equal.
    """
    transposed = _find_transposed(names, models)
    mapped = [
        _map_model(names, own, other, variables, transposed if i else frozenset())
        for i, (own, other) in enumerate([(models[0], models[1]), (models[1], models[0])])
    ]
    notes: list[Message] = []
    for one, other in (mapped, mapped[::-1]):
        for first, second in names.tied:
            if first not in one.tensors and first in other.tensors and second in one.tensors:
                one.tensors[first] = replace(one.tensors[second], name=first)
                one.stored[first] = one.stored[second]
                one.padded |= {first} if second in one.padded else set()
    if padded := _remove_padding(mapped):
        notes.append(Note.PADDED(names=tuple(padded), rows=max(padded.values())))
    for side, own in zip("AB", mapped, strict=True):
        if own.ignored:
            notes.append(Note.IGNORED(side=side, names=tuple(own.ignored)))
        if own.missing:
            notes.append(Note.UNKNOWN_SETTINGS(side=side, names=tuple(sorted(own.missing)), count=len(own.unfit)))
        elif own.unfit:
            notes.append(Note.UNFIT(side=side, names=tuple(own.unfit), map=names.title))
    return mapped, notes


def _find_transposed(names: NameMap, models: Sequence[Mapping[str, Tensor]]) -> frozenset[str]:
    """Return the transposed names of both models, if the shape of at least one of them shows this.

    Libraries store the weight of a linear layer in both orientations under one name. Square weights do not show it.
    """
    first, second = models
    found = {
        name: tensor.shape != second[name].shape
        for name, tensor in first.items()
        if name in second and (rule := names.find_rule(name)) and rule[0].transpose and rule[0].parts == (rule[0].name,)
        if second[name].shape == (*tensor.shape[:-2], *tensor.shape[:-3:-1])
    }
    return frozenset(found) if any(found.values()) else frozenset()


def _map_model(
    names: NameMap,
    own: Mapping[str, Tensor],
    other: Mapping[str, Tensor],
    variables: Mapping[str, int],
    transposed: frozenset[str],
) -> Mapped:
    mapped, names = Mapped(), names.select_rules(own)
    rules: dict[str, tuple[Rule, dict[str, str]]] = {}
    for name, tensor in own.items():
        partner = other.get(name)
        common = partner is not None and (partner.shape == tensor.shape or partner.refused) and name not in transposed
        found = None if common or tensor.refused else names.find_rule(name)
        if found is None or (found[0].parts == (found[0].name,) and name not in transposed):
            _add(mapped, {name: tensor}, tensor)
            mapped.padded |= {name} if found is not None and found[0].pad else set()
        else:
            rules[name] = found
    for name, (rule, values) in rules.items():
        tensor = own[name]
        if not rule.parts:
            mapped.ignored.append(name)
            continue
        unknown = rule.variables - variables.keys()
        parts = None if unknown else split_tensor(rule, values, tensor, variables)
        if parts is None or not mapped.tensors.keys().isdisjoint(parts) or len(parts) > _MOST_PARTS:
            mapped.missing |= unknown
            mapped.unfit.append(name)
            parts = {name: tensor}
        _add(mapped, parts, tensor)
        if rule.pad:
            mapped.padded |= parts.keys()
    return mapped


def _add(mapped: Mapped, parts: Mapping[str, Tensor], stored: Tensor) -> None:
    for name, part in parts.items():
        mapped.tensors[name] = part if part.name == name else replace(part, name=name)
        mapped.stored[name] = stored


def split_tensor(
    rule: Rule, values: Mapping[str, str], tensor: Tensor, variables: Mapping[str, int]
) -> dict[str, Tensor] | None:
    """Return the parts of a stored tensor by name; None if the rule does not fit its shape.

    values: of the placeholders. variables: numbers of heads and their size.
    """
    inner = next((x for x in _PLACEHOLDER.findall(re.escape(rule.parts[0])) if x not in values), None)
    if tensor.digest is not None and (inner or len(rule.parts) > 1 or rule.transpose or rule.rotary):
        return None  # a digest is of the whole tensor
    if inner is None:
        return dict(_split_one(rule, values, tensor, variables)) or None
    if not tensor.shape or tensor.shape[0] > _MOST_PARTS:
        return None
    parts: dict[str, Tensor] = {}
    for i, one in enumerate(views.unstack(tensor)):
        parts.update(_split_one(rule, {**values, inner: str(i)}, one, variables))
    return parts or None


def _split_one(
    rule: Rule, values: Mapping[str, str], tensor: Tensor, variables: Mapping[str, int]
) -> Iterator[tuple[str, Tensor]]:
    if rule.transpose:
        if len(tensor.shape) < 2:
            return
        dims = [*range(len(tensor.shape))]
        tensor = views.permute(tensor, [*dims[:-2], dims[-1], dims[-2]])
    if len(rule.parts) == 1 and not rule.rotary:
        yield rule.parts[0].format(**values), tensor
        return
    if rule.dim >= len(tensor.shape):
        return
    length = tensor.shape[rule.dim]
    shares = [variables[size] if isinstance(size, str) else size for size in rule.sizes] or [1] * len(rule.parts)
    total = sum(shares)
    groups = length // total if rule.groups == "rows" else rule.groups
    groups = variables[groups] if isinstance(groups, str) else groups
    if (
        not length
        or not 0 < groups <= (length if rule.groups == "rows" else _MOST_GROUPS)
        or any(length * share % (total * groups) for share in shares)
    ):
        return
    grouped = views.unflatten(tensor, rule.dim, (groups, length // groups)) if len(shares) > 1 else tensor
    at = 0
    for template, share in zip(rule.parts, shares, strict=True):
        part = tensor
        if len(shares) > 1:
            size = length * share // total // groups
            part = views.flatten(views.narrow(grouped, rule.dim + 1, at, size), rule.dim)
            at += size
        if rule.rotary:
            head = variables["head_dim"]
            if head % 2 or part.shape[0] % head:
                return
            part = views.unflatten(part, 0, (part.shape[0] // head, head // 2, 2))
            part = views.permute(part, (0, 2, 1, *range(3, len(part.shape))))
            part = views.flatten(views.flatten(part, 0), 0)
        yield template.format(**values), part


def _remove_padding(mapped: Sequence[Mapped]) -> dict[str, int]:
    """Cut padded tensors to the common rows. Return the number of cut rows by name."""
    cut: dict[str, int] = {}
    first, second = mapped
    for name in sorted((first.padded | second.padded) & first.tensors.keys() & second.tensors.keys()):
        a, b = first.tensors[name], second.tensors[name]
        if not a.shape or a.shape[1:] != b.shape[1:] or a.shape == b.shape or a.digest or b.digest:
            continue
        longer, least = (first, b.shape[0]) if a.shape[0] > b.shape[0] else (second, a.shape[0])
        if name in longer.padded:
            longer.tensors[name] = views.narrow(longer.tensors[name], 0, 0, least)
            cut[name] = abs(a.shape[0] - b.shape[0])
    return cut


def find_variables(paths: Sequence[str], values: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of heads and their size, from config.json beside the files or from saved arguments.

    values: the Python values of the files by dotted name, such as Megatron's saved arguments.
    """
    settings: dict[str, Any] = {name.rpartition(".")[2]: value for name, value in values.items()}
    for folder in dict.fromkeys(path if os.path.isdir(path) else os.path.dirname(path) for path in paths):
        config = read_json(os.path.join(folder, "config.json"))
        inner = config.get("text_config")
        settings |= config | (inner if isinstance(inner, dict) else {})
    found: dict[str, int] = {}
    keys = {
        "heads": ("num_attention_heads", "n_head", "n_heads"),
        "kv_heads": ("num_key_value_heads", "num_query_groups", "n_kv_heads"),
        "head_dim": ("head_dim", "kv_channels"),
    }
    for variable, names in keys.items():
        numbers = [settings[name] for name in names if _is_setting(settings.get(name))]
        if numbers:
            found[variable] = numbers[0]
    width = next((settings[name] for name in ("hidden_size", "n_embd") if _is_setting(settings.get(name))), 0)
    if "heads" in found:
        if width and width % found["heads"] == 0:
            found.setdefault("head_dim", width // found["heads"])
        found.setdefault("kv_heads", found["heads"])
    return found


def _is_setting(value: object) -> bool:
    """Whether a value of a configuration is a number of heads, or a size, that a model can have."""
    return _is_size(value) and isinstance(value, int) and value <= _MOST_SETTING


def read_json(path: str) -> dict[str, Any]:
    """Return a configuration; empty if the file is missing, too large or not a JSON object."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.loads(file.read(_MOST_JSON))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
