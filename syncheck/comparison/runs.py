"""Find the settings that distinguish runs and differ between files: run, run_id, configuration and seeds.

Within one run, some settings differ by design: ranks, hosts, devices, paths, and seeds that each rank derives from its
rank. They are skipped.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from syncheck.layout.groups import rank_of
from syncheck.tensors.value_kinds import differs_by_design, in_configuration, is_seed, values_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
    return {
        name: {rank: values.get(rank) for rank in snapshots}
        for name, values in by_name.items()
        if len({str(value) for value in values.values()}) > 1 and not _follows_rank(name, values, ranks)
    }


def find_repeated_ranks(snapshots: Mapping[int, Snapshot]) -> tuple[int, ...]:
    """Return the ranks that the metadata of several files records. A run saves one file of each rank."""
    recorded = [s.metadata.rank for s in snapshots.values() if s.metadata is not None and s.metadata.rank is not None]
    return tuple(sorted({rank for rank in recorded if recorded.count(rank) > 1}))


def _list_settings(snapshot: Snapshot) -> Iterator[tuple[str, Any]]:
    """Yield names and values of the settings of one file."""
    if snapshot.metadata is not None:
        yield from _list_metadata(snapshot.metadata)
    for name, value in values_of(snapshot).items():
        is_setting = isinstance(value, (int, float, str)) and not isinstance(value, bool)
        if is_setting and (is_seed(name) or in_configuration(name)) and not _belongs_to_rank(name, value):
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
    known = {position: rank for position, rank in ranks.items() if position in values and rank is not None}
    if len(known) < len(values) or len(set(known.values())) < len(known):
        return False
    if all(isinstance(value, str) for value in values.values()):
        patterns = {_without_number(values[position], rank) for position, rank in known.items()}
        return len(patterns) == 1
    if not all(isinstance(value, (int, float)) for value in values.values()):
        return False
    pairs = sorted((rank, values[position]) for position, rank in known.items())
    (first_rank, first), (second_rank, second) = pairs[:2]
    slope = (second - first) / (second_rank - first_rank)
    is_linear = all(value == first + slope * (rank - first_rank) for rank, value in pairs)
    # Any two numbers are on a line, so two seeds follow the rank only if the slope is typical.
    is_typical = len(pairs) > 2 or (is_seed(name) and abs(slope) in (1, 10, 100, 1000, 10_000))
    return slope != 0 and is_linear and is_typical


def _without_number(text: str, number: int) -> str:
    """Return a text without this number, where it stands alone."""
    return re.sub(rf"(?<!\d)0*{number}(?!\d)", "#", text)
