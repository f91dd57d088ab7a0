"""Records of an opened checkpoint: tensors with their location on disk, values, and shards; no tensor data."""

from __future__ import annotations

import math
from dataclasses import field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, Protocol

from syncheck.frozen import record

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.messages import Message

# torch's limits for any tensor: elements and bytes fit in 63 bits, and there are at most 64 dimensions.
MOST_ELEMENTS, MOST_DIMENSIONS = 2**63 - 1, 64


def are_naturals(numbers: Iterable[object]) -> bool:
    """Whether all numbers are valid as sizes, strides, offsets or ranks: integers from 0 to MOST_ELEMENTS."""
    # Twice as fast as all(), and called twice for each tensor.
    for n in numbers:  # noqa: SIM110
        if type(n) is not int or not 0 <= n <= MOST_ELEMENTS:
            return False
    return True


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    # A shortcut for the most frequent shape.
    if len(shape) == 1:
        return (1,)
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def ravel_index(index: Sequence[int] | None, shape: Sequence[int]) -> int:
    """Return the position of an element in C order; 0 without an index."""
    if index is None:
        return 0
    position = 0
    for coordinate, stride in zip(index, contiguous_strides(shape), strict=False):
        position += coordinate * stride
    return position


def unravel_index(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index of the element at a position in C order; () for a scalar."""
    index: list[int] = []
    for size in reversed(shape):
        flat, coordinate = divmod(flat, size)
        index.append(coordinate)
    return tuple(reversed(index))


class Membership(Enum):
    """How certain it is that the plain values in a container belong to the model, in ascending order."""

    NONE = "none"
    BESIDE = "beside"
    """They are directly beside tensors, and their names do not show that they describe the run. Files in formats that
    store tensors only may lack them."""
    MODULE = "module"
    """They are attributes of a module or tensor. Other files of the model may lack them, for example state dicts."""
    MODEL = "model"
    """They are as much a part of the model as its tensors."""


NoSync = Literal["", "active", "last forward"]


@record
class Metadata:
    """The validated content of a `syncheck.metadata()` block."""

    run: str | None = None
    run_id: str | None = None
    step: int | None = None
    epoch: int | None = None
    rank: int | None = None
    world_size: int | None = None
    host: str | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)
    # Names of the saved buffers; None if no model was described.
    buffers: tuple[str, ...] | None = None
    frozen: tuple[str, ...] = ()
    bn_momentum: Mapping[str, float | None] = field(default_factory=dict)
    # In the order of the optimizer's integer ids.
    optimizer_parameters: tuple[str, ...] = ()
    buffers_synced: bool | None = None
    # Whether each rank has a shard of the optimizer state; when local SGD averages. See `syncheck.metadata()`.
    optimizer_sharded: bool = False
    averaging: Mapping[str, int] = field(default_factory=dict)
    # Names of the objects in memory that average the weights of a model.
    averaged: tuple[str, ...] = ()
    # Names of copies in other pipeline stages.
    tied: Mapping[str, str] = field(default_factory=dict)
    # In memory only: whether DDP's no_sync() is active, or was at the last forward pass.
    no_sync: NoSync = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


class Sliced(Protocol):
    """Data that is not in memory: `[start:stop]` reads bytes, as for `bytes`."""

    def __getitem__(self, part: slice, /) -> bytes: ...


@record
class Sharding:
    """The layout of a DTensor on a mesh of ranks; its `Tensor` is one rank's shard.

    mesh: sizes of the mesh dimensions. names: of the mesh dimensions, empty if unnamed. ranks: of the mesh, flattened
    in C order. placements: one per mesh dimension, as torch prints them: "R" for replicated, "S(0)" for sharded along
    tensor dimension 0, "P(sum)" for partial.
    shape: of the full tensor. coordinate: of this rank in the mesh, empty if unknown. beside: this rank's coordinates
    in the other dimensions of the root mesh, if the mesh is a submesh and the file contains its root.
    """

    mesh: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[str, ...]
    shape: tuple[int, ...]
    names: tuple[str, ...] = ()
    coordinate: tuple[int, ...] = ()
    beside: tuple[tuple[str, int], ...] = ()


@record
class Shard:
    """A box of a tensor that is stored in several boxes. start: its first index in the full tensor."""

    tensor: Tensor
    start: tuple[int, ...]


@record
class Digest:
    """The digest and statistics of a tensor in a fingerprint, over its bytes in C order, little-endian.

    Digests of different algorithms are not comparable. Statistics cover finite elements, and are None without any.
    """

    algorithm: str
    value: str
    nonfinite: int | None = None
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    std: float | None = None


@record
class Tensor:
    """One tensor of a checkpoint: its description and the location of its bytes, which stay on disk.

    shape: () for a scalar. path: the file that contains the bytes. big_endian: whether elements are stored with the
    most significant byte first.
    """

    name: str
    """As stored, without its container key; optimizer state is `optimizer.<parameter>.<state>`."""
    dtype: str
    """torch's name without `torch.`: float32, bfloat16, int64, ..."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    path: str
    offset: int
    """Position of the first element in the file, in bytes."""
    big_endian: bool = False
    lazy: str = ""
    """"conj" or "neg": an operation that torch stored as a flag and applies on reading."""
    refused: Message | None = None
    """Why the tensor cannot be compared: a `Refusal`."""
    data: bytes | Sliced | None = None
    """The bytes, for tensors in memory and numpy arrays within a pickle; None if they are on disk."""
    parameter: bool = False
    """Whether the tensor is a module's parameter in memory, regardless of its name."""
    opened: os.stat_result | None = None
    """The file's status when the checkpoint was opened; None without a file."""
    crc32: int | None = None
    """The checksum that torch.save stored for exactly these bytes; None without a checksum, or with checksum 0."""
    record: tuple[int, int, int] | None = None
    """(CRC-32, first byte, length) of the zip record with these bytes; None without a checksum."""
    shards: tuple[Shard, ...] = ()
    """For a tensor in several boxes: they cover it without overlap, and replace its own path and offset."""
    sharding: Sharding | None = None
    """For a DTensor, whose bytes are one rank's shard."""
    digest: Digest | None = None
    """For a tensor of a fingerprint, which has no bytes."""
    same: bytes = b""
    """If set, equal on two replicas if and only if their bytes are equal, so that the bytes need not be read."""
    unplaced: tuple[int, ...] = ()
    """For a refused tensor whose parts have no known position: the number of elements of each different part."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor, also for a rank's shard of a DTensor."""
        if self.sharding is None:
            return self.shape
        return self.sharding.shape


@record
class Snapshot:
    """One opened checkpoint, without tensor data.

    path: of the file or folder. format: such as `torch-zip`. bytes: size of the file, or of all files of the folder.
    tensors: by name. metadata: the `syncheck.metadata()` block, if the file has one.
    """

    path: str
    format: str
    bytes: int
    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any] = field(default_factory=dict)
    """Python numbers, strings and None by dotted name: step, epoch, param_groups, ..."""
    stubs: tuple[str, ...] = ()
    """Unknown classes and functions in the pickle, whose objects are not compared."""
    metadata: Metadata | None = None
    notes: tuple[Message, ...] = ()
    """Limits of the file or its format that readers of a result should know."""
    ties: tuple[tuple[str, ...], ...] = ()
    """Groups of names of one tensor, if it has no location to show this because another process read the file."""
    mesh: Mapping[str, int] = field(default_factory=dict)
    """The rank's mesh coordinate by dimension, if the path contains it."""
    host: str | None = None
    """The machine, if the path contains it."""
    numbered: tuple[str, ...] = ()
    """Parameters of an optimizer that numbers its parameters: names if tensor shapes determine them, else numbers.
    Empty if the file or the order of the model's parameters names all of them."""
    matched: tuple[str, ...] = ()
    """Parameters of an optimizer that numbers its parameters, if the order of the model's parameters names all."""
    attributes: Mapping[str, Any] | None = None
    """Of modules in memory: plain attributes by path, and whether modules are in training mode. None without modules,
    or if they were not read."""
    shard_labels: frozenset[str] = frozenset()
    """Labels (within tensor names) of the shards in a folder, if other folders can contain other shards."""
    model_values: Mapping[str, Membership] = field(default_factory=dict)
    """Values that belong to the model, by name: scales of quantized tensors, numbers in a state dict, extra states."""


def are_in_memory(snapshots: Iterable[Snapshot]) -> bool:
    """Whether all replicas are objects in memory: of a running job, or compared by one process."""
    return {snapshot.format for snapshot in snapshots} == {"memory"}


def get_metadata(snapshot: Snapshot) -> Metadata:
    """Return the metadata of a checkpoint; without metadata, the metadata of a model without a description."""
    return snapshot.metadata or Metadata()
