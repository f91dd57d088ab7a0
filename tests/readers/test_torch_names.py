"""Storages, tensor descriptions and rare dtypes in torch.save files, compared with torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import torch
from checkpoints import Call, Global, _Stored, save_pth, save_safetensors
from dcp_folders import contents

import syncheck
from syncheck.messages import Detail, Refusal
from syncheck.records import Reason

if TYPE_CHECKING:
    from pathlib import Path

VALUES = torch.tensor([1.5, -2.0, 0.25])


def saved(path: Path, tree: Any) -> Path:
    """Save with torch."""
    torch.save(tree, path)
    return path


@pytest.mark.filterwarnings("ignore:TypedStorage")
def test_storages_are_tensors_of_one_dimension(tmp_path: Path) -> None:
    """A storage has the elements of its dtype, or bytes if untyped, also beside a tensor that uses it."""
    # torch saves only one kind of view per storage.
    tree = {"typed": VALUES.storage(), "view": VALUES[1:], "untyped": VALUES.clone().untyped_storage()}
    tree["none"] = torch.FloatStorage()
    raw = VALUES.numpy().tobytes()
    assert contents(saved(tmp_path / "f.pth", tree)) == {
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
    found = syncheck.read(str(saved(tmp_path / "f.pth", tree | more)))
    assert found.stubs == ()
    assert {name: tensor.shape for name, tensor in found.tensors.items()} == {
        "noted": (2,),
        "parameter": (3,),
        "buffer": (4,),
    }
    assert not [tensor for tensor in found.tensors.values() if tensor.refused]
    described = {name: str(more[name]) for name in ("on", "cpu", "layout", "scheme")}
    noted_values = {"noted.note": "x", "parameter.note": "x", "buffer._is_buffer": True, "buffer.persistent": True}
    assert found.values == described | noted_values


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e8m0fnu"])
def test_arrays_of_ml_dtypes_are_read(tmp_path: Path, name: str) -> None:
    """Arrays of a dtype that numpy lacks are compared like tensors."""
    array = np.array([1, 2, 4], getattr(ml_dtypes, name))
    path = saved(tmp_path / "f.pth", {"a": array})
    assert contents(path) == {"a": (name, (3,), array.tobytes())}
    assert syncheck.read(str(path)).stubs == ()


def test_arrays_of_other_dtypes_are_refused(tmp_path: Path) -> None:
    """An array of an unsupported dtype is counted, with the name of its dtype and its shape."""
    path = saved(tmp_path / "f.pth", {"a": np.ones((2, 3), ml_dtypes.int4)})
    tensor = syncheck.read(str(path)).tensors["a"]
    assert (tensor.refused, tensor.shape) == (Refusal.NUMPY_DTYPE(name="ml_dtypes.int4"), (2, 3))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_unsupported_dtypes_have_a_name_and_a_shape(tmp_path: Path) -> None:
    """A tensor of complex32 is counted with dtype and shape, and a shape that differs is found."""
    for rank in range(2):
        saved(tmp_path / f"rank{rank}.pth", {"c": torch.zeros(2, 3 + rank, dtype=torch.complex32)})
    tensor = syncheck.read(str(tmp_path / "rank0.pth")).tensors["c"]
    assert (tensor.refused, tensor.shape) == (Refusal.DTYPE(name="complex32"), (2, 3))
    (diff,) = syncheck.compare(tmp_path).groups[0].tensors
    assert (diff.reason, diff.clusters) == (Reason.SHAPE, ((0,), (1,)))


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
