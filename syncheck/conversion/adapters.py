"""Adapters beside a base model: their parts, and the model after they are merged.

Every part of an adapter is merged, or it remains with its problem: then the model is never "in sync". Names and
settings are those of PEFT.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from syncheck.conversion.adapter_settings import AdapterSettings
from syncheck.conversion.casts import convert
from syncheck.conversion.merges import LowRank, Merged, Replaced, find_adapted, fits_weight, make_adapted
from syncheck.conversion.name_maps import read_json, split_tensor
from syncheck.conversion.recognition import is_readable
from syncheck.errors import brief
from syncheck.logical import views
from syncheck.messages import AdapterProblem, Refusal
from syncheck.snapshots import Shard, Tensor, contiguous_strides

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from syncheck.conversion.name_maps import NameMap
    from syncheck.kernel.blocks import Files
    from syncheck.messages import Message

_PREFIX, _CONFIG = "base_model.model.", "adapter_config.json"
# Files of adapters alone: PEFT, torchtune, MLX.
_FILE = re.compile(r"(?:adapters?|adapter_\d+|adapter_model(?:-.*)?)\.\w+")
# Segments of names that the adapters of PEFT add, by the prefixes of its tuners.
_MARKER = re.compile(
    r"(?:^|\.)(?:modules_to_save|token_adapter|trainable_tokens_\w+|ln_tuning_\w+|oft_[rR]|boft_[rRs]|hada_[wt]\w*"
    r"|lokr_[wt]\w*|ia3_l|hra_u|vera_lambda_\w+|vera_[AB]|lora_\w+)(?:\.|$)"
)
_INNER = re.compile(r"\.(?:token_adapter\.base_layer|base_layer|original_module)(?=\.)")
_ADAPTER = r"(?:\.(?P<adapter>[^.]+))?"
_FACTOR = re.compile(rf"(?P<module>.+)\.lora_(?P<role>[AB]){_ADAPTER}\.(?P<leaf>weight|bias)")
_EMBEDDING = re.compile(rf"(?P<module>.+)\.lora_embedding_(?P<role>[AB]){_ADAPTER}")
_TOKENS = re.compile(rf"(?P<module>.+?)(?:\.token_adapter)?\.trainable_tokens_delta{_ADAPTER}")
_SAVED = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<leaf>.+)")
# Limit of the elements of a factor, which is read as a whole: 64 MB as float64.
_MOST_FACTOR = 1 << 23


@dataclass(slots=True)
class _Group:
    """The parts of an adapter that change one tensor of the base model."""

    target: str
    """The name of this tensor."""
    kind: str
    """linear, bias, embedding, tokens or saved."""
    parts: dict[str, str] = field(default_factory=dict)
    """The stored names of the parts by role."""


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
    """By stored name."""
    _settings: dict[str, AdapterSettings] = field(default_factory=dict)
    _ranks: dict[str, int] = field(default_factory=dict)
    _contradicted: bool = False

    def merge(self, tensors: Mapping[str, Tensor], other: Mapping[str, Tensor], files: Files) -> dict[str, Tensor]:
        """Return the model with all parts whose modules have tensors of these names.

        other: the other model; it shows the tensors that the adapter adds, and the dtype of replaced tensors.
        """
        merged = dict(tensors)
        self.problems = {}
        self._survey_modules(merged)
        ties = _find_ties(merged)
        for group in self._list_groups():
            result: Tensor | Message
            base = merged.get(group.target)
            if base is None and group.kind == "saved" and group.target in other:
                result = self.parts[group.parts["new"]]
            elif base is None:
                result = AdapterProblem.NO_MODULE()
            else:
                result = self._apply(group, base, other.get(group.target), files)
            if isinstance(result, Tensor):
                merged[group.target] = result
                # Tied weights have one storage, which PEFT changes in place.
                for name in ties.get(group.target, ()):
                    merged[name] = replace(result, name=name)
                for stored in group.parts.values():
                    del self.parts[stored]
            else:
                self.problems |= dict.fromkeys(group.parts.values(), result)
        for stored in self.parts:
            self.problems.setdefault(stored, AdapterProblem.UNKNOWN())
        return merged

    def _list_groups(self) -> list[_Group]:
        """Return the groups of the remaining parts: replaced tensors first, because factors may change them again."""
        names: set[str] = set()
        groups: dict[tuple[str, str], _Group] = {}
        for stored in self.parts:
            adapter, target, kind, role = _read_part(_strip(stored))
            names |= {adapter} - {""}
            if kind:
                group = groups.setdefault((kind, target), _Group(target, kind))
                group.parts[role] = stored
        if len(names) > 1:
            several = AdapterProblem.SEVERAL(names=tuple(sorted(names)))
            self.problems |= dict.fromkeys(self.parts, several)
            return []
        order = ("saved", "linear", "embedding", "bias", "tokens")
        return sorted(groups.values(), key=lambda group: order.index(group.kind))

    def _apply(self, group: _Group, base: Tensor, other: Tensor | None, files: Files) -> Tensor | Message:
        """Return a tensor with the parts of a group, or the reason why it is unknown."""
        parts = {role: self.parts[stored] for role, stored in group.parts.items()}
        if group.kind == "saved":
            return _replace(group.target, base, parts["new"], other, files)
        settings = self._find_settings(next(iter(parts.values())))
        module = group.target.rpartition(".")[0]
        if isinstance(find_adapted(base), Merged):
            return AdapterProblem.TAKEN()
        if group.kind == "tokens":
            return _replace_rows(base, parts["delta"], settings.find_tokens(module), files)
        if problem := settings.find_problem():
            return problem
        if group.kind == "bias":
            return self._add_bias(module, base, parts["B"], settings, files)
        if parts.keys() != {"A", "B"}:
            return AdapterProblem.INCOMPLETE()
        transposed = group.kind == "embedding" or settings.transposed
        shown = _find_orientation(base, parts["B"], parts["A"])
        if group.kind == "linear" and shown is not None:
            transposed = shown
        elif group.kind == "linear" and self._contradicted:
            return AdapterProblem.ORIENTATION()
        if not fits_weight(base, parts["B"], parts["A"], _MOST_FACTOR, transposed=transposed):
            return AdapterProblem.SHAPES()
        scale = settings.find_scale(module, parts["A"].shape[0])
        if not isinstance(scale, float):
            return scale
        product = LowRank(parts["B"], parts["A"], scale, transposed, base.numel // base.shape[0], files)
        return make_adapted(group.target, Merged(base, product, files))

    def _add_bias(
        self, module: str, base: Tensor, addend: Tensor, settings: AdapterSettings, files: Files
    ) -> Tensor | Message:
        """Return a bias with the bias of lora_B (`lora_bias`), whose scale is that of the module's product."""
        readable = is_readable(base) and is_readable(addend)
        if module not in self._ranks or base.shape != addend.shape or len(base.shape) != 1 or not readable:
            return AdapterProblem.SHAPES()
        scale = settings.find_scale(module, self._ranks[module])
        if not isinstance(scale, float):
            return scale
        product = LowRank(addend, None, scale, transposed=False, columns=1, files=files)
        return make_adapted(f"{module}.bias", Merged(base, product, files))

    def _survey_modules(self, tensors: Mapping[str, Tensor]) -> None:
        """Note the rank of each module, and whether the shape of one contradicts the setting fan_in_fan_out."""
        for group in self._list_groups():
            parts = {role: self.parts[stored] for role, stored in group.parts.items()}
            base = tensors.get(group.target)
            if group.kind != "linear" or parts.keys() != {"A", "B"} or not parts["A"].shape:
                continue
            self._ranks[group.target.removesuffix(".weight")] = parts["A"].shape[0]
            shown = None if base is None else _find_orientation(base, parts["B"], parts["A"])
            if shown is not None and shown != self._find_settings(parts["A"]).transposed:
                self._contradicted = True

    def _find_settings(self, part: Tensor) -> AdapterSettings:
        """Return the settings beside the file of a part."""
        folder = _find_folder(part)
        if folder not in self._settings:
            self._settings[folder] = _read_settings(part, memory=self.memory)
        return self._settings[folder]

    def find_divided(self, names: NameMap, tensors: Mapping[str, Tensor], variables: Mapping[str, int]) -> set[str]:
        """Return the tensors that a map divides into parts, one of which has a factor of the adapter.

        The map must divide them in both models, although their names are equal.
        """
        targets = {group.target for group in self._list_groups()}
        divided = set()
        for name, tensor in tensors.items():
            found = names.find_rule(name)
            if found is None or not found[0].parts or tensor.refused or not found[0].variables <= variables.keys():
                continue
            parts = split_tensor(*found, tensor, variables) or {}
            if len(parts) > 1 and not targets.isdisjoint(parts):
                divided.add(name)
        return divided

    def list_remaining(self) -> dict[str, Tensor]:
        """Return the parts that were not merged, refused with their problems."""
        refused = {}
        for stored, tensor in self.parts.items():
            problem = Refusal.ADAPTER_PART(problem=self.problems[stored])
            refused[stored] = replace(tensor, name=stored, refused=problem)
        return refused

    def list_touched(self) -> dict[str, list[str]]:
        """Return the remaining parts by the prefix of all tensors that they may change: of a module, or empty for all.

        A part belongs to the innermost module of the base model that its name shows.
        """
        modules = set()
        for name in self.base_names:
            segments = name.split(".")
            modules |= {".".join(segments[:count]) for count in range(1, len(segments))}
        touched: dict[str, list[str]] = defaultdict(list)
        for stored in self.parts:
            module = _strip(stored)
            while module and module not in modules:
                module = module.rpartition(".")[0]
            touched[f"{module}." if module else ""].append(stored)
        return touched


