"""The targets: what bytes become which checkpoint, who reads it, and what a fuzzer begins with. None needs atheris."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuzz import mutations
from fuzz.held import hold
from syncheck import readers
from syncheck.readers import fingerprint_file, safetensors_file, torch_legacy, torch_zip
from syncheck.readers.files import READERS
from syncheck.readers.pickles.tensor_location import Record, locate_tensor
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
_MOST_FIXTURE = 16_384  # bytes; a fuzzer gets on faster with small inputs
RANKS = ("rank0", "rank1")


@dataclass(frozen=True)
class Target:
    """A way into the readers. says: what is fuzzed. most: bytes of an input."""

    name: str
    says: str
    write: Callable[[bytes, Path], None]
    """Put an input where the checkpoint shall be."""
    seeds: Callable[[], Iterator[bytes]]
    read: Callable[[str], Snapshot] = readers.read
    words: tuple[bytes, ...] = ()
    mutate: Callable[[bytes, mutations.Mutate, random.Random], bytes] | None = None
    most: int = 16_384

    def check(self, data: bytes, folder: Path) -> Snapshot | CheckpointError:
        """Hold the property for one input. folder: for the copies; may be used again. Raises Broken."""
        for rank in RANKS:
            self.write(data, folder / rank)
        return hold(self.read, folder)


def _read_pickle(path: str) -> Snapshot:
    """Read a bare pickle as that of a zip would be, each of its storages in the file's first bytes."""
    with open(path, "rb") as file:
        data = file.read()
        opened = os.fstat(file.fileno())
    made: list[Any] = []
    tree, stubs = unpickle(data, path, "data.pkl", made=made)
    flat = flatten(tree, path, len(data), made)
    tensors = {
        name: locate_tensor(name, place, path, lambda storage: _record(storage, len(data)), opened=opened)
        for name, place in flat.tensors.items()
    }
    return Snapshot(path, "torch-zip", len(data), tensors, flat.values, stubs, flat.metadata)


def _record(storage: Storage, most: int) -> Record:
    """Return the file's first bytes, as many as a storage has, as its record."""
    return Record("data", 0, min(storage.numel * (storage.itemsize or 1), most))


def _write_file(data: bytes, path: Path) -> None:
    path.write_bytes(data)


def _write_dcp(data: bytes, path: Path) -> None:
    if not path.is_dir():
        path.mkdir()
        (path / "__0_0.distcp").write_bytes((SEEDS / "chunks" / "plain").read_bytes())
    (path / ".metadata").write_bytes(data)


def _own(name: str) -> Iterator[bytes]:
    return (path.read_bytes() for path in sorted((SEEDS / name).iterdir()))


def _fixtures() -> Iterator[bytes]:
    """Read the small ones among the files of real runs, one of each folder."""
    for folder in sorted(FIXTURES.glob("*/*/")):
        if folder.parent.name in ("desync", "in_sync"):
            for path in sorted(folder.rglob("*.pth"))[:1]:
                if path.stat().st_size <= _MOST_FIXTURE:
                    yield path.read_bytes()


def _malformed(matches: Callable[[bytes], bool]) -> Iterator[bytes]:
    """Read the files of a format among those that are malformed on purpose."""
    for path in sorted([*FIXTURES.glob("broken/*"), *FIXTURES.glob("hostile/*")]):
        if path.is_file() and path.stat().st_size <= _MOST_FIXTURE:
            data = path.read_bytes()
            if matches(data[:64]):
                yield data


def _of_format(name: str, form: str) -> Callable[[], Iterator[bytes]]:
    def seeds() -> Iterator[bytes]:
        yield from _own(name)
        if form == torch_zip.FORMAT:
            yield from _fixtures()
        yield from _malformed(READERS[form].matches)

    return seeds


def _pickles() -> Iterator[bytes]:
    yield from _own("pickle")
    for data in (*_fixtures(), *_malformed(torch_zip.matches)):
        records = mutations.records_of(data) or []
        yield from (content for name, content in records if name.endswith("data.pkl"))


def _indexes() -> Iterator[bytes]:
    yield from _own("dcp")
    for path in sorted([*FIXTURES.glob("broken/*/.metadata"), *FIXTURES.glob("hostile/*/.metadata")]):
        if path.stat().st_size <= _MOST_FIXTURE:
            yield path.read_bytes()


