"""An accepted conversion is no permission to lose elements beyond the range of its dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import syncheck
from syncheck.messages import Detail, Note
from syncheck.options import DiffOptions

if TYPE_CHECKING:
    from pathlib import Path

BODY = {"body.weight": torch.randn(12, 8), "norm.weight": torch.ones(8)}
NAME = "up.weight"


def make(fill: dict[tuple[int, int], float], base: torch.Tensor | None = None) -> torch.Tensor:
    """Return a matrix with some elements of other values."""
    matrix = torch.linspace(-1, 1, 60).reshape(6, 10) if base is None else base.clone()
    for index, value in fill.items():
        matrix[index] = value
    return matrix


def compare(folder: Path, tensor: torch.Tensor, dtype: torch.dtype, stored: torch.dtype, **options: Any) -> Any:
    """Compare a model with its conversion. stored: the dtype in which B stores the result."""
    a = {**BODY, NAME: tensor}
    b = {name: each.to(dtype).to(stored) for name, each in a.items()}
    torch.save({"model": a}, folder / "a.pt")
    torch.save({"model": b}, folder / "b.pt")
    return syncheck.diff(folder / "a.pt", folder / "b.pt", options=DiffOptions(**options))


def find_losses(report: syncheck.Report) -> dict[str, Any]:
    """Return the parameters of the relation of the tensor; empty if it counts as equal or close."""
    [diff] = [diff for diff in report.groups[-1].tensors if diff.name == NAME]
    relation = None if diff.evidence is None else diff.evidence.relation
    return dict(relation.parameters) if diff.out_of_sync and relation is not None else {}


TINY = torch.linspace(1e-9, 2e-9, 60).reshape(6, 10)
HALF, SMALL = torch.float16, torch.float8_e4m3fn
LOST = [
    (make({(2, 2): 70000.0}), HALF, ("overflowed", 1, (2, 2))),
    (make({(1, 3): -1e9, (5, 9): 65520.0}), HALF, ("overflowed", 2, (1, 3))),
    (make({(4, 0): 600.0}), SMALL, ("overflowed", 1, (4, 0))),  # becomes 448
    (TINY, HALF, ("flushed", 60, (0, 0))),
    (make({(0, 0): 0.0, (0, 1): 0.0}, TINY), HALF, ("flushed", 58, (0, 2))),
    (make({(3, 7): 1e-9}, torch.zeros(6, 10)), HALF, ("flushed", 1, (3, 7))),
    (TINY * 1e5, SMALL, ("flushed", 60, (0, 0))),
]


@pytest.mark.parametrize(("tensor", "dtype", "expected"), LOST)
def test_lost_elements_are_no_conversion(
    tmp_path: Path, tensor: torch.Tensor, dtype: torch.dtype, expected: Any
) -> None:
    """SYN307 states the number and the place of the elements, with and without the option."""
    name = str(dtype).removeprefix("torch.")
    for cast in (name, None):
        report = compare(tmp_path, tensor, dtype, dtype, cast=cast)
        assert report.exit_code == 1
        [finding] = report.groups[-1].findings
        assert (finding.code, NAME in finding.tensors) == ("SYN307", True)
        parameters = find_losses(report)
        assert (parameters["pattern"], parameters["count"], parameters["index"]) == expected
        assert finding.fix.code.name == "FIX_BEYOND_RANGE"
    assert compare(tmp_path, tensor, dtype, dtype, cast=name, allow=("SYN307",)).exit_code == 0


@pytest.mark.parametrize(("tensor", "dtype", "expected"), LOST)
def test_a_copy_that_is_stored_in_float32_again(
    tmp_path: Path, tensor: torch.Tensor, dtype: torch.dtype, expected: Any
) -> None:
    """The exit code is the same. Zeros in the dtype of A do not show a conversion, whatever the cause of them is."""
    report = compare(tmp_path, tensor, dtype, torch.float32, cast=str(dtype).removeprefix("torch."))
    assert report.exit_code == 1
    if expected[0] == "overflowed":
        parameters = find_losses(report)
        assert (parameters["pattern"], parameters["count"], parameters["index"]) == expected


@pytest.mark.parametrize(
    ("tensor", "dtype", "flushed", "index"),
    [
        (make({(1, 1): 1e-9, (2, 5): -2e-8}), "float16", 2, [1, 1]),
        (make({(5, 9): 1e-5}), "float8_e4m3fn", None, None),
        (make({(0, 3): float("inf"), (0, 4): float("nan")}), "float16", 0, None),
        (torch.zeros(6, 10), "float16", 0, None),
        (make({(1, 1): 1e-9}), "bfloat16", 0, None),
    ],
)
def test_single_elements_that_become_zero(
    tmp_path: Path, tensor: torch.Tensor, dtype: str, flushed: int | None, index: list[int] | None
) -> None:
    """They are rounding, which the option accepts, and a note of the summary counts them."""
    torch_dtype = getattr(torch, dtype)
    report = compare(tmp_path, tensor, torch_dtype, torch_dtype, cast=dtype)
    assert report.exit_code == 0
    noted = [note for note in report.groups[-1].notes if note.code is Note.FLUSHED]
    if flushed is None:
        flushed = int(((tensor != 0) & (tensor.to(torch_dtype).float() == 0)).sum())
        index = (tensor.to(torch_dtype).float() == 0).nonzero()[0].tolist()
    tensors = [] if not noted else noted[0].parameters["tensors"]
    expected = [Detail.FLUSHED(name=NAME, flushed=flushed, index=str(index))] if flushed else []
    assert [tensor for tensor in tensors if tensor.parameters["name"] == NAME] == expected
