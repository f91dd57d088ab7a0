"""torch.save files before torch 1.6, written by the installed torch: read without torch, and every fault."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from malformed.torch_parts import mapping, storage, tensor, torch_legacy, whole
from support.listings import find_texts, list_fields, map_fields
from support.strategies import content

import syncheck
from syncheck.errors import MalformedFile, RefusedFile
from syncheck.messages import Refusal

if TYPE_CHECKING:
    from pathlib import Path


def save(path: Path, tree: Any) -> str:
    """Save in the legacy format."""
    torch.save(tree, path, _use_new_zipfile_serialization=False)
    return str(path)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_unreadable_storages_are_skipped(tmp_path: Path) -> None:
    """Quantized and sparse tensors are refused with a reason, and later tensors are still found."""
    quantized = torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint32)
    tree = {"q": quantized, "sparse": torch.eye(3).to_sparse(), "after": torch.ones(3)}
    tensors = syncheck.read(save(tmp_path / "f.pth", tree)).tensors
    assert map_fields(tensors, "refused") == {
        "q": Refusal.IN_PARTS(refusal=Refusal.QUANTIZED()),
        "sparse": Refusal.IN_PARTS(refusal=Refusal.SPARSE()),
        **dict.fromkeys(("after", "q.int_repr", "sparse.indices", "sparse.values")),
    }
    assert content(tensors["after"]) == torch.ones(3).numpy().tobytes()


def test_old_and_new_files_are_compared(tmp_path: Path) -> None:
    """Replicas in the legacy format and the zip format are in sync, and a changed element is found."""
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
    """A module pickled with its source gives its tensors, and its class is inert."""
    snapshot = syncheck.read(save(tmp_path / "f.pth", torch.nn.Linear(2, 3)))
    assert sorted(list_fields(snapshot.tensors.values(), "shape")) == [(3,), (3, 2)]
    assert find_texts(snapshot.stubs, end="Linear")


def viewing(*views: Any) -> bytes:
    """Return a file with tensors a, b, ... of four elements in views of one storage of six float32."""
    tensors = [tensor(storage("0", 6, None, view), 0, (2, 2), (2, 1)) for view in views]
    return torch_legacy(whole(mapping(*((name, first) for name, first in zip("abc", tensors, strict=False)))))


def test_views_of_storages_are_read(tmp_path: Path) -> None:
    """Views of storages, as before torch 0.4, are read as by torch."""
    path = tmp_path / "f.pth"
    path.write_bytes(viewing(None, ("9", 2, 4), ("8", 1, 4)))
    tensors, expected = syncheck.read(str(path)).tensors, torch.load(path)
    assert expected["b"].tolist() == [[2, 3], [4, 5]]
    for name, value in expected.items():
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


def test_a_pickle_that_executes_code_is_refused(tmp_path: Path) -> None:
    """A global that executes code is refused in all of the pickles, and nothing is executed."""
    path, proof = tmp_path / "f.pth", tmp_path / "ran"
    save(path, {"w": torch.zeros(2)})
    data = path.read_bytes()
    evil = b"cos\nsystem\n(V" + f"touch {proof}".encode() + b"\ntR."
    head = data.index(b"M\xe9\x03")
    for position, location in ((head - 2, "protocol version"), (head + 4, "system information")):
        path.write_bytes(data[:position] + evil)
        with pytest.raises(RefusedFile, match=rf"{location}: the pickle calls os\.system"):
            syncheck.read(str(path))
    assert not proof.exists()
