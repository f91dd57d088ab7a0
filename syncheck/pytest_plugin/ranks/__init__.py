"""Tests on several ranks: each rank a process that runs the test in a pytest session of its own.

What starts processes is imported when the first such test is collected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from syncheck.pytest_plugin.ranks import marker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.testing import Rank


class RanksPlugin:
    """Hooks of the pytest that shows the tests."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: Sequence[pytest.Item]) -> None:
        """Make items with the marker run on ranks."""
        marked = [item for item in items if item.get_closest_marker(marker.NAME)]
        if not marked or config.pluginmanager.hasplugin("syncheck-rank"):  # in a rank they run as they are
            return
        from syncheck.pytest_plugin.ranks import item as on_ranks
        from syncheck.pytest_plugin.ranks.pool import Pool

        def report(data: object) -> pytest.TestReport:
            made: pytest.TestReport = config.hook.pytest_report_from_serializable(config=config, data=data)
            return made

        config.stash[on_ranks.LIMIT] = marker.limit(config)
        if on_ranks.POOL not in config.stash:
            pool = Pool(config.invocation_params.dir, report)
            config.stash[on_ranks.POOL] = pool
            config.add_cleanup(pool.close)
        for item in marked:
            on_ranks.spread(item)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Refuse a debugger: no rank has a terminal, and the others would run into their time limit."""
        marked = [item for item in session.items if item.get_closest_marker(marker.NAME)]
        for option in ("usepdb", "trace"):
            if marked and session.config.getoption(option, False):
                raise pytest.UsageError(
                    f"--{option.removeprefix('use')} does not work with tests on several ranks, such as "
                    f"{marked[0].nodeid}: a rank's process has no terminal, and the others would wait for it. "
                    "Leave them out with -m 'not syncheck'."
                )

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print which tests needed more than one start of their ranks, also those that passed."""
        reports = [r for kind in terminalreporter.stats.values() for r in kind if getattr(r, "when", "") == "call"]
        found = [(r.nodeid, reason) for r in reports for name, reason in r.user_properties if name == marker.RETRIED]
        for nodeid, reason in found:
            terminalreporter.write_line(f"{nodeid}: {reason}; the ranks were started again")


def generate(metafunc: pytest.Metafunc) -> None:
    """Make one test of each entry of `ranks=[2, 4]`."""
    wanted = marker.of(metafunc.definition)
    if wanted is not None and wanted.several:
        metafunc.fixturenames.append(marker.PARAMETER)
        ids = [f"{number}ranks" for number in wanted.ranks]
        metafunc.parametrize(marker.PARAMETER, wanted.ranks, ids=ids, indirect=True)


def this_rank(request: pytest.FixtureRequest) -> Rank:
    """Return what the fixture `syncheck_rank` gives; fails a test that has no marker."""
    from syncheck.pytest_plugin.ranks import group, session

    if session.TASK not in request.config.stash:
        pytest.fail("the fixture syncheck_rank needs @pytest.mark.syncheck(ranks=2) on the test", pytrace=False)
    return group.this_rank(request.config.stash[session.TASK])
