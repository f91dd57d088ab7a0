"""Distributed checkpoints of Megatron-Core, which stack the equal tensors of all layers and experts."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.errors import MalformedFile
from syncheck.layout import views
from syncheck.layout.megatron_names import select_of_model, unfuse
from syncheck.text import brief, make_unique_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from syncheck.snapshots import Snapshot, Tensor

_STACKED = re.compile(r"((?:.*\.)?(?:decoder|encoder)\.layers\.)(?!\d)(.*)")
_STACKED_EXPERTS = re.compile(r"(.*\.mlp\.experts\.)experts\.(.*)")
# The names of stacks, and the text before the number in the names of their tensors.
_STACKS = ((_STACKED, ""), (_STACKED_EXPERTS, "local_experts."))
# Limits of layers, of experts in a layer, and of both together.
_MOST_LAYERS, _MOST_SHARDS = 1 << 12, 1 << 20


def unstack(snapshot: Snapshot) -> Snapshot:
    """Return a distributed checkpoint with one tensor for each layer and expert; other checkpoints are unchanged."""
    if not any(map(_is_stacked, snapshot.tensors)):
        return snapshot

    tensors: dict[str, Tensor] = {}
    for stored_name, stacked_tensor in select_of_model(snapshot.tensors).items():
        for plain_name, tensor in _unstack_tensor(stored_name, stacked_tensor):
            if len(tensors) >= _MOST_SHARDS:
                raise MalformedFile(
                    snapshot.path,
                    place=f"tensor {brief(stored_name)}",
                    found=f"more than {_MOST_SHARDS} layers and experts",
                    needed="a readable layout",
                )

            name = make_unique_name(unfuse(plain_name), tensors)
            tensors[name] = replace(tensor, name=name)

    return replace(snapshot, tensors=tensors, values=select_of_model(snapshot.values))


def _is_stacked(name: str) -> bool:
    """Whether a tensor has the name of a stack."""
    return any(pattern.fullmatch(name) for pattern, _ in _STACKS)


def _unstack_tensor(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of all layers and experts in a tensor."""
    unstacked_name = _name_unstacked(name)
    if unstacked_name is None or not _is_divisible(tensor):
        yield name, tensor
        return

    for number, layer in enumerate(views.unstack(tensor)):
        yield from _unstack_tensor(unstacked_name.format(number), layer)


def _is_divisible(tensor: Tensor) -> bool:
    """Whether a tensor with the name of a stack can be divided into layers."""
    # A refused tensor has no bytes to divide, and a scalar has no layers.
    if tensor.refused or not tensor.shape:
        return False

    # Untrusted files can claim any number of layers.
    return tensor.shape[0] <= _MOST_LAYERS


def _name_unstacked(name: str) -> str | None:
    """Return a format of the names of the tensors in a stack; None for other tensors."""
    if name.startswith("optimizer."):
        return None

    for pattern, insert in _STACKS:
        match = pattern.fullmatch(name)
        if match is not None:
            return f"{_escape_braces(match[1])}{insert}{{}}.{_escape_braces(match[2])}"

    return None


def _escape_braces(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
