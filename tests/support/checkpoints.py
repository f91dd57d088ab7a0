"""Checkpoints for tests, written without torch, so their contents can be invalid too."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

import syncheck
from support.listings import find_texts
from syncheck.snapshots import Metadata, Snapshot, Tensor

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.records import Report

_STORAGES = {"float32": "FloatStorage", "float64": "DoubleStorage", "int64": "LongStorage", "bool": "BoolStorage"}
_CODES = {"float32": "F32", "float64": "F64", "int64": "I64", "int32": "I32", "uint8": "U8", "uint64": "U64"}
_CODES |= {"bool": "BOOL", "bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
_CODES |= {"complex64": "C64", "uint16": "U16", "int8": "I8", "float8_e8m0fnu": "F8_E8M0"}


@dataclass(frozen=True)
class Global:
    """A global to look up in the pickle: opcode GLOBAL. Nothing is imported here."""

    module: str
    name: str

    def __call__(self) -> None:
        """Make instances callable, as pickle requires of the function of a reduction."""


@dataclass(frozen=True)
class Call:
    """An object to rebuild by a call: opcode REDUCE, followed by BUILD if there is a state."""

    function: Any
    arguments: tuple[Any, ...] = ()
    state: Any = None


@dataclass(frozen=True)
class _Stored:
    key: str
    kind: str
    numel: int


class _Pickler(pickle._Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.records: dict[str, bytes] = {}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Stored):
            return ("storage", Global("torch", obj.kind), obj.key, "cpu", obj.numel)
        return None

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, Global):
            self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
        elif isinstance(obj, Call):
            self.save_reduce(obj.function, obj.arguments, state=obj.state)
        elif isinstance(obj, np.ndarray):
            key = str(len(self.records))
            self.records[key] = np.ascontiguousarray(obj).tobytes()
            stored_values = _Stored(key, _STORAGES[obj.dtype.name], obj.size)
            strides = tuple(stride // obj.itemsize for stride in np.ascontiguousarray(obj).strides)[: obj.ndim]
            arguments = (stored_values, 0, obj.shape, strides, False, OrderedDict())
            self.save_reduce(Global("torch._utils", "_rebuild_tensor_v2"), arguments)
        else:
            super().save(obj, save_persistent_id)


def save_pth(path: Path, tree: Any) -> Path:
    """Write a zip of a pickle and one record per tensor, as torch.save does. Arrays of the tree are its tensors."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(tree)
    return save_records(path, buffer.getvalue(), pickler.records)


def save_records(path: Path, pickled: bytes, records: dict[str, bytes] | None = None) -> Path:
    """Write a zip as torch.save does, around any pickle."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{path.stem}/data.pkl", pickled)
        archive.writestr(f"{path.stem}/byteorder", "little")
        for key, data in (records or {}).items():
            archive.writestr(f"{path.stem}/data/{key}", data)
        archive.writestr(f"{path.stem}/version", "3\n")
    return path


def save_safetensors(path: Path, tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> Path:
    """Write arrays as a safetensors file."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, array in tensors.items():
        raw = array.tobytes()
        header[name] = {
            "dtype": _CODES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    return save_header(path, header, data)


def save_header(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """Write any header, as JSON unless it is bytes, as a safetensors file. length: value of the first 8 bytes."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def save(path: Path, tensors: dict[str, Any]) -> Path:
    """Write arrays in the format of the file extension."""
    return (save_safetensors if path.suffix == ".safetensors" else save_pth)(path, tensors)


def compare_ranks(folder: Path, *states: Any, suffix: str = ".pth", write: Any = None, **options: Any) -> Report:
    """Write the checkpoint of each rank into a folder, and compare the folder. write: replaces `save`."""
    for rank, state in enumerate(states):
        (write or save)(folder / f"m_rank{rank}{suffix}", state)
    return syncheck.compare(folder, options=syncheck.Options(**options))


def network(seed: int = 0, layers: int = 2) -> dict[str, Any]:
    """Return the state dict of a small network with BatchNorm as arrays; equal for equal seeds."""
    random = np.random.default_rng(seed)
    state: dict[str, Any] = {}
    for i in range(layers):
        state[f"layer{i}.conv.weight"] = random.standard_normal((4, 3, 3, 3)).astype(np.float32)
        state[f"layer{i}.bn.weight"] = np.ones(4, np.float32)
        state[f"layer{i}.bn.bias"] = random.standard_normal(4).astype(np.float32)
        state[f"layer{i}.bn.running_mean"] = random.standard_normal(4).astype(np.float32)
        state[f"layer{i}.bn.running_var"] = random.random(4).astype(np.float32) + 1
        state[f"layer{i}.bn.num_batches_tracked"] = np.array(12, np.int64)
    state["fc.weight"] = random.standard_normal((10, 4)).astype(np.float32)
    state["fc.bias"] = random.standard_normal(10).astype(np.float32)
    return state


def changed(state: dict[str, Any], *endings: str, by: float = 1.0) -> dict[str, Any]:
    """Return a copy with `by` added to each element of the tensors with the given name endings."""
    return {k: v + np.asarray(by, v.dtype) if k.endswith(endings) else v.copy() for k, v in state.items()}


def snapshot(path: str, tensors: dict[str, tuple[int, ...]] | None = None, **metadata: Any) -> Snapshot:
    """Return a snapshot without a file. metadata: fields of the metadata block; without fields, there is no block."""
    created = {name: Tensor(name, "float32", shape, (), path, 0) for name, shape in (tensors or {"w": (2,)}).items()}
    return Snapshot(path, "torch-zip", 100, created, metadata=Metadata(**metadata) if metadata else None)


def select_summary(text: str) -> list[str]:
    """Return the lines of the last block of a text report."""
    return text.rstrip().rpartition("\n\n")[2].splitlines()


@dataclass
class Done:
    """The result of a command."""

    code: int
    out: str
    err: str = ""
    lines: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.lines = self.out.splitlines()

    @property
    def verdict(self) -> str:
        """The line with the verdict in the summary of a text report, the last block of the output."""
        return select_summary(self.out)[0]

    @property
    def counts(self) -> str:
        """The line with the numbers of tensors in the summary of a text report."""
        return find_texts(select_summary(self.out), " tensors: ")[0]
