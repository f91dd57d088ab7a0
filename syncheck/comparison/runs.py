"""Find the settings that distinguish runs and differ between files: run, run_id, configuration and seeds.

Within one run, some settings differ by design: ranks, hosts, devices, paths, and seeds that each rank derives from its
rank. They are skipped.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.layout.groups import rank_in_path, rank_of
from syncheck.snapshots import get_metadata
from syncheck.tensors.value_kinds import differs_by_design, in_configuration, is_seed, values_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from syncheck.snapshots import Snapshot

# Words in the names of settings that belong to a rank, a machine, or the main process.
_OF_RANK = frozenset(
    "rank ranks host hostname node addr address url ip port device devices gpu gpus cuda dir path file folder out "
    "output root cache log logging tmp time date pid main master primary chief leader verbose quiet progress writer "
    "shard shards worker workers offset index id local".split()
)
_WORD = r"[a-z]+"
# In paths, also on Windows.
_SEPARATORS = frozenset("/\\")
# Differences between the seeds of neighbouring ranks.
_TYPICAL_SLOPES = (1, 10, 100, 1000, 10_000)
# Nesting of configurations that is searched.
_MOST_LEVELS = 8


def find_differing_settings(snapshots: Mapping[int, Snapshot]) -> dict[str, dict[int, Any]]:
    """Return the settings that differ between files: by name, the value by rank, None for files without the setting.

    First the settings of the metadata (`run`, `run_id`, `world_size`, `config.NAME`), then saved values.
    """
    by_name: dict[str, dict[int, Any]] = defaultdict(dict)
    ranks: dict[int, int] = {}
    for position, snapshot in snapshots.items():
        rank = rank_of(snapshot)
        if rank is not None:
            ranks[position] = rank

        for name, value in _list_settings(snapshot):
            by_name[name][position] = value

    differing: dict[str, dict[int, Any]] = {}
    for name, values in by_name.items():
        distinct = set(map(str, values.values()))
        if len(distinct) > 1 and not _follows_rank(name, values, ranks):
            differing[name] = dict.fromkeys(snapshots) | values

    return differing


def find_repeated_ranks(snapshots: Mapping[int, Snapshot]) -> tuple[int, ...]:
    """Return the ranks that the metadata of several files records. A run saves one file of each rank."""
    files: Counter[int] = Counter()
    for snapshot in snapshots.values():
        rank = get_metadata(snapshot).rank
        if rank is not None:
            files[rank] += 1

    repeated = [rank for rank, count in files.items() if count > 1]
    return tuple(sorted(repeated))


class _Claim(NamedTuple):
    """The origin of a file, from its metadata. Files with equal claims are of one rank at one step."""

    rank: int
    run: str | None
    run_id: str | None
    step: int | None


def find_claimed_twice(snapshots: Mapping[int, Snapshot]) -> tuple[int, ...]:
    """Return the ranks that files of several ranks, by their names, claim for the same run and step in their metadata.

    A file and its copy have no ranks in their names, and may be compared. A process without a process group is rank 0
    of 1, and so is each of several independent processes.
    """
    named_ranks: dict[_Claim, set[int]] = defaultdict(set)
    for snapshot in snapshots.values():
        metadata = get_metadata(snapshot)
        if metadata.rank is None or metadata.world_size == 1:
            continue

        named_rank = rank_in_path(snapshot)
        if named_rank is None:
            continue

        claim = _Claim(
            metadata.rank,
            metadata.run,
            metadata.run_id,
            metadata.step,
        )
        named_ranks[claim].add(named_rank)

    claimed_twice = {claim.rank for claim, ranks in named_ranks.items() if len(ranks) > 1}
    return tuple(sorted(claimed_twice))


def _list_settings(snapshot: Snapshot) -> Iterator[tuple[str, Any]]:
    """Yield names and values of the settings of one file that must be equal within a run."""
    metadata = get_metadata(snapshot)
    for name in ("run", "run_id", "world_size"):
        value = getattr(metadata, name)
        if value is not None:
            yield name, value

    settings = chain(
        _flatten(metadata.config, "config", _MOST_LEVELS),
        _list_saved_settings(snapshot),
    )
    for name, value in settings:
        if not _belongs_to_rank(name, value):
            yield name, value


def _list_saved_settings(snapshot: Snapshot) -> Iterator[tuple[str, Any]]:
    """Yield seeds and the user's configuration among the saved values."""
    for name, value in values_of(snapshot).items():
        if not is_seed(name) and not in_configuration(name):
            continue

        # Saved flags often say whether this is the main process.
        is_flag = isinstance(value, bool)
        if not is_flag and isinstance(value, (int, float, str)):
            yield name, value


def _flatten(node: Any, name: str, levels: int) -> Iterator[tuple[str, Any]]:
    """Yield the plain values of a configuration by their names."""
    if isinstance(node, dict) and levels:
        for key, value in node.items():
            yield from _flatten(value, f"{name}.{key}", levels - 1)

    if isinstance(node, (bool, int, float, str)):
        yield name, node

    # A list is one setting, for example of the sizes of layers.
    if isinstance(node, (list, tuple)):
        yield name, str(node)


def _belongs_to_rank(name: str, value: Any) -> bool:
    """Whether a setting may differ within a run: of the rank, the machine or the main process, or a path."""
    if isinstance(value, str) and not _SEPARATORS.isdisjoint(value):
        return True

    if differs_by_design(name):
        return True

    last = name.rpartition(".")[2]
    words = re.findall(_WORD, last.lower())
    return not _OF_RANK.isdisjoint(words)


def _follows_rank(name: str, values: Mapping[int, Any], ranks: Mapping[int, int]) -> bool:
    """Whether the values are derived from the rank: seed + rank, or a text with the rank in it.

    values: by position in the group.
    ranks: the known ranks of files, by position.
    """
    value_of_rank: dict[int, Any] = {}
    for position in values.keys() & ranks.keys():
        value_of_rank[ranks[position]] = values[position]

    # The rank of a file is unknown, or two files have one rank.
    if len(value_of_rank) < len(values):
        return False

    kinds = {type(value) for value in values.values()}
    if kinds == {str}:
        patterns = {_without_number(text, rank) for rank, text in value_of_rank.items()}
        return len(patterns) == 1

    if not kinds <= {int, float}:
        return False

    pairs = sorted(value_of_rank.items())
    return _are_on_a_line(pairs, seeds=is_seed(name))


def _are_on_a_line(pairs: Sequence[tuple[int, float]], *, seeds: bool) -> bool:
    """Whether numbers grow evenly with the rank. pairs: rank and number. seeds: whether they are seeds."""
    (first_rank, first), (second_rank, second) = pairs[:2]
    slope = (second - first) / (second_rank - first_rank)
    if slope == 0:
        return False

    # Any two numbers are on a line, so two seeds follow the rank only if the slope is typical.
    if len(pairs) == 2:
        return seeds and abs(slope) in _TYPICAL_SLOPES

    return all(value == first + slope * (rank - first_rank) for rank, value in pairs)


def _without_number(text: str, number: int) -> str:
    """Return a text without this number, where it stands alone."""
    return re.sub(rf"(?<!\d)0*{number}(?!\d)", "#", text)
