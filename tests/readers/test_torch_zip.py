"""Our reader of torch.save files against torch itself."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import syncheck
from syncheck.blocks import Files, ranges
from syncheck.dtypes import DTYPES
from syncheck.errors import MalformedFile, NotACheckpoint, UnsupportedFormat

if TYPE_CHECKING:
    from pathlib import Path


def content(path: Path, name: str) -> bytes:
    """Return a tensor's bytes in C order, as our reader gives them."""
    tensor = syncheck.read(str(path)).tensors[name]
    with Files() as files:
        return b"".join(bytes(files.read(tensor, start, count, slot=0)) for start, count in ranges([tensor]))


def expected(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes in C order, as torch has them."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""


def shapes_and_views() -> dict[str, torch.Tensor]:
    """Return tensors whose bytes lie in every way that torch.save can write."""
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


def test_bytes_are_torchs(tmp_path: Path) -> None:
    """Whatever the storage, offset, strides and pending operations, the bytes are those that torch loads."""
    tensors = shapes_and_views()
    torch.save(tensors, tmp_path / "f.pth")
    loaded = torch.load(tmp_path / "f.pth", weights_only=True)
    read = syncheck.read(str(tmp_path / "f.pth")).tensors
    assert list(read) == list(tensors)
    for name, tensor in loaded.items():
        assert read[name].shape == tuple(tensor.shape)
        assert content(tmp_path / "f.pth", name) == expected(tensor), name


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype(tmp_path: Path, name: str) -> None:
    """Each dtype of the table is read under torch's name, with torch's bytes."""
    dtype = getattr(torch, name)
    raw = torch.randint(0, 2, (40,), dtype=torch.uint8)
    tensor = raw.bool() if name == "bool" else raw.repeat(4).view(dtype)
    torch.save({"t": tensor}, tmp_path / "f.pth")
    assert syncheck.read(str(tmp_path / "f.pth")).tensors["t"].dtype == name
    assert content(tmp_path / "f.pth", "t") == expected(tensor)


def training_checkpoint() -> dict[str, Any]:
    """Return what a training script saves after one step of AdamW."""
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
    """The model's key is no part of names, and optimizer state is named by its parameter, not by an integer."""
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


def test_param_names_that_torch_stored_come_first(tmp_path: Path) -> None:
    """An optimizer built from named parameters in another order says itself whose state it holds."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(list(model.named_parameters())[::-1])
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "f.pth")
    wanted = expected(optimizer.state[model[0].weight]["exp_avg"])
    assert content(tmp_path / "f.pth", "optimizer.0.weight.exp_avg") == wanted


def test_zip_of_something_else_is_no_checkpoint(tmp_path: Path) -> None:
    """A zip without data.pkl is named for what it is."""
    np.savez(tmp_path / "f.npz", a=np.ones(2))
    with pytest.raises(NotACheckpoint, match=r"a zip with 0 records data\.pkl; needed one, as torch\.save writes"):
        syncheck.read(str(tmp_path / "f.npz"))


def test_unknown_classes_are_inert_and_their_tensors_found(tmp_path: Path) -> None:
    """An argparse.Namespace is listed as a stub, and a tensor in it is still there."""
    torch.save({"w": torch.ones(2), "args": argparse.Namespace(t=torch.zeros(3))}, tmp_path / "f.pth")
    snapshot = syncheck.read(str(tmp_path / "f.pth"))
    assert snapshot.stubs == ("argparse.Namespace",)
    assert set(snapshot.tensors) == {"w", "args.t"}


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_what_is_not_read_is_counted(tmp_path: Path) -> None:
    """Sparse, quantized and meta tensors are there, refused with a reason, and counted."""
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
    assert (report.counts.identical, report.counts.not_compared) == (1, len(odd))


def test_what_is_not_read_can_still_be_missing(tmp_path: Path) -> None:
    """A tensor that is refused on one rank and absent on the other is missing there, whatever it holds."""
    torch.save({"w": torch.ones(2), "meta": torch.zeros(2, device="meta")}, tmp_path / "m_rank0.pth")
    torch.save({"w": torch.ones(2)}, tmp_path / "m_rank1.pth")
    (finding,) = syncheck.compare(tmp_path).groups[0].findings
    assert (finding.code, finding.evidence) == ("SYN101", "1 tensor not on rank 1: meta")


def test_numpy_arrays_are_tensors(tmp_path: Path) -> None:
    """Arrays of every order and byte order are compared like tensors, scalars like Python's numbers."""
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
        "o": "a numpy array of dtype O8",
        "s": "a numpy array of dtype U1",
    }


def test_dtensor_is_sharded_and_not_different(tmp_path: Path) -> None:
    """Shards of a DTensor that differ by design are counted as not compared and never called different."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        mesh = init_device_mesh("cpu", (1,))
        for rank in range(2):
            shard = DTensor.from_local(torch.full((2, 2), float(rank)), mesh, [Shard(0)])
            torch.save({"w": shard, "bn": torch.ones(2)}, tmp_path / f"m_rank{rank}.pth")
    finally:
        dist.destroy_process_group()
    report = syncheck.compare(tmp_path)
    (diff,) = report.groups[0].tensors
    assert (diff.name, diff.status, diff.reason) == ("w", "not_compared", "sharded")
    assert report.verdict == "in_sync"


@pytest.mark.parametrize("name", ["whole", "transposed"])
def test_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path, name: str) -> None:
    """A file that is cut while it is compared is malformed, whichever way its tensor is read."""
    torch.save({name: shapes_and_views()[name]}, tmp_path / "f.pth")
    tensor = syncheck.read(str(tmp_path / "f.pth")).tensors[name]
    with Files() as files:
        files.descriptor(tensor)
        with (tmp_path / "f.pth").open("r+b") as file:
            file.truncate(tensor.offset + 100)
        with pytest.raises(MalformedFile, match=f"tensor '{name}': the file ends before"):
            files.read(tensor, 0, next(ranges([tensor]))[1], slot=0)


def test_legacy_format_is_named(tmp_path: Path) -> None:
    """A file of before torch 1.6 is recognized, with what to do."""
    torch.save({"w": torch.ones(2)}, tmp_path / "f.pth", _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedFormat, match=r"before torch 1\.6\. Load it and torch\.save it again"):
        syncheck.read(str(tmp_path / "f.pth"))


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9, 0.999])
def test_cut_file_is_one_line(tmp_path: Path, keep: float) -> None:
    """A file that is cut short anywhere is malformed, in one line that names it."""
    torch.save({"w": torch.randn(1000)}, tmp_path / "f.pth")
    data = (tmp_path / "f.pth").read_bytes()
    (tmp_path / "f.pth").write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(MalformedFile, match=r"f\.pth: zip directory: ") as caught:
        syncheck.read(str(tmp_path / "f.pth"))
    assert "\n" not in str(caught.value)


def test_storage_that_is_shorter_than_its_tensor_is_refused(tmp_path: Path) -> None:
    """A tensor that claims more bytes than its record holds is malformed before anything is allocated."""
    torch.save({"w": torch.zeros(201)}, tmp_path / "f.pth")
    data = (tmp_path / "f.pth").read_bytes()
    assert data.count(b"K\xc9") == 2  # opcode BININT1, 201: the storage's size and the tensor's
    (tmp_path / "f.pth").write_bytes(data.replace(b"K\xc9", b"K\xff"))
    with pytest.raises(MalformedFile, match=r"tensor 'w' ends at byte 1020 of a record of 804"):
        syncheck.read(str(tmp_path / "f.pth"))
