"""The tensors of an adapter: recognize them beside a base model, and read their names, which are those of PEFT."""

from __future__ import annotations

import os
import re
from bisect import bisect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from syncheck.frozen import record
from syncheck.tensors.names import has_adapter_segment, is_adapter_file

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from syncheck.snapshots import Tensor

_ROOT, _PREFIX = "base_model.", "base_model.model."
# Of the tensors of an optimizer, whose states have the names of parts.
_STATE = "optimizer."
# Segments before the parameters of a wrapped module of the base model.
_INNER = re.compile(r"\.(?:token_adapter\.base_layer|base_layer|original_module)(?=\.)")
_ADAPTER = r"(?:\.(?P<adapter>[^.]+))?"
# In the order in which the parts change a tensor: a factor may change a tensor that the adapter has replaced.
_SAVED = "saved"
_PATTERNS = {
    _SAVED: re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<leaf>.+)"),
    "linear": re.compile(rf"(?P<module>.+)\.lora_(?P<role>[AB]){_ADAPTER}\.(?P<leaf>weight)"),
    "embedding": re.compile(rf"(?P<module>.+)\.lora_embedding_(?P<role>[AB]){_ADAPTER}"),
    "bias": re.compile(rf"(?P<module>.+)\.lora_(?P<role>B){_ADAPTER}\.(?P<leaf>bias)"),
    "tokens": re.compile(rf"(?P<module>.+?)(?:\.token_adapter)?\.trainable_tokens_(?P<role>delta){_ADAPTER}"),
}
KINDS = tuple(_PATTERNS)


@record
class PartName:
    """The name of a part of an adapter."""

    target: str
    """The tensor of the base model that the part changes; the name itself for an unknown part."""
    kind: str = ""
    """One of `KINDS`, or empty for an unknown part."""
    role: str = "new"
    """A or B for a factor, delta for rows, new for a whole tensor."""
    adapter: str = ""
    """The name of the adapter, empty in a file of the adapter's own."""


@dataclass(slots=True)
class PartGroup:
    """The parts of an adapter that change one tensor of the base model."""

    target: str
    """The name of this tensor."""
    kind: str
    """One of `KINDS`."""
    stored_names: dict[str, str] = field(default_factory=dict)
    """By role."""

    @property
    def module(self) -> str:
        """The module of the tensor."""
        return self.target.rpartition(".")[0]


def read_part_name(stored_name: str) -> PartName:
    """Read the name of a part."""
    name = strip_prefixes(stored_name)
    for kind, pattern in _PATTERNS.items():
        match = pattern.fullmatch(name)
        if match is None:
            continue
        groups = match.groupdict(default="")
        leaf = groups.get("leaf", "weight")
        role = groups.get("role", "new")
        return PartName(
            f"{match['module']}.{leaf}",
            kind,
            role,
            adapter=groups["adapter"],
        )
    if has_adapter_segment(name):
        return PartName(name)
    # Files of adapters store replaced tensors under their own names.
    return PartName(name, _SAVED)


def group_parts(stored_names: Iterable[str]) -> tuple[list[PartGroup], set[str]]:
    """Return the groups of known parts, in the order of their kinds, and the names of all adapters."""
    groups: dict[tuple[str, str], PartGroup] = {}
    adapters = set()
    for stored_name in stored_names:
        part = read_part_name(stored_name)
        adapters.add(part.adapter)
        if part.kind:
            empty_group = PartGroup(part.target, part.kind)
            group = groups.setdefault((part.kind, part.target), empty_group)
            group.stored_names[part.role] = stored_name
    # A part in a file of the adapter's own has no name of an adapter.
    adapters.discard("")
    return sorted(groups.values(), key=_find_order), adapters


def _find_order(group: PartGroup) -> int:
    return KINDS.index(group.kind)


def strip_prefixes(name: str) -> str:
    """Return the name without the segments that PEFT inserts."""
    return _INNER.sub("", name.removeprefix(_PREFIX))


def find_path(tensor: Tensor) -> str:
    """Return the file of a tensor, or of its first box."""
    return tensor.shards[0].tensor.path if tensor.shards else tensor.path


def split_parts(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of the base model by its own names, and the parts of an adapter by stored name."""
    states = _select(tensors, _STATE)
    marked = {name for name, tensor in tensors.items() if _is_marked(name, tensor)}
    prefixed = _find_prefixed(tensors.keys() - states - marked)
    part_names = (marked | prefixed | _find_beside_base(tensors)) - states
    base, parts = {}, {}
    for name, tensor in tensors.items():
        if name in part_names:
            parts[name] = tensor
            continue
        # The states of an optimizer have the names of parts, and keep them.
        base_name = name if name in states else strip_prefixes(name)
        base[base_name] = tensor
    return base, parts


def _is_marked(name: str, tensor: Tensor) -> bool:
    """Whether the name or the file of a tensor is that of an adapter."""
    file_name = os.path.basename(find_path(tensor))
    if is_adapter_file(file_name):
        return True
    # A wrapped module of the base model has segments of an adapter, too.
    base_name = _INNER.sub("", name)
    return has_adapter_segment(base_name)


def _find_prefixed(names: Collection[str]) -> set[str]:
    """Return the tensors whose prefix shows that they belong to the adapter.

    names: of all tensors without another mark.
    """
    prefixed = _select(names, _ROOT)
    # Beside a base model without PEFT's prefix, these are all names with the prefix.
    if len(prefixed) < len(names):
        return prefixed
    # Otherwise, they are the tensors beside the wrapped model, which several modules of an adapter share.
    wrapped_model = _select(prefixed, _PREFIX)
    return prefixed - wrapped_model


def _select(names: Iterable[str], prefix: str) -> set[str]:
    return {name for name in names if name.startswith(prefix)}


def _find_beside_base(names: Collection[str]) -> set[str]:
    """Return the tensors of modules that wrap a module of the base model, without the wrapped modules."""
    wrapped_modules = set()
    outer_names = []
    for name in names:
        # Below the outermost of several wrapped modules, a tensor is beside all of them.
        match = _INNER.search(name)
        if match is None:
            outer_names.append(name)
        elif match.start():
            wrapped_modules.add(f"{name[: match.start()]}.")
    # The wrapped module itself belongs to the base model.
    outermost_modules: list[str] = []
    for module in sorted(wrapped_modules):
        # In this order, a module comes before all modules within it.
        if not module.startswith(tuple(outermost_modules[-1:])):
            outermost_modules.append(module)
    beside_base = set()
    for name in outer_names:
        # No module contains another module, so only the last module before the name may contain the name.
        position = bisect(outermost_modules, name)
        last_modules = outermost_modules[max(position - 1, 0) : position]
        if name.startswith(tuple(last_modules)):
            beside_base.add(name)
    return beside_base
