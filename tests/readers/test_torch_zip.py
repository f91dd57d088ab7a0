"""torch.save files, read bitwise equal to torch."""

from __future__ import annotations

import argparse
import re
import zipfile
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import torch
from support.checkpoints import Call, Global, _Stored, save_pth, save_safetensors
from support.dcp_folders import assemble
from support.listings import list_codes, list_fields, list_rank_files, map_fields
from support.states import pick
from support.strategies import found_in, from_bytes, loaded, noise

import syncheck
from syncheck.errors import MalformedFile, NotACheckpoint
from syncheck.messages import Detail, Refusal
from syncheck.records import Reason
from syncheck.tensors.blocks import Files
from syncheck.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def saved(path: Path, tree: Any) -> Path:
    """Save with torch."""
    torch.save(tree, path)
    return path


def all_views() -> dict[str, torch.Tensor]:
    """Return tensors with all storage layouts of torch.save."""
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


def all_dtypes() -> dict[str, torch.Tensor]:
    """Return a tensor of each supported dtype, with random bits."""
    return {name: from_bytes(noise(1, name, 40), name) for name in DTYPES if hasattr(torch, name)}


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("make", [all_views, all_dtypes])
def test_bytes_equal_torch(tmp_path: Path, make: Callable[[], dict[str, torch.Tensor]], legacy: bool) -> None:
    """Every dtype, view, offset, stride and lazy operation is read bitwise equal and in order, in both formats."""
    tensors = make()
    torch.save(tensors, tmp_path / "f.pth", _use_new_zipfile_serialization=not legacy)
    result = found_in(tmp_path / "f.pth")
    assert result == {name: loaded(tensor) for name, tensor in tensors.items()}
    assert list(result) == list(tensors)


