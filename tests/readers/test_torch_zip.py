"""The reader of torch.save files compared with torch."""

from __future__ import annotations

import argparse
import re
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from checkpoints import save_pth, save_records
from dcp_folders import assemble

import syncheck
from syncheck.dtypes import DTYPES
from syncheck.errors import MalformedFile, NotACheckpoint
from syncheck.kernel.blocks import Files, ranges
from syncheck.messages import Detail, Refusal
from syncheck.records import Reason

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from checkpoints import Done


def content(path: Path, name: str) -> bytes:
    """Return a tensor's bytes in C order, as read by syncheck."""
    tensor = syncheck.read(str(path)).tensors[name]
    with Files() as files:
        return b"".join(bytes(files.read(tensor, start, count, slot=0)) for start, count in ranges([tensor]))


def expected(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes in C order, as in torch."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""


def shapes_and_views() -> dict[str, torch.Tensor]:
    """Return tensors with all storage layouts that torch.save can write."""
    base = torch.arange(600_000, dtype=torch.float32).reshape(600, 1000)
    images = torch.randn(4, 3, 17, 19)
    numbers = torch.randn(5, 7, dtype=torch.complex64)
    return {
        "whole": base,
        "view": base[10:20, 5:],
        "offset": base.view(-1)[12345:54321],
        "transposed": base.t(),
        "channels_last": images.to(memory_format=torch.channels_last),
        "permuted": images.permute(3, 1, 0, 2),
        "every_third": base[::3, ::7],
        "expanded": torch.randn(1, 9).expand(400_000, 9),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 5),
        "row_of_empty": torch.zeros(3, 0),
        "conj": numbers.conj(),
        "neg": torch.randn(4, 6, dtype=torch.complex128).conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(3)),
    }


def test_bytes_equal_torch(tmp_path: Path) -> None:
    """For all storages, offsets, strides and lazy operations, the bytes equal torch.load's."""
    tensors = shapes_and_views()
    torch.save(tensors, tmp_path / "f.pth")
    loaded = torch.load(tmp_path / "f.pth", weights_only=True)
    read = syncheck.read(str(tmp_path / "f.pth")).tensors
    assert list(read) == list(tensors)
    for name, tensor in loaded.items():
        assert read[name].shape == tuple(tensor.shape)
        assert content(tmp_path / "f.pth", name) == expected(tensor), name


@pytest.mark.parametrize("name", [name for name in DTYPES if hasattr(torch, name)])
def test_every_dtype(tmp_path: Path, name: str) -> None:
    """Each supported dtype is read under torch's name, with torch's bytes."""
    dtype = getattr(torch, name)
    raw = torch.randint(0, 2, (40,), dtype=torch.uint8)
    tensor = raw.bool() if name == "bool" else raw.repeat(4).view(dtype)
    torch.save({"t": tensor}, tmp_path / "f.pth")
    assert syncheck.read(str(tmp_path / "f.pth")).tensors["t"].dtype == name
    assert content(tmp_path / "f.pth", "t") == expected(tensor)


def training_checkpoint() -> dict[str, Any]:
    """Return a training script's checkpoint after one step of AdamW."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": schedule.state_dict(),
        "rng_state": torch.get_rng_state(),
        "epoch": 3,
        "note": None,
    }


def test_training_checkpoint_has_names_without_containers(tmp_path: Path) -> None:
    """The model's key is not in names, and optimizer states have parameter names instead of integer ids."""
    saved = training_checkpoint()
    torch.save(saved, tmp_path / "f.pth")
    snapshot = syncheck.read(str(tmp_path / "f.pth"))
    parameters = [name for name in saved["model"] if "running" not in name and "num_batches" not in name]
    states = {f"optimizer.{name}.{state}" for name in parameters for state in ("step", "exp_avg", "exp_avg_sq")}
    assert set(snapshot.tensors) == {*saved["model"], *states, "rng_state"}
    assert content(tmp_path / "f.pth", "optimizer.2.weight.exp_avg") == expected(
        saved["optimizer"]["state"][4]["exp_avg"]
    )
    assert snapshot.values["epoch"] == 3
    assert snapshot.values["optimizer.param_groups.0.lr"] == 0.001


