"""New and known findings of consecutive checks of a monitor."""

from __future__ import annotations

from groups import make_finding, make_group

from syncheck.live.monitor.monitor import DesyncState
from syncheck.records import Counts, Finding, Report


def found(*findings: Finding) -> Report:
    """Return a report with findings, in sync unless one fails."""
    verdict = "out_of_sync" if any(finding.fails for finding in findings) else "in_sync"
    return Report(verdict, (make_group("model", None, verdict, (), Counts(1), findings=findings),))


def finding(*tensors: str, rank: int = 1, allowed: bool = False) -> Finding:
    """Return a flipped bit in tensors of a rank."""
    return make_finding("SYN220", "bit-flip", "error", (rank,), tensors, "", "", "", allowed=allowed)


def test_a_finding_is_new_once() -> None:
    """A finding is new once, also with fewer tensors; with another tensor or rank it is new again."""
    state = DesyncState()
    first, fewer, more, other = finding("a", "b"), finding("a"), finding("a", "c"), finding("a", rank=2)
    assert state.update(10, found(first)) == (first,)
    assert state.update(20, found(first)) == state.update(30, found(fewer)) == ()
    assert state.update(40, found(more, other)) == (more, other)
    assert state.update(50, found(first, more, other)) == ()
    assert (state.last_good, state.since) == (None, 10)


def test_a_recurring_finding_is_new() -> None:
    """After a check in sync, even with an allowed finding, the same finding is new again."""
    state, flip = DesyncState(), finding("a")
    state.update(10, found(flip))
    assert state.update(20, found(finding("b", allowed=True))) == ()
    assert (state.last_good, state.since) == (20, None)
    assert state.update(30, found(flip)) == (flip,)
    assert (state.last_good, state.since) == (20, 30)


def test_undecided_changes_nothing() -> None:
    """An undecided check changes neither the last step in sync nor the first out of sync."""
    state, flip = DesyncState(), finding("a")
    state.update(10, found(flip))
    assert state.update(20, Report("undecided", ())) == ()
    assert (state.last_good, state.since) == (None, 10)
    assert state.update(30, found(flip)) == ()
