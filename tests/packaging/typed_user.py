"""A user's program for `mypy --strict`: public names of syncheck have types, and wrong uses are errors.

mypy also reports unused `type: ignore` comments (warn_unused_ignores), and thus public names without a type.
"""

from __future__ import annotations

import syncheck
from syncheck.testing import assert_in_sync, compare


def judged() -> int:
    """Use the API as in README."""
    report: syncheck.Report = syncheck.compare("ckpts/*.pth", options=syncheck.Options(allow=("SYN201",)))
    codes: list[str] = [finding.code for group in report.groups for finding in group.findings]
    counted: int = report.groups[0].counts.identical + len(codes)
    snapshot: syncheck.Snapshot = syncheck.read("a.pth")
    names: list[str] = sorted(snapshot.tensors)
    try:
        assert_in_sync("ckpts/*.pth", only="params")
        report = compare("ckpts/*.pth")
    except syncheck.OutOfSync as error:
        print(error.report.verdict, names)
    return counted


def wrong() -> None:
    """Use the API incorrectly on each line."""
    verdict: int = syncheck.compare("ckpts/*.pth").verdict  # type: ignore[assignment]
    syncheck.Options(alow=("SYN201",))  # type: ignore[call-arg]
    syncheck.read(3)  # type: ignore[arg-type]
    print(verdict)
