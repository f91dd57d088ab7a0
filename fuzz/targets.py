"""Fuzz targets: how each target writes inputs as checkpoints, reads checkpoints, and finds seeds, without atheris."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import syncheck
from fuzz import mutations
from fuzz.judge import RANKS, check_copies
from syncheck.readers import fingerprint_file, plain_pickle, safetensors_file, torch_legacy, torch_zip
from syncheck.readers.formats import READERS
from syncheck.readers.pickles.locate import Record, locate_tensor
from syncheck.readers.pickles.tree import flatten
from syncheck.readers.pickles.unpickle import unpickle
from syncheck.snapshots import Snapshot

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from syncheck.errors import CheckpointError
    from syncheck.readers.pickles.stand_ins import Storage

SEEDS = Path(__file__).resolve().parent / "seeds"
FIXTURES = SEEDS.parents[1] / "fixtures"
_MAX_FIXTURE = 16_384  # bytes; small inputs make the fuzzer faster


@dataclass(frozen=True)
class Target:
    """A reader with its inputs. words: names of dictionaries in `words/`. most: maximum size of an input in bytes."""

    name: str
    write: Callable[[bytes, Path], None]
    """Write an input to a path as a checkpoint."""
    seeds: Callable[[], Iterator[bytes]]
    words: tuple[str, ...]
    read: Callable[[str], Snapshot] = syncheck.read
    mutate: Callable[[bytes, mutations.Mutate, random.Random], bytes] | None = None
    most: int = 16_384

    def check(self, data: bytes, folder: Path) -> Snapshot | CheckpointError:
        """Check the property for one input. folder: for two copies. Raises Broken."""
        for rank in RANKS:
            self.write(data, folder / rank)
        return check_copies(self.read, folder)


def _read_pickle(path: str) -> Snapshot:
    """Read a bare pickle like the pickle of a zip. All storages are the first bytes of the file."""
    with open(path, "rb") as file:
        data = file.read()
        opened = os.fstat(file.fileno())

    def find_record(storage: Storage) -> Record:
        return Record("data", 0, min(storage.numel * (storage.itemsize or 1), len(data)))

    found = unpickle(data, path, "data.pkl")
    flat = flatten(found.tree, path, len(data), found.rebuilt)
    tensors = {name: locate_tensor(name, tensor, path, find_record, opened) for name, tensor in flat.tensors.items()}
    return Snapshot(path, "torch-zip", len(data), tensors, flat.values, found.stubs, flat.metadata)


def _write_file(data: bytes, path: Path) -> None:
    path.write_bytes(data)


def _write_dcp(data: bytes, path: Path) -> None:
    if not path.is_dir():
        path.mkdir()
        (path / "__0_0.distcp").write_bytes((SEEDS / "chunks" / "plain").read_bytes())
    (path / ".metadata").write_bytes(data)


def _read_seeds(name: str, *others: Path) -> Iterator[bytes]:
    """Read the seeds of a target, then the small files among other paths."""
    for path in sorted((SEEDS / name).iterdir()):
        yield path.read_bytes()
    for path in sorted(others):
        if path.is_file() and path.stat().st_size <= _MAX_FIXTURE:
            yield path.read_bytes()


def _run_files() -> list[Path]:
    """Return one file of each training run in the fixtures."""
    runs = [*FIXTURES.glob("desync/*/"), *FIXTURES.glob("in_sync/*/")]
    return [path for run in runs for path in sorted(run.rglob("*.pth"))[:1]]


def _malformed_files(matches: Callable[[bytes], bool]) -> list[Path]:
    """Return the malformed fixtures of a format."""
    paths = [*FIXTURES.glob("broken/*"), *FIXTURES.glob("hostile/*")]
    return [path for path in paths if path.is_file() and matches(path.read_bytes()[:64])]


def _format_seeds(name: str, format_name: str) -> Callable[[], Iterator[bytes]]:
    runs = _run_files if format_name == torch_zip.FORMAT else list
    return lambda: _read_seeds(name, *runs(), *_malformed_files(READERS[format_name].matches))


def _pickle_seeds() -> Iterator[bytes]:
    yield from _read_seeds("pickle")
    for data in _format_seeds("zip", torch_zip.FORMAT)():
        yield from (content for name, content in mutations.read_records(data) if name.endswith("data.pkl"))


def _index_seeds() -> Iterator[bytes]:
    return _read_seeds("dcp", *FIXTURES.glob("broken/*/.metadata"), *FIXTURES.glob("hostile/*/.metadata"))


_ALL = (
    Target("pickle", _write_file, _pickle_seeds, ("pickle",), read=_read_pickle),
    Target(
        "zip", _write_file, _format_seeds("zip", torch_zip.FORMAT), ("zip", "pickle"), mutate=mutations.mutate_zip,
        most=32_768,
    ),
    Target(
        "safetensors", _write_file, _format_seeds("safetensors", safetensors_file.FORMAT), ("json",),
        mutate=mutations.mutate_safetensors,
    ),
    Target("dcp", _write_dcp, _index_seeds, ("dcp", "pickle")),
    Target("plain", _write_file, _format_seeds("plain", plain_pickle.FORMAT), ("pickle",)),
    Target("legacy", _write_file, _format_seeds("legacy", torch_legacy.FORMAT), ("pickle",)),
    Target(
        "fingerprint", _write_file, _format_seeds("fingerprint", fingerprint_file.FORMAT), ("json", "fingerprint")
    ),
)  # fmt: skip
TARGETS = {target.name: target for target in _ALL}
