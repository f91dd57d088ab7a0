"""Compare tensors by their rows: digests identify equal rows in another order."""

from __future__ import annotations

from collections import defaultdict
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from syncheck.tensors.blocks import BLOCK
from syncheck.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files

# Limit of rows of a tensor, 32 MB of digests: vocabularies have up to 300,000 rows.
MOST_ROWS = 1 << 19
# blake2b with 128 bits: a collision among 2**40 rows has a probability below 2**-48, the birthday bound.
_DIGEST = 16
_BEGIN = 16  # elements
# Orders of more runs of rows than this are not listed.
_MOST_RUNS = 8


def digest_rows(tensor: Tensor, files: Files, rows: int) -> list[bytes]:
    """Return the digest of each row. rows: their number, a divisor of the number of elements."""
    length = tensor.numel // rows
    size = length * DTYPES[tensor.dtype].size
    digests = []
    if size <= BLOCK:
        step = max(1, BLOCK // size)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            data = memoryview(files.read(tensor, first * length, count * length, 0))
            digests += [blake2b(data[i * size : (i + 1) * size], digest_size=_DIGEST).digest() for i in range(count)]
        return digests
    step = BLOCK // DTYPES[tensor.dtype].size
    for row in range(rows):
        state = blake2b(digest_size=_DIGEST)
        for start in range(0, length, step):
            state.update(files.read(tensor, row * length + start, min(step, length - start), 0))
        digests.append(state.digest())
    return digests


def may_have_rows(a: Tensor, b: Tensor, rows: int, files: Files) -> bool:
    """Whether `a` contains the beginning of a row of `b`, whose rows have this number. Much faster than digests."""
    length, size = b.numel // rows, DTYPES[b.dtype].size
    start = bytes(files.read(b, rows // 2 * length, min(length, _BEGIN), 0))
    step = BLOCK // size
    # Blocks overlap by one beginning.
    blocks = (files.read(a, at, min(step + _BEGIN, a.numel - at), 0) for at in range(0, a.numel, step))
    return any(start in bytes(block) for block in blocks)


def find_order(a: Sequence[bytes], b: Sequence[bytes]) -> list[int] | None:
    """Return the row of `a` for each row of `b`; None if `a` lacks a row of `b`, or has it less often.

    Equal rows are taken in their order.
    """
    places: dict[bytes, list[int]] = defaultdict(list)
    for i in range(len(a) - 1, -1, -1):
        places[a[i]].append(i)
    order = []
    for digest in b:
        found = places.get(digest)
        if not found:
            return None
        order.append(found.pop())
    return order


def describe_order(order: Sequence[int]) -> dict[str, str | int | tuple[int, ...]]:
    """Return the structure of a permutation of rows, as parameters of a relation.

    `pattern` is "blocks" (few runs of rows; `runs` lists their first rows and lengths), "interleaved" (one row of each
    of `size` blocks in turn), "within" (each block of `size` rows has the same order), or "other".
    """
    count = len(order)
    runs = _find_runs(order)
    if len(runs) <= _MOST_RUNS:
        return {"pattern": "blocks", "runs": tuple(number for run in runs for number in run)}
    for size in [n for n in range(2, count // 2 + 1) if count % n == 0]:
        if all(at == (i % size) * (count // size) + i // size for i, at in enumerate(order)):
            return {"pattern": "interleaved", "size": size}
        if all(at == order[i % size] + i - i % size for i, at in enumerate(order)):
            return {"pattern": "within", "size": size}
    return {"pattern": "other"}


def _find_runs(order: Sequence[int]) -> list[tuple[int, int]]:
    """Return runs of consecutive rows: (first, length), at most one more than are listed."""
    runs: list[tuple[int, int]] = []
    for at in order:
        if runs and at == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((at, 1))
        if len(runs) > _MOST_RUNS:
            break
    return runs


def describe_copies(a: list[bytes], b: list[bytes]) -> dict[str, str | int] | None:
    """Return which rows of `a` the longer or equally long `b` holds several times; None if other rows exist in `b`.

    `pattern` is "tile" (`size` rows from row `start` on, `times` times), "each" (each block of `size` rows `times`
    times in succession), or "other" (copies of other rows take the place of `missing` rows of `a`).
    """
    positions = {digest: row for row, digest in reversed(list(enumerate(a)))}
    if not positions.keys() >= set(b):
        return None
    start, count = positions[b[0]], len(b)
    part = list(a[start:])
    for times in range(2, count + 1):
        size = count // times
        if count % times == 0 and b == part[:size] * times:
            whole = int(size == len(a))
            return {"pattern": "tile", "start": start, "size": size, "times": times, "whole": whole}
    # The first block ends where its first row occurs again.
    block = b.index(b[0], 1) if b[0] in b[1:] else count
    for times in range(2, count // block + 1):
        if count % (block * times) == 0 and b == _repeat_blocks(part[: count // times], block, times):
            return {"pattern": "each", "start": start, "size": block, "times": times}
    return {"pattern": "other", "missing": len(set(a)) - len(set(b))}


def _repeat_blocks(rows: Sequence[bytes], size: int, times: int) -> list[bytes]:
    """Return the rows with each block of rows repeated in succession."""
    repeated: list[bytes] = []
    for first in range(0, len(rows), size):
        repeated += [*rows[first : first + size]] * times
    return repeated


def describe_heads(order: Sequence[int]) -> dict[str, str | int] | None:
    """Return how an order of rows permutes the halves of heads for rotary embeddings; None for another order.

    `head_dim` is the number of rows of a head. `to` is "interleaved" or "half". `back` is the number of rows of a head
    with which the rows were permuted back; only present for a permutation with two different numbers.
    """
    import numpy as np

    count = len(order)
    rows = np.asarray(order)
    sizes = [size for size in range(4, count + 1, 2) if count % size == 0]
    interleaved = {size: _interleave(np.arange(count), size) for size in sizes}
    for size, expected in interleaved.items():
        if np.array_equal(rows, expected):
            return {"head_dim": size, "to": "interleaved"}
        if np.array_equal(rows, np.argsort(expected)):
            return {"head_dim": size, "to": "half"}
    for size, expected in interleaved.items():
        for back, other in interleaved.items():
            if np.array_equal(rows, expected[np.argsort(other)]):
                return {"head_dim": size, "to": "interleaved", "back": back}
    return None


def _interleave(rows: Any, size: int) -> Any:
    """Return rows with the halves of each head interleaved."""
    return rows.reshape(-1, 2, size // 2).swapaxes(1, 2).reshape(-1)
