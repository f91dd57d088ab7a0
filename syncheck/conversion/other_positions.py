"""Find tensors of A that B holds at another position: under another name, or in the shards of another rank."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.conversion.fused_parts import are_parts_of_one, is_fused
from syncheck.conversion.model_pairs import find_different_dim
from syncheck.conversion.rows import digest_rows
from syncheck.findings import Relation, RelationKind
from syncheck.layout import views
from syncheck.layout.copies import find_shared_tensors
from syncheck.tensors.blocks import has_elements

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.conversion.model_pairs import Models
    from syncheck.snapshots import Shard, Tensor
    from syncheck.tensors.blocks import Files

# The name of a tensor of an expert: before its number, the number, and the rest.
_EXPERT = re.compile(r"(.*\bexperts?\.(?:local_experts\.)?)(\d+)(\..*)")
# Limit of the compared shards of a tensor.
_MOST_SHARDS = 1 << 12


def relate_elsewhere(name: str, models: Models) -> dict[str, Relation]:
    """Find the tensor of A that B holds under another name."""
    match = models.find_elsewhere(name)
    if match is None:
        return _relate_transposed_elsewhere(name, models)
    source, conversion = match
    if _are_experts_of_one_layer(name, source):
        return {name: Relation(RelationKind.EXPERT, {**conversion, "other": source})}
    if any(are_parts_of_one(name, source, stored) for stored in models.stored):
        parameters: dict[str, Any] = {**conversion, "pattern": "other-part", "other": source}
        # Without a fused tensor on any side, there is no order of its parts.
        if not any(is_fused(name, source, stored) for stored in models.stored):
            parameters["separate"] = True
        return {name: Relation(RelationKind.FUSED_ORDER, parameters)}
    return {name: Relation(RelationKind.SHARD, {**conversion, "other": source})}


def _are_experts_of_one_layer(first: str, second: str) -> bool:
    """Whether two names differ in the number of an expert only."""
    match_first, match_second = _EXPERT.fullmatch(first), _EXPERT.fullmatch(second)
    if match_first is None or match_second is None:
        return False
    return match_first.group(1, 3) == match_second.group(1, 3)


def _relate_transposed_elsewhere(name: str, models: Models) -> dict[str, Relation]:
    """Find the matrix of A that B holds transposed under another name."""
    shape = models.b[name].shape
    # The elements of a single row are in order in the transposed matrix, too.
    if len(shape) != 2 or min(shape) < 2:
        return {}
    match = models.find_elsewhere(name, transposed=True)
    if match is None:
        return {}
    source, conversion = match
    return {name: Relation(RelationKind.SHARD, {**conversion, "other": source, "dims": (0, 1)})}


class _NamedShard(NamedTuple):
    """A shard of one model, beside the whole tensor of the other model."""

    name: str
    """The name of the tensor of which the shard is a box."""
    shard: Shard
    """The position in the tensor, and the bytes."""


def relate_shards(name: str, models: Models) -> dict[str, Relation]:
    """Find the shards of B among the shards of A, and of the other parts of A's stored tensor. Or the reverse.

    Uneven shards, like shards of a padded vocabulary, are compared as far as the smallest of them.
    """
    model_a, model_b = models.a, models.b
    for side, sharded, partner in (("B", model_b, model_a), ("A", model_a, model_b)):
        stored = models.stored["AB".index(side)]
        names = _list_parts_of_one(name, stored, sharded, partner)
        # Tensors of other shapes have other boxes.
        if any(sharded[part_name].shape != partner[part_name].shape for part_name in names):
            continue
        shards: list[_NamedShard] = []
        for part_name in names:
            shards += [_NamedShard(part_name, shard) for shard in views.list_shards(sharded[part_name])]
        wrong_shards = _find_wrong_shards(name, shards, partner, models.files)
        if wrong_shards:
            count = sum(named.name == name for named in shards)
            return {name: _describe_wrong_shards(name, wrong_shards, count, side)}
        foreign = _relate_foreign_shards(name, sharded[name], partner, models) if len(shards) > 1 else {}
        if foreign:
            return {name: Relation(RelationKind.SHARD, {**foreign, "side": side})}
    return {}


def _relate_foreign_shards(name: str, sharded: Tensor, partner: Mapping[str, Tensor], models: Models) -> dict[str, Any]:
    """Return the parameters of a tensor with shards of other tensors, at the same position; empty for other values."""
    shards = views.list_shards(sharded)
    sources: list[_NamedShard] = []
    for shard in shards:
        # Equal positions come first.
        candidates = [name, *_list_alike(sharded, partner)] if models.is_distinct(shard.tensor) else [name]
        source = _find_source(shard, candidates, partner, models.files)
        sources.append(_NamedShard(source, shard))
    foreign_shards = [named for named in sources if named.name != name]
    names = {named.name for named in foreign_shards}
    # A shard with the values of no tensor has another cause.
    if "" in names or not names:
        return {}
    # Shards are divided along one dimension, or more of them in a mesh.
    dim = find_different_dim(foreign_shards[0].shard.tensor, sharded) or 0
    runs: list[int] = []
    for named in foreign_shards:
        runs += (named.shard.start[dim], named.shard.tensor.shape[dim])
    return {
        "pattern": "foreign",
        "files": _join({named.shard.tensor.path for named in foreign_shards}),
        "source": _join(names),
        "dim": dim,
        "runs": tuple(runs),
    }


def _join(texts: Iterable[str]) -> str:
    return ", ".join(sorted(texts))


def _list_alike(sharded: Tensor, partner: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors of the other model with the shape and dtype of a tensor, and with elements."""
    names = []
    for name, tensor in partner.items():
        if (tensor.shape, tensor.dtype) == (sharded.shape, sharded.dtype) and has_elements(tensor):
            names.append(name)
    return names


