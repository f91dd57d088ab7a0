"""Find rules of one module that divide its rows in different groups, like a fused weight and its bias.

Row i of the weight and element i of the bias of a linear layer are one output. If a conversion interleaves q, k and v
of the weight by head, and only concatenates their biases, each part has its data, and the model is another one.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from syncheck.conversion.name_maps import split_tensor
from syncheck.conversion.part_names import list_labels
from syncheck.conversion.rows import digest_rows
from syncheck.tensors.blocks import has_elements

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.conversion.name_maps import NameMap, Rule
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files


class _Fused(NamedTuple):
    """A stored tensor, divided by a rule."""

    name: str
    rule: Rule
    values: Mapping[str, str]
    """The values of the placeholders."""
    tensor: Tensor

    def split(self, rule: Rule, variables: Mapping[str, int]) -> list[Tensor]:
        """Return the parts by a rule; none if it does not fit."""
        parts = split_tensor(
            rule,
            self.values,
            tensor=self.tensor,
            variables=variables,
        )
        return list((parts or {}).values())


def find_divided_groups(
    names: NameMap, models: Sequence[Mapping[str, Tensor]], variables: Mapping[str, int], files: Files
) -> dict[Rule, str]:
    """Return the rules that divide a module in other groups than another rule, with a tensor of the other rule.

    models: tensors by name. variables: numbers of heads and their size.
    """
    model_a, model_b = models
    modules = [*_group_by_module(names, model_a, model_b), *_group_by_module(names, model_b, model_a)]
    divided: dict[Rule, str] = {}
    for first, second in itertools.chain.from_iterable(itertools.combinations(module, 2) for module in modules):
        if _are_divided(first, second, variables, files):
            divided.setdefault(first.rule, second.name)
            divided.setdefault(second.rule, first.name)
    return divided


def _group_by_module(
    names: NameMap, model: Mapping[str, Tensor], partner_model: Mapping[str, Tensor]
) -> Iterable[list[_Fused]]:
    """Return the fused tensors of each module. Those that the other model has in equal shape keep their names."""
    modules: defaultdict[object, list[_Fused]] = defaultdict(list)
    for name, rule, values in names.select_rules(model).match_names(model):
        tensor = model[name]
        partner_shape = getattr(partner_model.get(name), "shape", None)
        conditions = (len(rule.parts) > 1, partner_shape != tensor.shape, has_elements(tensor))
        if all(conditions):
            key = _make_key(name, rule)
            fused = _Fused(
                name,
                rule,
                values,
                tensor,
            )
            modules[key].append(fused)
    return modules.values()


def _make_key(name: str, rule: Rule) -> object:
    """Return what the weight and the bias of a module have in common, also in names like `qkv_weight`: its parts."""
    module, _, last = name.rpartition(".")
    labels = sorted(list_labels(rule.parts))
    # A name without dots may have the number of its layer in its only word.
    return module, tuple(re.findall(r"\d+", last)), tuple(labels)


def _are_divided(first: _Fused, second: _Fused, variables: Mapping[str, int], files: Files) -> bool:
    """Whether two tensors with as many rows are in different groups, and the data of each needs its own groups."""
    if first.rule.groups == second.rule.groups:
        return False
    # A scale of each part has no rows of the weight.
    if _count_rows(first, variables) != _count_rows(second, variables):
        return False
    fits = (
        _fits(first, second.rule, variables, files),
        _fits(second, first.rule, variables, files),
    )
    return not any(fits)


def _count_rows(fused: _Fused, variables: Mapping[str, int]) -> int:
    """Return the rows of all parts; 0 if the rule does not fit."""
    return sum(part.shape[fused.rule.dim] for part in fused.split(fused.rule, variables))


def _fits(fused: _Fused, rule: Rule, variables: Mapping[str, int], files: Files) -> bool:
    """Whether a tensor has the same parts in the groups of another rule, as a constant does."""
    parts = fused.split(fused.rule, variables)
    regrouped_parts = fused.split(replace(fused.rule, groups=rule.groups), variables)
    # A rule without a fit has no parts.
    return _digest(parts, files) == _digest(regrouped_parts, files)


def _digest(parts: Iterable[Tensor], files: Files) -> list[list[bytes]]:
    """Return the digests of all parts."""
    return [digest_rows(part, files, 1) for part in parts]
