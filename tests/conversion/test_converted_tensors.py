"""Tensors that differ in more than the accepted conversion are compared after it, with the place and the size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import syncheck
from syncheck.diagnose.model_remainder import Unexplained
from syncheck.messages import Note
from syncheck.options import DiffOptions

torch = pytest.importorskip("torch")

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NAME = "layers.1.up.weight"
SHAPE = (24, 16)


def compare(
    folder: Path, dtype: Any, damage: Callable[[Any], Any], *, is_stored_back: bool = False, **options: Any
) -> syncheck.Report:
    """Compare float32 weights with their conversion, in which one tensor has another damage.

    is_stored_back: whether the converted weights are stored as float32 again.
    """
    torch.manual_seed(0)
    model = {f"layers.{layer}.{part}.weight": torch.randn(SHAPE) for layer in range(3) for part in ("up", "down")}
    copy = {name: weight.to(dtype) for name, weight in model.items()}
    copy[NAME] = damage(copy[NAME].float().clone()).to(dtype)
    if is_stored_back:
        copy = {name: weight.float() for name, weight in copy.items()}
    torch.save(model, folder / "a.pt")
    torch.save(copy, folder / "b.pt")
    options = {"cast": str(dtype).removeprefix("torch.")} | options
    return syncheck.diff(folder / "a.pt", folder / "b.pt", options=DiffOptions(**options))


def set_elements(part: Any, value: float) -> Callable[[Any], Any]:
    """Return the damage that sets a part of a tensor to a value."""

    def damage(weight: Any) -> Any:
        weight[part] = value
        return weight

    return damage


DAMAGES = [
    (torch.bfloat16, set_elements((3, 4), 7), 1, (3, 4)),
    (torch.float16, set_elements(5, -9), 16, None),
    (torch.bfloat16, set_elements((slice(None), 2), 0), 24, None),
    (torch.float16, set_elements((0, 0), float("nan")), 1, (0, 0)),
    (torch.float8_e4m3fn, set_elements((23, slice(14, 16)), 8), 2, None),
]


@pytest.mark.parametrize(("dtype", "damage", "count", "index"), DAMAGES)
@pytest.mark.parametrize("is_stored_back", [False, True])
def test_the_number_and_the_place_of_other_values(
    tmp_path: Path, dtype: Any, damage: Any, count: int, index: tuple[int, int] | None, is_stored_back: bool
) -> None:
    """The tensor counts as different, and all others as close, also if B has the dtype of A again."""
    report = compare(tmp_path, dtype, damage, is_stored_back=is_stored_back)
    (group,) = report.groups
    assert (report.exit_code, report.counts.different, report.counts.close, report.counts.not_compared) == (1, 1, 5, 0)
    (diff,) = [diff for diff in group.tensors if diff.status == "different"]
    assert (diff.name, diff.mismatched) == (NAME, count)
    if index is not None:
        assert diff.index == index
        assert {place.path for place in diff.places.values()} == {str(tmp_path / "a.pt"), str(tmp_path / "b.pt")}
    assert [note.parameters["names"] for note in group.notes if note.code is Note.CONVERTED] == [(NAME,)]
    assert "SYN102" not in {finding.code for finding in group.findings}


@pytest.mark.parametrize("is_stored_back", [False, True])
def test_a_part_that_was_not_converted_is_named(tmp_path: Path, is_stored_back: bool) -> None:
    """Zeros in place of some rows have the same cause as without a conversion."""
    report = compare(tmp_path, torch.bfloat16, set_elements(slice(3, 7), 0), is_stored_back=is_stored_back)
    (finding,) = report.findings
    assert (finding.code, finding.cause.code) == ("SYN399", Unexplained.CAUSE_CONSTANT)
    (rows,) = finding.facts[-1].parameters["ranges"]
    assert (rows.parameters["first"], rows.parameters["last"]) == (3, 6)


def test_without_the_option_the_dtypes_differ(tmp_path: Path) -> None:
    """Nothing states in which dtype the values should be compared."""
    report = compare(tmp_path, torch.bfloat16, set_elements(5, -9), cast=None)
    assert (report.exit_code, report.counts.different, report.counts.not_compared) == (1, 0, 6)


def test_a_tolerance_accepts_no_other_conversion(tmp_path: Path) -> None:
    """Values within the tolerance of the conversion, which are not its result, stay a difference of dtypes."""
    report = compare(tmp_path, torch.bfloat16, lambda weight: weight * 1.01, rtol=0.1, atol=0.1)
    assert (report.exit_code, report.counts.close) == (1, 5)
