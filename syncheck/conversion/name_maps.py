"""Maps of names: bring the tensors of two models to one set of names and layouts.

A map is a table of rules. Each rule divides a stored tensor into its *parts*: the tensors of the same data in the files
that divide it most, which are those of Hugging Face for language models. All rules apply to both models, so a table
with the names of several libraries maps each of them to each other. Parts are views: no data is read or copied.

Every operation is documented at its field of `Rule`; docs/same-model.md explains the file format.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from syncheck.conversion.templates import Template, parse_template
from syncheck.logical import views

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.snapshots import Tensor

VARIABLES = ("heads", "kv_heads", "head_dim")
# Limits of the parts of one stored tensor, and of its groups of heads: more than any model has.
MOST_PARTS, _MOST_GROUPS = 1 << 14, 1 << 12
_MOST_JSON = 1 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of a map. Lengths are in elements of the dimension, dimensions count from 0.

    Names are templates (`syncheck.conversion.templates`).
    """

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
    pad: bool | int = False
    """The multiple to which the rows of a vocabulary are padded; true: the multiple in the model's saved arguments."""
    beside: str = ""
    """The rule applies only to models with a tensor of this name, which shows the library."""

    def match(self, name: str) -> dict[str, str] | None:
        """Return the values of the placeholders of a name, None if the rule does not apply to it."""
        return parse_template(self.name).match(name)

    @property
    def variables(self) -> frozenset[str]:
        """The variables of the rule."""
        numbers = {*self.sizes, self.groups, "rows"}
        used = {number for number in numbers if isinstance(number, str)} - {"rows"}
        if self.rotary:
            used.add("head_dim")
        return frozenset(used)

    @property
    def turns(self) -> bool:
        """Whether the rule only transposes a tensor that has the same name in both orientations."""
        return self.transpose and self.parts == (self.name,)


@dataclass(frozen=True)
class NameMap:
    """A table of rules."""

    title: str
    """Its name or file."""
    rules: tuple[Rule, ...]
    tied: tuple[tuple[str, str], ...] = ()
    """Pairs of names; a model without the first uses the second."""
    built_in: bool = False
    """Whether it is a map of this package."""

    def find_rule(self, name: str) -> tuple[Rule, dict[str, str]] | None:
        """Return the first rule for a stored tensor, and the values of the placeholders."""
        templates, positions = self._index
        position = positions.get(name, len(self.rules))
        # A rule with placeholders that comes first is tried first.
        for earlier, template in templates:
            if earlier > position:
                break
            values = template.match(name)
            if values is not None:
                return self.rules[earlier], values
        # No rule has this name.
        if position == len(self.rules):
            return None
        return self.rules[position], {}

    @cached_property
    def _index(self) -> tuple[list[tuple[int, Template]], dict[str, int]]:
        """The positions of the rules: with their names if they have placeholders, and by name otherwise."""
        templates = []
        positions: dict[str, int] = {}
        for position, rule in enumerate(self.rules):
            template = parse_template(rule.name)
            if template.placeholders:
                templates.append((position, template))
            else:
                # The first rule of a name counts.
                positions.setdefault(template.literals[0], position)
        return templates, positions

    def select_rules(self, model: Mapping[str, Tensor]) -> NameMap:
        """Return the map with the rules that apply to a model."""
        absent = set()
        for beside in {rule.beside for rule in self.rules} - {""}:
            template = parse_template(beside)
            if not any(template.match(name) is not None for name in model):
                absent.add(beside)
        # The templates of the whole map are parsed only once.
        if not absent:
            return self
        rules = [rule for rule in self.rules if rule.beside not in absent]
        return replace(self, rules=tuple(rules))


def is_size(value: object, least: int = 1) -> bool:
    """Whether a value is a whole number of at least `least`."""
    # True and False are of another type.
    return type(value) is int and value >= least


def split_tensor(
    rule: Rule, values: Mapping[str, str], tensor: Tensor, variables: Mapping[str, int]
) -> dict[str, Tensor]:
    """Return the parts of a stored tensor by name; none if the rule does not fit its shape.

    values: of the placeholders.
    variables: numbers of heads and their size.
    """
    divider = _Divider(rule, variables)
    # A placeholder that only the parts have counts the indices of a stack.
    placeholders = parse_template(rule.parts[0]).placeholders
    index_names = [name for name in placeholders if name not in values]
    parts: dict[str, Tensor] = {}
    if not index_names:
        parts = divider.divide(tensor, values)
    elif len(tensor.shape) > 0 and tensor.shape[0] * len(rule.parts) <= MOST_PARTS:
        (index_name,) = index_names
        for index, member in enumerate(views.unstack(tensor)):
            parts |= divider.divide(member, {**values, index_name: str(index)})
    # A digest is of the whole tensor in its stored layout.
    if tensor.digest is not None and list(parts.values()) != [tensor]:
        return {}
    return parts


