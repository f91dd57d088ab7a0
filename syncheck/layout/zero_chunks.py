"""Chunks of parameters in the flat tensors of ZeRO 1, 2 and 3, as DeepSpeed stores them."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

from syncheck.errors import MalformedFile
from syncheck.text import brief

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


def malformed_folder(path: str, place: str, found: str, needed: str) -> MalformedFile:
    """Return the error for a folder of DeepSpeed."""
    return MalformedFile(
        path,
        place=place,
        found=found,
        needed=needed,
        next_step="copy the files of all ranks into one folder, or save again",
    )


class Chunk(NamedTuple):
    """A chunk of a parameter in the flat tensor of a rank.

    position: of its first element in the flat tensor.
    start: its first element in the parameter.
    length: its number of elements.
    """

    parameter: str
    rank: int
    position: int
    start: int
    length: int


def split_parameters(path: str, group: str, sizes: Mapping[str, int], lengths: Sequence[int]) -> Iterator[Chunk]:
    """Yield the chunks of ZeRO 3, which cuts each parameter into one chunk for each rank.

    sizes: elements of the parameters.
    lengths: of the flat tensors. Raises MalformedFile for other lengths.
    """
    ranks = len(lengths)
    chunk_sizes = {name: -(-size // ranks) for name, size in sizes.items()}
    # Each rank has one chunk of every parameter, so all flat tensors have one length.
    length = sum(chunk_sizes.values())
    if set(lengths) != {length}:
        raise _refuse_lengths(
            path,
            group,
            lengths=lengths,
            needed=ranks * length,
        )

    # The last chunk of a parameter may be shorter, and has padding in the flat tensor.
    position = 0
    for name, size in sizes.items():
        for rank in range(ranks):
            start = min(rank * chunk_sizes[name], size)
            yield Chunk(
                parameter=name,
                rank=rank,
                position=position,
                start=start,
                length=min(chunk_sizes[name], size - start),
            )

        position += chunk_sizes[name]


def split_group(
    path: str, group: str, sizes: Mapping[str, int], lengths: Sequence[int], gaps: Sequence[int]
) -> Iterator[Chunk]:
    """Yield the chunks of ZeRO 1 and 2, which cut the concatenated parameters of a group into ranges.

    sizes: elements of the parameters.
    lengths: of the flat tensors. Raises MalformedFile for other lengths.
    gaps: padding after each parameter.
    """
    needed = sum(sizes.values()) + sum(gaps)
    # The last rank may have padding to a multiple of twice the number of ranks.
    most_padding = 2 * len(lengths)
    if len(gaps) != len(sizes) or not needed <= sum(lengths) < needed + most_padding:
        raise _refuse_lengths(
            path,
            group,
            lengths=lengths,
            needed=needed,
        )

    begins = [*itertools.accumulate(lengths, initial=0)]
    parameter_begin = 0
    for (name, size), gap in zip(sizes.items(), gaps, strict=True):
        rank = bisect_right(begins, parameter_begin) - 1
        start = 0
        while start < size:
            position = parameter_begin + start - begins[rank]
            count = min(size - start, lengths[rank] - position)
            yield Chunk(
                parameter=name,
                rank=rank,
                position=position,
                start=start,
                length=count,
            )
            rank += 1
            start += count

        parameter_begin += size + gap


def _refuse_lengths(path: str, group: str, lengths: Sequence[int], needed: int) -> MalformedFile:
    found = f"{brief(lengths)} elements in flat tensors"
    return malformed_folder(
        path,
        place=f"group {brief(group)}",
        found=found,
        needed=f"{needed} for the shapes of its parameters",
    )