def _find_source(shard: Shard, names: Sequence[str], partner: Mapping[str, Tensor], files: Files) -> str:
    """Return the first of the names whose tensor has the values of a shard at its position; empty if no tensor has."""
    shape = shard.tensor.shape
    digest = _digest_box(shard.tensor, (0,) * len(shape), shape, files)
    for name in names:
        if _digest_box(partner[name], shard.start, shape, files) == digest:
            return name
    return ""


def _list_parts_of_one(
    name: str, stored: Mapping[str, Tensor], sharded: Mapping[str, Tensor], partner: Mapping[str, Tensor]
) -> list[str]:
    """Return the names of the parts of one stored tensor that both models have, this name first.

    stored: the stored tensor of each name of the sharded model.
    """
    names = [name]
    # Without a map, each tensor is stored as it is compared.
    if name not in stored:
        return names
    parts = [part_name for part_name in sharded if stored.get(part_name) is stored[name]]
    parts.remove(name)
    for part_name in parts:
        # A part that the other model lacks is a finding of its own.
        if part_name not in partner:
            continue
        # A tied weight is the same part under a second name.
        if not find_shared_tensors((sharded[name], sharded[part_name])):
            names.append(part_name)
    return names


def _find_wrong_shards(
    name: str, shards: Sequence[_NamedShard], partner: Mapping[str, Tensor], files: Files
) -> list[tuple[_NamedShard, str]]:
    """Return the shards of a tensor that differ, each with the name of the tensor that has its elements.

    Empty if no tensor has the elements of a shard.
    partner: the whole tensors of the other model.
    """
    shapes = [named.shard.tensor.shape for named in shards]
    dimensions = set(map(len, shapes))
    # A single shard is the whole tensor, and boxes of other dimensions have no common part.
    if not 1 < len(shards) <= _MOST_SHARDS or len(dimensions) > 1:
        return []
    least = [min(sizes) for sizes in zip(*shapes, strict=True)]
    digests = [_digest_box(partner[named.name], named.shard.start, least, files) for named in shards]
    names_by_digest: dict[bytes, str] = {}
    for named, digest in zip(shards, digests, strict=True):
        # Equal shards belong to the first part.
        names_by_digest.setdefault(digest, named.name)
    zeros = (0,) * len(least)
    wrong_shards = []
    for named, expected in zip(shards, digests, strict=True):
        # The shards of the other parts are compared with the shards of their own tensor.
        if named.name != name:
            continue
        digest = _digest_box(named.shard.tensor, zeros, least, files)
        if digest not in names_by_digest:
            return []
        if digest != expected:
            wrong_shards.append((named, names_by_digest[digest]))
    return wrong_shards


def _describe_wrong_shards(
    name: str, wrong_shards: Sequence[tuple[_NamedShard, str]], count: int, side: str
) -> Relation:
    """Return the relation of a tensor with wrong shards. count: the number of its shards."""
    paths = {named.shard.tensor.path for named, _ in wrong_shards}
    sources = {source for _, source in wrong_shards}
    # Rows of another part are an error of the order of parts, all others of the order of ranks.
    kind = RelationKind.SHARD if sources == {name} else RelationKind.FUSED_ORDER
    parameters: dict[str, Any] = {
        "pattern": "boxes",
        "boxes": len(wrong_shards),
        "of": count,
        "files": _join(paths),
        "side": side,
    }
    return Relation(kind, parameters)


def _digest_box(tensor: Tensor, start: Sequence[int], shape: Sequence[int], files: Files) -> bytes:
    """Return the digest of a box of a tensor."""
    return digest_rows(cut_box(tensor, start, shape), files, 1)[0]


def cut_box(tensor: Tensor, start: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return the view of a box of a tensor."""
    for dim, (first, size) in enumerate(zip(start, shape, strict=True)):
        tensor = views.narrow(tensor, dim, first, size)
    return tensor
