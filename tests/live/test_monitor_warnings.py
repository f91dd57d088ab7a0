"""A monitor and findings that are only warnings: the run continues unless stop_at asks for more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from support.agreement import all_pass, all_raise, each_rank
from support.listings import find_all, list_codes, list_fields, read_json_lines
from support.monitored import Watched, flip_at

from syncheck.errors import UsageError
from syncheck.live import SyncMonitor

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.testing import Rank


def _codes(watched: Watched) -> list[tuple[str, str]]:
    assert watched.monitor.last is not None
    findings = list(watched.monitor.last.findings)
    return list_fields(findings, "code", "severity")


def _round_at(step: int, rank: int) -> Any:
    """Return a fault: the last bit of two weights changes on one rank, as after a sum in another order."""

    def plant(now: int, model: Any) -> None:
        if now == step and dist.get_rank() == rank:
            with torch.no_grad():
                weight = model.fc.weight.view(-1)
                weight[:2] = torch.nextafter(weight[:2], torch.full((2,), torch.inf))

    return plant


@pytest.mark.syncheck(ranks=2)
def test_local_statistics_do_not_stop_a_run(syncheck_rank: Rank, tmp_path: Path) -> None:
    """Plain DDP with BatchNorm trains to the end with the default action; the events have the warning."""
    events = tmp_path / "events.jsonl"
    watched = Watched(norm=True)
    report = all_pass(each_rank(watched.run, 6, events=events if syncheck_rank.rank == 0 else None))
    assert watched.monitor.checks == 3
    assert (report.verdict, _codes(watched)) == ("out_of_sync", [("SYN201", "warning")])
    if syncheck_rank.rank == 0:
        rows = read_json_lines(events)
        assert list_fields(find_all(rows, event="check"), "verdict") == ["out_of_sync"] * 3
        assert list_fields(find_all(rows, event="end"), "exception") == [None]


@pytest.mark.syncheck(ranks=2)
def test_warnings_stop_a_run_that_asks_for_it(syncheck_rank: Rank) -> None:
    """With stop_at="warning" the same run stops at its first check on all ranks."""
    watched = Watched(norm=True)
    outcome = all_raise(each_rank(watched.run, 6, stop_at="warning"))
    assert list_codes(outcome.findings) == ["SYN201"]
    assert watched.monitor.checks == 1


@pytest.mark.syncheck(ranks=2)
def test_a_warning_beside_an_error_stops(syncheck_rank: Rank) -> None:
    """A bit flip beside local statistics is an error, and stops the run."""
    watched = Watched(norm=True, plant=flip_at(3, rank=1))
    outcome = all_raise(each_rank(watched.run, 6))
    assert set(list_fields(outcome.findings, "severity")) >= {"error"}
    assert watched.monitor.checks == 2


@pytest.mark.syncheck(ranks=2)
def test_a_repair_without_a_majority_continues_after_a_warning(syncheck_rank: Rank) -> None:
    """Local statistics have no majority: "resync" refuses, and the run continues."""
    watched = Watched(norm=True)
    report = all_pass(each_rank(watched.run, 4, on_desync="resync"))
    assert (report.verdict, _codes(watched)) == ("out_of_sync", [("SYN201", "warning")])
    assert watched.monitor.checks == 2


@pytest.mark.syncheck(ranks=3)
def test_a_repair_with_a_majority_repairs_a_warning(syncheck_rank: Rank) -> None:
    """A rounding difference on one of three ranks is a warning, and "resync" still repairs it."""
    watched = Watched(plant=_round_at(2, rank=1))
    all_pass(each_rank(watched.run, 4, on_desync="resync"))
    verdicts = {step: report.verdict for step, report in watched.returned.items() if report is not None}
    assert verdicts == {2: "out_of_sync", 4: "in_sync"}


@pytest.mark.syncheck(ranks=2)
def test_different_severities_raise_on_all_ranks(syncheck_rank: Rank) -> None:
    """If one rank would stop and the other would continue, the first check raises on both."""
    watched = Watched()
    watched.start(stop_at=("error", "warning")[syncheck_rank.rank])
    all_raise(each_rank(watched.monitor.check), "UsageError")


def test_an_unknown_severity_is_refused() -> None:
    """The monitor raises when it is created."""
    for value in ("info", None, "errors"):
        with pytest.raises(UsageError):
            SyncMonitor(torch.nn.Linear(1, 1), stop_at=value)  # type: ignore[arg-type]
