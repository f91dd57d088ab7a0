"""Zips of torch.save files are read; formats that are not read are named with the next step."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.listings import find_texts, list_fields

import syncheck
from syncheck.errors import CheckpointError, NotACheckpoint, RefusedFile, UnsupportedFormat

torch = pytest.importorskip("torch")

if TYPE_CHECKING:
    from pathlib import Path


def saved(tree: Any, **options: Any) -> bytes:
    """Return a torch.save file."""
    buffer = io.BytesIO()
    torch.save(tree, buffer, **options)
    return buffer.getvalue()


def zipped(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    """Write a zip, streaming its members as stable-baselines3 does."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            with archive.open(name, "w", force_zip64=True) as member:
                member.write(data)
    return path


def policy(value: float = 1.0) -> dict[str, bytes]:
    """Return the members of a model of stable-baselines3."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    layer(torch.ones(3)).sum().backward()
    optimizer.step()
    layer.bias.data[0] = value
    return {
        "data": b"{}",
        "pytorch_variables.pth": saved(None),
        "policy.pth": saved(layer.state_dict()),
        "policy.optimizer.pth": saved(optimizer.state_dict()),
        "_stable_baselines3_version": b"2.3.0",
    }


def test_a_zip_of_torch_files(tmp_path: Path) -> None:
    """The tensors of all members are compared, and the other members are counted in a note."""
    first, second = zipped(tmp_path / "a.zip", policy()), zipped(tmp_path / "b.zip", policy())
    third = zipped(tmp_path / "c.zip", policy(2.0))
    result = syncheck.read(str(first))
    assert {"policy.weight", "policy.bias"} < set(result.tensors)
    assert find_texts(result.tensors, start="optimizer.")
    assert [note.parameters["names"] for note in result.notes] == [("_stable_baselines3_version", "data")]
    assert syncheck.compare(first, second).exit_code == 0
    assert syncheck.compare(first, third).exit_code == 1
    assert syncheck.diff(first, third).exit_code == 1


def test_members_of_equal_names_keep_their_storages(tmp_path: Path) -> None:
    """Storages of several members with equal keys are distinguished."""
    members = {"a.pth": saved({"w": torch.ones(2)}), "a.pt": saved({"w": torch.zeros(2)})}
    result = syncheck.read(str(zipped(tmp_path / "a.zip", members)))
    assert list(result.tensors) == ["a.w", "a.pt.w"]
    assert len(set(list_fields(result.tensors.values(), "offset"))) == 2


def test_a_member_that_is_not_read_is_an_error(tmp_path: Path) -> None:
    """A member with weights in another format is not left out."""
    old = saved({"w": torch.ones(2)}, _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedFormat, match=r"old\.pth"):
        syncheck.read(str(zipped(tmp_path / "a.zip", {**policy(), "old.pth": old})))


def test_code_in_a_member_is_refused(tmp_path: Path) -> None:
    """A member that would execute code is refused with its name."""

    class Evil:
        def __reduce__(self) -> Any:
            return eval, ("1",)

    with pytest.raises(RefusedFile, match=r"evil\.pth"):
        syncheck.read(str(zipped(tmp_path / "a.zip", {**policy(), "evil.pth": saved(Evil())})))


def tar(names: list[str]) -> bytes:
    """Return a tar archive of empty files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(name))
    return buffer.getvalue()


