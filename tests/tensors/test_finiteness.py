"""NaN and infinity in equal tensors: the search in blocks, and what reports say."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.checkpoints import select_summary
from support.listings import list_codes

import syncheck
from syncheck.live import SyncMonitor
from syncheck.report import github, html, json_document, markdown, plain, text, words
from syncheck.report.events import read_events
from syncheck.tensors import finiteness
from syncheck.tensors.dtypes import DTYPES
from syncheck.tensors.finiteness import FiniteScan
from syncheck.testing import compare

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.testing import Rank

FLOATS = [name for name, row in DTYPES.items() if row.family in ("float", "complex")]
VALUES = (0.0, -0.0, 1.0, -3.5, 240.0, 448.0, -57344.0, 65504.0, 3.3e38, math.inf, -math.inf, math.nan)


@pytest.mark.parametrize("without_numpy", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_search_agrees_with_torch(dtype: str, without_numpy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value of every dtype is found if and only if torch converts it to NaN or infinity."""
    if without_numpy:
        monkeypatch.setattr(finiteness, "find_loaded", lambda _name: None)
    for value in VALUES:
        tensor = torch.tensor([1.0, value, 0.5], dtype=torch.float64).to(getattr(torch, dtype))
        numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor.double()
        data = bytes(tensor.view(torch.uint8).numpy().data)
        for nan_only, expected in ((False, not numbers.isfinite().all()), (True, bool(numbers.isnan().any()))):
            scan = FiniteScan(dtype, nan_only=nan_only)
            scan.look(data)
            assert scan.found == expected, (value, nan_only)


def save(path: Path, step: int, rank: int, value: float) -> None:
    """Save a checkpoint with one value in a parameter, and a mask of infinities."""
    model = {"a.weight": torch.tensor([1.0, value]), "b.weight": torch.ones(3), "mask": torch.tensor([0.0, -math.inf])}
    torch.save({"model": model, "step": step}, path / f"step{step}_rank{rank}.pth")


@pytest.fixture
def run_of_three_steps(tmp_path: Path) -> Path:
    """Checkpoints of two equal ranks at three steps; the last two hold NaN."""
    for step, value in ((10, 1.0), (20, math.nan), (30, math.nan)):
        for rank in range(2):
            save(tmp_path, step, rank, value)
    return tmp_path


def test_reports_say_since_when_the_model_is_not_finite(run_of_three_steps: Path) -> None:
    """Equal NaN stays in sync, and every format names the tensors and the first step."""
    report = syncheck.compare(str(run_of_three_steps / "*.pth"), options=syncheck.Options(buffers=("mask",)))
    assert (report.verdict, report.exit_code) == ("in_sync", 0)
    first, _, last = report.groups
    assert first.not_finite is None
    result = last.not_finite
    assert result is not None
    assert (result.names, result.count, result.since, result.finite, result.first) == (
        ("a.weight",), 1, 20, 10, ("a.weight",)
    )  # fmt: skip
    (fact,) = words.not_finite_lines(report)
    for parts in (text.draw_comparison(report, 5), text.draw_overview(report, 5)):
        assert fact in select_summary(plain.render(parts))
    document = json.loads(json_document.render(report, "0"))
    assert document["groups"][2]["not_finite"]["since"] == 20
    assert document["groups"][2]["notes"][0] == fact
    for rendered in (markdown.render(report), html.render(report, "0"), github.render(report)):
        assert "a.weight" in rendered
        assert words.verdict_line(report) in rendered


def test_two_models_and_differences(tmp_path: Path) -> None:
    """Two equal models with NaN are reported likewise; a tensor that differs counts if all replicas hold NaN."""
    state = {"a.weight": torch.tensor([math.nan, 1.0]), "b.weight": torch.ones(2)}
    for name in ("x", "y"):
        torch.save(state, tmp_path / f"{name}.pth")
    report = syncheck.diff(tmp_path / "x.pth", tmp_path / "y.pth")
    assert (report.verdict, report.groups[0].not_finite.names) == ("in_sync", ("a.weight",))
    second = {"a.weight": torch.tensor([math.nan, 2.0]), "b.weight": torch.tensor([1.0, math.nan])}
    report = compare(state, second)
    assert (report.verdict, report.groups[0].not_finite.names) == ("out_of_sync", ("a.weight",))


@pytest.mark.syncheck(ranks=2)
def test_live_checks_and_events(syncheck_rank: Rank, tmp_path: Path) -> None:
    """A live check names tensors that are not finite on all ranks; masks of infinity are usual. Events keep them."""
    model = torch.nn.BatchNorm1d(3)
    model.register_buffer("mask", torch.full((2,), -math.inf))
    events: Any = tmp_path / "events.jsonl"
    with SyncMonitor(model, every=1, events=events, console=False) as monitor:
        assert monitor.check().groups[0].not_finite is None
        monitor.step()
        with torch.no_grad():
            model.bias.fill_(math.nan)
            model.weight.fill_(math.inf)
        assert monitor.step().groups[0].not_finite.names == ("weight", "bias")
    if syncheck_rank.rank == 0:
        result = read_events([events]).groups[-1].not_finite
        assert (result.count, result.since) == (2, 2)


def test_a_plain_comparison_does_not_import_numpy(tmp_path: Path) -> None:
    """Finite tensors are recognized without numpy."""
    paths = [str(tmp_path / name) for name in ("x.pth", "y.pth")]
    for path in paths:
        torch.save({"w": torch.randn(100, generator=torch.Generator().manual_seed(0))}, path)
    code = "import sys, syncheck; syncheck.compare(*sys.argv[1:]); assert 'numpy' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, *paths], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_replicas_of_other_dtypes(tmp_path: Path) -> None:
    """Ranks with another dtype are compared with each other, also if their bytes are no elements of the first dtype."""
    for rank, dtype in enumerate((torch.float64, torch.float64, torch.float32, torch.float32)):
        torch.save({"w": torch.ones(1, dtype=dtype)}, tmp_path / f"run_rank{rank}.pth")
    report = syncheck.compare(tmp_path)
    assert list_codes(report.groups[0].findings) == ["SYN102"]
