"""Find tensors that are copies: names sharing memory on some ranks only, and copies in several pipeline stages.

torch.save and torch.load preserve shared memory. Other formats store separate bytes for each name, so ties are unknown.

An embedding tied to the last layer is copied to the last stage. The parts of a model that is not joined are accepted if
they are no copies.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.errors import UsageError
from syncheck.layout.replica_groups import PIPELINE, coordinates_in
from syncheck.records import Counts, Reason, Tie
from syncheck.tensors.value_kinds import is_membership
from syncheck.text import brief

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

    from syncheck.records import Comparison
    from syncheck.snapshots import Snapshot, Tensor

# Names of embeddings without the number of a layer, which a stage might count from 0. Other tensors with one name in
# several stages may be different tensors.
_EMBEDDING = re.compile(
    r"(?:[^.\d]+\.)*(?:word_embeddings?|embed_tokens|tok_embeddings?|token_embeddings?|tok_emb|wte|embed|embeddings?)"
    r"\.weight"
)

_FORMATS_WITH_TIES = ("torch-zip", "torch-legacy")


def broken_ties(snapshots: Mapping[int, Snapshot], names: Mapping[int, Mapping[str, str]]) -> tuple[Tie, ...]:
    """Return the ties present on some ranks only.

    names: by rank, from stored to normalized names. Ranks that lack a name do not count.
    """
    tied = _list_tied(snapshots, names)
    broken = []
    for tie in set[frozenset[str]]().union(*tied.values()):
        together = tuple(rank for rank, sets in tied.items() if tie in sets or any(tie < same for same in sets))
        if len(together) < len(tied) and any(tie <= set(names[rank].values()) for rank in tied if rank not in together):
            broken.append(Tie(tuple(sorted(tie)), together))
    return tuple(sorted(broken, key=lambda tie: tie.names))


def common_ties(
    snapshots: Mapping[int, Snapshot], names: Mapping[int, Mapping[str, str]]
) -> tuple[tuple[str, ...], ...]:
    """Return the names that share memory on every rank. names: by rank, from stored to normalized names."""
    tied = _list_tied(snapshots, names)
    if not tied or len(tied) < len(snapshots):
        return ()
    common = frozenset.intersection(*map(frozenset, tied.values()))
    return tuple(sorted(tuple(sorted(same)) for same in common))


def _list_tied(
    snapshots: Mapping[int, Snapshot], names: Mapping[int, Mapping[str, str]]
) -> dict[int, set[frozenset[str]]]:
    """Return the sets of normalized names that share memory, by rank. Ranks in a format without ties are left out."""
    return {
        rank: {
            frozenset(names[rank][name] for name in same)
            for same in snapshot.ties or find_shared_tensors(snapshot.tensors.values())
        }
        for rank, snapshot in snapshots.items()
        if snapshot.format in _FORMATS_WITH_TIES
    }


def find_shared_tensors(tensors: Collection[Tensor]) -> list[list[str]]:
    """Return lists of names with the same storage offset, dtype, shape and strides."""
    places = [_find_place(tensor) for tensor in tensors]
    shared = {place for place, count in Counter(places).items() if count > 1}  # most offsets are unique
    tied: dict[Hashable, list[str]] = defaultdict(list)
    for tensor, place in zip(tensors, places, strict=True):
        if place is not None and place in shared:
            boxes = tuple((shard.start, _find_place(shard.tensor), shard.tensor.strides) for shard in tensor.shards)
            tied[place, tensor.dtype, tensor.shape, tensor.strides, boxes].append(tensor.name)
    return [names for names in tied.values() if len(names) > 1]


def _find_place(tensor: Tensor) -> tuple[str, int] | None:
    """Return the file and the offset of the first element, or None for a tensor without bytes in a file."""
    first = tensor.shards[0].tensor if tensor.shards else tensor
    unplaced = tensor.refused or not tensor.numel or first.data is not None or first.digest is not None
    return None if unplaced else (first.path, first.offset)


def find_copies(names: Mapping[str, Iterable[int]], snapshots: Mapping[int, Snapshot]) -> dict[str, str]:
    """Return the name of the tensor by the name of each copy of it that the metadata lists.

    names: normalized names, with the ranks that have them. States of the optimizer follow their parameters. Metadata is
    untrusted: a name counts as a copy only if no pipeline stage has both names.
    """
    stages = {rank: coordinates_in(snapshot, PIPELINE) for rank, snapshot in snapshots.items()}
    tied = list_ties(snapshots.values()) if all(stages.values()) else {}
    held = {name: {stages[rank] for rank in ranks} for name, ranks in names.items()} if tied else {}
    copies: dict[str, str] = {}
    for name in [*held]:
        new = name_of_copied(name, tied)
        if new != name and held.get(new) and name not in copies.values() and held[new].isdisjoint(held[name]):
            held[new] |= held.pop(name)
            copies[name] = new
    return copies


def list_ties(snapshots: Iterable[Snapshot]) -> dict[str, str]:
    """Return the tensor of each copy in the metadata of some ranks: the last stage alone may list its copies.

    A copy of a copy is a copy of the first tensor. A name with two meanings, or in a circle, is not a copy.
    """
    listed: dict[str, str] = {}
    contradicted: set[str] = set()
    for snapshot in snapshots:
        for name, new in snapshot.metadata.tied.items() if snapshot.metadata is not None else ():
            if listed.setdefault(name, new) != new:
                contradicted.add(name)
    ties: dict[str, str] = {}
    for name in listed.keys() - contradicted:
        source, passed = name, {name}
        while source in listed and source not in contradicted:
            source = listed[source]
            if source in passed:
                break
            passed.add(source)
        else:
            ties[name] = source
    return ties


def name_of_copied(name: str, tied: Mapping[str, str]) -> str:
    """Return the name of the tensor of which `name` is a copy, else `name`. tied: from the metadata."""
    container, dot, rest = name.partition(".") if name.startswith(("optimizer.", "ema.")) else ("", "", name)
    parameter, state_dot, state = rest.rpartition(".") if container == "optimizer" else (rest, "", "")
    return f"{container}{dot}{tied.get(parameter, parameter)}{state_dot}{state}"


def find_second_copies(
    names: Iterable[str], copies: Mapping[str, str], snapshots: Mapping[int, Snapshot]
) -> dict[str, str]:
    """Return the name of the tensor by the name of each second copy of it in a stage.

    names: of all tensors, without the first copies. copies: the first copies in other stages, from `find_copies`.
    """
    ties = list_ties(snapshots.values()) if copies else {}
    sources = {*copies.values()}
    second: dict[str, str] = {}
    for name in names:
        source = name_of_copied(name, ties)
        if name != source and source in sources and name not in copies:
            second[name] = source
    return second


def is_embedding_in_stages(name: str, tensors: Mapping[int, Tensor], snapshots: Mapping[int, Snapshot]) -> bool:
    """Whether several pipeline stages hold an embedding: the last stage needs it only for a tied output layer."""
    parameter = name.removeprefix("optimizer.").rpartition(".")[0] if name.startswith("optimizer.") else name
    if not _EMBEDDING.fullmatch(parameter) or len({tensor.full_shape for tensor in tensors.values()}) > 1:
        return False
    return len({coordinates_in(snapshots[rank], PIPELINE) for rank in tensors}) > 1


def accept_partitioned_files(comparison: Comparison) -> Comparison:
    """Return the comparison of files that may hold different parts of one model, without parts as missing tensors.

    If every file lacks tensors of another file, no file is a whole model. Then only copies are compared with each
    other: whether a tensor is missing shows in the comparison with the other model.
    """
    missing = [diff for diff in comparison.tensors if diff.reason is Reason.MISSING and not diff.facts]
    lacking: set[int] = set()
    for diff in missing:
        holders = {rank for cluster in diff.clusters for rank in cluster}
        lacking |= {rank for ranks in diff.replica_groups for rank in ranks} - holders
    if lacking != {replica.rank for replica in comparison.replicas}:
        return comparison
    parts = {diff.name for diff in missing}
    kinds = dict(comparison.kinds)
    for diff in missing:
        count = kinds[diff.kind]
        kinds[diff.kind] = replace(count, tensors=count.tensors - 1, not_compared=count.not_compared - 1)
    # Each part of an optimizer has its own parameters.
    values = tuple(
        replace(value, counts=value.counts and not value.lost and not is_membership(value.name), lost=())
        for value in comparison.values
    )
    tensors = tuple(diff for diff in comparison.tensors if diff.name not in parts)
    return replace(comparison, tensors=tensors, values=values, kinds=kinds, counts=sum(kinds.values(), Counts()))


def require_own_numbers(title: str, snapshots: Sequence[Snapshot], copies: Comparison) -> None:
    """Raise UsageError if files of different tensors have other data under all of their common names of layers.

    title: of the side.
    snapshots: its files.
    copies: the comparison of the tensors that several files have.
    """
    name_sets = {frozenset(snapshot.tensors) for snapshot in snapshots}
    differing = [diff.name for diff in copies.tensors if diff.out_of_sync and diff.reason is None]
    if len(name_sets) < 2 or len(differing) < 2 or copies.counts.compared > len(differing):
        return
    for name in differing:
        # Tied weights, which stages have in common, have no number.
        if not any(part.isdigit() for part in name.split(".")):
            return
    raise UsageError(
        f"{title}: the files have other data under all {len(differing)} names of layers that they have in common, such "
        f"as {brief(differing[0])}: stages that number their layers from 0, or several models. Give each layer its "
        "number in the whole model"
    )
