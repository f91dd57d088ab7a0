"""Maps of names: bring the tensors of two models to one set of names and layouts.

A map is a table of rules. Each rule divides a stored tensor into its *parts*: the tensors of the same data in the files
that divide it most, which are those of Hugging Face for language models. All rules apply to both models, so a table
with the names of several libraries maps each of them to each other. Parts are views: no data is read or copied.

Every operation is documented at its field of `Rule`; docs/same-model.md explains the file format.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from syncheck.conversion.templates import Template, parse_template
from syncheck.logical import views

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from syncheck.snapshots import Tensor

VARIABLES = ("heads", "kv_heads", "head_dim")
# Limits of the parts of one stored tensor, and of its groups of heads: more than any model has.
MOST_PARTS, _MOST_GROUPS = 1 << 14, 1 << 12
_MOST_JSON = 1 << 20  # bytes
# Limit of heads and sizes in a configuration, more than any model has: JSON integers have no upper limit.
_MOST_SETTING = 1 << 24


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
        used = {value for value in (*self.sizes, self.groups) if isinstance(value, str)} - {"rows"}
        return frozenset(used | ({"head_dim"} if self.rotary else set()))

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
        position = self._positions.get(name, len(self.rules))
        for i, template in self._templates:
            if i > position:
                break
            values = template.match(name)
            if values is not None:
                return self.rules[i], values
        return (self.rules[position], {}) if position < len(self.rules) else None

    @cached_property
    def _templates(self) -> list[tuple[int, Template]]:
        """The positions and names of the rules with placeholders."""
        templates = [(i, parse_template(rule.name)) for i, rule in enumerate(self.rules)]
        return [(i, template) for i, template in templates if template.placeholders]

    @cached_property
    def _positions(self) -> dict[str, int]:
        """The position of the first rule of each name without placeholders."""
        positions: dict[str, int] = {}
        for i, rule in enumerate(self.rules):
            template = parse_template(rule.name)
            if not template.placeholders:
                positions.setdefault(template.literals[0], i)
        return positions

    def select_rules(self, model: Mapping[str, Tensor]) -> NameMap:
        """Return the map with the rules that apply to a model."""
        present = {"": True}
        for beside in {rule.beside for rule in self.rules} - {""}:
            template = parse_template(beside)
            present[beside] = any(template.match(name) is not None for name in model)
        if all(present.values()):
            return self
        return replace(self, rules=tuple(rule for rule in self.rules if present[rule.beside]))


def is_size(value: object, least: int = 1) -> bool:
    """Whether a value is a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def split_tensor(
    rule: Rule, values: Mapping[str, str], tensor: Tensor, variables: Mapping[str, int]
) -> dict[str, Tensor] | None:
    """Return the parts of a stored tensor by name; None if the rule does not fit its shape.

    values: of the placeholders. variables: numbers of heads and their size.
    """
    placeholders = parse_template(rule.parts[0]).placeholders
    inner = next((name for name in placeholders if name not in values), None)
    if tensor.digest is not None and (inner or len(rule.parts) > 1 or rule.transpose or rule.rotary):
        return None  # a digest is of the whole tensor
    if inner is None:
        return dict(_split_one(rule, values, tensor, variables)) or None
    if not tensor.shape or tensor.shape[0] > MOST_PARTS:
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
        yield parse_template(rule.parts[0]).fill(values), tensor
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
        yield parse_template(template).fill(values), part


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
        numbers = [settings[name] for name in names if _is_setting(settings.get(name))]
        if numbers:
            found[variable] = numbers[0]
    ranks = settings.get("tensor_model_parallel_size", 1)
    if "vocabulary_multiple" in found and isinstance(ranks, int) and _is_setting(ranks):
        found["vocabulary_multiple"] *= ranks  # each rank has a multiple
    width = next((settings[name] for name in ("hidden_size", "n_embd") if _is_setting(settings.get(name))), 0)
    if "heads" in found:
        if width and width % found["heads"] == 0:
            found.setdefault("head_dim", width // found["heads"])
        found.setdefault("kv_heads", found["heads"])
    return found


def _is_setting(value: object) -> bool:
    """Whether a value of a configuration is a number of heads, or a size, that a model can have."""
    return is_size(value) and isinstance(value, int) and value <= _MOST_SETTING


def read_json(path: str) -> dict[str, Any]:
    """Return a configuration; empty if the file is missing, too large or not a JSON object."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.loads(file.read(_MOST_JSON))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
