"""Find the settings that distinguish runs and differ between files: run, run_id, configuration and seeds.

Within one run, some settings differ by design: ranks, hosts, devices, paths, and seeds that each rank derives from its
rank. They are skipped.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from syncheck.layout.groups import rank_in_path, rank_of
from syncheck.tensors.value_kinds import differs_by_design, in_configuration, is_seed, values_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from syncheck.snapshots import Metadata, Snapshot

# Words in the names of settings that belong to a rank, a machine, or the main process.
_OF_RANK = frozenset(
    "rank ranks host hostname node addr address url ip port device devices gpu gpus cuda dir path file folder out "
    "output root cache log logging tmp time date pid main master primary chief leader verbose quiet progress writer "
    "shard shards worker workers offset index id local".split()
)
_WORD = re.compile(r"[a-z]+")
# Nesting of configurations that is searched.
_MOST_LEVELS = 8


def find_differing_settings(snapshots: Mapping[int, Snapshot]) -> dict[str, dict[int, Any]]:
    """Return the settings that differ between files: by name, the value by rank, None for files without the setting.

    First the settings of the metadata (`run`, `run_id`, `world_size`, `config.NAME`), then saved values.
    """
    by_name: dict[str, dict[int, Any]] = {}
    for rank, snapshot in snapshots.items():
        for name, value in _list_settings(snapshot):
            by_name.setdefault(name, {})[rank] = value

    ranks = {rank: rank_of(snapshot) for rank, snapshot in snapshots.items()}
    differing: dict[str, dict[int, Any]] = {}
    for name, values in by_name.items():
        distinct = set(map(str, values.values()))
        if len(distinct) > 1 and not _follows_rank(name, values, ranks):
            differing[name] = {rank: values.get(rank) for rank in snapshots}

    return differing


def find_repeated_ranks(snapshots: Mapping[int, Snapshot]) -> tuple[int, ...]:
    """Return the ranks that the metadata of several files records. A run saves one file of each rank."""
    files: Counter[int] = Counter()
    for snapshot in snapshots.values():
        if snapshot.metadata is not None and snapshot.metadata.rank is not None:
            files[snapshot.metadata.rank] += 1

    return tuple(sorted(rank for rank, count in files.items() if count > 1))


def find_claimed_twice(snapshots: Mapping[int, Snapshot]) -> tuple[int, ...]:
    """Return the ranks that files of several ranks, by their names, claim for the same run and step in their metadata.

    A file and its copy have no ranks in their names, and may be compared. A process without a process group is rank 0
    of 1, and so is each of several independent processes.
    """
    named_ranks: dict[tuple[Any, ...], set[int | None]] = defaultdict(set)
    for snapshot in snapshots.values():
        metadata = snapshot.metadata
        if metadata is not None and metadata.rank is not None and metadata.world_size != 1:
            claim = (metadata.rank, metadata.run, metadata.run_id, metadata.step)
            named_ranks[claim].add(rank_in_path(snapshot))

    return tuple(sorted({claim[0] for claim, ranks in named_ranks.items() if len(ranks - {None}) > 1}))


def _list_settings(snapshot: Snapshot) -> Iterator[tuple[str, Any]]:
    """Yield names and values of the settings of one file."""
    if snapshot.metadata is not None:
        yield from _list_metadata(snapshot.metadata)

    for name, value in values_of(snapshot).items():
        if not is_seed(name) and not in_configuration(name):
            continue

        # Saved flags often say whether this is the main process.
        is_setting = isinstance(value, (int, float, str)) and not isinstance(value, bool)
        if is_setting and not _belongs_to_rank(name, value):
            yield name, value


def _list_metadata(metadata: Metadata) -> Iterator[tuple[str, Any]]:
    for name in ("run", "run_id", "world_size"):
        value = getattr(metadata, name)
        if value is not None:
            yield name, value

    for name, value in _flatten(metadata.config, "config", _MOST_LEVELS):
        if not _belongs_to_rank(name, value):
            yield name, value


def _flatten(node: Any, name: str, levels: int) -> Iterator[tuple[str, Any]]:
    """Yield the plain values of a configuration by their names."""
    if isinstance(node, dict) and levels:
        for key, value in node.items():
            yield from _flatten(value, f"{name}.{key}", levels - 1)
    elif isinstance(node, (bool, int, float, str)):
        yield name, node
    elif isinstance(node, (list, tuple)):
        yield name, str(node)


def _belongs_to_rank(name: str, value: Any) -> bool:
    """Whether a setting may differ within a run: of the rank, the machine or the main process, or a path."""
    words = set(_WORD.findall(name.rpartition(".")[2].lower()))
    is_path = isinstance(value, str) and ("/" in value or "\\" in value)
    return bool(words & _OF_RANK) or differs_by_design(name) or is_path


def _follows_rank(name: str, values: Mapping[int, Any], ranks: Mapping[int, int | None]) -> bool:
    """Whether the values are derived from the rank: seed + rank, or a text with the rank in it.

    ranks: by position in the group, the rank of the file, None if it is unknown.
    """
    rank_of_position: dict[int, int] = {}
    for position in values:
        rank = ranks[position]
        if rank is None:
            return False

        rank_of_position[position] = rank

    if len(set(rank_of_position.values())) < len(rank_of_position):  # two files of one rank
        return False

    kinds = {type(value) for value in values.values()}
    if kinds == {str}:
        patterns = {_without_number(values[position], rank) for position, rank in rank_of_position.items()}
        return len(patterns) == 1

    if not kinds <= {int, float}:
        return False

    return _are_on_a_line(
        sorted((rank, values[position]) for position, rank in rank_of_position.items()), seeds=is_seed(name)
    )


def _are_on_a_line(pairs: Sequence[tuple[int, float]], *, seeds: bool) -> bool:
    """Whether numbers grow evenly with the rank. pairs: rank and number. seeds: whether they are seeds."""
    (first_rank, first), (second_rank, second) = pairs[:2]
    slope = (second - first) / (second_rank - first_rank)
    if slope == 0:
        return False

    # Any two numbers are on a line, so two seeds follow the rank only if the slope is typical.
    if len(pairs) == 2:
        return seeds and abs(slope) in (1, 10, 100, 1000, 10_000)

    return all(value == first + slope * (rank - first_rank) for rank, value in pairs)


def _without_number(text: str, number: int) -> str:
    """Return a text without this number, where it stands alone."""
    return re.sub(rf"(?<!\d)0*{number}(?!\d)", "#", text)