def test_stored_param_names_come_first(tmp_path: Path) -> None:
    """Names stored by an optimizer with named parameters in another order are used."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(list(model.named_parameters())[::-1])
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "f.pth")
    expected = loaded(optimizer.state[model[0].weight]["exp_avg"])
    assert found_in(tmp_path / "f.pth")["optimizer.0.weight.exp_avg"] == expected


def test_zip_of_something_else_is_no_checkpoint(tmp_path: Path) -> None:
    """A zip without data.pkl is not a checkpoint."""
    np.savez(tmp_path / "f.npz", a=np.ones(2))
    with pytest.raises(NotACheckpoint, match=r"NumPy archive \(\.npz\)"):
        syncheck.read(str(tmp_path / "f.npz"))


def test_unknown_classes_are_inert_and_their_tensors_found(tmp_path: Path) -> None:
    """An argparse.Namespace is listed as a stub, and a tensor in it is found."""
    torch.save({"w": torch.ones(2), "args": argparse.Namespace(t=torch.zeros(3))}, tmp_path / "f.pth")
    snapshot = syncheck.read(str(tmp_path / "f.pth"))
    assert snapshot.stubs == ("argparse.Namespace",)
    assert set(snapshot.tensors) == {"w", "args.t"}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_unreadable_tensors_are_counted_and_have_a_shape(tmp_path: Path) -> None:
    """Unreadable tensors are refused and counted, their components are compared, and different shapes are SYN102."""
    for rank, size in enumerate((3, 4, 3)):
        outlier = {
            "coo": torch.eye(size).to_sparse(),
            "csr": torch.eye(size).to_sparse_csr(),
            "bsr": torch.eye(2 * size).to_sparse_bsr((2, 2)),
            "q": torch.quantize_per_tensor(torch.ones(size, 2), 0.1, 0, torch.qint8),
            "meta": torch.zeros(size, device="meta"),
        }
        torch.save({"w": torch.ones(2), **outlier}, tmp_path / f"m_rank{rank}.pth")
    paths = list_rank_files(tmp_path, "m_rank{}.pth", 3)
    assert all(syncheck.read(str(paths[0])).tensors[name].refused for name in outlier)
    equal = syncheck.compare(paths[0], paths[2])
    components = 2 + 3 + 3 + 1  # of coo, csr, bsr and q
    counted = equal.exit_code, equal.counts.identical, equal.counts.not_compared
    # Equal parts are equal tensors, but a meta tensor has no values to compare.
    assert counted == (2, 1 + components, len(outlier))
    assert syncheck.compare(paths[0], paths[2], options=syncheck.Options(exclude=("meta",))).exit_code == 0
    (group,) = syncheck.compare(*paths[:2]).groups
    result = {diff.name: diff for diff in group.tensors if diff.name in outlier}
    assert set(list_fields(result.values(), "reason")) == {Reason.SHAPE}
    assert {name: re.findall(r"\[.*?\]", str(diff.detail)) for name, diff in result.items()} == {
        "coo": ["[3, 3]", "[4, 4]"],
        "csr": ["[3, 3]", "[4, 4]"],
        "bsr": ["[6, 6]", "[8, 8]"],
        "q": ["[3, 2]", "[4, 2]"],
        "meta": ["[3]", "[4]"],
    }
    assert list_codes(group.findings) == ["SYN102"]


def test_unreadable_tensors_can_be_missing(tmp_path: Path) -> None:
    """A tensor refused on one rank and absent on the other is reported as missing."""
    torch.save({"w": torch.ones(2), "meta": torch.zeros(2, device="meta")}, tmp_path / "m_rank0.pth")
    torch.save({"w": torch.ones(2)}, tmp_path / "m_rank1.pth")
    (group,) = syncheck.compare(tmp_path).groups
    assert list_fields(group.tensors, "name", "detail") == [("meta", Detail.MISSING(ranks=(1,)))]
    assert list_fields(group.findings, "code", "tensors") == [("SYN101", ("meta",))]


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
    second = arrays["fortran"].copy()
    second[2, 1] += 1
    torch.save({"w": torch.ones(2), **arrays, "fortran": second, "loss": np.float32(0.5)}, tmp_path / "m_rank1.pth")
    read = syncheck.read(str(tmp_path / "m_rank0.pth"))
    assert read.stubs == ()
    assert read.values["loss"] == 0.25
    result = found_in(tmp_path / "m_rank0.pth")
    assert pick(result, arrays) == {name: loaded(array) for name, array in arrays.items()}
    (diff,) = syncheck.compare(tmp_path).groups[0].tensors
    assert (diff.name, diff.dtype, diff.max_abs, diff.index, diff.extent) == ("fortran", "int16", 1, (2, 1), "one")


def test_numpy_objects_are_refused_and_counted(tmp_path: Path) -> None:
    """An array of objects, strings or a dtype unknown to torch is counted as not compared, with dtype and shape."""
    arrays = {"O8": np.array([None, 1]), "U1": np.array(["a"]), "ml_dtypes.int4": np.ones((2, 3), ml_dtypes.int4)}
    tensors = syncheck.read(str(saved(tmp_path / "f.pth", {"w": torch.ones(2), **arrays}))).tensors
    assert {name: (t.refused, t.shape) for name, t in tensors.items() if t.refused} == {
        name: (Refusal.IN_PARTS(refusal=Refusal.NUMPY_DTYPE(name=name)), array.shape) for name, array in arrays.items()
    }


def test_a_record_with_a_partial_element_is_read(tmp_path: Path) -> None:
    """torch.save writes all ten bytes of a storage viewed as two 4-byte numbers."""
    torch.save({"w": torch.arange(10, dtype=torch.uint8)[:8].view(torch.int32)}, tmp_path / "f.pth")
    assert Files().read(syncheck.read(str(tmp_path / "f.pth")).tensors["w"], 0, 2, 0) == bytes(range(8))


@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [
        (20, b"\0", "0 bytes stored of 8; needed equal sizes"),
        (42, b"\0\xff\xff\xff", "a record beyond the file's end; needed a local header"),
    ],
)
def test_a_record_that_torch_would_not_read_is_malformed(tmp_path: Path, at: int, value: bytes, reason: str) -> None:
    """A record beyond the end of the file, or with unequal sizes in the directory, is malformed."""
    path = save_pth(tmp_path / "f.pth", {"w": np.ones(2, np.float32)})
    data = bytearray(path.read_bytes())
    entry = data.rindex(b"f/data/0") - 46  # offset of the name in the directory's entry
    assert data[entry : entry + 4] == b"PK\x01\x02"
    data[entry + at : entry + at + len(value)] = value
    path.write_bytes(data)
    with pytest.raises(MalformedFile, match=f"f/data/0: {reason}"):
        syncheck.read(str(path))


def test_a_missing_checksum_is_not_checked(tmp_path: Path) -> None:
    """If saving stored no checksums, a pickle is read without a check."""
    path = save_pth(tmp_path / "f.pth", {"w": np.ones(2, np.float32)})
    with zipfile.ZipFile(path) as archive:
        stored_values = archive.getinfo("f/data.pkl").CRC
    data = path.read_bytes()
    path.write_bytes(data.replace(stored_values.to_bytes(4, "little"), bytes(4)))
    assert list(syncheck.read(str(path)).tensors) == ["w"]


def test_a_chunk_file_refers_to_its_folder(tmp_path: Path) -> None:
    """Files with chunks of several tensors are unreadable, and the error refers to the folder."""
    files = []
    for name in "ab":
        folder = assemble(tmp_path / name, {key: (torch.ones(3), [((0,), (3,))]) for key in "vw"})
        files.append((folder / "__0_0.distcp").rename(tmp_path / f"{name}.distcp"))
    report = syncheck.compare(*files)
    assert report.exit_code == 2
    assert [file.reason.count("pass the folder.") for file in report.unreadable] == [1, 1]


# --- storages, descriptions of tensors, and rare dtypes ---

VALUES = torch.tensor([1.5, -2.0, 0.25])


@pytest.mark.filterwarnings("ignore:TypedStorage")
def test_storages_are_tensors_of_one_dimension(tmp_path: Path) -> None:
    """A storage has the elements of its dtype, or bytes if untyped, also beside a tensor on the same storage."""
    # torch saves only one kind of view per storage.
    tree = {"typed": VALUES.storage(), "view": VALUES[1:], "untyped": VALUES.clone().untyped_storage()}
    tree["none"] = torch.FloatStorage()
    raw = VALUES.numpy().tobytes()
    assert found_in(saved(tmp_path / "f.pth", tree)) == {
        "typed": ("float32", (3,), raw),
        "untyped": ("uint8", (12,), raw),
        "view": ("float32", (2,), raw[4:]),
        "none": ("float32", (0,), b""),
    }


@pytest.mark.parametrize("legacy", [False, True])
def test_a_storage_that_differs_is_out_of_sync(tmp_path: Path, legacy: bool) -> None:
    """Files that differ only in a bare storage are out of sync, in both formats of torch."""
    for rank in range(2):
        tree = {"w": torch.ones(2), "s": (VALUES + rank).untyped_storage()}
        torch.save(tree, tmp_path / f"rank{rank}.pth", _use_new_zipfile_serialization=not legacy)
    (diff,) = syncheck.compare(tmp_path).groups[0].tensors
    assert (diff.name, diff.status) == ("s", "different")


def test_a_storage_of_an_unknown_class_is_counted(tmp_path: Path) -> None:
    """A storage of an unknown class has an unknown element size, so it is counted as not compared."""
    path = save_pth(tmp_path / "f.pth", {"w": np.ones(2, np.float32), "s": _Stored("0", "OddStorage", 2)})
    assert syncheck.read(str(path)).tensors["s"].refused == Refusal.UNKNOWN_STORAGE()


def test_descriptions_of_tensors_are_known(tmp_path: Path) -> None:
    """Tensors with attributes, buffers, devices, layouts and dtypes are not reported as unknown classes."""
    noted = torch.ones(2)
    noted.note = "x"  # type: ignore[attr-defined]
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.note = "x"  # type: ignore[attr-defined]
    tree = {"noted": noted, "parameter": parameter, "buffer": torch.nn.Buffer(torch.ones(4))}
    more = {"on": torch.device("cuda:1"), "cpu": torch.device("cpu"), "layout": torch.strided}
    more |= {"scheme": torch.per_tensor_affine, "dtype": torch.float32, "half": torch.complex32}
    result = syncheck.read(str(saved(tmp_path / "f.pth", tree | more)))
    assert result.stubs == ()
    assert map_fields(result.tensors, "shape") == {
        "noted": (2,),
        "parameter": (3,),
        "buffer": (4,),
    }
    assert not [tensor for tensor in result.tensors.values() if tensor.refused]
    described = {name: str(value) for name, value in more.items()}
    noted_values = {"noted.note": "x", "parameter.note": "x", "buffer._is_buffer": True, "buffer.persistent": True}
    assert result.values == described | noted_values


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e8m0fnu"])
def test_arrays_of_ml_dtypes_are_read(tmp_path: Path, name: str) -> None:
    """Arrays of a dtype that numpy lacks are compared like tensors."""
    array = np.array([1, 2, 4], getattr(ml_dtypes, name))
    path = saved(tmp_path / "f.pth", {"a": array})
    assert found_in(path) == {"a": (name, (3,), array.tobytes())}
    assert syncheck.read(str(path)).stubs == ()


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_unsupported_dtypes_have_a_name_and_a_shape(tmp_path: Path) -> None:
    """A tensor of complex32 is counted with dtype and shape, and a different shape is found."""
    for rank in range(2):
        saved(tmp_path / f"rank{rank}.pth", {"c": torch.zeros(2, 3 + rank, dtype=torch.complex32)})
    tensor = syncheck.read(str(tmp_path / "rank0.pth")).tensors["c"]
    assert (tensor.refused, tensor.shape) == (Refusal.IN_PARTS(refusal=Refusal.DTYPE(name="complex32")), (2, 3))
    diffs = syncheck.compare(tmp_path).groups[0].tensors
    assert list_fields(diffs, "name", "reason", "clusters") == [
        (name, Reason.SHAPE, ((0,), (1,))) for name in ("c", "c.bytes")
    ]


def test_dtypes_of_later_versions_have_a_shape(tmp_path: Path) -> None:
    """An unknown dtype does not hide the tensor's shape."""
    arguments = (_Stored("0", "ByteStorage", 8), 0, (2, 4), (4, 1), False, {}, Global("torch", "float2_odd"))
    call = Call(Global("torch._utils", "_rebuild_tensor_v3"), arguments)
    tensor = syncheck.read(str(save_pth(tmp_path / "f.pth", {"w": np.ones(2, np.float32), "t": call}))).tensors["t"]
    assert (tensor.refused, tensor.shape) == (Refusal.UNKNOWN_DTYPE(), (2, 4))


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_scales_of_microscaling_formats_are_measured(tmp_path: Path, ending: str) -> None:
    """Differences of float8_e8m0fnu, unsigned powers of two, are computed from its values."""
    for rank, scales in enumerate(([1.0, 0.5, 2.0**127, 2.0**-127], [1.0, 4.0, 2.0**126, 2.0**-127])):
        array = np.array(scales, ml_dtypes.float8_e8m0fnu)
        if ending == "safetensors":
            save_safetensors(tmp_path / f"rank{rank}.safetensors", {"s": array})
        else:
            torch.save({"s": array}, tmp_path / f"rank{rank}.pth")
    (diff,) = syncheck.compare(tmp_path).groups[0].tensors
    assert (diff.dtype, diff.mismatched, diff.max_abs, diff.max_ulp) == ("float8_e8m0fnu", 2, 2.0**126, 3)


def test_a_huge_view_is_refused(tmp_path: Path) -> None:
    """A number expanded to 400 GB, minutes of reading, is counted and not compared; a small view is read."""
    for rank in range(2):
        torch.save(
            {"huge": torch.zeros(1).expand(10**11), "small": torch.ones(1).expand(100), "w": torch.ones(1)},
            tmp_path / f"rank{rank}.pth",
        )
    (group,) = syncheck.compare(tmp_path).groups
    (diff,) = group.tensors
    assert (group.counts.identical, diff.name, diff.reason, diff.shape) == (2, "huge", Reason.REFUSED, (10**11,))
    assert diff.detail == Detail.REFUSED(refusal=Refusal.HUGE_VIEW(stored=4, shown=4 * 10**11))
