"""Compare tensors by their rows: digests identify equal rows in another order."""

from __future__ import annotations

import itertools
from collections import defaultdict
from hashlib import blake2b
from operator import itemgetter
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
    if length * DTYPES[tensor.dtype].size <= BLOCK:
        return _digest_short_rows(tensor, files, rows, length)
    return _digest_long_rows(tensor, files, rows, length)


def _digest_short_rows(tensor: Tensor, files: Files, rows: int, length: int) -> list[bytes]:
    """Return the digest of each row, reading several rows at once. length: of a row, in elements."""
    size = length * DTYPES[tensor.dtype].size
    step = max(1, BLOCK // size)
    digests = []
    for first in range(0, rows, step):
        count = min(step, rows - first)
        data = memoryview(files.read(tensor, first * length, count * length, 0))
        for start in range(0, count * size, size):
            digests.append(blake2b(data[start : start + size], digest_size=_DIGEST).digest())
    return digests


def _digest_long_rows(tensor: Tensor, files: Files, rows: int, length: int) -> list[bytes]:
    """Return the digest of each row, reading a part of a row at once. length: of a row, in elements."""
    step = BLOCK // DTYPES[tensor.dtype].size
    digests = []
    for row in range(rows):
        state = blake2b(digest_size=_DIGEST)
        for start in range(0, length, step):
            state.update(files.read(tensor, row * length + start, min(step, length - start), 0))
        digests.append(state.digest())
    return digests


def may_have_rows(a: Tensor, b: Tensor, rows: int, files: Files) -> bool:
    """Whether `a` contains the beginning of a row of `b`, whose rows have this number. Much faster than digests."""
    length = b.numel // rows
    row = rows // 2
    beginning = bytes(files.read(b, row * length, min(length, _BEGIN), 0))
    step = BLOCK // DTYPES[b.dtype].size
    for start in range(0, a.numel, step):
        # Blocks overlap by one beginning.
        count = min(step + _BEGIN, a.numel - start)
        if beginning in bytes(files.read(a, start, count, 0)):
            return True
    return False


def find_order(a: Sequence[bytes], b: Sequence[bytes]) -> list[int] | None:
    """Return the row of `a` for each row of `b`; None if `a` lacks a row of `b`, or has it less often.

    Equal rows are taken in their order.
    """
    # The last position of each digest is the next in order.
    positions: dict[bytes, list[int]] = defaultdict(list)
    for position in range(len(a) - 1, -1, -1):
        positions[a[position]].append(position)
    order = []
    for digest in b:
        unused_positions = positions[digest]
        if not unused_positions:
            return None
        order.append(unused_positions.pop())
    return order


def describe_order(order: Sequence[int]) -> dict[str, str | int | tuple[int, ...]]:
    """Return the structure of a permutation of rows, as parameters of a relation.

    `pattern` is "reversed" (the last row first), "blocks" (few runs of rows; `runs` lists their first rows and
    lengths), "interleaved" (one row of each of `size` blocks in turn), "within" (each block of `size` rows has the same
    order), or "other".
    """
    if list(order) == [*reversed(range(len(order)))]:
        return {"pattern": "reversed"}
    runs = find_runs(order, _MOST_RUNS)
    if len(runs) <= _MOST_RUNS:
        return {"pattern": "blocks", "runs": tuple(itertools.chain.from_iterable(runs))}
    # A single block of all rows has any order.
    *sizes, _ = _list_divisors(len(order))
    for size in sizes:
        if _is_interleaved(order, size):
            return {"pattern": "interleaved", "size": size}
        if _is_within_blocks(order, size):
            return {"pattern": "within", "size": size}
    return {"pattern": "other"}


def _is_interleaved(order: Sequence[int], blocks: int) -> bool:
    """Whether the order takes one row of each of so many blocks in turn."""
    length = len(order) // blocks
    return all(row == i % blocks * length + i // blocks for i, row in enumerate(order))


def _is_within_blocks(order: Sequence[int], size: int) -> bool:
    """Whether each block of so many rows has the order of the first block."""
    return all(row == order[i % size] + i - i % size for i, row in enumerate(order))


def find_runs(order: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Return runs of consecutive rows: (first, length), at most one more than `most`."""
    runs: list[tuple[int, int]] = []
    for row in order:
        first, length = runs[-1] if runs else (row, 0)
        if row == first + length:
            runs[-1:] = [(first, length + 1)]
            continue
        runs.append((row, 1))
        if len(runs) > most:
            break
    return runs


def _find_shortest_run(order: Sequence[int]) -> int:
    """Return the number of rows of the shortest run of consecutive rows."""
    runs = find_runs(order, len(order))
    _, shortest = min(runs, key=itemgetter(1), default=(0, 0))
    return shortest


def describe_shift(a: Sequence[bytes], b: Sequence[bytes]) -> dict[str, int] | None:
    """Return from which row on all rows of `a` have another position in `b`; None for other rows.

    `row` is the first of these rows, `shift` how many rows later they are in `b`, negative for earlier, and `lost` the
    number of rows that `b` lacks.
    """
    row = 0
    while row < min(len(a), len(b)) and a[row] == b[row]:
        row += 1
    # Additional rows at the end shift no row.
    if row == min(len(a), len(b)):
        return None
    rows_a, rows_b = a[row:], b[row:]
    inserted, removed = _find_start(rows_a, rows_b), _find_start(rows_b, rows_a)
    if inserted:
        # Rows of padding that B has at other positions, too, are not lost.
        dropped_rows = set(rows_a[len(rows_b) - inserted :]) - set(b)
        return {"row": row, "shift": inserted, "lost": len(dropped_rows)}
    if removed:
        return {"row": row, "shift": -removed, "lost": removed}
    return None


def _find_start(rows: Sequence[bytes], longer: Sequence[bytes]) -> int:
    """Return the position from which on the longer rows are the other rows, as far as both reach; 0 for no position."""
    start = longer.index(rows[0]) if rows[0] in longer else 0
    count = min(len(rows), len(longer) - start)
    # A single equal row at the end is no shift.
    is_shifted = count > 1 and list(rows[:count]) == list(longer[start : start + count])
    return start if is_shifted else 0


def describe_copies(a: list[bytes], b: list[bytes]) -> dict[str, str | int] | None:
    """Return which rows of `a` the longer or equally long `b` holds several times; None if other rows exist in `b`.

    `pattern` is "tile" (`size` rows from row `start` on, `times` times), "each" (each block of `size` rows `times`
    times in succession), or "other" (copies of other rows take the place of `missing` rows of `a`).
    """
    missing_rows = set(a) - set(b)
    copies = describe_regular_copies(a, b)
    if copies is None and set(a) >= set(b):
        return {"pattern": "other", "missing": len(missing_rows)}
    return copies


def describe_regular_copies(a: list[bytes], b: list[bytes]) -> dict[str, str | int] | None:
    """Return the same as `describe_copies`, but None for copies without a regular pattern."""
    # Most tensors have other rows, and a comparison with each pattern takes longer.
    if not set(a) >= set(b):
        return None
    start = a.index(b[0])
    return _find_tiles(a, b, start) or _find_repeated_blocks(a, b, start)


def _find_tiles(a: list[bytes], b: list[bytes], start: int) -> dict[str, str | int] | None:
    """Return the parameters of "tile", see `describe_copies`. start: the first of the repeated rows in `a`."""
    for times in _list_divisors(len(b)):
        size = len(b) // times
        if b == a[start : start + size] * times:
            is_whole = size == len(a)
            return {
                "pattern": "tile",
                "start": start,
                "size": size,
                "times": times,
                "whole": int(is_whole),
            }
    return None


def _list_divisors(count: int) -> list[int]:
    """Return the divisors of a number of rows, without 1."""
    return [divisor for divisor in range(2, count + 1) if count % divisor == 0]


def _find_repeated_blocks(a: list[bytes], b: list[bytes], start: int) -> dict[str, str | int] | None:
    """Return the parameters of "each", see `describe_copies`. start: the first of the repeated rows in `a`."""
    if b.count(b[0]) < 2:
        return None
    # The first block ends where its first row occurs again.
    block = b.index(b[0], 1)
    blocks, remainder = divmod(len(b), block)
    # A block that was cut off is no copy.
    if remainder:
        return None
    for times in _list_divisors(blocks):
        rows = a[start : start + len(b) // times]
        if b == _repeat_blocks(rows, block, times):
            return {
                "pattern": "each",
                "start": start,
                "size": block,
                "times": times,
            }
    return None


def _repeat_blocks(rows: Sequence[bytes], size: int, times: int) -> list[bytes]:
    """Return the rows with each block of rows repeated in succession."""
    repeated: list[bytes] = []
    for first in range(0, len(rows), size):
        repeated += [*rows[first : first + size]] * times
    return repeated


def describe_heads(order: Sequence[int], least: int) -> dict[str, str | int] | None:
    """Return how an order of rows permutes the halves of heads for rotary embeddings; None for another order.

    `head_dim` is the number of rows of a head. `to` is "interleaved" or "half". `back` is the number of rows of a head
    with which the rows were permuted back; only present for a permutation with two different numbers.

    least: the fewest rows of a whole head.
    """
    import numpy as np

    count = len(order)
    rows = np.asarray(order)
    interleaved_orders = {}
    # The halves of two rows are single rows, in either order.
    for half in _list_divisors(count // 2):
        size = 2 * half
        if count % size == 0:
            interleaved_orders[size] = _interleave(np.arange(count), size)
    for size, interleaved in interleaved_orders.items():
        if np.array_equal(rows, interleaved):
            return {"head_dim": size, "to": "interleaved"}
        if np.array_equal(rows, np.argsort(interleaved)):
            return {"head_dim": size, "to": "half"}
    # Exchanged heads, or exchanged parts of several heads each, have the order of two permutations, too.
    if _find_shortest_run(order) >= least:
        return None
    # Permuted with one number of heads, and back with another.
    for size, size_back in itertools.permutations(interleaved_orders, 2):
        back = np.argsort(interleaved_orders[size_back])
        if np.array_equal(rows, interleaved_orders[size][back]):
            return {"head_dim": size, "to": "interleaved", "back": size_back}
    return None


def _interleave(rows: Any, size: int) -> Any:
    """Return rows with the halves of each head interleaved."""
    return rows.reshape(-1, 2, size // 2).swapaxes(1, 2).reshape(-1)