@dataclass(frozen=True, slots=True)
class AdaptedModel:
    """A model with its merged adapter."""

    tensors: Mapping[str, Tensor]
    adapter: Adapter | None = None
    stored: Mapping[str, str] = field(default_factory=dict)
    """The stored names of mapped tensors."""


def merge_adapters(
    models: Sequence[Mapping[str, Tensor]], memory: Sequence[bool], files: Files
) -> tuple[AdaptedModel, AdaptedModel]:
    """Return two models, one of them with its adapter merged as far as the names of its modules are known.

    memory: whether each model is in memory. Two models with adapters are compared as they are stored, together with
    their settings. An adapter without its base model is compared as it is stored, too.
    """
    divided = [split_parts(model) for model in models]
    if divided[0][1] and divided[1][1]:
        return _compare_settings(models, memory)
    results = [AdaptedModel(model) for model in models]
    for i, (base, parts) in enumerate(divided):
        if parts and base and not divided[1 - i][1]:
            adapter = Adapter(parts, frozenset(base), memory[i])
            results[i] = AdaptedModel(adapter.merge(base, models[1 - i], files), adapter)
    return results[0], results[1]


def _compare_settings(
    models: Sequence[Mapping[str, Tensor]], memory: Sequence[bool]
) -> tuple[AdaptedModel, AdaptedModel]:
    """Return two models with adapters, and with a refused tensor if their settings differ."""
    settings = []
    for model, in_memory in zip(models, memory, strict=True):
        part = next(iter(split_parts(model)[1].values()))
        settings.append(_read_settings(part, memory=in_memory))
    name = settings[0].find_difference(settings[1])
    if name is None:
        return AdaptedModel(models[0]), AdaptedModel(models[1])
    values = tuple(brief(each.content.get(name)) for each in settings)
    problem = AdapterProblem.SETTINGS_DIFFER(name=name, a=values[0], b=values[1])
    row = Tensor(_CONFIG, "uint8", (0,), (1,), "", 0, data=b"", refused=Refusal.ADAPTER_PART(problem=problem))
    return AdaptedModel({**models[0], _CONFIG: row}), AdaptedModel({**models[1], _CONFIG: row})


