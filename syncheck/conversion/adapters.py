"""Adapters beside a base model: the model after they are merged, and the parts that remain.

Every part of an adapter is merged, or it remains with its problem: then the model is never "in sync".
"""

from __future__ import annotations

import itertools
import os
from bisect import bisect
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from syncheck.conversion.adapted_tensors import LowRank, Merged, are_comparable, find_adapted, fits_weight, make_adapted
from syncheck.conversion.adapter_parts import (
    PartGroup,
    find_path,
    group_parts,
    split_parts,
    strip_prefixes,
)
from syncheck.conversion.adapter_problems import AdapterProblem
from syncheck.conversion.adapter_settings import AdapterSettings
from syncheck.conversion.name_maps import split_tensor
from syncheck.conversion.replacements import replace_rows, replace_tensor
from syncheck.frozen import record, replace
from syncheck.messages import Refusal
from syncheck.readers.adapter_config import NAME
from syncheck.settings.files import read_json
from syncheck.snapshots import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from syncheck.conversion.name_maps import NameMap
    from syncheck.messages import Message
    from syncheck.tensors.blocks import Files

# Limit of the elements of a factor, which is read as a whole: 64 MB as float64.
_MOST_FACTOR = 1 << 23
# The roles of the parts of a product.
_FACTOR_ROLES = {"A", "B"}


@record
class AdaptedModel:
    """A model with its merged adapter."""

    tensors: Mapping[str, Tensor]
    adapter: Adapter | None = None
    stored_names: Mapping[str, str] = field(default_factory=dict)
    """Of mapped tensors."""


@record
class _Change:
    """The parts of an adapter that change a tensor of the base model."""

    group: PartGroup
    """The names of the parts."""
    parts: Mapping[str, Tensor]
    """The parts by role."""
    base: Tensor
    """The tensor of the base model."""
    settings: AdapterSettings
    """The settings beside the parts."""
    files: Files


