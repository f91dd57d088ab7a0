"""torch.save files before torch 1.6, written by the installed torch: read without torch, and every fault."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from malformed.torch_parts import legacy_state, mapping, storage, tensor, torch_legacy, whole

import syncheck
from syncheck.errors import MalformedFile, RefusedFile, UnsupportedFormat
from syncheck.kernel.blocks import Files, ranges
from syncheck.messages import Refusal

if TYPE_CHECKING:
    from pathlib import Path


def save(path: Path, tree: Any) -> str:
    """Save in the legacy format."""
    torch.save(tree, path, _use_new_zipfile_serialization=False)
    return str(path)


def every_kind() -> dict[str, Any]:
    """Return tensors of many dtypes and layouts, some with a shared storage."""
    base = torch.randn(100)
    return {
        "base": base,
        "view": base[10:30].view(4, 5).t(),
        "half": torch.randn(3).half(),
        "bfloat16": torch.randn(5).bfloat16(),
        "float64": torch.randn(3, 2).double(),
        "int64": torch.arange(7),
        "int8": torch.arange(7).to(torch.int8),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 3),
        "complex64": torch.randn(3, dtype=torch.complex64),
        "uint16": torch.arange(5).to(torch.uint16),
        "float8": torch.randn(4).to(torch.float8_e4m3fn),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
        "expanded": torch.randn(1, 3).expand(4, 3),
        "array": torch.from_numpy(np.arange(4.0)),
    }


def content(tensor: Any) -> bytes:
    """Return a tensor's bytes in C order, as read by syncheck."""
    with Files() as files:
        return b"".join(bytes(files.read(tensor, start, count, 0)) for start, count in ranges([tensor]))


def test_tensors_equal_the_saved_ones(tmp_path: Path) -> None:
    """Every dtype, view and shared storage has the bytes, shape and dtype of the saved tensor."""
    tree = every_kind()
    snapshot = syncheck.read(save(tmp_path / "f.pth", {"model": tree, "step": 3}))
    assert (snapshot.format, snapshot.values) == ("torch-legacy", {"step": 3})
    assert list(snapshot.tensors) == list(tree)
    for name, value in tree.items():
        tensor, flat = snapshot.tensors[name], value.detach().contiguous().reshape(-1)
        assert (tensor.dtype, tensor.shape) == (str(value.dtype).removeprefix("torch."), tuple(value.shape))
        assert content(tensor) == (flat.view(torch.uint8).numpy().tobytes() if value.numel() else b""), name


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_unreadable_storages_are_skipped(tmp_path: Path) -> None:
    """Quantized and sparse tensors are refused with a reason, and later tensors are still found."""
    quantized = torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint32)
    tree = {"q": quantized, "sparse": torch.eye(3).to_sparse(), "after": torch.ones(3)}
    tensors = syncheck.read(save(tmp_path / "f.pth", tree)).tensors
    assert {name: t.refused for name, t in tensors.items()} == {
        "q": Refusal.QUANTIZED(),
        "sparse": Refusal.SPARSE(),
        **dict.fromkeys(("after", "q.storage", "sparse.indices", "sparse.values")),
    }
    assert content(tensors["after"]) == np.ones(3, np.float32).tobytes()


def test_old_and_new_files_are_compared(tmp_path: Path) -> None:
    """A replica in the legacy format equals one in the zip format, and one changed element makes it differ."""
    tree = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(2)}
    save(tmp_path / "m_rank0.pth", tree)
    torch.save(tree, tmp_path / "m_rank1.pth")
    assert syncheck.compare(tmp_path).verdict == "in_sync"
    tree["w"][1, 2] += 1
    save(tmp_path / "m_rank0.pth", tree)
    (diff,) = syncheck.compare(tmp_path).groups[0].tensors
    assert (diff.name, diff.index, diff.max_abs) == ("w", (1, 2), 1.0)


def test_torch_is_not_needed(tmp_path: Path) -> None:
    """Reading the format imports no torch."""
    path = save(tmp_path / "f.pth", {"w": torch.ones(3)})
    code = f"import sys, syncheck; print(len(syncheck.read({path!r}).tensors), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1 False\n"


def test_a_whole_module_is_read(tmp_path: Path) -> None:
    """A module that was pickled with its source gives its tensors, and its class is inert."""
    snapshot = syncheck.read(save(tmp_path / "f.pth", torch.nn.Linear(2, 3)))
    assert sorted(tensor.shape for tensor in snapshot.tensors.values()) == [(3,), (3, 2)]
    assert any(stub.endswith("Linear") for stub in snapshot.stubs)


@pytest.mark.parametrize("keep", [0.03, 0.2, 0.5, 0.9, 0.999])
def test_a_cut_file_is_one_line(tmp_path: Path, keep: float) -> None:
    """A file cut after its magic number is malformed, with a one-line error and its path."""
    path = tmp_path / "f.pth"
    save(path, every_kind())
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(MalformedFile, match=r"f\.pth: ") as caught:
        syncheck.read(str(path))
    assert "\n" not in str(caught.value)


