"""The nodes of pytest's tree that stand for checkpoints: folder, run, and one test item per kind of tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from syncheck.pytest_plugin.checkpoints.judge import Judge
    from syncheck.pytest_plugin.checkpoints.plan import Planned


class Checkpoints(pytest.Collector):
    """A folder of checkpoints, or a run in it: the levels of an id above the items."""

    def __init__(self, *, planned: list[Planned], judge: Judge, **fields: Any) -> None:
        super().__init__(**fields)
        self.planned = planned
        self.judge = judge

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        """Return the runs of a folder, the items of a run."""
        if not isinstance(self.parent, Checkpoints):
            return [
                Checkpoints.from_parent(self, name=owner, planned=planned, judge=self.judge)
                for owner, planned in _sorted(self.planned, "owner").items()
            ]
        return [
            CheckpointItem.from_parent(self, name=planned.item, planned=planned, judge=self.judge)
            for planned in self.planned
        ]


class CheckpointItem(pytest.Item):
    """Judges one kind of tensor of one group of replicas, or says why it cannot."""

    def __init__(self, *, planned: Planned, judge: Judge, **fields: Any) -> None:
        super().__init__(**fields)
        self.planned = planned
        self.judge = judge
        self._headline = ""

    def runtest(self) -> None:
        """Compare, and fail or skip with a text of ours instead of a traceback."""
        __tracebackhide__ = True
        from syncheck.pytest_plugin.checkpoints.outcomes import outcome

        ended = outcome(self.planned, self.judge)
        # A plugin that runs failed tests again runs the same item.
        kept = [(name, value) for name, value in self.user_properties if not name.startswith("syncheck_")]
        self.user_properties[:] = [*kept, *ended.properties]
        self._headline = ended.headline
        if ended.status == "failed":
            pytest.fail(ended.body, pytrace=False)
        if ended.status == "skipped":
            pytest.skip(ended.body)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the failure as pytest draws it, with our line for the short summary instead of `Failed: ...`."""
        drawn = super().repr_failure(excinfo, style)
        crash = getattr(drawn, "reprcrash", None)
        if isinstance(excinfo.value, pytest.fail.Exception) and crash is not None:
            crash.message = self._headline
            crash.path, crash.lineno = str(self.reportinfo()[0]), 0  # for --tb=line: the folder, not a line of ours
        return drawn

    def reportinfo(self) -> tuple[Path, None, str]:
        """Return where the item is, and the title of its failure.

        The folder is escaped: not every name of one can be sent to another process or written to XML. With the id
        alone as the title, pytest's -v would take the dots in a run's name for its own.
        """
        return self.config.rootpath / self.planned.shown, None, f"syncheck {self.nodeid}"


def tree(session: pytest.Session, planned: list[Planned], judge: Judge) -> list[Checkpoints]:
    """Return the collectors of the folders."""
    return [
        Checkpoints.from_parent(session, name=shown, nodeid=shown, path=of[0].folder, planned=of, judge=judge)
        for shown, of in _sorted(planned, "shown").items()
    ]


def _sorted(planned: list[Planned], level: str) -> dict[str, list[Planned]]:
    found: dict[str, list[Planned]] = {}
    for one in planned:
        found.setdefault(getattr(one, level), []).append(one)
    return found
