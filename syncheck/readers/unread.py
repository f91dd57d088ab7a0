"""Formats that syncheck does not read, and how to get a file that it reads.

They are recognized by their first bytes, their records, or the names of the files in a folder. Only formats without
first bytes of their own are recognized by their file extension.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.readers.untrusted import open_regular_file

if TYPE_CHECKING:
    from collections.abc import Collection

NEEDED = "a torch.save, pickle or safetensors file, or a fingerprint"


class Unread(NamedTuple):
    """A format that is not read: its name with an article, and the next step of the user."""

    title: str
    next_step: str


Table = tuple[tuple[re.Pattern[Any], Unread], ...]
_EXPORTED = "compare the checkpoint that it was exported from"
_UNPACK = "unpack it, and pass the file in it"
_SAVE = "save its tensors with torch.save or safetensors, and pass the new file"
_GGUF = Unread("a GGUF file of llama.cpp", "pass the safetensors files that it was converted from")
_HDF5 = Unread("an HDF5 file (Keras, h5py)", f"load it with h5py or Keras, {_SAVE}")
_NUMPY = Unread("a NumPy array (.npy)", f"load it with numpy.load, {_SAVE}")
_TAR = Unread("a tar archive", "unpack it with tar -xf, and pass a file of it")
_ONNX = Unread("an ONNX model", f"{_EXPORTED}, or {_SAVE} (onnx.numpy_helper reads them)")
_MSGPACK = Unread("a msgpack file of Flax", f"load it with flax.serialization, {_SAVE}")
_TENSORFLOW_STEP = f"load it with TensorFlow (tf.train.load_checkpoint, tf.saved_model.load), {_SAVE}"
_LFS = Unread("a Git LFS pointer, not the file itself", "download the file with git lfs pull")
_PAGE = Unread("an HTML page, not a checkpoint", "download the file again")
_ORBAX = Unread("an Orbax checkpoint of JAX", f"load it with orbax.checkpoint, {_SAVE}")


def _starts(magic: bytes, offset: int = 0) -> re.Pattern[bytes]:
    """Return a pattern of first bytes. offset: of the magic number."""
    return re.compile(b"." * offset + re.escape(magic) + b".*", re.DOTALL)


_MAGIC: Table = (
    (_starts(b"GGUF"), _GGUF),
    (re.compile(rb"(lmgg|tjgg|fmgg|algg).*", re.DOTALL), _GGUF._replace(title="a GGML file of llama.cpp")),
    (_starts(b"\x93NUMPY"), _NUMPY),
    (_starts(b"\x89HDF\r\n\x1a\n"), _HDF5),
    (_starts(b"TFL3", offset=4), Unread("a TensorFlow Lite model", _EXPORTED)),
    (_starts(b"ET12", offset=4), Unread("an ExecuTorch program (.pte)", _EXPORTED)),
    (_starts(b"ftrt"), Unread("a TensorRT engine", _EXPORTED)),
    (_starts(b"\x12\x01\0\0\0\0\0\0"), Unread("an MXNet parameter file", f"load it with mxnet.nd.load, {_SAVE}")),
    (_starts(b"\xba\x16\x4f\x2f"), Unread("a fastText model", f"load it with fasttext, {_SAVE}")),
    (_starts(b"\x1f\x8b"), Unread("a file compressed with gzip", "unpack it with gunzip")),
    (_starts(b"BZh"), Unread("a file compressed with bzip2", "unpack it with bunzip2")),
    (_starts(b"\xfd7zXZ\0"), Unread("a file compressed with xz", "unpack it with unxz")),
    (_starts(b"\x28\xb5\x2f\xfd"), Unread("a file compressed with zstd", "unpack it with unzstd")),
    (_starts(b"\x04\x22\x4d\x18"), Unread("a file compressed with lz4", "unpack it with unlz4")),
    (_starts(b"7z\xbc\xaf\x27\x1c"), Unread("a 7-Zip archive", _UNPACK)),
    (_starts(b"Rar!\x1a\x07"), Unread("a RAR archive", _UNPACK)),
    (_starts(b"version https://git-lfs"), _LFS),
    (re.compile(rb"<(!doctype|html).*", re.DOTALL | re.IGNORECASE), _PAGE),
)
# Formats without first bytes of their own, by the end of the file name.
_EXTENSIONS: Table = (
    (re.compile(r".*\.gguf"), _GGUF),
    (re.compile(r".*\.onnx"), _ONNX),
    (re.compile(r".*\.msgpack"), _MSGPACK),
    (re.compile(r".*\.npy"), _NUMPY),
    (re.compile(r".*\.(h5|hdf5|keras)"), _HDF5),
    (re.compile(r".*\.pb(txt)?"), Unread("a TensorFlow graph (.pb)", _TENSORFLOW_STEP)),
    (re.compile(r".*\.(index|data-\d{5}-of-\d{5})"), Unread("a part of a TensorFlow checkpoint", _TENSORFLOW_STEP)),
    (re.compile(r".*\.tflite"), Unread("a TensorFlow Lite model", _EXPORTED)),
    (re.compile(r".*\.mlmodel"), Unread("a Core ML model", _EXPORTED)),
    (re.compile(r".*\.(engine|plan|trt)"), Unread("a TensorRT engine", _EXPORTED)),
    (re.compile(r".*\.caffemodel"), Unread("a Caffe model", f"load it with Caffe, {_SAVE}")),
    (re.compile(r".*\.joblib"), Unread("a compressed file of joblib.dump", f"load it with joblib, {_SAVE}")),
    (re.compile(r".*\.params"), Unread("a parameter file of another library", f"load it with its library, {_SAVE}")),
    (re.compile(r".*\.weights"), Unread("a weight file of Darknet", f"load it with its library, {_SAVE}")),
)
# Fields 2 to 8 of an ONNX model (producer_name, ..., opset_import) after the version of the format in field 1.
_ONNX_START: Table = ((re.compile(rb"\x08[\x01-\x20][\x12\x1a\x22\x28\x32\x3a\x42].*", re.DOTALL), _ONNX),)
_TAR_MAGIC, _TAR_OFFSET = b"ustar", 257
_MOST_MEMBERS = 1_000
_TORCH_02 = Unread("a torch.save file from before torch 0.2", "load it with torch.load, and save it again")
_SAVED_MODEL = Unread("a SavedModel folder of TensorFlow", _TENSORFLOW_STEP)
_EXPORT_STEP = "load it with torch.export.load, save its state_dict with torch.save, and pass the new file"
_PT2 = Unread("a program of torch.export (.pt2)", _EXPORT_STEP)
_SCRIPT = Unread("a TorchScript archive without data.pkl", "load it with torch.jit.load, and save its state_dict")
_OTHER = Unread("a document or an app, not a checkpoint", "pass another file")
# Records of a zip, by a pattern of their path.
_ZIP_RECORDS: Table = (
    (re.compile(r"(.*/)?(archive_format|serialized_exported_program\.(json|pt2))"), _PT2),
    (re.compile(r"MAR-INF/MANIFEST\.json"), Unread("a TorchServe archive (.mar)", _UNPACK)),
    (re.compile(r"(.*/)?model\.weights\.h5"), Unread("a Keras model (.keras)", f"load it with Keras, {_SAVE}")),
    (re.compile(r"(.*/)?code/.*"), _SCRIPT),
    (re.compile(r"AndroidManifest\.xml|\[Content_Types\]\.xml"), _OTHER),
)
_ARRAYS = re.compile(r"[^\n]+\.npy(\n[^\n]+\.npy)*")
_NPZ = Unread("a NumPy archive (.npz)", f"load it with numpy.load, {_SAVE}")
_NEMO = "a NeMo model (.nemo), which is a tar archive"
# Members of a tar archive, by a pattern of their path.
_TAR_MEMBERS: Table = (
    (
        re.compile(r"(.*/)?model_weights\.ckpt"),
        Unread(_NEMO, "unpack it with tar -xf, and pass its model_weights.ckpt"),
    ),
    (re.compile(r"(.*/)?model_weights/.*"), Unread(_NEMO, "unpack it with tar -xf, and pass its folder model_weights")),
    (re.compile(r"storages"), _TORCH_02),
    (re.compile(r".*"), _TAR),
)
# Files of a folder, by a pattern of their name.
_FOLDER_FILES: Table = (
    (re.compile(r"saved_model\.pb(txt)?"), _SAVED_MODEL),
    (re.compile(r"_CHECKPOINT_METADATA|manifest\.ocdbt|_sharding"), _ORBAX),
    (re.compile(r".*\.data-\d{5}-of-\d{5}"), Unread("a folder of a TensorFlow checkpoint", _TENSORFLOW_STEP)),
)


def describe_file(path: str, head: bytes) -> Unread | None:
    """Return the format of a file that no reader matches, or None. head: its first bytes. Raises OSError."""
    by_magic = _find_match(_MAGIC, [head])
    if by_magic is not None:
        return by_magic

    with open_regular_file(path) as file:
        file.seek(_TAR_OFFSET)
        mark = file.read(len(_TAR_MAGIC))

    if mark == _TAR_MAGIC:
        return _describe_tar(path)

    # A graph of TensorFlow may start like an ONNX model.
    name = os.path.basename(path).lower()
    by_name = _find_match(_EXTENSIONS, [name])
    return by_name or _find_match(_ONNX_START, [head])


def _describe_tar(path: str) -> Unread | None:
    """Describe a tar archive by the names in it."""
    # For a rare format.
    import tarfile

    names: list[str] = []
    # A damaged archive is described by the names before the damage; its own program reports the damage.
    with suppress(tarfile.TarError, ValueError, OverflowError, OSError), tarfile.open(path, "r:") as archive:
        for member in islice(archive, _MOST_MEMBERS):
            names += [member.name]

    # An archive without names is still an archive.
    names.append("")
    return _find_match(_TAR_MEMBERS, names)


def describe_zip(names: Collection[str]) -> Unread | None:
    """Return the format of a zip that is no torch.save file, or None. names: of its records."""
    text = "\n".join(names)
    # Arrays beside other files are data of another program.
    if _ARRAYS.fullmatch(text):
        return _NPZ
    return _find_match(_ZIP_RECORDS, names)


def describe_folder(folder: str) -> Unread | None:
    """Return the format of a folder without checkpoints, or None. Raises OSError."""
    names = os.listdir(folder)
    return _find_match(_FOLDER_FILES, names)


def _find_match(table: Table, names: Collection[Any]) -> Unread | None:
    """Return the format of the first pattern that a name, or the first bytes, match."""
    for pattern, unread in table:
        if any(map(pattern.fullmatch, names)):
            return unread
    return None
