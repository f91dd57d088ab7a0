"""`--baseline FILE` and `--update-baseline`: what is known is accepted, or becomes known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from syncheck.cli import output
from syncheck.errors import UsageError

if TYPE_CHECKING:
    from syncheck.baseline import Known
    from syncheck.records import Report


@dataclass(frozen=True, slots=True)
class Baseline:
    """The file that a run goes by. path: None where it goes by none. known: what the file has had at the start."""

    path: str | None = None
    known: Known = frozenset()
    update: bool = False
    quiet: bool = False

    def judged(self, found: Report) -> tuple[Report, UsageError | None]:
        """Return a report as the baseline has it, which is brought up to date first where that was asked for.

        Returns also why it was not: what could not be told cannot be accepted, and the file stays as it was.
        """
        if self.path is None:
            return found, None
        from syncheck import baseline

        known, failed = self.known, None
        if self.update:
            try:
                made = baseline.updated(found, known)
                baseline.write(self.path, made)
            except UsageError as error:
                failed = error
                output.tell(f"error: {self.path}: {error}")
            else:
                if not self.quiet:
                    output.tell(f"{self.path}: {baseline.change(known, made)}")
                known = made
        return baseline.accepted(found, known), failed


def opened(path: str | None, *, update: bool, quiet: bool) -> Baseline:
    """Read the baseline before anything is compared. Raises UsageError where it cannot be gone by."""
    if path is None:
        if update:
            raise UsageError("--update-baseline: needs --baseline FILE, or baseline in the table tool.syncheck")
        return Baseline()
    from syncheck import baseline

    known = baseline.read_for_update(path) if update else baseline.read(path)
    return Baseline(path, known, update, quiet)
