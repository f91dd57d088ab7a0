"""Large checkpoints, written block by block as safetensors, and removed as soon as they are measured."""

from __future__ import annotations

import json
import math
import shutil
import struct
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

Shapes = dict[str, tuple[int, ...]]
GIB = 1 << 30
# Arguments: a folder, a model of torchvision, the number of ranks. As after data-parallel training, only BatchNorm
# statistics differ.
RESNET = """
import sys, torch, torchvision
torch.manual_seed(0)
model = getattr(torchvision.models, sys.argv[2])().eval()
for rank in range(int(sys.argv[3])):
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer += rank * 1e-3
    torch.save(model.state_dict(), f"{sys.argv[1]}/model_rank{rank}.pth")
"""


@contextmanager
def folder(needed: int) -> Iterator[Path]:
    """Yield an empty folder and remove it at the end. needed: bytes. Raises RuntimeError if the disk is too full."""
    with tempfile.TemporaryDirectory() as name:
        if shutil.disk_usage(name).free < needed + GIB:
            raise RuntimeError(f"{name} has no room for {needed / GIB:.1f} GiB; set TMPDIR")
        yield Path(name)


def layers(count: int, *shape: int) -> Shapes:
    """Return the shapes of `count` layers of one shape, by name."""
    return {f"layers.{i}.weight": shape for i in range(count)}


def header(tensors: Mapping[str, tuple[int, ...]]) -> bytes:
    """Return the start of a safetensors file of float32 tensors."""
    found, at = {}, 0
    for name, shape in tensors.items():
        end = at + 4 * math.prod(shape)
        found[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    raw = json.dumps(found).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


def write(paths: Sequence[Path], tensors: Mapping[str, tuple[int, ...]], noise: float = 0.0) -> list[str]:
    """Write one rank per path, with normal values and separate normal noise on each rank. noise: its scale.

    Returns the paths as strings.
    """
    common = np.random.default_rng(0)
    own = [np.random.default_rng(1 + i) for i in range(len(paths))]
    files = [path.open("wb") for path in paths]
    for file in files:
        file.write(header(tensors))
    for shape in tensors.values():
        base = common.standard_normal(shape, np.float32)
        for file, random in zip(files, own, strict=True):
            file.write(_noisy(base, random, noise).data)
    for file in files:
        file.close()
    return [str(path) for path in paths]


def _noisy(base: NDArray[np.float32], random: np.random.Generator, noise: float) -> NDArray[np.float32]:
    return base + np.float32(noise) * random.standard_normal(base.shape, np.float32) if noise else base


def ranks(where: Path, count: int) -> list[Path]:
    """Return the paths of `count` ranks."""
    return [where / f"rank{i}.safetensors" for i in range(count)]
