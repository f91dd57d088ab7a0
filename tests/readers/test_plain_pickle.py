"""Files of pickle.dump: arrays and tensors are read, and nothing is executed."""

from __future__ import annotations

import pickle
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.listings import map_fields

import syncheck
from syncheck.errors import MalformedFile, RefusedFile, UnsupportedFormat

torch = pytest.importorskip("torch")
nn = torch.nn

if TYPE_CHECKING:
    from pathlib import Path

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


def dump(path: Path, *trees: Any, protocol: int = 4) -> Path:
    """Write a plain pickle, or several consecutive pickles."""
    path.write_bytes(b"".join(pickle.dumps(tree, protocol) for tree in trees))
    return path


def content() -> dict[str, Any]:
    """Return a checkpoint with tensors of several layouts."""
    torch.manual_seed(0)
    weight = torch.randn(300, 200)
    return {
        "model": {"w": weight, "t": weight.t(), "row": weight[3], "half": torch.ones(5, dtype=torch.bfloat16)},
        "array": np.arange(6, dtype=np.float32).reshape(2, 3),
        "parameter": nn.Parameter(torch.zeros(3)),
        "empty": torch.empty(0, 3),
        "epoch": 3,
    }


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_tensors_and_arrays(tmp_path: Path, protocol: int) -> None:
    """Each protocol gives the tensors and values of a torch.save file."""
    torch.save(content(), tmp_path / "saved.pth")
    path = dump(tmp_path / "plain.pkl", content(), protocol=protocol)
    result, saved = syncheck.read(str(path)), syncheck.read(str(tmp_path / "saved.pth"))
    assert result.format == "pickle"
    assert map_fields(result.tensors, "dtype", "shape") == map_fields(saved.tensors, "dtype", "shape")
    assert result.values == saved.values
    assert syncheck.diff(path, tmp_path / "saved.pth").exit_code == 0


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", ["w", "half", "array", "parameter"])
def test_a_changed_element(tmp_path: Path, name: str, protocol: int) -> None:
    """A changed element of any tensor is found."""
    first, second = content(), content()
    with torch.no_grad():
        changed = second["model"].get(name, second.get(name))
        changed.reshape(-1)[-1] += 1
    first_path = dump(tmp_path / "a.pkl", first, protocol=protocol)
    second_path = dump(tmp_path / "b.pkl", second, protocol=protocol)
    report = syncheck.compare(first_path, second_path)
    assert report.exit_code == 1
    assert name in {diff.name.rpartition(".")[2] for diff in report.groups[0].tensors if diff.status == "different"}


def test_large_tensors_stay_on_disk(tmp_path: Path) -> None:
    """The opened checkpoint does not hold the bytes of its tensors."""
    path = dump(tmp_path / "a.pkl", {f"w{i}": torch.full((1 << 20,), float(i)) for i in range(4)})
    tracemalloc.start()
    result = syncheck.read(str(path))
    contents, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert all(tensor.data is None for tensor in result.tensors.values())
    assert contents < 1 << 20


def test_several_pickles_in_one_file(tmp_path: Path) -> None:
    """Every pickle of a file is read, and a difference in the second is found."""
    first = dump(tmp_path / "a.pkl", {"epoch": 1}, {"w": torch.ones(2)})
    second = dump(tmp_path / "b.pkl", {"epoch": 1}, {"w": torch.zeros(2)})
    assert list(syncheck.read(str(first)).tensors) == ["1.w"]
    assert syncheck.compare(first, second).exit_code == 1


def test_bytes_behind_the_pickle_are_an_error(tmp_path: Path) -> None:
    """Other bytes behind a pickle are not ignored."""
    path = dump(tmp_path / "a.pkl", {"w": torch.ones(2)})
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(MalformedFile, match="pickle 2"):
        syncheck.read(str(path))


def test_copies_of_one_text_are_bounded(tmp_path: Path) -> None:
    """A pickle cannot ask for the same storage many times under new identities."""
    inner = pickle.loads(pickle.dumps(torch.ones(500).untyped_storage().__reduce__()))[1][0]
    text = inner.decode("latin1").encode()
    copies = b"c_codecs\nencode\n(h\x00X\x06\x00\x00\x00latin1tR\x85R"
    body = b"\x80\x02X" + len(text).to_bytes(4, "little") + text + b"q\x00]"
    body += (b"ctorch.storage\n_load_from_bytes\n" + copies + b"a") * 1000 + b"\x86."
    (tmp_path / "a.pkl").write_bytes(body)
    with pytest.raises(MalformedFile, match="more bytes than the file"):
        syncheck.read(str(tmp_path / "a.pkl"))


def test_a_file_of_joblib_is_named(tmp_path: Path) -> None:
    """The arrays of joblib follow outside the pickle; the error says so, and does not warn of code."""
    (tmp_path / "a.pkl").write_bytes(b"\x80\x04cjoblib.numpy_pickle\nNumpyArrayWrapper\n)\x81.")
    with pytest.raises(UnsupportedFormat, match="joblib"):
        syncheck.read(str(tmp_path / "a.pkl"))


def test_code_is_refused(tmp_path: Path) -> None:
    """The classic payload is refused in a plain pickle, before and behind other content."""

    class Evil:
        def __reduce__(self) -> Any:
            return print, ("run",)

    for trees in ((Evil(),), ({"w": 1}, Evil())):
        with pytest.raises(RefusedFile, match="nothing was run"):
            syncheck.read(str(dump(tmp_path / "a.pkl", *trees)))


def test_other_pickles_in_a_folder_are_skipped(tmp_path: Path, cli: Any) -> None:
    """A pickle without a checkpoint's file extension is not part of a folder's checkpoints."""
    for i in range(2):
        dump(tmp_path / f"m_rank{i}.pkl", {"w": torch.ones(2)})
    dump(tmp_path / "vocabulary", {"a": 1})
    assert cli("compare", tmp_path).code == 0
