"""Rows, columns and other indices with a single value in one model are stated with their range and value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support import llama

import syncheck
from syncheck.conversion import constant_parts
from syncheck.diagnose.model_remainder import Unexplained
from syncheck.diagnose.ranges import Ranges
from syncheck.findings import RelationKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from syncheck.findings import Finding

SHAPE = (40, 24)


def diff_after(tmp_path: Path, change: Callable[[Any], None], shape: tuple[int, ...] = SHAPE) -> Finding:
    """Return the finding of B, a changed copy of A, and check that both directions agree."""
    weight = np.random.default_rng(0).standard_normal(shape, np.float32)
    changed = weight.copy()
    change(changed)
    model = {"other": np.arange(64, dtype=np.float32)}
    a = llama.write(tmp_path / "a", model | {"w": weight})
    b = llama.write(tmp_path / "b", model | {"w": changed})
    report = syncheck.diff(a, b)
    (finding,) = report.findings
    relation = get_relation(report)
    reverse = get_relation(syncheck.diff(b, a))
    if relation:
        assert reverse == {**relation, "side": "A"}
    return finding


def get_relation(report: syncheck.Report) -> Mapping[str, Any]:
    """Return the parameters of the constant part of a tensor; empty without one."""
    (diff,) = [tensor for tensor in report.groups[-1].tensors if tensor.name == "w"]
    assert diff.evidence is not None
    relation = diff.evidence.relation
    if relation is None or relation.kind is not RelationKind.CONSTANT_PART:
        return {}
    return relation.parameters


def set_rows(w: Any) -> None:
    """Make some rows zero, with both signs as a mask leaves them."""
    w[8:16] *= 0


def set_single_row(w: Any) -> None:
    """Give one row another value."""
    w[5] = 1.5


def set_two_ranges(w: Any) -> None:
    """Make rows in two places zero."""
    w[3:5] = w[30:] = 0


def set_columns(w: Any) -> None:
    """Make some columns zero."""
    w[:, 20:] = 0


def set_elements(w: Any) -> None:
    """Make elements of a vector zero."""
    w[4:12] = 0


def set_channels(w: Any) -> None:
    """Make channels of a convolution zero."""
    w[:, 1:3] = 0


CASES = [
    (set_rows, SHAPE, Ranges.ROWS, (8, 15), 0),
    (set_single_row, SHAPE, Ranges.ROW, (5, 5), 1.5),
    (set_two_ranges, SHAPE, Ranges.ROWS, (3, 4), 0),
    (set_columns, SHAPE, Ranges.COLUMNS, (20, 23), 0),
    (set_elements, (64,), Ranges.ELEMENTS, (4, 11), 0),
    (set_channels, (8, 6, 3, 3), Ranges.INDICES, (1, 2), 0),
]


@pytest.mark.parametrize(("change", "shape", "unit", "bounds", "value"), CASES)
def test_a_constant_part(
    tmp_path: Path, change: Any, shape: tuple[int, ...], unit: Unexplained, bounds: tuple[int, int], value: float
) -> None:
    """The evidence and the relation have the range and the value, and the cause is that of a missing part."""
    finding = diff_after(tmp_path, change, shape)
    assert (finding.code, finding.cause.code) == ("SYN399", Unexplained.CAUSE_CONSTANT)
    fact = finding.facts[-1]
    assert fact.code == Unexplained.CONSTANT
    assert (fact.parameters["name"], fact.parameters["value"], fact.parameters["side"]) == ("w", value, "B")
    first = fact.parameters["ranges"][0]
    assert (first.code, first.parameters["first"], first.parameters["last"]) == (unit, *bounds)


def set_scattered(w: Any) -> None:
    """Make every second row zero: no block."""
    w[::2] = 0


def set_few_elements(w: Any) -> None:
    """Give a row equal beginnings, and another end."""
    w[4, :10] = 0


def add_noise(w: Any) -> None:
    """Change the whole tensor."""
    w += np.random.default_rng(1).standard_normal(w.shape, np.float32)


@pytest.mark.parametrize("change", [set_scattered, set_few_elements, add_noise])
def test_no_constant_part(tmp_path: Path, change: Any) -> None:
    """Scattered rows, parts of rows and other differences are no constant part."""
    finding = diff_after(tmp_path, change)
    assert Unexplained.CONSTANT not in [fact.code for fact in finding.facts]


def test_other_differences_have_no_such_cause(tmp_path: Path) -> None:
    """If other elements differ too, the range is stated, but it is not the cause."""

    def change(w: Any) -> None:
        w[8:16] = 0
        w[20, 3] += 1

    finding = diff_after(tmp_path, change)
    assert (finding.facts[-1].code, finding.cause.code) == (Unexplained.CONSTANT, Unexplained.CAUSE)


@pytest.mark.parametrize("block", [64, 1 << 10])
def test_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Rows longer than a block are read in parts, and shorter rows together."""
    monkeypatch.setattr(constant_parts, "BLOCK", block)
    assert diff_after(tmp_path, set_two_ranges).facts[-1].code == Unexplained.CONSTANT


def test_rows_that_are_constant_in_both_models(tmp_path: Path) -> None:
    """Rows of padding in both models are no difference; only the other rows are stated."""

    def change(w: Any) -> None:
        w[10:12] = 0

    weight = np.random.default_rng(0).standard_normal(SHAPE, np.float32)
    weight[30:] = 0
    changed = weight.copy()
    change(changed)
    report = syncheck.diff(llama.write(tmp_path / "a", {"w": weight}), llama.write(tmp_path / "b", {"w": changed}))
    assert get_relation(report)["runs"] == (10, 2)