@dataclass(slots=True)
class Adapter:
    """The parts of an adapter that are not merged yet, and the names of its base model."""

    parts: dict[str, Tensor]
    """By stored name."""
    base_names: frozenset[str]
    """Without PEFT's prefix."""
    memory: bool
    """Whether the model is in memory, so that it has no adapter_config.json."""
    problems: dict[str, Message] = field(default_factory=dict)
    """By stored name of a part."""
    _settings: dict[str, AdapterSettings] = field(default_factory=dict)
    """By folder of a part."""
    _factors: dict[str, Tensor] = field(default_factory=dict)
    """lora_A of each module with both factors."""
    _contradicted: bool = False
    """Whether the shape of a weight contradicts the setting fan_in_fan_out."""

    def merge(self, tensors: Mapping[str, Tensor], partners: Mapping[str, Tensor], files: Files) -> dict[str, Tensor]:
        """Return the model with all parts whose modules have tensors of the names.

        partners: the other model; it shows the tensors that the adapter adds, and the dtype of replaced tensors.
        """
        merged = {}
        for name, tensor in tensors.items():
            # A map notes the names of tensors, which may have PEFT's prefix.
            merged[name] = replace(tensor, name=name)
        ties = _find_ties(merged)
        self.problems = dict.fromkeys(self.parts, AdapterProblem.UNKNOWN())
        self._survey_modules(merged)
        for group in self._list_groups():
            result = self._merge_group(group, merged, partners, files)
            if not isinstance(result, Tensor):
                self.problems |= dict.fromkeys(group.stored_names.values(), result)
                continue
            merged[group.target] = result
            # Tied weights have one storage, which PEFT changes in place.
            for tied_name in ties.get(group.target, ()):
                merged[tied_name] = replace(result, name=tied_name)
            for stored_name in group.stored_names.values():
                del self.parts[stored_name]
                del self.problems[stored_name]
        return merged

    def _list_groups(self) -> list[PartGroup]:
        """Return the groups of the remaining parts; none if they belong to several adapters."""
        groups, adapters = group_parts(self.parts)
        if len(adapters) > 1:
            # The names do not show which of them is active.
            several = AdapterProblem.SEVERAL(names=tuple(sorted(adapters)))
            self.problems = dict.fromkeys(self.parts, several)
            return []
        return groups

    def _find_parts(self, group: PartGroup) -> dict[str, Tensor]:
        """Return the parts of a group by role."""
        return {role: self.parts[stored_name] for role, stored_name in group.stored_names.items()}

    def _merge_group(
        self, group: PartGroup, tensors: Mapping[str, Tensor], partners: Mapping[str, Tensor], files: Files
    ) -> Tensor | Message:
        """Return a tensor with the parts of a group, or the reason why it is unknown."""
        parts = self._find_parts(group)
        base, partner = tensors.get(group.target), partners.get(group.target)
        settings = self._find_settings(next(iter(parts.values())))
        if group.kind == "saved":
            return self._merge_saved(
                group,
                base=base,
                partner=partner,
                settings=settings,
                files=files,
            )
        if base is None:
            return AdapterProblem.NO_MODULE()
        # PEFT refuses two products of one weight, or adds them in an unknown order.
        if isinstance(find_adapted(base), Merged):
            return AdapterProblem.TAKEN()
        change = _Change(
            group,
            parts=parts,
            base=base,
            settings=settings,
            files=files,
        )
        merge_parts = _MERGES[group.kind]
        return merge_parts(self, change)

    def _merge_saved(
        self,
        group: PartGroup,
        base: Tensor | None,
        partner: Tensor | None,
        settings: AdapterSettings,
        files: Files,
    ) -> Tensor | Message:
        """Return a tensor that the adapter stores as a whole, or the reason why PEFT does not load it."""
        new = self._find_parts(group)["new"]
        if base is not None:
            obstacle = self._find_wrapper(group, settings)
            return obstacle or replace_tensor(
                group.target,
                base,
                new,
                partner,
                files,
            )
        if partner is None:
            return AdapterProblem.NO_MODULE()
        # A tensor that the adapter adds to the model, like a new head.
        return replace(new, name=group.target)

    def _find_wrapper(self, group: PartGroup, settings: AdapterSettings) -> Message | None:
        """Return the reason why PEFT does not load a whole tensor, None if it loads the tensor."""
        module = group.module
        # In a model of PEFT, the tensors of a module with factors have another name.
        is_wrapped = module in self._factors and settings.find_obstacle(module) is None
        if is_wrapped and ".base_layer." not in group.stored_names["new"]:
            return settings.refuse_module(module, "target_modules")
        return None

    def merge_tokens(self, change: _Change) -> Tensor | Message:
        """Return an embedding with rows of the adapter, or the reason why PEFT does not load them."""
        settings, module = change.settings, change.group.module
        obstacle = settings.find_obstacle_of_tokens(module)
        return obstacle or replace_rows(
            change.base,
            new=change.parts["delta"],
            rows=settings.find_tokens(module),
            files=change.files,
        )

    def merge_embedding(self, change: _Change) -> Tensor | Message:
        """Return an embedding with the product of two factors, or the reason why it is unknown."""
        problem = self._find_problem_of_factors(change)
        # The factors of an embedding are always transposed.
        return problem or self._add_product(change, transposed=True)

    def merge_linear(self, change: _Change) -> Tensor | Message:
        """Return the weight of a layer with the product of two factors, or the reason why it is unknown."""
        problem = self._find_problem_of_factors(change)
        if problem is not None:
            return problem
        orientation = _find_orientation(change.base, change.parts)
        # Only for square weights, the setting is needed: PEFT corrects it for each module.
        if orientation is not None:
            return self._add_product(change, transposed=orientation)
        if self._contradicted:
            return AdapterProblem.ORIENTATION()
        return self._add_product(change, transposed=change.settings.transposed)

    def merge_bias(self, change: _Change) -> Tensor | Message:
        """Return a bias with the bias of lora_B (`lora_bias`), or the reason why PEFT does not load it."""
        obstacle = change.settings.refuse_bias(change.group.module)
        problem = self._find_problem(change, obstacle)
        return problem or self._add_bias(change)

    def _find_problem(self, change: _Change, first_obstacle: Message | None = None) -> Message | None:
        """Return the reason why PEFT does not load the factors of a module, None if it loads them.

        first_obstacle: the reason of this kind of factors.
        """
        module = change.group.module
        factor = self._factors.get(module)
        # The factors of a convolution have more dimensions, and the factors of an embedding have another name.
        is_linear = factor is not None and len(factor.shape) == 2
        settings = change.settings
        problem = settings.find_problem() or first_obstacle
        return problem or settings.find_obstacle(module, linear=is_linear)

    def _find_problem_of_factors(self, change: _Change) -> Message | None:
        """Return the reason why two factors are not merged, or None."""
        problem = self._find_problem(change)
        if problem is None and change.parts.keys() != _FACTOR_ROLES:
            return AdapterProblem.INCOMPLETE()
        return problem

    def _add_product(self, change: _Change, *, transposed: bool) -> Tensor | Message:
        """Return a weight with the product of two factors."""
        base, up, down = change.base, change.parts["B"], change.parts["A"]
        has_fitting_shapes = fits_weight(
            base,
            up,
            down,
            most=_MOST_FACTOR,
            transposed=transposed,
        )
        if not has_fitting_shapes:
            return AdapterProblem.SHAPES()
        scale = change.settings.find_scale(change.group.module, down.shape[0])
        if not isinstance(scale, float):
            return scale
        product = LowRank(
            up,
            down,
            scale,
            transposed,
            columns=base.numel // base.shape[0],
            files=change.files,
        )
        return make_adapted(change.group.target, Merged(base, product, change.files))

    def _add_bias(self, change: _Change) -> Tensor | Message:
        """Return a bias with the bias of lora_B, whose scale is that of the module's product."""
        base, addend = change.base, change.parts["B"]
        factor = self._factors.get(change.group.module)
        if factor is None:
            return AdapterProblem.INCOMPLETE()
        if not are_comparable(base, addend):
            return AdapterProblem.SHAPES()
        scale = change.settings.find_scale(change.group.module, factor.shape[0])
        if not isinstance(scale, float):
            return scale
        product = LowRank(
            addend,
            down=None,
            scale=scale,
            transposed=False,
            columns=1,
            files=change.files,
        )
        return make_adapted(change.group.target, Merged(base, product, change.files))

    def _survey_modules(self, tensors: Mapping[str, Tensor]) -> None:
        """Note a factor of each module, and whether the shape of one contradicts the setting fan_in_fan_out."""
        linear_groups = [group for group in self._list_groups() if group.kind == "linear"]
        for group in linear_groups:
            parts = self._find_parts(group)
            if parts.keys() != _FACTOR_ROLES:
                continue
            # The bias of a module has the scale of its product, which may be merged before it.
            factor = parts["A"]
            if factor.shape:
                self._factors[group.module] = factor
            # Without a base, nothing shows the orientation.
            if group.target in tensors:
                orientation = _find_orientation(tensors[group.target], parts)
                setting = self._find_settings(factor).transposed
                self._contradicted |= orientation not in (None, setting)

    def _find_settings(self, part: Tensor) -> AdapterSettings:
        """Return the settings beside the file of a part."""
        folder = os.path.dirname(find_path(part))
        if folder not in self._settings:
            self._settings[folder] = _read_settings(part, memory=self.memory)
        return self._settings[folder]

    def find_split_tensors(
        self, names: NameMap, tensors: Mapping[str, Tensor], variables: Mapping[str, int]
    ) -> set[str]:
        """Return the tensors that a map splits into parts, one of which has a factor of the adapter.

        The map must split them in both models, although their names are equal.
        """
        targets = {group.target for group in self._list_groups()}
        split_names = set()
        stored_names = [name for name, tensor in tensors.items() if not tensor.refused]
        for name, rule, values in names.match_names(stored_names):
            # A rule without parts ignores the tensor.
            if not rule.parts:
                continue
            parts = split_tensor(
                rule,
                values,
                tensor=tensors[name],
                variables=variables,
            )
            part_names = set(parts or ())
            # A single part is the tensor itself.
            if len(part_names) > 1 and not targets.isdisjoint(part_names):
                split_names.add(name)
        return split_names

    def list_remaining(self) -> dict[str, Tensor]:
        """Return the parts that were not merged, refused with their problems."""
        refused = {}
        for stored_name, tensor in self.parts.items():
            problem = Refusal.ADAPTER_PART(problem=self.problems[stored_name])
            refused[stored_name] = replace(tensor, name=stored_name, refused=problem)
        return refused

    def list_touched(self) -> dict[str, list[str]]:
        """Return the remaining parts by the prefix of all tensors that they may change: of a module, or empty for all.

        A part belongs to the innermost module of the base model that its name shows.
        """
        base_names = sorted(self.base_names)
        touched: dict[str, list[str]] = defaultdict(list)
        for stored_name in self.parts:
            # The name of a part may be that of a module.
            name = f"{strip_prefixes(stored_name)}."
            position = bisect(base_names, name)
            # In this order, a neighbor has the longest start in common with the name.
            neighbors = base_names[max(position - 1, 0) : position + 1]
            starts = [_find_common_start(name, neighbor) for neighbor in neighbors]
            longest = max(starts, key=len, default="")
            # Without a module, it may change any tensor.
            prefix = longest[: longest.rfind(".") + 1]
            touched[prefix].append(stored_name)
        return touched


