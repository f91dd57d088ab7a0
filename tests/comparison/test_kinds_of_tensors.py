"""Tensors of any two kinds are compared without a crash, and only equal bytes that were compared are in sync."""

from __future__ import annotations

import itertools
import shutil
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.checkpoints import save_header

import syncheck
from syncheck.errors import SyncheckError
from syncheck.readers.fingerprints import fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DTYPES = "float32 float8_e4m3fn complex64 int8 bool complex32".split()
# Codes of dtypes in safetensors that syncheck does not read, or that no library has.
CODES = {"F4": 8, "XX": 16}
# They have no values, so equal files are undecided.
WITHOUT_VALUES = {"meta", "meta fingerprint"}


def make_quantized(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return quantized tensors of every scheme."""
    scales, zeros = torch.full((4,), 0.02, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    return {
        "per tensor": torch.quantize_per_tensor(weight, 0.02, 0, torch.qint8),
        "per channel": torch.quantize_per_channel(weight, scales, zeros, 0, torch.quint8),
        "packed": torch.quantize_per_tensor(weight, 0.5, 0, torch.quint4x2),
    }


def make_tensors() -> dict[str, Any]:
    """Return one tensor of each kind."""
    torch.manual_seed(0)
    weight = torch.randn(4, 4)
    part = weight * (weight > 0)
    tensors: dict[str, Any] = {name: (weight * 3).abs().to(getattr(torch, name)) for name in DTYPES}
    tensors |= make_quantized(weight)
    tensors |= {
        "coo": part.to_sparse(),
        "coo of 3": torch.eye(3).to_sparse(),
        "csr": part.to_sparse_csr(),
        "bsr": part.to_sparse_bsr((2, 2)),
        "nested": torch.nested.nested_tensor([weight, weight[:2]]),
        "meta": torch.empty(4, 4, device="meta"),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(1.5),
        "text": torch.zeros(4, 4).numpy().astype("U1"),
    }
    return tensors


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a file with each kind of tensor."""
    folder = tmp_path_factory.mktemp("kinds")
    result: dict[str, Path] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, tensor in make_tensors().items():
            result[name] = folder / f"{name}.pt"
            torch.save({"layer.weight": tensor, "layer.bias": torch.ones(4)}, result[name])
    for code, size in CODES.items():
        result[code] = folder / f"{code}.safetensors"
        header = {
            "layer.bias": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
            "layer.weight": {"dtype": code, "shape": [4, 4], "data_offsets": [16, 16 + size]},
        }
        save_header(result[code], header, torch.ones(4).numpy().tobytes() + bytes(size))
    for name in ("float32", "coo", "meta"):
        result[f"{name} fingerprint"] = folder / f"{name}.json"
        result[f"{name} fingerprint"].write_text(fingerprint(syncheck.read(str(result[name]))))
    return result


def find_exit_code(call: Callable[[], syncheck.Report]) -> int:
    """Return the exit code of a comparison."""
    try:
        return call().exit_code
    except SyncheckError as error:
        return error.exit_code


@pytest.mark.slow
def test_diff_of_any_two_kinds(files: dict[str, Path]) -> None:
    """`diff` is in sync for a copy only, unless the kind has no values, and for a file and its fingerprint."""
    for first, second in itertools.product(files, repeat=2):
        code = find_exit_code(lambda a=files[first], b=files[second]: syncheck.diff(a, b))  # type: ignore[misc]
        is_same = first.removesuffix(" fingerprint") == second.removesuffix(" fingerprint")
        expected = (2 if first in WITHOUT_VALUES else 0) if is_same else 1
        assert code == expected, (first, second)


def test_compare_of_any_two_kinds(files: dict[str, Path], tmp_path: Path) -> None:
    """`compare` of two ranks has the same verdicts."""
    for number, (first, second) in enumerate(itertools.combinations_with_replacement(files, 2)):
        paths = []
        for rank, name in enumerate((first, second)):
            paths.append(tmp_path / f"{number}_rank{rank}{files[name].suffix}")
            shutil.copyfile(files[name], paths[-1])
        code = find_exit_code(lambda a=paths[0], b=paths[1]: syncheck.compare(a, b))  # type: ignore[misc]
        is_same = first.removesuffix(" fingerprint") == second.removesuffix(" fingerprint")
        expected = (2 if first in WITHOUT_VALUES else 0) if is_same else 1
        assert code == expected, (first, second)


def test_equal_bytes_of_another_dtype_differ(tmp_path: Path) -> None:
    """Integers of quantized tensors are compared with their dtype, and bytes of unknown dtypes with their shape."""
    ones = torch.ones(3, 3, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, integers in (("a", ones), ("b", ones.to(torch.int8))):
            torch.save({"w": torch._make_per_tensor_quantized_tensor(integers, 0.1, 0)}, tmp_path / f"{name}.pt")
    assert syncheck.diff(tmp_path / "a.pt", tmp_path / "b.pt").exit_code == 1
    for name, shape in (("a", [4, 4]), ("b", [16]), ("c", [])):
        header = {"w": {"dtype": "F4", "shape": shape, "data_offsets": [0, 8]}}
        save_header(tmp_path / f"{name}.safetensors", header, bytes(8))
    for name in "bc":
        assert syncheck.diff(tmp_path / "a.safetensors", tmp_path / f"{name}.safetensors").exit_code == 1
