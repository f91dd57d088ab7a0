"""The sums of `digest.lanes` for any number of tensors in one Triton kernel.

Importing this module imports Triton if it is installed; otherwise `add_rows` raises.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

from syncheck.live.digest.lanes import MIX_A, MIX_B, STEP_A, STEP_B
from syncheck.live.digest.parts import WORD

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncheck.live.digest.lanes import Row

try:
    import triton  # type: ignore[import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-untyped,unused-ignore]
except ImportError:  # without Triton, the eager implementation computes the sums
    triton = None

# Words per step of a program, and steps per program: 64 KiB. A large tensor gives a GPU thousands of programs, and few
# programs end in an atomic addition to the same slot.
BLOCK = 1024
STEPS = 8
COLUMNS = 5  # columns of the table: address, bytes, first word, slot, first program


def add_rows(rows: Sequence[Row], sums: Any) -> None:
    """Add the words of rows to the sums in one launch, on the current stream of their device.

    rows: on the device of sums, or both on the CPU in Triton's interpreter. sums: int64[slots, 2]. Raises ImportError
    without Triton, and Triton's errors if it cannot compile.
    """
    if triton is None:
        raise ImportError("Triton is not installed")
    if sums.is_cuda and not isinstance(sum_words, triton.runtime.JITFunction):
        # The interpreter would read device addresses as host addresses.
        raise RuntimeError("Triton's interpreter reads the memory of the CPU only (TRITON_INTERPRET=1 is set)")
    import numpy as np
    import torch

    table = np.empty((len(rows), COLUMNS), np.int64)
    table[:, 0] = [row.tensor.data_ptr() for row in rows]
    table[:, 1] = [row.tensor.nbytes for row in rows]
    table[:, 2] = [row.first for row in rows]
    table[:, 3] = [row.slot for row in rows]
    programs = -(-table[:, 1] // (WORD * BLOCK * STEPS))
    ends = np.cumsum(programs)
    table[:, 4] = ends - programs
    owners = np.repeat(np.arange(len(rows)), programs)
    both = torch.from_numpy(np.concatenate([table.reshape(-1), owners])).to(sums.device)
    with torch.cuda.device(sums.device) if sums.is_cuda else contextlib.nullcontext():
        sum_words[(len(owners),)](both, both[table.size :], sums, **CONSTANTS, **OPTIONS)


def _jit(function: Callable[..., Any]) -> Any:
    return function if triton is None else triton.jit(function)


@_jit
def mix(
    x: tl.tensor,
    shift_1: tl.constexpr,
    shift_2: tl.constexpr,
    shift_3: tl.constexpr,
    factor_1: tl.constexpr,
    factor_2: tl.constexpr,
) -> tl.tensor:
    """Mix a block of uint64 words, as in `lanes.Mix`. Unsigned, so that right shifts fill with zeros."""
    x = (x ^ (x >> shift_1)) * factor_1
    x = (x ^ (x >> shift_2)) * factor_2
    return x ^ (x >> shift_3)


@_jit
def sum_words(
    table: tl.tensor,
    owners: tl.tensor,
    sums: tl.tensor,
    step_a: tl.constexpr,
    step_b: tl.constexpr,
    a1: tl.constexpr,
    a2: tl.constexpr,
    a3: tl.constexpr,
    a4: tl.constexpr,
    a5: tl.constexpr,
    b1: tl.constexpr,
    b2: tl.constexpr,
    b3: tl.constexpr,
    b4: tl.constexpr,
    b5: tl.constexpr,
    columns: tl.constexpr,
    block: tl.constexpr,
    steps: tl.constexpr,
) -> None:
    """Add block * steps words of one row, mixed in both ways, to the sums of its slot. `add_rows` builds the table."""
    program = tl.program_id(0)
    row = table + tl.load(owners + program) * columns
    address = tl.load(row)
    size = tl.load(row + 1)
    first = tl.load(row + 2)
    slot = tl.load(row + 3)
    mine = program - tl.load(row + 4)
    words = size // 8
    lane = tl.arange(0, block)
    begin = mine * (block * steps)
    # Keys grow by a constant, because a 64-bit multiplication takes four 32-bit multiplications on a GPU.
    number = (first + begin + lane + 1).to(tl.uint64, bitcast=True)
    key_a = number * step_a
    key_b = number * step_b
    sum_a = tl.zeros([block], tl.uint64)
    sum_b = tl.zeros([block], tl.uint64)
    source = address.to(tl.pointer_type(tl.int64))
    for step in range(steps):
        index = begin + step * block + lane
        valid = index < words
        word = tl.load(source + index, mask=valid, other=0).to(tl.uint64, bitcast=True)
        sum_a += tl.where(valid, mix(word + key_a, a1, a2, a3, a4, a5), 0)
        sum_b += tl.where(valid, mix(word ^ key_b, b1, b2, b3, b4, b5), 0)
        key_a += (block * step_a) & 0xFFFFFFFFFFFFFFFF
        key_b += (block * step_b) & 0xFFFFFFFFFFFFFFFF
    # The bytes after the last whole word, padded with zeros, belong to the first program.
    tail_bytes = tl.where(mine == 0, size % 8, 0)
    position = tl.arange(0, 8)
    byte = tl.load(address.to(tl.pointer_type(tl.uint8)) + words * 8 + position, mask=position < tail_bytes, other=0)
    tail = tl.sum(byte.to(tl.int64) << (position * 8).to(tl.int64), axis=0).to(tl.uint64, bitcast=True)
    last = (first + words + 1).to(tl.uint64, bitcast=True)
    # In a single lane, because the sum runs over all lanes.
    has_tail = (lane == 0) & (tail_bytes > 0)
    sum_a += tl.where(has_tail, mix(tail + last * step_a, a1, a2, a3, a4, a5), 0)
    sum_b += tl.where(has_tail, mix(tail ^ (last * step_b), b1, b2, b3, b4, b5), 0)
    tl.atomic_add(sums + slot * 2, tl.sum(sum_a.to(tl.int64, bitcast=True), axis=0), sem="relaxed")
    tl.atomic_add(sums + slot * 2 + 1, tl.sum(sum_b.to(tl.int64, bitcast=True), axis=0), sem="relaxed")


# Compile-time constants of `sum_words`, separately because torch 2.6's Triton supports no tuples.
CONSTANTS = {
    "step_a": STEP_A,
    "step_b": STEP_B,
    **{f"a{i}": number for i, number in enumerate(itertools.chain(*MIX_A), start=1)},
    **{f"b{i}": number for i, number in enumerate(itertools.chain(*MIX_B), start=1)},
    "columns": COLUMNS,
    "block": BLOCK,
    "steps": STEPS,
}
# Compiler options. The kernel uses no floats, but newer Tritons warn unless this is set.
OPTIONS = {"enable_fp_fusion": False}
