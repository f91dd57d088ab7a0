"""How a tensor of model B follows from model A: the evidence of the findings SYN301 to SYN313."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class RelationKind(StrEnum):
    """Relations. All but the last three are proven: the bytes are equal after the operation."""

    BASE = "base"
    """B equals the model before the update."""
    ADAPTER = "adapter"
    """B equals A without the adapter. pattern: replaced, if the adapter stores the tensor. factor: of its product."""
    TRANSPOSED = "transposed"
    """B is A with two dimensions exchanged. dims."""
    FUSED_ORDER = "fused-order"
    """The parts or rows have another order. order: a description. other: the tensor of A with these bytes."""
    ROTARY = "rotary"
    """The rows of each head are in the other order of rotary embeddings. head_dim. to: half or interleaved."""
    CAST = "cast"
    """One model is the other one, converted. dtype. side: the converted model."""
    PADDED = "padded"
    """The common part is equal. dim, added: number of indices that B has more."""
    EXPERT = "expert"
    """B holds another expert of A. order: expert of A by expert of B. other: the tensor of A with these bytes."""
    SHARD = "shard"
    """B holds another shard or layer of A. other: tensor of A, or boxes: number of wrong boxes. files: of B."""
    QUANTIZED = "quantized"
    """B is within half a quantization step of A. scheme, steps: largest difference in steps; scales: where from."""
    SCALED = "scaled"
    """B is A times a constant, within rounding. factor."""
    UNRELATED = "unrelated"
    """B is constant, or not correlated with A. correlation, or value of the constant."""


@dataclass(frozen=True, slots=True)
class Relation:
    """The relation of one tensor. parameters: see `RelationKind`; dtype, if the values were converted as well."""

    kind: RelationKind
    parameters: Mapping[str, int | float | str | tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stored:
    """How the files of a model store one tensor, for the maps of shards and names of a report page.

    name, dtype, shape: of the whole stored tensor. boxes: (start, size, ranks or files with it), in elements; start and
    size are None if the files do not show the position.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...] | None, tuple[int, ...] | None, str], ...] = ()
