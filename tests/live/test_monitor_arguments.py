"""Arguments of a monitor, its behavior without a process group, and which findings are new."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from support.agreement import Net
from support.groups import make_finding, make_group
from support.listings import list_fields
from support.monitored import printer

import syncheck
from syncheck import errors, testing
from syncheck.live import SyncMonitor
from syncheck.live.desync_state import DesyncState
from syncheck.records import Counts, Finding, Report


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"every": 0}, "every=0: must be an integer, at least 1"),
        ({"every": 2.5}, "every=2.5: must be an integer, at least 1"),
        ({"start": -1}, "start=-1: must be an integer, at least 0"),
        ({"on_desync": "stop"}, "on_desync='stop': must be raise, warn, resync, or a function of a report"),
        ({"writer": "runs"}, "writer='runs': expected an object with add_scalar(tag, value, step)"),
        ({"console": "log"}, "console='log': expected a rich Console"),
        ({"exclud": "bn*"}, "exclud=: no such option; syncheck.live.check takes "),
        ({"allow": "SYN999"}, "SYN999"),
        ({"only": ("weights",)}, "weights"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_refused_at_once(options: dict[str, Any], says: str) -> None:
    """Invalid arguments raise UsageError in the constructor, not at the first check."""
    with pytest.raises(syncheck.UsageError) as caught:
        SyncMonitor(Net(), **options)
    assert says in str(caught.value)


def test_a_wrong_step_is_refused() -> None:
    """An invalid step number is a UsageError."""
    with pytest.raises(syncheck.UsageError, match="step='5': must be an integer, at least 0"):
        SyncMonitor(Net()).step("5")  # type: ignore[arg-type]


def test_without_a_process_group_it_warns_once() -> None:
    """In a single process the same script runs, and the monitor warns once."""
    console, out = printer()
    with SyncMonitor(Net(), every=1, console=console) as monitor:
        reports = [monitor.step() for _ in range(3)]
    assert [report and report.verdict for report in reports] == ["undecided"] * 3
    (line,) = out.getvalue().splitlines()
    assert line.startswith("syncheck: warning: step 1: could not tell: no process group to compare across")
    assert "init_process_group()" in line


def test_out_of_sync_is_one_class() -> None:
    """Assertions and monitors raise the same class: an AssertionError with exit code 1 and several lines."""
    assert testing.OutOfSync is errors.OutOfSync is syncheck.OutOfSync
    error = syncheck.OutOfSync("replicas are out of sync\n\n  fc.weight", Report("out_of_sync", ()))
    assert isinstance(error, AssertionError)
    assert isinstance(error, syncheck.SyncheckError)
    assert (str(error), error.exit_code) == ("replicas are out of sync\n\n  fc.weight", 1)


def test_importing_it_loads_neither_torch_nor_rich() -> None:
    """Importing the public names of `syncheck.live` imports neither torch nor rich."""
    code = (
        "import sys; from syncheck.live import Resync, SyncMonitor, check, resync; "
        "print([name for name in ('torch', 'rich', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# --- new findings ---


def found(*findings: Finding) -> Report:
    """Return a report with findings, in sync unless one fails."""
    verdict = "out_of_sync" if any(list_fields(findings, "fails")) else "in_sync"
    return Report(verdict, (make_group("model", None, verdict, (), Counts(1), findings=findings),))


def finding(*tensors: str, rank: int = 1, allowed: bool = False) -> Finding:
    """Return a flipped bit in tensors of a rank."""
    return make_finding("SYN220", "bit-flip", "error", (rank,), tensors, "", "", "", allowed=allowed)


def test_a_finding_is_new_once() -> None:
    """A finding is new once, also with fewer tensors; with another tensor or rank it is new again."""
    state = DesyncState()
    first, fewer, more, other_finding = finding("a", "b"), finding("a"), finding("a", "c"), finding("a", rank=2)
    assert state.update(10, found(first)) == (first,)
    assert state.update(20, found(first)) == state.update(30, found(fewer)) == ()
    assert state.update(40, found(more, other_finding)) == (more, other_finding)
    assert state.grown == (more,)
    assert state.update(50, found(first, more, other_finding)) == ()
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
