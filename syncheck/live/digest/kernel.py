"""The sums of `digest.lanes` in one kernel for any number of tensors, written in Triton.

Importing this module imports Triton where it is installed; `add_rows` raises where it is not.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

from syncheck.live.digest.mixing import MIX_A, MIX_B, STEP_A, STEP_B
from syncheck.live.digest.parts import WORD

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncheck.live.digest.mixing import Row

try:
    import triton  # type: ignore[import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-untyped,unused-ignore]
except ImportError:  # as where torch came without it: the eager form does the work
    triton = None

# Words that a program reads in a step, and steps of a program: 64 KiB, so that a GPU has some thousand of them to share
# out, and few end in an atomic addition to one place.
BLOCK = 1024
STEPS = 8
COLUMNS = 5  # of the table: address, bytes, first word, slot, first program


def add_rows(rows: Sequence[Row], sums: Any) -> None:
    """Add the words of rows to the sums: one launch, on the current stream of their device.

    rows: on the device of sums; both on the CPU in Triton's interpreter. sums: [slots, 2] of int64.
    Raises ImportError without Triton, and what Triton raises where it cannot compile.
    """
    if triton is None:
        raise ImportError("Triton is not installed")
    if sums.is_cuda and not isinstance(sum_words, triton.runtime.JITFunction):
        # It would take the addresses of the device for its own.
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
    """Mix a block of words as `digest.lanes.Mix` says. They are uint64, so that a shift brings zeros."""
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
    """Add block * steps words of one row, both mixes, to the sums of its slot. `add_rows` says what the table holds."""
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
    # Keys are kept, and grow by a constant: a multiplication of 64 bits is four of a GPU's.
    number = (first + begin + lane + 1).to(tl.uint64, bitcast=True)
    key_a = number * step_a
    key_b = number * step_b
    sum_a = tl.zeros([block], tl.uint64)
    sum_b = tl.zeros([block], tl.uint64)
    source = address.to(tl.pointer_type(tl.int64))
    for step in range(steps):
        at = begin + step * block + lane
        there = at < words
        word = tl.load(source + at, mask=there, other=0).to(tl.uint64, bitcast=True)
        sum_a += tl.where(there, mix(word + key_a, a1, a2, a3, a4, a5), 0)
        sum_b += tl.where(there, mix(word ^ key_b, b1, b2, b3, b4, b5), 0)
        key_a += (block * step_a) & 0xFFFFFFFFFFFFFFFF
        key_b += (block * step_b) & 0xFFFFFFFFFFFFFFFF
    # The bytes after the last whole word, padded with zeros, belong to the first program.
    rest = tl.where(mine == 0, size % 8, 0)
    place = tl.arange(0, 8)
    byte = tl.load(address.to(tl.pointer_type(tl.uint8)) + words * 8 + place, mask=place < rest, other=0)
    tail = tl.sum(byte.to(tl.int64) << (place * 8).to(tl.int64), axis=0).to(tl.uint64, bitcast=True)
    last = (first + words + 1).to(tl.uint64, bitcast=True)
    # In one lane of a block: the sum is over blocks.
    there = (lane == 0) & (rest > 0)
    sum_a += tl.where(there, mix(tail + last * step_a, a1, a2, a3, a4, a5), 0)
    sum_b += tl.where(there, mix(tail ^ (last * step_b), b1, b2, b3, b4, b5), 0)
    tl.atomic_add(sums + slot * 2, tl.sum(sum_a.to(tl.int64, bitcast=True), axis=0), sem="relaxed")
    tl.atomic_add(sums + slot * 2 + 1, tl.sum(sum_b.to(tl.int64, bitcast=True), axis=0), sem="relaxed")


# What is compiled into `sum_words`. One by one: the Triton of torch 2.6 takes no tuple.
CONSTANTS = {
    "step_a": STEP_A,
    "step_b": STEP_B,
    **{f"a{i}": number for i, number in enumerate(itertools.chain(*MIX_A), start=1)},
    **{f"b{i}": number for i, number in enumerate(itertools.chain(*MIX_B), start=1)},
    "columns": COLUMNS,
    "block": BLOCK,
    "steps": STEPS,
}
# Of the compiler. Nothing here is a float; but newer Tritons warn where it is not said.
OPTIONS = {"enable_fp_fusion": False}
