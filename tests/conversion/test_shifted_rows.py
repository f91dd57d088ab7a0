"""Rows inserted into or removed from a vocabulary shift all further tokens: the first of them is named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import syncheck
from syncheck.diagnose.measures import parameters_of
from syncheck.options import DiffOptions

torch = pytest.importorskip("torch")

if TYPE_CHECKING:
    from pathlib import Path

NAME = "model.embed_tokens.weight"
ROWS, OTHER = torch.randn(50, 8), torch.randn(3, 8)
ZEROS = torch.zeros(14, 8)


def compare(folder: Path, a: Any, b: Any, **options: Any) -> syncheck.Report:
    """Compare two models that differ in one tensor."""
    for side, tensor in (("a", a), ("b", b)):
        torch.save({NAME: tensor.clone(), "body.weight": torch.ones(6, 6)}, folder / f"{side}.pt")
    return syncheck.diff(folder / "a.pt", folder / "b.pt", options=DiffOptions(**options))


def insert(row: int, count: int = 1) -> Any:
    """Return the rows with other rows before a row."""
    return torch.cat([ROWS[:row], OTHER[:count], ROWS[row:]])


CASES = [
    (ROWS, insert(10), "SYN305", (10, 1)),
    (ROWS, torch.cat([insert(10, 3), ZEROS]), "SYN305", (10, 3)),
    # The last row of the padding is lost, and the padding has the same rows.
    (torch.cat([ROWS, ZEROS]), torch.cat([insert(48), ZEROS[1:]]), "SYN305", (48, 1)),
    (insert(0, 2), ROWS, "SYN318", (0, -2)),
    (ROWS, torch.cat([ROWS[:3], ROWS[4:], ZEROS[:1]]), "SYN318", (3, -1)),
    (ROWS, insert(20)[:-1], "SYN318", (20, 1)),
    (ROWS, insert(20).bfloat16(), "SYN305", (20, 1)),
]


@pytest.mark.parametrize(("a", "b", "code", "shift"), CASES)
def test_the_first_shifted_row(tmp_path: Path, a: Any, b: Any, code: str, shift: tuple[int, int]) -> None:
    """Rows of A that B lacks are lost; accepting padding accepts neither."""
    report = compare(tmp_path, a, b, allow=("SYN309",))
    (finding,) = report.findings
    assert (report.exit_code, finding.code, finding.certainty, finding.tensors) == (1, code, "proved", (NAME,))
    (diff,) = [diff for diff in report.tensors if diff.out_of_sync]
    parameters = parameters_of(diff)
    assert (parameters["row"], parameters["shift"]) == shift


OTHER_CAUSES = [
    (ROWS, torch.cat([ROWS, ZEROS]), {"SYN309"}),
    (ROWS, torch.cat([ROWS, OTHER]), {"SYN318"}),
    (ROWS, ROWS[:-2], {"SYN318"}),
    (ROWS, ROWS.roll(1, 0), {"SYN305"}),
    # One further row was changed.
    (ROWS, torch.cat([insert(10)[:30], OTHER[:1], insert(10)[31:]]), {"SYN102"}),
    # Only the last row is at another position.
    (ROWS, torch.cat([ROWS[:-1], OTHER[:1], ROWS[-1:]]), {"SYN102"}),
]


@pytest.mark.parametrize(("a", "b", "codes"), OTHER_CAUSES)
def test_other_changes_are_no_shift(tmp_path: Path, a: Any, b: Any, codes: set[str]) -> None:
    """Additional or lost rows at the end, a permutation, and a shift that is not all."""
    report = compare(tmp_path, a, b)
    assert {finding.code for finding in report.findings} == codes
    (diff,) = [diff for diff in report.tensors if diff.out_of_sync]
    assert "shift" not in parameters_of(diff)
