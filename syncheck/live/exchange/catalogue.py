"""What a rank holds, without the bytes: small enough to be sent, and equal on ranks whose models are built alike."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.dtypes import DTYPES
from syncheck.names import normalize
from syncheck.snapshots import Digest, Sharding, Snapshot, Tensor, contiguous_strides

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.messages import Message
    from syncheck.snapshots import Metadata


class Row(NamedTuple):
    """One tensor. algorithm: of its digest; empty where it has none. sharding: position among the catalogue's, or -1.

    crc32: what torch.save stored for its bytes, of a file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    refused: Message | None
    parameter: bool
    algorithm: str
    sharding: int
    crc32: int | None


@dataclass(frozen=True)
class Catalogue:
    """The tensors of one rank in their order, and its plain values. shardings: those of DTensors, each once.

    ties: names that are one tensor, in a file that tells it.
    """

    format: str
    rows: tuple[Row, ...]
    shardings: tuple[Sharding, ...]
    values: Mapping[str, Any]
    stubs: tuple[str, ...]
    metadata: Metadata | None
    notes: tuple[Message, ...]
    ties: tuple[tuple[str, ...], ...]

    def layout(self) -> bytes:
        """Return 16 bytes that are the same where all is equal but the values, of which only the names count."""
        names = tuple(self.values)
        rest = repr((self.format, names, self.stubs, self.metadata, self.notes, self.ties))
        return _hashed(_of_rows(self.rows, self.shardings), rest)

    def digest(self) -> bytes:
        """Return 16 bytes that are the same for equal catalogues."""
        return _hashed(self.layout(), repr(self.values))

    def short(self) -> dict[str, str]:
        """Return each tensor's name without wrappers' prefixes: the one by which ranks are compared."""
        return normalize(row.name for row in self.rows)

    def tensors(self, digests: Sequence[bytes]) -> dict[str, Tensor]:
        """Return the tensors as all ranks see them: of known digests, and without bytes."""
        return {
            row.name: Tensor(
                row.name,
                row.dtype,
                row.shape,
                contiguous_strides(row.shape),
                "",
                0,
                refused=row.refused,
                data=b"",
                parameter=row.parameter,
                sharding=self.shardings[row.sharding] if row.sharding >= 0 else None,
                same=digest,
                crc32=row.crc32,
                record=(row.crc32, 0, math.prod(row.shape) * DTYPES[row.dtype].size) if row.crc32 else None,
            )
            for row, digest in zip(self.rows, digests, strict=True)
        }


def _hashed(first: bytes, rest: str) -> bytes:
    return hashlib.sha256(first + rest.encode("utf-8", "backslashreplace")).digest()[:16]


@lru_cache(maxsize=8)
def _of_rows(rows: tuple[Row, ...], shardings: tuple[Sharding, ...]) -> bytes:
    """Hash the tensors' descriptions, which are the same at each check; to write them out takes long."""
    return _hashed(b"", repr((rows, shardings)))


def catalogue_of(taken: Snapshot, algorithms: Sequence[str]) -> Catalogue:
    """Return what is to be known of a rank's snapshot by the others. algorithms: of its tensors' digests."""
    known: dict[Sharding, int] = {}
    rows = []
    for tensor, algorithm in zip(taken.tensors.values(), algorithms, strict=True):
        at = -1
        if tensor.sharding is not None:
            # Where a rank stands follows from its number; without that, ranks have the same catalogue.
            at = known.setdefault(replace(tensor.sharding, coordinate=()), len(known))
        rows.append(
            Row(
                tensor.name,
                tensor.dtype,
                tensor.shape,
                tensor.refused,
                tensor.parameter,
                algorithm,
                at,
                tensor.crc32,
            )
        )
    return Catalogue(
        taken.format,
        tuple(rows),
        tuple(known),
        dict(taken.values),
        taken.stubs,
        taken.metadata,
        taken.notes,
        taken.ties,
    )


def untold(tensor: Tensor) -> Tensor:
    """Return a tensor of which only the digest is known, and stays so; the ranks have agreed on its algorithm."""
    return replace(tensor, data=None, digest=Digest("agreed", tensor.same.hex()), same=b"")
