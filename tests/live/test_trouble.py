"""What a monitor takes for new, from one check to the next."""

from __future__ import annotations

from groups import make_finding, make_group

from syncheck.live.monitor import Trouble
from syncheck.records import Counts, Finding, Report


def found(*findings: Finding) -> Report:
    """Return a report with these findings, in sync if there are none that fail."""
    verdict = "out_of_sync" if any(finding.fails for finding in findings) else "in_sync"
    return Report(verdict, (make_group("model", None, verdict, (), Counts(1), findings=findings),))


def finding(*tensors: str, rank: int = 1, allowed: bool = False) -> Finding:
    """Return a flipped bit in these tensors of a rank."""
    return make_finding("SYN220", "bit-flip", "error", (rank,), tensors, "", "", "", allowed=allowed)


def test_a_finding_is_new_once() -> None:
    """The same finding, or one with fewer tensors, is not new; with another tensor or rank it is."""
    trouble = Trouble()
    first, fewer, more, other = finding("a", "b"), finding("a"), finding("a", "c"), finding("a", rank=2)
    assert trouble.seen(10, found(first)) == (first,)
    assert trouble.seen(20, found(first)) == trouble.seen(30, found(fewer)) == ()
    assert trouble.seen(40, found(more, other)) == (more, other)
    assert trouble.seen(50, found(first, more, other)) == ()
    assert (trouble.good, trouble.since) == (None, 10)


def test_what_comes_back_is_new() -> None:
    """After a check in sync, an allowed finding beside it or not, the same finding is new again."""
    trouble, flip = Trouble(), finding("a")
    trouble.seen(10, found(flip))
    assert trouble.seen(20, found(finding("b", allowed=True))) == ()
    assert (trouble.good, trouble.since) == (20, None)
    assert trouble.seen(30, found(flip)) == (flip,)
    assert (trouble.good, trouble.since) == (20, 30)


def test_undecided_tells_nothing() -> None:
    """A check that compared nothing makes the ranks neither apart nor in sync."""
    trouble, flip = Trouble(), finding("a")
    trouble.seen(10, found(flip))
    assert trouble.seen(20, Report("undecided", ())) == ()
    assert (trouble.good, trouble.since) == (None, 10)
    assert trouble.seen(30, found(flip)) == ()