def test_a_storage_beyond_the_end_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """An element count beyond the file's size is malformed, and nothing is allocated."""
    path = tmp_path / "f.pth"
    save(path, {"w": torch.zeros(77)})
    data = path.read_bytes()
    count = (77).to_bytes(8, "little")
    assert data.count(count) == 1
    for wrong in ((78).to_bytes(8, "little"), (2**62).to_bytes(8, "little"), (-1).to_bytes(8, "little", signed=True)):
        path.write_bytes(data.replace(count, wrong))
        with pytest.raises(MalformedFile, match=r"storage '\d+': (ends at byte|no such storage, or no count)"):
            syncheck.read(str(path))
    path.write_bytes(data.replace(count, (76).to_bytes(8, "little")))
    with pytest.raises(MalformedFile, match=r"tensor 'w' ends at byte 308 of a record of 304"):
        syncheck.read(str(path))


def viewing(*views: Any) -> bytes:
    """Return a file with tensors a, b, ... of four elements in views of one storage of six float32."""
    tensors = [tensor(storage("0", 6, None, view), 0, (2, 2), (2, 1)) for view in views]
    return torch_legacy(whole(mapping(*((name, one) for name, one in zip("abc", tensors, strict=False)))))


def test_views_of_storages_are_read(tmp_path: Path) -> None:
    """Views of storages, as before torch 0.4, have the bytes that torch reads."""
    path = tmp_path / "f.pth"
    path.write_bytes(viewing(None, ("9", 2, 4), ("8", 1, 4)))
    tensors, wanted = syncheck.read(str(path)).tensors, torch.load(path)
    assert wanted["b"].tolist() == [[2, 3], [4, 5]]
    for name, value in wanted.items():
        assert content(tensors[name]) == value.numpy().tobytes()
    path.write_bytes(torch_legacy(whole(mapping(("s", storage("0", 6, None, ("9", 2, 3)))))))
    assert content(syncheck.read(str(path)).tensors["s"]) == torch.arange(2.0, 5.0).numpy().tobytes()


@pytest.mark.parametrize(
    "views",
    [
        [("9", 3, 4)], [("9", -1, 4)], [("9", 2, -1)], [("9", 2**70, 4)], [("9", 2, 3)], [(9, 2, 4)], [("9", 2)],
        [5], [("0", 2, 4)], [("9", 1, 4), ("9", 2, 4)],
    ],
)  # fmt: skip
def test_invalid_views_of_storages_are_malformed(views: list[Any], tmp_path: Path) -> None:
    """A view is malformed if it is not a triple, exceeds its storage, is too small, or repeats a key."""
    path = tmp_path / "f.pth"
    path.write_bytes(viewing(*views))
    with pytest.raises(MalformedFile, match="view"):
        syncheck.read(str(path))


@pytest.mark.parametrize("view", [(), (None, None)])
def test_a_storage_has_six_elements(view: tuple[None, ...], tmp_path: Path) -> None:
    """Like torch, syncheck refuses a persistent id with another number of elements."""
    path = tmp_path / "f.pth"
    path.write_bytes(torch_legacy(legacy_state(of=storage("0", 6, None, *view))))
    with pytest.raises(ValueError, match="values to unpack"):
        torch.load(path)
    with pytest.raises(MalformedFile, match="is not a storage"):
        syncheck.read(str(path))


def test_another_version_is_unsupported(tmp_path: Path) -> None:
    """An unknown protocol version is reported with the supported version."""
    path = tmp_path / "f.pth"
    save(path, {"w": torch.zeros(2)})
    data = path.read_bytes()
    assert data.count(b"M\xe9\x03") == 2  # opcode BININT2, 1001: the version, and again among the machine's facts
    path.write_bytes(data.replace(b"M\xe9\x03", b"M\xea\x03", 1))
    with pytest.raises(UnsupportedFormat, match=r"protocol version: 1002; needed 1001"):
        syncheck.read(str(path))


def test_a_pickle_that_executes_code_is_refused(tmp_path: Path) -> None:
    """A global that executes code is refused in all of the pickles, and nothing is executed."""
    path, proof = tmp_path / "f.pth", tmp_path / "ran"
    save(path, {"w": torch.zeros(2)})
    data = path.read_bytes()
    evil = b"cos\nsystem\n(V" + f"touch {proof}".encode() + b"\ntR."
    head = data.index(b"M\xe9\x03")
    for at, place in ((head - 2, "protocol version"), (head + 4, "system information")):
        path.write_bytes(data[:at] + evil)
        with pytest.raises(RefusedFile, match=rf"{place}: the pickle calls os\.system"):
            syncheck.read(str(path))
    assert not proof.exists()
