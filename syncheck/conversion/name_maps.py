"""Maps of names: bring the tensors of two models to one set of names and layouts.

A map is a table of rules. Each rule splits a stored tensor into its *parts*: the tensors of the same data in the files
that split it most, which are those of Hugging Face for language models. All rules apply to both models, so a table
with the names of several libraries maps each of them to each other. Parts are views: no data is read or copied.

Every operation is documented at its field of `Rule`; docs/same-model.md explains the file format.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.conversion.templates import Template, parse_template
from syncheck.frozen import record
from syncheck.layout import views
from syncheck.settings.files import CONFIGURATIONS, is_setting, list_folders, read_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from syncheck.snapshots import Tensor

VARIABLES = ("heads", "kv_heads", "head_dim")
# Limits of the parts of one stored tensor, and of its groups of heads: more than any model has.
MOST_PARTS, _MOST_GROUPS = 1 << 14, 1 << 12
# The names of the variables in the settings of several libraries.
_SETTINGS = {
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_query_groups", "n_kv_heads"),
    "head_dim": ("head_dim", "kv_channels"),
    "vocabulary": ("vocab_size",),
    "vocabulary_multiple": ("make_vocab_size_divisible_by",),
}


@record
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
    def part_templates(self) -> list[Template]:
        """The parsed names of the parts."""
        return [parse_template(part) for part in self.parts]

    @property
    def shares(self) -> tuple[int | str, ...]:
        """The shares of the parts: numbers or variables."""
        return self.sizes or (1,) * len(self.parts)

    @property
    def variables(self) -> frozenset[str]:
        """The variables of the rule."""
        variables = {value for value in (*self.sizes, self.groups) if isinstance(value, str)}
        variables.discard("rows")
        if self.rotary:
            variables.add("head_dim")
        return frozenset(variables)

    @property
    def turns(self) -> bool:
        """Whether the rule only transposes a tensor that has the same name in both orientations."""
        return self.transpose and self.parts == (self.name,)


class RuleMatch(NamedTuple):
    """The rule of a map for a stored tensor."""

    name: str
    """The name of the tensor."""
    rule: Rule
    """The first rule that applies to the name."""
    values: dict[str, str]
    """The values of the placeholders in the name."""


class _RuleIndex(NamedTuple):
    """The positions of the rules of a map."""

    positions: dict[str, int]
    """The position of the first rule of each name without placeholders."""
    templates: list[tuple[int, Template]]
    """The positions and names of the rules with placeholders."""


@dataclass(frozen=True)
class NameMap:
    """A table of rules."""

    title: str
    """Its name or file."""
    rules: tuple[Rule, ...]
    tied: tuple[tuple[str, str], ...] = ()
    """Pairs of names; a model without the first uses the second."""
    variables: tuple[tuple[str, int], ...] = ()
    """Numbers of heads and their size, of models with no configuration beside them."""
    built_in: bool = False
    """Whether it is a map of this package."""
    prefix: str = ""
    """The start of names that some files lack, as files of a model without an output layer do."""

    def find_rule(self, name: str) -> tuple[Rule, dict[str, str]] | None:
        """Return the first rule for a stored tensor, and the values of the placeholders."""
        index = self._index
        position = index.positions.get(name, len(self.rules))
        for template_position, template in index.templates:
            # The first rule applies, with or without placeholders.
            if template_position > position:
                break
            values = template.match(name)
            if values is not None:
                return self.rules[template_position], values
        return None if position == len(self.rules) else (self.rules[position], {})

    def match_names(self, names: Iterable[str]) -> Iterator[RuleMatch]:
        """Yield the rules of stored tensors, without tensors that no rule matches."""
        for name in names:
            match = self.find_rule(name)
            if match is not None:
                yield RuleMatch(name, *match)

    @cached_property
    def _index(self) -> _RuleIndex:
        """The positions of the rules by name."""
        index = _RuleIndex({}, [])
        for position, rule in enumerate(self.rules):
            template = parse_template(rule.name)
            if template.placeholders:
                index.templates.append((position, template))
            else:
                index.positions.setdefault(template.literals[0], position)
        return index

    def select_rules(self, model: Mapping[str, Tensor]) -> NameMap:
        """Return the map with the rules that apply to a model."""
        # Rules without a condition always apply.
        present = {""}
        for beside in {rule.beside for rule in self.rules}:
            template = parse_template(beside)
            if any(template.match(name) is not None for name in model):
                present.add(beside)
        rules = tuple(rule for rule in self.rules if rule.beside in present)
        return replace(self, rules=rules)


def split_tensor(
    rule: Rule, values: Mapping[str, str], tensor: Tensor, variables: Mapping[str, int]
) -> dict[str, Tensor] | None:
    """Return the parts of a stored tensor by name; None if the rule does not fit its shape, or needs another variable.

    values: of the placeholders.
    variables: numbers of heads and their size.
    """
    # Names alone may select the rule, while no configuration states the number of heads.
    if not rule.variables <= variables.keys():
        return None
    index_placeholder = _find_index_placeholder(rule, values)
    # A digest is of the whole tensor.
    changes_tensor = (index_placeholder is not None, rule.transpose, rule.rotary, len(rule.parts) > 1)
    if tensor.digest is not None and any(changes_tensor):
        return None
    if index_placeholder is None:
        return _split_one(rule, values, tensor, variables)
    return _split_stack(
        rule,
        values,
        index_placeholder,
        tensor,
        variables,
    )


def is_stack_rule(rule: Rule) -> bool:
    """Whether the parts of a rule are at the indices of the first dimension of a stack."""
    placeholders = parse_template(rule.name).placeholders
    # A rule without parts ignores a tensor.
    return bool(rule.parts) and _find_index_placeholder(rule, dict.fromkeys(placeholders, "")) is not None


def _find_index_placeholder(rule: Rule, values: Mapping[str, str]) -> str | None:
    """Return the placeholder that counts the first dimension of a stack; None for a rule of other tensors."""
    for placeholder in parse_template(rule.parts[0]).placeholders:
        if placeholder not in values:
            return placeholder
    return None


def _split_stack(
    rule: Rule, values: Mapping[str, str], index_placeholder: str, tensor: Tensor, variables: Mapping[str, int]
) -> dict[str, Tensor] | None:
    """Return the parts at all indices of a stack by name; None if the rule does not fit all indices."""
    # A number without dimensions has no index.
    length = sum(tensor.shape[:1])
    if not 0 < length <= MOST_PARTS:
        return None
    parts: dict[str, Tensor] = {}
    for index, indexed_tensor in enumerate(views.unstack(tensor)):
        indexed_values = {**values, index_placeholder: str(index)}
        indexed_parts = _split_one(rule, indexed_values, indexed_tensor, variables)
        if indexed_parts is None:
            return None
        parts.update(indexed_parts)
    return parts


def _split_one(
    rule: Rule, values: Mapping[str, str], tensor: Tensor, variables: Mapping[str, int]
) -> dict[str, Tensor] | None:
    """Return views of the parts of a tensor that is no stack, by name; None if the rule does not fit all of them."""
    # A vector has no orientation.
    if rule.transpose and len(tensor.shape) < 2:
        return None
    turned = _exchange_last_dims(tensor) if rule.transpose else tensor
    # A tensor with one name may have any shape, even none.
    is_undivided = len(rule.parts) == 1 and not rule.rotary
    parts = [turned] if is_undivided else _split_groups(rule, turned, variables)
    # Meta's code exchanges the rows within each part.
    if rule.rotary:
        parts = _separate_heads(parts, variables["head_dim"])
    if len(parts) != len(rule.parts):
        return None
    names = [template.fill(values) for template in rule.part_templates]
    return dict(zip(names, parts, strict=True))


def _exchange_last_dims(tensor: Tensor) -> Tensor:
    """Return the view of a tensor with its last two dimensions exchanged."""
    *dims, rows, columns = range(len(tensor.shape))
    return views.permute(tensor, [*dims, columns, rows])


def _separate_heads(parts: Sequence[Tensor], head_dim: int) -> list[Tensor]:
    """Return parts with the two halves of each head in turn; none if a part has rows of half a head."""
    separated = []
    for part in parts:
        # These rows would be compared with nothing.
        if head_dim % 2 or part.shape[0] % head_dim:
            return []
        halves = _separate_halves(part, head_dim)
        separated.append(halves)
    return separated


def _split_groups(rule: Rule, tensor: Tensor, variables: Mapping[str, int]) -> list[Tensor]:
    """Return the parts of a tensor along the dimension of a rule; none if the rule does not fit its shape."""
    if rule.dim >= len(tensor.shape):
        return []
    length = tensor.shape[rule.dim]
    shares = [_get_number(share, variables) for share in rule.shares]
    total = sum(shares)
    groups = _count_groups(rule, length // total, variables)
    # Nothing can be divided without rows, and no more groups than rows.
    if not 0 < groups <= length:
        return []
    units, remainder = divmod(length, groups)
    sizes = [units * share // total for share in shares]
    # Without a remainder, the parts have all rows of a group.
    if remainder or sum(sizes) != units:
        return []
    if len(sizes) == 1:
        return [tensor]

    grouped = views.unflatten(tensor, rule.dim, (groups, length // groups))
    parts = []
    begin = 0
    for size in sizes:
        part = views.narrow(grouped, rule.dim + 1, begin, size)
        parts.append(views.flatten(part, rule.dim))
        begin += size
    return parts


def _count_groups(rule: Rule, rows: int, variables: Mapping[str, int]) -> int:
    """Return the number of groups in which the parts alternate; 0 for too many groups. rows: of one share."""
    # A group of single rows has one row for each share.
    if rule.groups == "rows":
        return rows
    groups = _get_number(rule.groups, variables)
    return groups if groups <= _MOST_GROUPS else 0


def _get_number(size: int | str, variables: Mapping[str, int]) -> int:
    """Return a number, or the value of a variable."""
    return variables[size] if isinstance(size, str) else size


def _separate_halves(tensor: Tensor, head_dim: int) -> Tensor:
    """Return a view with the two halves of each head in turn, from rows that alternate between them."""
    heads = tensor.shape[0] // head_dim
    pairs = views.unflatten(tensor, 0, (heads, head_dim // 2, 2))
    further_dims = range(3, len(pairs.shape))
    halves = views.permute(pairs, (0, 2, 1, *further_dims))
    return views.flatten(views.flatten(halves, 0), 0)


def add_variables(names: NameMap, variables: Mapping[str, int], stated: Mapping[str, int]) -> NameMap:
    """Return a map with the numbers of heads that its rules need, and that no configuration states.

    variables: all known numbers.
    stated: those of a configuration.
    """
    needed: set[str] = set()
    for rule in names.rules:
        needed |= rule.variables
    missing = (needed & variables.keys()) - stated.keys()
    # Files have one order of the variables.
    ordered_names = sorted(missing, key=VARIABLES.index)
    numbers = tuple((name, variables[name]) for name in ordered_names)
    return replace(names, variables=numbers)


def find_variables(paths: Sequence[str], values: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of heads and their size, from a configuration beside the files or from saved arguments.

    values: the Python values of the files by dotted name, like Megatron's saved arguments.
    """
    settings: dict[str, Any] = {}
    for configuration in read_settings(paths, values):
        settings |= configuration
    numbers = {variable: _find_number(settings, names) for variable, names in _SETTINGS.items()}
    # A setting without a valid number is unknown.
    variables = {variable: number for variable, number in numbers.items() if number}
    ranks = _find_number(settings, ("tensor_model_parallel_size",))
    # Each rank has a multiple.
    if "vocabulary_multiple" in variables:
        variables["vocabulary_multiple"] *= max(1, ranks)
    if "heads" in variables:
        width = _find_number(settings, ("hidden_size", "n_embd", "dim"))
        head_dim, remainder = divmod(width, variables["heads"])
        if head_dim and not remainder:
            variables.setdefault("head_dim", head_dim)
        variables.setdefault("kv_heads", variables["heads"])
    return variables


def read_settings(paths: Sequence[str], values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the saved values by the last part of their names, and the settings of each configuration beside the files.

    Parameters as for `find_variables`. Later settings take precedence.
    """
    settings = [{name.rpartition(".")[2]: value for name, value in values.items()}]
    for folder in list_folders(paths):
        for file_name in CONFIGURATIONS:
            config = read_json(os.path.join(folder, file_name)) or {}
            settings.append(config)
            # The settings of the language model in a model with several modalities.
            text_config = config.get("text_config")
            if isinstance(text_config, dict):
                settings.append(text_config)
    return settings


def _find_number(settings: Mapping[str, Any], names: Iterable[str]) -> int:
    """Return the first of the settings that is a valid number, else 0."""
    for name in names:
        value: Any = settings.get(name)
        if is_setting(value):
            return int(value)
    return 0