def _transpose(tensor: Tensor) -> Tensor:
    """Return a tensor with its last two dimensions exchanged."""
    dims = list(range(len(tensor.shape)))
    dims[-2:] = reversed(dims[-2:])
    return views.permute(tensor, dims)


class _Divider:
    """Divides tensors into parts by a rule."""

    def __init__(self, rule: Rule, variables: Mapping[str, int]) -> None:
        self._rule = rule
        self._variables = variables
        shares = rule.sizes or (1,) * len(rule.parts)
        self._shares = [self._evaluate(share) for share in shares]

    def _evaluate(self, number: int | str) -> int:
        """Return a number, or the value of a variable."""
        # The caller checks that all variables are known.
        if isinstance(number, str):
            return self._variables[number]
        return number

    def divide(self, tensor: Tensor, values: Mapping[str, str]) -> dict[str, Tensor]:
        """Return the parts of a tensor by name; none if the rule does not fit its shape."""
        # A bias has one dimension, so it needs a rule without transposition.
        if self._rule.transpose and len(tensor.shape) < 2:
            return {}
        if self._rule.transpose:
            tensor = _transpose(tensor)
        parts = [tensor]
        if len(self._rule.parts) > 1:
            parts = self._split(tensor)
        if self._rule.rotary:
            parts = self._join_halves(parts)
        by_name = {}
        # Without parts, the rule does not fit.
        for template, part in zip(self._rule.parts, parts, strict=False):
            name = parse_template(template).fill(values)
            by_name[name] = part
        return by_name

    def _split(self, tensor: Tensor) -> list[Tensor]:
        """Return the parts of a tensor along a dimension, in which they alternate; none if its length does not fit."""
        dim = self._rule.dim
        length = math.prod(tensor.shape[dim : dim + 1])
        groups = self._count_groups(length)
        total = sum(self._shares) * groups
        # Each part has the same whole number of rows in each group.
        for share in self._shares:
            if length * share % total:
                return []
        # The bias of a layer may lack the dimension of its weight.
        if dim >= len(tensor.shape):
            return []
        grouped = views.unflatten(tensor, dim, (groups, length // groups))
        parts = []
        begin = 0
        for share in self._shares:
            size = length * share // total
            part = views.narrow(grouped, dim + 1, begin, size)
            parts.append(views.flatten(part, dim))
            begin += size
        return parts

    def _count_groups(self, length: int) -> int:
        """Return the number of groups in which the parts alternate, in a dimension of this length."""
        # The smallest groups, of which a long tensor has many.
        if self._rule.groups == "rows":
            return max(1, length // sum(self._shares))
        groups = self._evaluate(self._rule.groups)
        # More groups than heads of any model do not fit a tensor of this length.
        return groups if groups <= _MOST_GROUPS else length + 1

    def _join_halves(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors with the halves of each head one after the other; none if they do not consist of heads."""
        head = self._variables["head_dim"]
        joined = []
        for tensor in tensors:
            rows = math.prod(tensor.shape[:1])
            if head % 2 or rows % head:
                return []
            # (heads, rows of a half, halves, ...)
            alternating = views.unflatten(tensor, 0, (rows // head, head // 2, 2))
            further = range(3, len(alternating.shape))
            ordered = views.permute(alternating, (0, 2, 1, *further))
            joined.append(views.flatten(views.flatten(ordered, 0), 0))
        return joined


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
        "vocabulary": ("vocab_size",),
        "vocabulary_multiple": ("make_vocab_size_divisible_by",),
    }
    for variable, names in keys.items():
        numbers = [settings[name] for name in names if is_size(settings.get(name))]
        if numbers:
            found[variable] = numbers[0]
    ranks = settings.get("tensor_model_parallel_size", 1)
    if "vocabulary_multiple" in found and isinstance(ranks, int) and is_size(ranks):
        found["vocabulary_multiple"] *= ranks  # each rank has a multiple
    width = next((settings[name] for name in ("hidden_size", "n_embd") if is_size(settings.get(name))), 0)
    if "heads" in found:
        if width and width % found["heads"] == 0:
            found.setdefault("head_dim", width // found["heads"])
        found.setdefault("kv_heads", found["heads"])
    return found


def read_json(path: str) -> dict[str, Any]:
    """Return a configuration; empty if the file is missing, too large or not a JSON object."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.loads(file.read(_MOST_JSON))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