def finish_adapters(models: Sequence[AdaptedModel], files: Files) -> list[AdaptedModel]:
    """Merge the parts whose modules have mapped names, and add all other parts to both models, refused."""
    results = [dict(model.tensors) for model in models]
    for i, model in enumerate(models):
        if model.adapter is not None and model.adapter.parts:
            results[i] = model.adapter.merge(results[i], results[1 - i], files)
            remaining = model.adapter.list_remaining()
            results = [tensors | remaining for tensors in results]
    return [replace(model, tensors=tensors) for model, tensors in zip(models, results, strict=True)]


def split_parts(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of the base model by its own names, and the parts of an adapter by stored name."""
    wrapped, plain = set(), False
    for name, tensor in tensors.items():
        wrapped |= {name[: match.start()] for match in _INNER.finditer(name)}
        plain = plain or not (_is_outside(name) or name.startswith("base_model.") or _is_marked(name, tensor))
    base, parts = {}, {}
    for name, tensor in tensors.items():
        short = name.removeprefix(_PREFIX)
        # Beside a base model without PEFT's prefix, all names with the prefix belong to the adapter.
        foreign = name.startswith("base_model.") and (plain or short == name)
        outside = _is_outside(name)
        if not outside and (foreign or _is_marked(name, tensor) or _is_beside_base(name, wrapped)):
            parts[name] = tensor
        else:
            base[name if outside else _strip(name)] = tensor
    return base, parts


def _is_outside(name: str) -> bool:
    """Whether a tensor belongs to the optimizer, whose states have the names of parts."""
    return name.startswith("optimizer.")


def _is_marked(name: str, tensor: Tensor) -> bool:
    box = tensor.shards[0].tensor if tensor.shards else tensor
    return bool(_MARKER.search(_INNER.sub("", name)) or _FILE.fullmatch(os.path.basename(box.path)))


def _is_beside_base(name: str, wrapped: Collection[str]) -> bool:
    """Whether a tensor belongs to a module that wraps one of the base model, and not to the wrapped module."""
    if _INNER.search(name):
        return False
    module = name.rpartition(".")[0]
    while module:
        if module in wrapped:
            return True
        module = module.rpartition(".")[0]
    return False


def _strip(name: str) -> str:
    """Return the name of a tensor in the base model."""
    return _INNER.sub("", name.removeprefix(_PREFIX))


def _read_part(name: str) -> tuple[str, str, str, str]:
    """Return the name of a part's adapter, the tensor that it changes, the kind of its group, and its role in it.

    The kind of an unknown part is empty.
    """
    if match := _FACTOR.fullmatch(name):
        kind = "linear" if match["leaf"] == "weight" else "bias"
        # Only lora_B has a bias.
        known = kind == "linear" or match["role"] == "B"
        return match["adapter"] or "", f"{match['module']}.{match['leaf']}", kind if known else "", match["role"]
    if match := _EMBEDDING.fullmatch(name):
        return match["adapter"] or "", f"{match['module']}.weight", "embedding", match["role"]
    if match := _TOKENS.fullmatch(name):
        return match["adapter"] or "", f"{match['module']}.weight", "tokens", "delta"
    if match := _SAVED.fullmatch(name):
        return match["adapter"], f"{match['module']}.{match['leaf']}", "saved", "new"
    return "", name, "" if _MARKER.search(name) else "saved", "new"


def _find_folder(part: Tensor) -> str:
    box = part.shards[0].tensor if part.shards else part
    return os.path.dirname(box.path)


def _read_settings(part: Tensor, *, memory: bool) -> AdapterSettings:
    """Return the settings beside the file of a part. memory: whether it has no file."""
    if memory:
        return AdapterSettings()
    return AdapterSettings(read_json(os.path.join(_find_folder(part), _CONFIG)))


def _find_orientation(base: Tensor, up: Tensor, down: Tensor) -> bool | None:
    """Return whether the product is transposed, None if its shape does not show it."""
    shapes = [tensor.shape for tensor in (base, up, down)]
    if {len(shape) for shape in shapes} != {2}:
        return False
    product = up.shape[0], down.shape[1]
    if product[0] == product[1]:
        return None
    return base.shape == product[::-1]


def _find_ties(tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return the names of the same bytes in a file, for each name of several."""
    names: dict[object, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.data is None and not tensor.shards:
            names[tensor.path, tensor.offset, tensor.shape, tensor.strides].append(name)
    ties = {}
    for tied in names.values():
        for name in tied if len(tied) > 1 else ():
            ties[name] = [other for other in tied if other != name]
    return ties


def _replace(name: str, base: Tensor, new: Tensor, other: Tensor | None, files: Files) -> Tensor | Message:
    """Return a tensor that the adapter stores as a whole.

    It is loaded into the dtype of the base model, unless the other model has its own dtype.
    """
    readable = is_readable(base) and is_readable(new)
    if not readable:
        return replace(new, name=name) if not new.refused else AdapterProblem.SHAPES()
    if new.dtype != base.dtype and (other is None or other.dtype != new.dtype):
        new = convert(new, (base.dtype,), files)
    return make_adapted(name, Replaced(base, new, files, whole=name))


def _replace_rows(base: Tensor, new: Tensor, rows: list[int] | None, files: Files) -> Tensor | Message:
    """Return an embedding with some rows of the adapter (`trainable_token_indices`)."""
    if rows is None:
        return AdapterProblem.TOKENS()
    shapes = base.shape[1:] == new.shape[1:] and len(base.shape) == 2 and new.shape[0] == len(rows)
    if not shapes or not (is_readable(base) and is_readable(new)) or max(rows, default=0) >= base.shape[0]:
        return AdapterProblem.SHAPES()
    if new.dtype != base.dtype:
        new = convert(new, (base.dtype,), files)
    boxes = tuple(_list_row_boxes(base, new, rows))
    strides = contiguous_strides(base.shape)
    joined = Tensor(base.name, base.dtype, base.shape, strides, base.path, 0, shards=boxes)
    return make_adapted(base.name, Replaced(base, joined, files))


def _list_row_boxes(base: Tensor, new: Tensor, rows: list[int]) -> Iterator[Shard]:
    """Yield the boxes of a matrix with replaced rows: rows of the adapter, and the rows of the base between them."""
    position = 0
    for row, index in sorted(zip(rows, range(len(rows)), strict=True)):
        if row > position:
            yield from _shift(views.narrow(base, 0, position, row - position), position)
        yield from _shift(views.narrow(new, 0, index, 1), row)
        position = row + 1
    if position < base.shape[0]:
        yield from _shift(views.narrow(base, 0, position, base.shape[0] - position), position)


def _shift(tensor: Tensor, rows: int) -> Iterator[Shard]:
    for box in views.list_boxes(tensor):
        yield Shard(box.tensor, (box.start[0] + rows, *box.start[1:]))