def in_zip(*names: str, compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return a zip of short files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name in names:
            archive.writestr(name, b"text")
    return buffer.getvalue()


def array() -> bytes:
    """Return a .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, np.ones(3))
    return buffer.getvalue()


# By file name: the content, a part of the description, and a part of the next step.
UNREAD: dict[str, tuple[bytes, str, str]] = {
    "model.nemo": (tar(["./model_config.yaml", "./model_weights.ckpt"]), "NeMo", "model_weights.ckpt"),
    "distributed.nemo": (tar(["model_config.yaml", "model_weights/.metadata"]), "NeMo", "model_weights"),
    "old.pth": (tar(["sys_info", "pickle", "storages", "tensors"]), "torch 0.2", "torch.load"),
    "model.tar": (tar(["a.txt"]), "tar archive", "tar -xf"),
    "model.gguf": (b"GGUF\x03\0\0\0" + bytes(60), "GGUF", "safetensors"),
    "weights.npy": (array(), "NumPy", "numpy.load"),
    "weights.npz": (in_zip("a.npy", "b.npy"), "NumPy", "numpy.load"),
    "model.pt2": (
        in_zip("m/archive_format", "m/models/model.json", "m/data/weights/weight_0"),
        "torch.export",
        "state_dict",
    ),
    "old.pt2": (in_zip("serialized_exported_program.json", "serialized_state_dict.pt"), "torch.export", "state_dict"),
    "model.mar": (in_zip("MAR-INF/MANIFEST.json", "model.pt"), "TorchServe", "unpack"),
    "model.keras": (in_zip("config.json", "model.weights.h5"), "Keras", "Keras"),
    "model.h5": (b"\x89HDF\r\n\x1a\n" + bytes(60), "HDF5", "h5py"),
    "model.onnx": (b"\x08\x07\x12\x07pytorch" + bytes(60), "ONNX", "exported"),
    "renamed.bin": (b"\x08\x07\x12\x07pytorch" + bytes(60), "ONNX", "exported"),
    "flax_model.msgpack": (b"\x81\xa6params\x80", "Flax", "flax"),
    "saved_model.pb": (b"\x08\x01\x12\x07" + bytes(60), "TensorFlow", "TensorFlow"),
    "model.ckpt-5.index": (b"\0\0\x06\x08\x01", "TensorFlow", "TensorFlow"),
    "model.ckpt-5.data-00000-of-00001": (b"abcdef", "TensorFlow", "TensorFlow"),
    "model.tflite": (b"\x1c\0\0\0TFL3" + bytes(60), "TensorFlow Lite", "exported"),
    "model.pth.gz": (gzip.compress(saved({"w": torch.ones(2)})), "gzip", "gunzip"),
    "model.pth.zst": (b"\x28\xb5\x2f\xfd" + bytes(60), "zstd", "unzstd"),
    "model.safetensors": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS", "git lfs pull"),
    "page.pth": (b"<!DOCTYPE html><html></html>", "HTML", "download"),
    "files.zip": (in_zip("a.txt"), "a.txt", "unpack"),
    "compressed.zip": (in_zip("a.pth", compression=zipfile.ZIP_DEFLATED), "a.pth", "unpack"),
}


@pytest.mark.parametrize("name", UNREAD)
def test_a_format_that_is_not_read(tmp_path: Path, cli: Any, name: str) -> None:
    """The error is one line that names the format and the next step, with exit code 2."""
    data, description, next_step = UNREAD[name]
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        syncheck.read(str(path))
    assert description in caught.value.reason
    assert next_step.lower() in caught.value.reason.lower()
    for command in (("compare", path, path), ("diff", path, path), ("show", path)):
        done = cli(*command)
        assert done.code == 2
        assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize("name", sorted(UNREAD))
def test_truncated_files_of_other_formats(tmp_path: Path, name: str) -> None:
    """Every truncation is a one-line error."""
    data = UNREAD[name][0]
    path = tmp_path / name
    for end in range(1, min(len(data), 80)):
        path.write_bytes(data[:end])
        with pytest.raises(CheckpointError):
            syncheck.read(str(path))


def test_other_formats_beside_a_checkpoint_are_skipped(tmp_path: Path, cli: Any) -> None:
    """Exports in a folder with checkpoints do not change its verdict."""
    for i in range(2):
        torch.save({"w": torch.ones(2)}, tmp_path / f"m_rank{i}.pth")
    for name in ("weights.npz", "model.onnx", "model.h5", "flax_model.msgpack", "files.zip"):
        (tmp_path / name).write_bytes(UNREAD[name][0])
    assert cli("compare", tmp_path).code == 0


@pytest.mark.parametrize(
    ("names", "description"),
    [
        (["saved_model.pb", "variables/variables.index"], "SavedModel"),
        (["_CHECKPOINT_METADATA", "manifest.ocdbt"], "Orbax"),
        (["model.ckpt.index", "model.ckpt.data-00000-of-00001"], "TensorFlow"),
        (["model.onnx", "config.json"], "ONNX"),
    ],
    ids=str,
)
def test_a_folder_that_is_not_read(tmp_path: Path, cli: Any, names: list[str], description: str) -> None:
    """A folder without checkpoints is named by its files."""
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"\x08\x07\x12\x07pytorch")
    done = cli("diff", tmp_path, tmp_path)
    assert done.code == 2
    assert description in done.err
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize("with_model", [False, True])
def test_a_universal_checkpoint_is_named(tmp_path: Path, cli: Any, with_model: bool) -> None:
    """A universal checkpoint of DeepSpeed is one error, and its files are not compared one by one."""
    for name in ("layer.weight", "layer.bias"):
        (tmp_path / "zero" / name).mkdir(parents=True)
        torch.save({"param": torch.ones(2)}, tmp_path / "zero" / name / "fp32.pt")
    if with_model:
        torch.save({"module": {}}, tmp_path / "mp_rank_00_model_states.pt")
    done = cli("compare", tmp_path)
    assert done.code == 2
    assert "universal" in done.err
    assert "fp32.pt" not in done.out + done.err


def test_an_empty_zip_is_no_checkpoint(tmp_path: Path) -> None:
    """A zip without records is an error."""
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("folder/", b"")
    with pytest.raises(NotACheckpoint):
        syncheck.read(str(path))