# What opcodes name and hold; whole instructions, since a fuzzer finds single bytes by itself.
_NAMES = """
collections|OrderedDict torch._utils|_rebuild_tensor_v2 torch._utils|_rebuild_tensor_v3 torch._utils|_rebuild_parameter
torch._utils|_rebuild_sparse_tensor torch._utils|_rebuild_qtensor torch._tensor|_rebuild_from_type_v2 torch|Size
torch|FloatStorage torch.storage|UntypedStorage torch|device torch|float32 builtins|set builtins|frozenset
builtins|complex builtins|bytes _codecs|encode copyreg|_reconstructor numpy|dtype numpy._core.multiarray|_reconstruct
numpy._core.multiarray|scalar os|system builtins|eval builtins|range argparse|Namespace functools|partial
torch.distributed.tensor|DTensor
"""
_PICKLE = (
    *(b"c%b\n" % name.encode().replace(b"|", b"\n") for name in _NAMES.split()),
    b"\x80\x02",
    b"\x80\x04\x95",
    b"}q\x00",
    b"(lp0\n",
    b"(dp0\n",
    b"\x85R",
    b"\x86R",
    b"tR",
    b"tQ",
    b"h\x00",
    b"\x81}b",
    b"\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\x00",
    b"\x8b\x10\x27\x00\x00",
    b"J\xff\xff\xff\x7f",
    b"2\x86",
    b"2\x862\x86",
    b"X\x07\x00\x00\x00storage",
    b"X\x05\x00\x00\x00state",
    b"X\x0c\x00\x00\x00param_groups",
    b"X\x08\x00\x00\x00syncheck",
    b"X\x06\x00\x00\x00params",
    b"X\x05\x00\x00\x00model",
    b"G\x7f\xf8\x00\x00\x00\x00\x00\x00",
    b"\x8f(",
    b"\x90",
    b"\x91",
)
_ZIP = (
    b"PK\x03\x04",
    b"PK\x01\x02",
    b"PK\x05\x06",
    b"PK\x06\x06",
    b"PK\x06\x07",
    b"/data.pkl",
    b"/data/0",
    b"/byteorder",
    b"little",
    b"big",
    b"/version",
    b"/code/",
)
_JSON = (
    b'"dtype":"',
    b'"shape":[',
    b'"data_offsets":[',
    b'"__metadata__":{',
    b'"F32"',
    b'"BF16"',
    b'"F4"',
    b"null",
    b"1e999",
    b"-1",
    b"NaN",
    b"\\u0000",
    b"\\ud800",
    b"[[[[",
    b"9223372036854775807",
    b'"syncheck":',
    b'"rank":',
    b'"run":',
    b'"step":',
    b'"mesh":{',
    b'"buffers":[',
)
_FINGERPRINT = (
    *_JSON,
    b'"digest":"',
    b'"refused":"',
    b'"nonfinite":',
    b'"sharding":{',
    b'"ranks":[',
    b'"placements":[',
    b'"coordinate":[',
    b'{"float":"nan"}',
    b'"values":{',
    b'"algorithm":',
)
_DCP = (
    b"MetadataIndex",
    b"_StorageInfo",
    b"TensorStorageMetadata",
    b"ChunkStorageMetadata",
    b"BytesStorageMetadata",
    b"state_dict_metadata",
    b"storage_data",
    b"planner_data",
    b"relative_path",
    b"../",
    b"/etc/passwd",
    b"offsets",
    b"transform_descriptors",
    b"fqn",
    b"__0_0.distcp",
)

TARGETS = {
    target.name: target
    for target in (
        Target("pickle", "the unpickler and the tree of names", _write_file, _pickles, _read_pickle, _PICKLE),
        Target(
            "zip",
            "files of torch.save",
            _write_file,
            _of_format("zip", torch_zip.FORMAT),
            words=(*_ZIP, *_PICKLE),
            mutate=mutations.zipped,
            most=32_768,
        ),
        Target(
            "safetensors",
            "safetensors files",
            _write_file,
            _of_format("safetensors", safetensors_file.FORMAT),
            words=_JSON,
            mutate=mutations.safetensors,
        ),
        Target("dcp", "`.metadata` of torch.distributed.checkpoint", _write_dcp, _indexes, words=(*_DCP, *_PICKLE)),
        Target(
            "legacy",
            "files of torch.save before torch 1.6",
            _write_file,
            _of_format("legacy", torch_legacy.FORMAT),
            words=_PICKLE,
        ),
        Target(
            "fingerprint",
            "fingerprint files",
            _write_file,
            _of_format("fingerprint", fingerprint_file.FORMAT),
            words=_FINGERPRINT,
        ),
    )
}