def merge_adapters(
    models: Sequence[Mapping[str, Tensor]], memory: Sequence[bool], files: Files
) -> tuple[AdaptedModel, AdaptedModel]:
    """Return two models, one of them with its adapter merged as far as the names of its modules are known.

    memory: whether each model is in memory. Two models with adapters are compared as they are stored, and so is an
    adapter without its base model. Their settings are values of the models.
    """
    split_models = [split_parts(model) for model in models]
    with_parts = [index for index, (_, parts) in enumerate(split_models) if parts]
    results = [AdaptedModel(models[0]), AdaptedModel(models[1])]
    if len(with_parts) != 1:
        return results[0], results[1]
    (index,) = with_parts
    base, parts = split_models[index]
    # Without a base model, the names of the parts are all that can be compared.
    if base:
        adapter = Adapter(parts, frozenset(base), memory[index])
        merged = adapter.merge(base, models[1 - index], files)
        results[index] = AdaptedModel(merged, adapter)
    return results[0], results[1]


def finish_adapters(models: Sequence[AdaptedModel], files: Files) -> list[AdaptedModel]:
    """Merge the parts whose modules have mapped names, and add all other parts to both models, refused."""
    results = [dict(model.tensors) for model in models]
    for index, model in enumerate(models):
        adapter = model.adapter
        # Without parts that remain, nothing is left to merge.
        if adapter is None or not adapter.parts:
            continue
        results[index] = adapter.merge(results[index], results[1 - index], files)
        remaining = adapter.list_remaining()
        for tensors in results:
            tensors.update(remaining)
    finished = []
    for model, tensors in zip(models, results, strict=True):
        finished.append(replace(model, tensors=tensors))
    return finished


