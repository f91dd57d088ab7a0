"""The confusion matrix of planted desyncs and findings counts what is right and names what is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from types import ModuleType

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"


@pytest.fixture
def confusion(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program, imported."""
    monkeypatch.syspath_prepend(str(FIXTURES))
    import confusion

    return confusion


def outcome(confusion: ModuleType, fault: str | None, found: dict[str, tuple[int, ...]], started: int = 4) -> object:
    """One run's result: what it has, the findings allowed beside SYN201 none."""
    return confusion.Outcome(confusion.Trial(fault, (), started, 12, allowed=frozenset({"SYN201"})), found)


@pytest.mark.parametrize(
    ("fault", "found", "problem"),
    [
        ("skipped-step", {"SYN214": (3,)}, ""),
        ("skipped-step", {"SYN214": (3,), "SYN201": (0, 1, 2, 3)}, ""),
        ("skipped-step", {}, "SYN214 missing"),
        ("skipped-step", {"SYN214": (2,)}, "SYN214 suspects [2]"),
        ("skipped-step", {"SYN214": (3,), "SYN211": (3,)}, "SYN211 found"),
        ("skipped-step", {"SYN299": (3,)}, "SYN214 missing; SYN299 found"),
        ("optimizer-on-one-rank", {"SYN215": (0,)}, ""),
        ("forward-through-module", {"SYN211": (3,)}, "SYN211 suspects [3]"),
        (None, {}, ""),
        (None, {"SYN201": (0, 1, 2, 3)}, ""),
        (None, {"SYN240": (3,)}, "SYN240 found"),
    ],
)
def test_wrong_cells_are_seen(
    confusion: ModuleType, fault: str | None, found: dict[str, tuple[int, ...]], problem: str
) -> None:
    """A missing finding, other suspects, and a finding too many are wrong; what is true besides is not."""
    assert outcome(confusion, fault, found).problem == problem


def test_what_cannot_be_told_is_not_to_be_claimed(confusion: ModuleType) -> None:
    """Where a fault leaves no marks of its own, "unexplained" is right, and another cause is wrong."""
    trial = confusion.Trial("skipped-step", (), 4, 12, decidable=False)
    assert confusion.Outcome(trial, {"SYN299": (3,)}).problem == ""
    assert confusion.Outcome(trial, {"SYN211": (3,)}).problem == "SYN211 found"
    assert confusion.Outcome(trial, {"SYN211": (3,)}, hedged=frozenset({"SYN211"})).problem == ""


def test_numbers_are_counted(confusion: ModuleType) -> None:
    """Precision and recall follow from the cells, and every wrong one is named with a command to see it."""
    outcomes = [
        outcome(confusion, "skipped-step", {"SYN214": (3,)}),
        outcome(confusion, "skipped-step", {"SYN299": (3,)}),
        outcome(confusion, None, {}),
        outcome(confusion, None, {"SYN240": (3,)}),
    ]
    table, text = confusion.table(outcomes), confusion.summary(outcomes)
    assert "| planted | own | runs | 214 | 240 | 299 | none | own found | suspects |" in table
    assert "| skipped-step | SYN214 | 2 | **1** |  | 1 |  | 1/2 | 1/1 |" in table
    assert "| clean |  | 2 |  | 1 |  | 1 |  |  |" in table
    assert "Recall: 1 of 2 planted desyncs led to their own finding (50.0%)." in text
    assert "Precision: 1 of 3 findings were right (33.3%)" in text
    assert "Clean runs: 2, of them 1 with a false alarm." in text
    assert text.count("python train/run.py --out DIR --spawn 4 --max-steps 12 --save-per-rank") == 2


def test_every_fault_and_every_method_has_runs(confusion: ModuleType) -> None:
    """Every planted desync is tried on several models and numbers of ranks, and 50 runs or more have none."""
    faults, clean = confusion.planted(), confusion.clean()
    for name in {trial.fault for trial in faults}:
        assert len({(trial.options[1], trial.started) for trial in faults if trial.fault == name}) >= 3
    assert len({trial.name for trial in (*faults, *clean)}) == len(faults) + len(clean)
    assert len(clean) >= 50
    assert {word for trial in clean for word in trial.options} >= {"zero", "fsdp", "hsdp", "localsgd", "dp"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_some_live_runs() -> None:
    """The program trains, compares, prints the matrix, and leaves with 0 where all cells are right."""
    command = [sys.executable, str(FIXTURES / "confusion.py"), "--quick", "damaged-on-disk", "last-save-failed"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == ("SYN223 missing" in done.stdout), done.stderr
    assert "| last-save-failed | SYN106 | 1 |" in done.stdout
    assert "of 2 planted desyncs led to their own finding" in done.stdout
