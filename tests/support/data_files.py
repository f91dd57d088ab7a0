"""Small data sets in the formats of MNIST and CIFAR, accepted by torchvision in place of the published files."""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import struct
import tarfile
from typing import TYPE_CHECKING, Any

import numpy as np

from train.data import load_data

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

PARTS = (("train", 200), ("t10k", 40))


def digits(count: int, *, test: bool, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return digits as bytes, enlarged without smoothing: uint8 [count, size, size] and labels uint8 [count]."""
    data = load_data("digits", None, None)
    x, y = (data.test if test else data.train)[:count]
    pixels = ((x[:, 0] * 0.3759 + 0.3054) * 255).round().clamp(0, 255).byte().numpy()
    indices = np.arange(size) * 8 // size
    return pixels[:, indices][:, :, indices], y.numpy().astype(np.uint8)


def idx(array: np.ndarray) -> bytes:
    """Return the format of MNIST: two zeros, the type, the number of dimensions, their sizes, all big-endian."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def mnist(folder: Path, *, packed: bool = False, parts: Any = PARTS) -> dict[str, bytes]:
    """Write the four files of MNIST into the folder that torchvision expects, and return them compressed."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    files = {}
    for part, count in parts:
        images, labels = digits(count, test=part == "t10k", size=28)
        for name, array in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            content = idx(array)
            files[f"{name}.gz"] = gzip.compress(content, mtime=0)
            (raw / (f"{name}.gz" if packed else name)).write_bytes(files[f"{name}.gz"] if packed else content)
    return files


def publish_mnist(monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], address: str) -> None:
    """Make torchvision download these files from this address."""
    from torchvision.datasets import MNIST

    monkeypatch.setattr(MNIST, "mirrors", [address])
    monkeypatch.setattr(MNIST, "resources", [(name, md5(content)) for name, content in files.items()])


def cifar_batch(images: np.ndarray, labels: list[int], key: str) -> bytes:
    """Return a batch in the format of CIFAR: a pickle with images as rows, red before green before blue."""
    return pickle.dumps({"data": images.reshape(len(images), -1), key: labels, "batch_label": "made"}, protocol=2)


def cifar(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch, change: Callable[..., None] | None = None) -> Path:
    """Write a small CIFAR10 or CIFAR100 and its archive, and set their MD5 sums in torchvision.

    change: modifies the dict of the files' bytes by name before the files are written.
    """
    import torchvision.datasets

    dataset = getattr(torchvision.datasets, kind)
    classes, key = (10, "labels") if kind == "CIFAR10" else (100, "fine_labels")
    random = np.random.RandomState(0)
    files = {}
    for name, _ in [*dataset.train_list, *dataset.test_list]:
        images = random.randint(0, 256, (20, 3, 32, 32)).astype(np.uint8)
        files[name] = cifar_batch(images, [int(label) for label in random.randint(0, classes, 20)], key)
    files[dataset.meta["filename"]] = pickle.dumps({dataset.meta["key"]: [str(n) for n in range(classes)]}, protocol=2)
    if change is not None:
        change(files)
    target = folder / dataset.base_folder
    target.mkdir(parents=True)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            (target / name).write_bytes(content)
            entry = tarfile.TarInfo(f"{dataset.base_folder}/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    (folder / dataset.filename).write_bytes(buffer.getvalue())
    for name in ("train_list", "test_list"):
        checksums = [[file, md5(files[file])] for file, _ in getattr(dataset, name)]
        monkeypatch.setattr(dataset, name, checksums)
    meta = dataset.meta["filename"]
    monkeypatch.setattr(dataset, "meta", {**dataset.meta, "md5": md5(files[meta])})
    monkeypatch.setattr(dataset, "tgz_md5", md5(buffer.getvalue()))
    return target


def md5(content: bytes) -> str:
    """Return the MD5 sum of a file's content."""
    return hashlib.md5(content, usedforsecurity=False).hexdigest()
