"""torch.distributed.checkpoint folders for tests, saved by torch or assembled with torch's classes."""

from __future__ import annotations

import pickle
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import metadata as classes
from torch.distributed.checkpoint.filesystem import _StorageInfo

import syncheck
from syncheck.tensors.blocks import Files, ranges

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from syncheck.snapshots import Snapshot

    Spans = Sequence[tuple[tuple[int, ...], tuple[int, ...]]]


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a small network with BatchNorm and AdamW after one step; equal seeds give equal networks."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 16, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(4, 1, 6, 6)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def save(path: Path, state: dict[str, Any]) -> Path:
    """Save with torch, in this process alone, or on all ranks if there is a process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save(state, checkpoint_id=str(path))
    return path


def load(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Load into a state dict with torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=str(path))
    return state


def assemble(
    path: Path, tensors: Mapping[str, tuple[torch.Tensor, Spans]], *, listed: Mapping[str, Spans] | None = None
) -> Path:
    """Write a folder with chunks of any geometry, one file per chunk.

    tensors: each with the start and size of its chunks. listed: other chunks for `.metadata`.
    """
    path.mkdir(parents=True)
    entries, places = {}, {}
    for name, (tensor, spans) in tensors.items():
        for i, (start, size) in enumerate(spans):
            index = tuple(slice(position, position + length) for position, length in zip(start, size, strict=True))
            file = path / f"__{i}_0.distcp"
            with file.open("ab") as stream:
                begin = stream.tell()
                torch.save(tensor[index].clone(), stream)
                places[classes.MetadataIndex(name, torch.Size(start))] = _StorageInfo(
                    file.name, begin, stream.tell() - begin
                )
        properties = classes.TensorProperties(dtype=tensor.dtype)
        said = (listed or {}).get(name, spans)
        chunks = [classes.ChunkStorageMetadata(torch.Size(start), torch.Size(size)) for start, size in said]
        entries[name] = classes.TensorStorageMetadata(properties, tensor.size(), chunks)
    paths = {name: (name,) for name in tensors}
    write_metadata(path, classes.Metadata(entries, paths, places))
    return path


def metadata(path: Path) -> Any:
    """Read `.metadata` with torch's classes, to modify it."""
    with (path / ".metadata").open("rb") as file:
        return pickle.load(file)


def write_metadata(path: Path, content: Any) -> None:
    """Write `.metadata` as torch does."""
    with (path / ".metadata").open("wb") as file:
        pickle.dump(content, file)


def contents(path: Path | Snapshot) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Read every tensor of a checkpoint with syncheck: dtype, shape and bytes in C order."""
    snapshot = syncheck.read(str(path)) if not hasattr(path, "tensors") else path
    with Files() as files:
        return {
            name: (
                tensor.dtype,
                tensor.shape,
                b"".join(bytes(files.read(tensor, start, count, 0)) for start, count in ranges([tensor])),
            )
            for name, tensor in snapshot.tensors.items()
        }


def expected(tensors: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return the same for tensors in memory, with torch."""
    return {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape), raw(t.detach())) for name, t in tensors.items()}


def raw(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes in C order."""
    flat = tensor.contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""
