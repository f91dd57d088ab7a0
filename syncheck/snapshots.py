"""What the readers find in checkpoints: names and places of tensors, values, and how shards lie over ranks; no data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.messages import Message

# What any tensor may have, of whatever format: torch counts elements and bytes in 63 bits, and has 64 dimensions.
MOST_ELEMENTS, MOST_DIMENSIONS = 2**63 - 1, 64


def are_naturals(numbers: Iterable[object]) -> bool:
    """Whether all are what a size, a stride, an offset or a rank can be: integers from 0 to MOST_ELEMENTS."""
    for n in numbers:  # noqa: SIM110 - twice as fast as all(), and called twice a tensor
        if type(n) is not int or not 0 <= n <= MOST_ELEMENTS:
            return False
    return True


def in_c_order(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a tensor without gaps."""
    if len(shape) == 1:  # as most of many small ones
        return (1,)
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def flat_index(index: Sequence[int] | None, shape: Sequence[int]) -> int:
    """Return where in C order an element stands; the first where no index is given."""
    return sum(at * stride for at, stride in zip(index or (), in_c_order(shape), strict=False))


def index_at(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index of the element that stands at this place in C order; () of a tensor without dimensions."""
    index: list[int] = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        index.append(at)
    return tuple(reversed(index))


@dataclass(frozen=True, slots=True)
class Metadata:
    """What `syncheck.metadata()` wrote into a checkpoint, checked."""

    run: str | None = None
    run_id: str | None = None
    step: int | None = None
    epoch: int | None = None
    rank: int | None = None
    world_size: int | None = None
    host: str | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)
    buffers: tuple[str, ...] | None = None  # names of the saved ones; None: no model was described
    frozen: tuple[str, ...] = ()
    bn_momentum: Mapping[str, float | None] = field(default_factory=dict)
    optimizer_parameters: tuple[str, ...] = ()  # names in the order of the optimizer's integer ids
    buffers_synced: bool | None = None
    # Whether each rank holds a part of the optimizer's state; when local SGD averages. See `syncheck.metadata()`.
    optimizer_sharded: bool = False
    averaging: Mapping[str, int] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


class Sliced(Protocol):
    """Bytes that lie elsewhere, such as in a live tensor: `[start:stop]` gives those, as of `bytes`."""

    def __getitem__(self, part: slice, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a DTensor is laid over a mesh of ranks; the `Tensor` it belongs to is one rank's part of it.

    mesh: sizes of the mesh's dimensions. names: the dimensions' names, empty if the mesh has none. ranks: the ranks of
    the mesh, flattened in C order. placements: one for each dimension of the mesh, as torch prints them: "R" for
    replicated, "S(0)" for sharded along the tensor's dimension 0, "P(sum)" for a part of a sum.
    shape: of the whole tensor. coordinate: where this rank stands in the mesh; empty where that is not known. beside:
    where it stands along the other dimensions of the root mesh, if the mesh is a part of one and the file says it.
    """

    mesh: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[str, ...]
    shape: tuple[int, ...]
    names: tuple[str, ...] = ()
    coordinate: tuple[int, ...] = ()
    beside: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a tensor that is stored in several pieces. start: where it begins, in elements by dimension."""

    tensor: Tensor
    start: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Digest:
    """What a fingerprint keeps of a tensor's bytes (in C order, little-endian).

    Digests of different algorithms are never compared. Moments are over finite elements, None where there are none.
    """

    algorithm: str
    value: str
    nonfinite: int | None = None
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    std: float | None = None


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of one checkpoint: what it is and where its bytes lie. The bytes stay on disk.

    shape: elements by dimension, as torch has it; empty for a scalar. path: of the file that its bytes lie in.
    big_endian: whether the most significant byte of an element comes first.
    """

    name: str
    """As stored, without its container; optimizer state is `optimizer.<parameter>.<state>`."""
    dtype: str
    """Torch's name without `torch.`: float32, bfloat16, int64, ..."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements, as torch counts them."""
    path: str
    offset: int
    """Of the first element, in bytes from the start of the file."""
    big_endian: bool = False
    lazy: str = ""
    """"conj" or "neg": the operation that torch left to be done on reading."""
    refused: Message | None = None
    """Why the bytes of this tensor cannot be compared: a `Refusal`."""
    data: bytes | Sliced | None = None
    """The bytes themselves, of a numpy array that lies in a pickle or of a tensor in memory; else they stay on disk."""
    parameter: bool = False
    """Whether it is known to be a parameter, whatever its name: of a module in memory."""
    opened: os.stat_result | None = None
    """The file as it was when the tensor's place was read; None for what lies in no file."""
    crc32: int | None = None
    """What torch.save stored for these bytes and no others; None where it stored none (its 0 proves nothing)."""
    record: tuple[int, int, int] | None = None
    """(CRC-32, first byte, bytes) of the record that these, and perhaps others, lie in; None where none is stored."""
    parts: tuple[Part, ...] = ()
    """Of a tensor that is stored in pieces: these cover it, without overlap; then its own place means nothing."""
    sharding: Sharding | None = None
    """Of a DTensor: these bytes are this rank's part."""
    digest: Digest | None = None
    """Of a fingerprint: stands for the bytes, which are not there."""
    same: bytes = b""
    """Where given: equal on replicas of equal bytes and on no others, so that these are told without reading any."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One replica's checkpoint, opened: names and places, no data.

    path: of the file or folder. format: how it was read, such as `torch-zip`. bytes: of the file, or of all files of
    the folder. tensors: by name. metadata: what `syncheck.metadata()` wrote, None where there is no such block.
    """

    path: str
    format: str
    bytes: int
    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any] = field(default_factory=dict)
    """Python numbers, strings and None by dotted name: step, epoch, param_groups, ..."""
    stubs: tuple[str, ...] = ()
    """Globals of the pickle that became inert: not compared."""
    metadata: Metadata | None = None
    notes: tuple[Message, ...] = ()
    """What a reader of the answer must know of this file or its format."""
    ties: tuple[tuple[str, ...], ...] = ()
    """Names of one tensor, where the tensors have no places that tell it: those of another process's file."""
    mesh: Mapping[str, int] = field(default_factory=dict)
    """The rank's coordinate by dimension of the mesh, if the file's name has it."""
    host: str | None = None
    """The machine, if the path names it."""
    numbered: tuple[str, ...] = ()
    """Parameters of an optimizer that numbers them, by their names if the shapes of tensors give these, else by number.
    Empty if the file names the parameters."""
    shards: frozenset[str] = frozenset()
    """Labels of the parts that a folder holds, if other folders may hold others: they stand in the tensors' names."""
