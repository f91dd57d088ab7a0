"""Find tensors that are copies: names sharing memory on some ranks only, and copies in several pipeline stages.

torch.save and torch.load preserve shared memory. Other formats store separate bytes for each name, so ties are unknown.

An embedding tied to the last layer is copied to the last stage. The parts of a model that is not joined are accepted if
they are no copies.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from syncheck.errors import UsageError
from syncheck.findings import UnclearParts
from syncheck.layout.boxes import is_in_file
from syncheck.layout.replica_groups import MODEL_PARALLEL, PIPELINE, coordinates_in
from syncheck.layout.replicated_names import get_parameter
from syncheck.records import Counts, Reason, Tie
from syncheck.tensors.value_kinds import is_membership
from syncheck.text import brief

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from syncheck.records import Comparison, TensorDiff
    from syncheck.snapshots import Snapshot, Tensor

# Names of embeddings without the number of a layer, which a stage might count from 0. Other tensors with one name in
# several stages may be different tensors.
_EMBEDDING = (
    r"(?:[^.\d]+\.)*(?:word_embeddings?|embed_tokens|tok_embeddings?|token_embeddings?|tok_emb|wte|embed|embeddings?)"
    r"\.weight"
)

# The number of a layer in the name of a tensor.
_NUMBER = r"(?:^|\.)\d+(?:\.|$)"
# A pipeline stage in the name of a file.
_STAGE = r"(?i)(?:^|[^a-z])(?:stage|pp|pipe|pipeline)(?:[-_]?(?:stage|rank))?[-_]?\d"
_FORMATS_WITH_TIES = ("torch-zip", "torch-legacy")


# By rank, the sets of normalized names that share memory. Ranks in a format without ties are left out.
TiesByRank = dict[int, set[frozenset[str]]]


def broken_ties(ties_by_rank: TiesByRank, names: Mapping[int, Mapping[str, str]]) -> tuple[Tie, ...]:
    """Return the ties present on some ranks only.

    names: by rank, from stored to normalized names. Ranks that lack a name do not count.
    """
    all_ties = set[frozenset[str]]().union(*ties_by_rank.values())
    broken: list[Tie] = []
    for tie in all_ties:
        ranks_with_tie: list[int] = []
        ranks_without_tie: list[int] = []
        for rank, ties in ties_by_rank.items():
            # More names may share memory on some ranks.
            if any(map(tie.issubset, ties)):
                ranks_with_tie.append(rank)
            elif tie.issubset(names[rank].values()):
                ranks_without_tie.append(rank)

        if ranks_without_tie:
            sorted_names = tuple(sorted(tie))
            broken.append(Tie(sorted_names, tuple(ranks_with_tie)))

    return tuple(sorted(broken, key=attrgetter("names")))


def common_ties(ties_by_rank: TiesByRank, ranks: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """Return the names that share memory on every rank. ranks: all of them."""
    # A rank in a format without ties may have any.
    if len(ties_by_rank) < len(ranks):
        return ()

    common = set.intersection(*ties_by_rank.values())
    sorted_ties = [tuple(sorted(tie)) for tie in common]
    return tuple(sorted(sorted_ties))


def list_ties_by_rank(snapshots: Mapping[int, Snapshot], names: Mapping[int, Mapping[str, str]]) -> TiesByRank:
    """Return the names that share memory. names: by rank, from stored to normalized names."""
    ties_by_rank: TiesByRank = {}
    for rank, snapshot in snapshots.items():
        if snapshot.format not in _FORMATS_WITH_TIES:
            continue

        # Another process that read the file listed its ties, because its tensors have no locations.
        stored_ties = snapshot.ties or find_shared_tensors(snapshot.tensors.values())
        names_of_rank = names[rank]
        ties_by_rank[rank] = set()
        for tie in stored_ties:
            normalized_tie = frozenset(names_of_rank[name] for name in tie)
            ties_by_rank[rank].add(normalized_tie)

    return ties_by_rank


class _Location(NamedTuple):
    """The file and the offset of the first element of a tensor."""

    path: str
    offset: int


def find_shared_tensors(tensors: Iterable[Tensor]) -> list[list[str]]:
    """Return lists of names with the same storage offset, dtype, shape and strides."""
    names: dict[Hashable, list[str]] = defaultdict(list)
    for tensor in tensors:
        location = _find_location(tensor)
        if location is not None:
            # Two tensors in several boxes may begin with the same box.
            boxes = [(shard.start, _find_location(shard.tensor), shard.tensor.strides) for shard in tensor.shards]
            layout = (tensor.dtype, tensor.shape, tensor.strides, *boxes)
            names[location, layout].append(tensor.name)

    return [tie for tie in names.values() if len(tie) > 1]


def _find_location(tensor: Tensor) -> _Location | None:
    """Return the location of the first element, or None for a tensor without bytes in a file."""
    # A tensor without elements shares its location with the next tensor.
    if tensor.refused or not tensor.numel:
        return None

    first = tensor
    if tensor.shards:
        first = tensor.shards[0].tensor

    # Bytes in memory have no offset: the process that read them lists the ties.
    if not is_in_file(first):
        return None

    return _Location(first.path, first.offset)


def find_copies(names: Mapping[str, Iterable[int]], snapshots: Mapping[int, Snapshot]) -> dict[str, str]:
    """Return the name of the tensor by the name of each copy of it that the metadata lists.

    names: normalized names, with the ranks that have them. States of the optimizer follow their parameters. Metadata is
    untrusted: a name counts as a copy only if no pipeline stage has both names.
    """
    stages = {rank: coordinates_in(snapshot, PIPELINE) for rank, snapshot in snapshots.items()}
    if not all(stages.values()):
        return {}

    ties = list_ties(snapshots.values())
    if not ties:
        return {}

    stages_of_name: dict[str, set[Hashable]] = {}
    for name, ranks in names.items():
        stages_of_name[name] = {stages[rank] for rank in ranks}

    copies: dict[str, str] = {}
    sources: set[str] = set()
    for name in names:
        source = name_of_copied(name, ties)
        source_stages = stages_of_name.get(source)
        if name in sources or not source_stages:
            continue

        # A tensor is in its own stages, so it is no copy of itself.
        is_in_other_stages = source_stages.isdisjoint(stages_of_name[name])
        if is_in_other_stages:
            # Then no other copy in these stages is a first copy.
            source_stages |= stages_of_name.pop(name)
            copies[name] = source
            sources.add(source)

    return copies


def list_ties(snapshots: Iterable[Snapshot]) -> dict[str, str]:
    """Return the tensor of each copy in the metadata of some ranks: the last stage alone may list its copies.

    A copy of a copy is a copy of the first tensor. A name with two meanings, or in a circle, is not a copy.
    """
    candidates_by_name: dict[str, set[str]] = defaultdict(set)
    for snapshot in snapshots:
        if snapshot.metadata is not None:
            for name, source in snapshot.metadata.tied.items():
                candidates_by_name[name].add(source)

    # Metadata is untrusted, and ranks of different runs may list different ties.
    sources = {name: min(candidates) for name, candidates in candidates_by_name.items() if len(candidates) == 1}
    ties: dict[str, str] = {}
    for name in sources:
        first_source = _follow_copies(name, sources)
        if first_source is not None:
            ties[name] = first_source

    return ties


def _follow_copies(name: str, sources: Mapping[str, str]) -> str | None:
    """Return the tensor of which a name is a copy, or a copy of a copy; None for a circle."""
    passed = {name}
    source = sources[name]
    while source in sources:
        if source in passed:
            return None

        passed.add(source)
        source = sources[source]

    return source


def name_of_copied(name: str, tied: Mapping[str, str]) -> str:
    """Return the name of the tensor of which `name` is a copy, else `name`. tied: from the metadata."""
    if not tied:
        return name

    container, dot, parameter = name.partition(".")
    state = ""
    if container == "optimizer":
        parameter, dot_of_state, state = parameter.rpartition(".")
        state = dot_of_state + state
    elif container != "ema":
        return tied.get(name, name)

    return f"{container}{dot}{tied.get(parameter, parameter)}{state}"


def find_second_copies(
    names: Iterable[str], copies: Mapping[str, str], snapshots: Mapping[int, Snapshot]
) -> dict[str, str]:
    """Return the name of the tensor by the name of each second copy of it in a stage.

    names: of all tensors, without the first copies. copies: the first copies in other stages, from `find_copies`.
    """
    if not copies:
        return {}

    ties = list_ties(snapshots.values())
    sources = {*copies.values()}
    second: dict[str, str] = {}
    for name in names:
        source = name_of_copied(name, ties)
        if name != source and source in sources:
            second[name] = source

    return second


def is_embedding_in_stages(name: str, tensors: Mapping[int, Tensor], snapshots: Mapping[int, Snapshot]) -> bool:
    """Whether several pipeline stages hold an embedding: the last stage needs it only for a tied output layer."""
    # The names first: most tensors are no embeddings.
    if not re.fullmatch(_EMBEDDING, get_parameter(name)):
        return False

    shapes: set[tuple[int, ...]] = set()
    stages: set[Hashable] = set()
    for rank, tensor in tensors.items():
        shapes.add(tensor.full_shape)
        stages.add(coordinates_in(snapshots[rank], PIPELINE))

    # Embeddings of other shapes are other tensors, like an encoder's and a decoder's.
    return len(shapes) == 1 and len(stages) > 1


def accept_partitioned_files(comparison: Comparison) -> Comparison:
    """Return the comparison of files that may hold different parts of one model, without parts as missing tensors.

    If every file lacks tensors of another file, no file is a whole model. Then only copies are compared with each
    other: whether a tensor is missing shows in the comparison with the other model.
    """
    kinds = dict(comparison.kinds)
    lacking_ranks: set[int] = set()
    remaining_tensors: list[TensorDiff] = []
    for diff in comparison.tensors:
        if diff.reason is not Reason.MISSING or diff.facts:
            remaining_tensors.append(diff)
            continue

        lacking_ranks |= _find_lacking_ranks(diff)
        counts = kinds[diff.kind]
        kinds[diff.kind] = replace(
            counts,
            tensors=counts.tensors - 1,
            not_compared=counts.not_compared - 1,
        )

    # If one file holds all tensors, the other files lack tensors.
    if lacking_ranks != {replica.rank for replica in comparison.replicas}:
        return comparison

    values = []
    for value in comparison.values:
        # Each file's optimizer has its own parameters.
        counts_here = value.counts and not value.lost and not is_membership(value.name)
        values.append(replace(value, counts=counts_here, lost=()))

    return replace(
        comparison,
        tensors=tuple(remaining_tensors),
        values=tuple(values),
        kinds=kinds,
        counts=sum(kinds.values(), Counts()),
    )


def _find_lacking_ranks(diff: TensorDiff) -> set[int]:
    """Return the ranks that lack a missing tensor."""
    expected_ranks = set[int]().union(*diff.replica_groups)
    return expected_ranks.difference(*diff.clusters)


def _list_of_stages(snapshots: Sequence[Snapshot], copies: Comparison) -> Sequence[str]:
    """Return the names that several pipeline stages have for different tensors; empty if other meshes divide them."""
    unclear = copies.evidence.unclear_parts or UnclearParts()
    for snapshot in snapshots:
        # Parts of one tensor have a common name.
        if coordinates_in(snapshot, MODEL_PARALLEL - PIPELINE):
            return ()
    # Equal copies show that the stages number their layers alike.
    return () if unclear.equal else unclear.different


def require_own_numbers(title: str, snapshots: Sequence[Snapshot], copies: Comparison) -> None:
    """Raise UsageError if files of different tensors have other data under all of their common names of layers.

    title: of the side.
    snapshots: its files.
    copies: the comparison of the tensors that several files have.
    """
    differing = [diff.name for diff in copies.tensors if diff.out_of_sync and diff.reason is None]
    differing += _list_of_stages(snapshots, copies)
    # Equal data under any common name shows that the files number their layers alike.
    if len(differing) < 2 or copies.counts.compared > len(differing):
        return

    # Files with the same tensors are replicas, whose differences are findings, unless their paths name stages.
    name_sets = {frozenset(snapshot.tensors) for snapshot in snapshots}
    first_name = os.path.basename(snapshots[0].path)
    signs_of_replicas = (len(name_sets) < 2, re.search(_STAGE, first_name) is None)
    if all(signs_of_replicas):
        return

    for name in differing:
        # Tied weights, which stages have in common, have no number.
        if not re.search(_NUMBER, name):
            return

    raise UsageError(
        f"{title}: the files have other data under all {len(differing)} names of layers that they have in common, such "
        f"as {brief(differing[0])}: stages that number their layers from 0, or several models. Give each layer its "
        "number in the whole model"
    )