# How the parts of each kind change a tensor, without parts that replace it.
_MERGES: dict[str, Callable[[Adapter, _Change], Tensor | Message]] = {
    "linear": Adapter.merge_linear,
    "embedding": Adapter.merge_embedding,
    "bias": Adapter.merge_bias,
    "tokens": Adapter.merge_tokens,
}


def _read_settings(part: Tensor, *, memory: bool) -> AdapterSettings:
    """Return the settings beside the file of a part. memory: whether it has no file."""
    if memory:
        return AdapterSettings()
    folder = os.path.dirname(find_path(part))
    return AdapterSettings(read_json(os.path.join(folder, NAME)) or {})


def _find_common_start(name: str, partner: str) -> str:
    """Return the characters with which both names begin."""
    length = 0
    for character, partner_character in zip(name, partner, strict=False):
        if character != partner_character:
            break
        length += 1
    return name[:length]


def _find_orientation(base: Tensor, parts: Mapping[str, Tensor]) -> bool | None:
    """Return whether the product of two factors is transposed, None if its shape does not show it."""
    up_shape, down_shape = parts["B"].shape, parts["A"].shape
    dimensions = {len(base.shape), len(up_shape), len(down_shape)}
    # Kernels of convolutions are never transposed.
    if dimensions != {2}:
        return False
    rows, columns = up_shape[0], down_shape[1]
    if rows == columns:
        return None
    return base.shape == (columns, rows)


def _find_ties(tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return all names of the same bytes in a file by each of the names."""
    names_by_place: dict[object, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.data is None and not tensor.shards:
            names_by_place[tensor.path, tensor.offset, tensor.shape, tensor.strides].append(name)
    ties: dict[str, list[str]] = defaultdict(list)
    for tied_names in names_by_place.values():
        for name, tied_name in itertools.permutations(tied_names, 2):
            ties[name].append(tied_name)
    return ties
