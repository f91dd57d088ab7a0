"""`--syncheck-update-baseline`: what all tests of checkpoints of a run found becomes the baseline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from syncheck import baseline
from syncheck.errors import OptionError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.api import Options
    from syncheck.baseline import Known
    from syncheck.pytest_plugin.checkpoints.arguments import Asked
    from syncheck.pytest_plugin.checkpoints.judge import Judge
    from syncheck.pytest_plugin.checkpoints.plan import Planned


@dataclass(frozen=True, slots=True)
class Update:
    """The file to write. known: what it has had at the start."""

    path: str
    known: Known

    def write(self, judge: Judge, left_out: Sequence[Planned]) -> str:
        """Write the file and say what was done. left_out: tests that did not run, whose findings nobody has seen.

        Raises SyncheckError where it is not written.
        """
        if left_out:
            raise UsageError(
                f"the baseline is not updated: {len(left_out)} of the tests of checkpoints did not run, the first is "
                f"{left_out[0].nodeid}"
            )
        made = baseline.update(judge.report(), self.known)
        with judge.here():
            baseline.write(self.path, made)
        return f"{self.path}: {baseline.describe_update(self.known, made)}"


def begun(options: Options, asked: Asked) -> tuple[Options, Update]:
    """Return how to compare for an update, which is without the baseline, and the update.

    To be called where pytest was started. Raises UsageError where it cannot be carried out.
    """
    if options.baseline is None:
        raise OptionError(
            "requires {baseline} FILE, or baseline in the table tool.syncheck", "baseline", update_baseline=True
        )
    if asked.ids:
        raise OptionError(f"requires the tests of all checkpoints: remove {asked.ids[0]}", update_baseline=True)
    return replace(options, baseline=None), Update(options.baseline, baseline.read_for_update(options.baseline))