def test_stored_param_names_come_first(tmp_path: Path) -> None:
    """Names stored by an optimizer with named parameters in another order are used."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(list(model.named_parameters())[::-1])
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "f.pth")
    wanted = expected(optimizer.state[model[0].weight]["exp_avg"])
    assert content(tmp_path / "f.pth", "optimizer.0.weight.exp_avg") == wanted


def test_zip_of_something_else_is_no_checkpoint(tmp_path: Path) -> None:
    """A zip without data.pkl is not a checkpoint."""
    np.savez(tmp_path / "f.npz", a=np.ones(2))
    with pytest.raises(NotACheckpoint, match=r"a zip with 0 records data\.pkl; needed one, as torch\.save writes"):
        syncheck.read(str(tmp_path / "f.npz"))


def test_unknown_classes_are_inert_and_their_tensors_found(tmp_path: Path) -> None:
    """An argparse.Namespace is listed as a stub, and a tensor in it is found."""
    torch.save({"w": torch.ones(2), "args": argparse.Namespace(t=torch.zeros(3))}, tmp_path / "f.pth")
    snapshot = syncheck.read(str(tmp_path / "f.pth"))
    assert snapshot.stubs == ("argparse.Namespace",)
    assert set(snapshot.tensors) == {"w", "args.t"}


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_unreadable_tensors_are_counted(tmp_path: Path) -> None:
    """Sparse, quantized and meta tensors are refused with a reason and counted; their components are compared."""
    quantized = torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)
    odd = {
        "sparse": torch.eye(3).to_sparse(),
        "q": quantized,
        "meta": torch.zeros(2, device="meta"),
    }
    for rank in range(2):
        torch.save({"w": torch.ones(2), **odd}, tmp_path / f"m_rank{rank}.pth")
    tensors = syncheck.read(str(tmp_path / "m_rank0.pth")).tensors
    assert all(tensors[name].refused for name in odd)
    report = syncheck.compare(tmp_path)
    parts = {"sparse.indices", "sparse.values", "q.storage"}
    assert tensors.keys() == {"w"} | odd.keys() | parts
    assert (report.counts.identical, report.counts.not_compared) == (1 + len(parts), len(odd))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_unreadable_tensors_have_a_shape(tmp_path: Path) -> None:
    """Different shapes are SYN102, although the values of unreadable tensors are not compared."""
    for rank in range(2):
        size = 3 + rank
        odd = {
            "coo": torch.eye(size).to_sparse(),
            "csr": torch.eye(size).to_sparse_csr(),
            "bsr": torch.eye(2 * size).to_sparse_bsr((2, 2)),
            "q": torch.quantize_per_tensor(torch.randn(size, 2), 0.1, 0, torch.qint8),
            "meta": torch.zeros(size, device="meta"),
        }
        torch.save({"w": torch.ones(2), **odd}, tmp_path / f"m_rank{rank}.pth")
    (group,) = syncheck.compare(tmp_path).groups
    found = {diff.name: diff for diff in group.tensors if diff.name in odd}
    assert {diff.reason for diff in found.values()} == {Reason.SHAPE}
    assert {name: re.findall(r"\[.*?\]", str(diff.detail)) for name, diff in found.items()} == {
        "coo": ["[3, 3]", "[4, 4]"],
        "csr": ["[3, 3]", "[4, 4]"],
        "bsr": ["[6, 6]", "[8, 8]"],
        "q": ["[3, 2]", "[4, 2]"],
        "meta": ["[3]", "[4]"],
    }
    assert [finding.code for finding in group.findings] == ["SYN102"]


def test_unreadable_tensors_can_be_missing(tmp_path: Path) -> None:
    """A tensor that is refused on one rank and absent on the other is reported as missing."""
    torch.save({"w": torch.ones(2), "meta": torch.zeros(2, device="meta")}, tmp_path / "m_rank0.pth")
    torch.save({"w": torch.ones(2)}, tmp_path / "m_rank1.pth")
    (group,) = syncheck.compare(tmp_path).groups
    assert [(diff.name, diff.detail) for diff in group.tensors] == [("meta", Detail.MISSING(ranks=(1,)))]
    assert [(finding.code, finding.tensors) for finding in group.findings] == [("SYN101", ("meta",))]


def test_numpy_arrays_are_tensors(tmp_path: Path) -> None:
    """Arrays of every order and byte order are compared like tensors, scalars like Python numbers."""
    arrays = {
        "plain": np.arange(12, dtype=np.float64).reshape(3, 4),
        "fortran": np.asfortranarray(np.arange(12, dtype=np.int16).reshape(3, 4)),
        "big_endian": np.arange(5, dtype=">f4"),
        "bool": np.array([True, False]),
        "empty": np.zeros((0, 3), np.uint32),
        "zero_d": np.array(7, np.int64),
    }
    torch.save({"w": torch.ones(2), **arrays, "loss": np.float32(0.25)}, tmp_path / "m_rank0.pth")
    arrays["fortran"] = arrays["fortran"].copy()
    arrays["fortran"][2, 1] += 1
    torch.save({"w": torch.ones(2), **arrays, "loss": np.float32(0.5)}, tmp_path / "m_rank1.pth")
    read = syncheck.read(str(tmp_path / "m_rank0.pth"))
    assert read.stubs == ()
    assert read.values["loss"] == 0.25
    for name, array in arrays.items():
        if name != "fortran":
            wanted = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"))).tobytes()
            assert content(tmp_path / "m_rank0.pth", name) == wanted, name
    (diff,) = syncheck.compare(tmp_path).groups[0].tensors
    assert (diff.name, diff.dtype, diff.max_abs, diff.index, diff.extent) == ("fortran", "int16", 1, (2, 1), "one")


def test_numpy_objects_are_refused_and_counted(tmp_path: Path) -> None:
    """An array of Python objects or strings is counted as not compared, with its dtype."""
    torch.save({"w": torch.ones(2), "o": np.array([None, 1]), "s": np.array(["a"])}, tmp_path / "f.pth")
    tensors = syncheck.read(str(tmp_path / "f.pth")).tensors
    assert {name: t.refused for name, t in tensors.items() if t.refused} == {
        "o": Refusal.NUMPY_DTYPE(name="O8"),
        "s": Refusal.NUMPY_DTYPE(name="U1"),
    }


@pytest.mark.parametrize("name", ["whole", "transposed"])
def test_file_truncated_while_it_is_read(tmp_path: Path, name: str) -> None:
    """A file that is truncated during the comparison is malformed in all ways of reading."""
    torch.save({name: shapes_and_views()[name]}, tmp_path / "f.pth")
    tensor = syncheck.read(str(tmp_path / "f.pth")).tensors[name]
    files = Files()
    files.descriptor(tensor)
    with (tmp_path / "f.pth").open("r+b") as file:
        file.truncate(tensor.offset + 100)
    with pytest.raises(MalformedFile, match=f"tensor '{name}': the file ends before"), files:
        files.read(tensor, 0, next(ranges([tensor]))[1], slot=0)


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9, 0.999])
def test_cut_file_is_one_line(tmp_path: Path, keep: float) -> None:
    """A file cut anywhere is malformed, with a one-line error and its path."""
    torch.save({"w": torch.randn(1000)}, tmp_path / "f.pth")
    data = (tmp_path / "f.pth").read_bytes()
    (tmp_path / "f.pth").write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(MalformedFile, match=r"f\.pth: zip directory: ") as caught:
        syncheck.read(str(tmp_path / "f.pth"))
    assert "\n" not in str(caught.value)


def test_a_record_with_a_partial_element_is_read(tmp_path: Path) -> None:
    """torch.save writes all ten bytes of a storage that is viewed as two 4-byte numbers."""
    torch.save({"w": torch.arange(10, dtype=torch.uint8)[:8].view(torch.int32)}, tmp_path / "f.pth")
    assert Files().read(syncheck.read(str(tmp_path / "f.pth")).tensors["w"], 0, 2, 0) == bytes(range(8))


def test_storage_that_is_shorter_than_its_tensor_is_refused(tmp_path: Path) -> None:
    """A tensor with more bytes than its record is malformed before anything is allocated."""
    torch.save({"w": torch.zeros(201)}, tmp_path / "f.pth")
    with zipfile.ZipFile(tmp_path / "f.pth") as archive:
        pickled, data = archive.read("f/data.pkl"), archive.read("f/data/0")
    assert pickled.count(b"K\xc9") == 2  # opcode BININT1, 201: the storage's size and the tensor's
    save_records(tmp_path / "f.pth", pickled.replace(b"K\xc9", b"K\xff"), {"0": data})
    with pytest.raises(MalformedFile, match=r"tensor 'w' ends at byte 1020 of a record of 804"):
        syncheck.read(str(tmp_path / "f.pth"))


@pytest.mark.parametrize(
    ("before", "after", "record"),
    [(b"running_mean", b"running_meal", "data.pkl"), (b"KM", b"KL", "data.pkl"), (b"little", b"lyttle", "byteorder")],
)
def test_a_damaged_pickle_is_malformed(tmp_path: Path, before: bytes, after: bytes, record: str) -> None:
    """A pickle that was changed after saving is malformed, even if it loads."""
    path = save_pth(tmp_path / "f.pth", {"running_mean": np.ones(2, np.float32), "notes": {"patience": 77}})
    data = path.read_bytes()
    assert data.count(before) == 1
    path.write_bytes(data.replace(before, after))
    with pytest.raises(MalformedFile, match=rf"f/{record}: the bytes do not match the CRC-32 stored for them; needed"):
        syncheck.read(str(path))


@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [(38, 0x10, "a record that is marked as a folder; needed"), (20, 0, "0 bytes stored of 8; needed equal sizes")],
)
def test_a_record_that_torch_would_not_read_is_malformed(tmp_path: Path, at: int, value: int, reason: str) -> None:
    """A record that torch.load would fill with uninitialized memory is malformed."""
    path = save_pth(tmp_path / "f.pth", {"w": np.ones(2, np.float32)})
    data = bytearray(path.read_bytes())
    entry = data.rindex(b"f/data/0") - 46  # offset of the name in the directory's entry
    data[entry + at] = value
    path.write_bytes(data)
    with pytest.raises(MalformedFile, match=f"f/data/0: {reason}"):
        syncheck.read(str(path))


def test_a_missing_checksum_is_not_checked(tmp_path: Path) -> None:
    """If saving stored no checksums, a pickle is read without a check."""
    path = save_pth(tmp_path / "f.pth", {"w": np.ones(2, np.float32)})
    with zipfile.ZipFile(path) as archive:
        stored = archive.getinfo("f/data.pkl").CRC
    data = path.read_bytes()
    path.write_bytes(data.replace(stored.to_bytes(4, "little"), bytes(4)))
    assert list(syncheck.read(str(path)).tensors) == ["w"]


def test_a_record_beyond_the_files_end_is_malformed(tmp_path: Path) -> None:
    """A directory entry beyond the end of the file is malformed, with the record's name."""
    path = save_pth(tmp_path / "f.pth", {"w": np.ones(2, np.float32)})
    data = bytearray(path.read_bytes())
    entry = data.rindex(b"f/data/0") - 46  # offset of the name in the directory's entry
    assert data[entry : entry + 4] == b"PK\x01\x02"
    data[entry + 42 : entry + 46] = (0xFFFFFF00).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(MalformedFile, match=r"f/data/0: a record beyond the file's end; needed a local header"):
        syncheck.read(str(path))


def test_concatenated_zips_are_malformed(tmp_path: Path) -> None:
    """With two zips in one file, the second directory is not used for the first zip."""
    one, two = (save_pth(tmp_path / f"{name}.pth", {name: np.ones(2, np.float32)}) for name in "ab")
    (tmp_path / "f.pth").write_bytes(one.read_bytes() + two.read_bytes())
    first = len(one.read_bytes())
    with pytest.raises(MalformedFile, match=rf"zip directory: the records begin at byte {first}; needed byte 0"):
        syncheck.read(str(tmp_path / "f.pth"))


def test_a_chunk_file_refers_to_its_folder(cli: Callable[..., Done], tmp_path: Path) -> None:
    """Files with chunks of several tensors exit with 2, and one line each that refers to the folder."""
    files = []
    for name in "ab":
        folder = assemble(tmp_path / name, {key: (torch.ones(3), [((0,), (3,))]) for key in "vw"})
        files.append((folder / "__0_0.distcp").rename(tmp_path / f"{name}.distcp"))
    done = cli("compare", *files)
    assert done.code == 2
    lines = done.err.splitlines()
    assert len(lines) == 2
    assert all("the records begin at byte" in line and "pass the folder." in line for line in lines)
