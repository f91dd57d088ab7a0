"""Hooks for tests on several ranks.

The implementation is imported when the first test with the marker is collected.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import pytest

from syncheck.pytest_plugin.ranks.marker import NAME, PARAMETER, RETRIED, read_marker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.testing import Rank


def default_timeout(config: pytest.Config) -> float:
    """Return the time limit in seconds of tests without a limit in their marker: the option, then the ini value."""
    name, text = "--syncheck-timeout", config.getoption("syncheck_timeout")
    if text is None:
        name, text = "syncheck_timeout", config.getini("syncheck_timeout")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        from syncheck.pytest_plugin.texts import PytestText

        raise pytest.UsageError(str(PytestText.TIMEOUT(option=name, value=text)))
    return seconds


def _list_marked(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the tests on several ranks."""
    return [item for item in items if item.get_closest_marker(NAME)]


class RanksPlugin:
    """Hooks of the outer pytest session, which starts the ranks and reports the tests."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: Sequence[pytest.Item]) -> None:
        """Make items with the marker run on ranks."""
        marked = _list_marked(items)
        # Inside a rank, run the test itself.
        if not marked or config.pluginmanager.hasplugin("syncheck-rank"):
            return

        from syncheck.pytest_plugin.ranks import item as on_ranks

        config.stash[on_ranks.LIMIT] = default_timeout(config)
        if on_ranks.POOL not in config.stash:
            _create_pool(config)

        for item in marked:
            on_ranks.run_on_ranks(item)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Raise UsageError for --pdb and --trace, because ranks have no terminal."""
        marked = _list_marked(session.items)
        if not marked:
            return

        for option in ("usepdb", "trace"):
            if session.config.getoption(option, False):
                from syncheck.pytest_plugin.texts import PytestText

                name = f"--{option.removeprefix('use')}"
                raise pytest.UsageError(str(PytestText.NO_DEBUGGER(option=name, test=marked[0].nodeid)))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the tests whose ranks had to be started again, even if they passed."""
        for report in chain.from_iterable(terminalreporter.stats.values()):
            # `stats` also contains warnings and deselected items, which have no properties.
            if getattr(report, "when", "") != "call":
                continue

            for name, reason in report.user_properties:
                if name == RETRIED:
                    terminalreporter.write_line(f"{report.nodeid}: {reason}; the ranks were started again")


def _create_pool(config: pytest.Config) -> None:
    """Create the processes of this run. They are killed at its end."""
    from syncheck.pytest_plugin.ranks import item as on_ranks
    from syncheck.pytest_plugin.ranks.pool import Pool

    def load_report(data: object) -> pytest.TestReport:
        report: pytest.TestReport = config.hook.pytest_report_from_serializable(config=config, data=data)
        return report

    pool = Pool(config.invocation_params.dir, load_report)
    config.stash[on_ranks.POOL] = pool
    config.add_cleanup(pool.close)


def parametrize_ranks(metafunc: pytest.Metafunc) -> None:
    """Create one test for each entry of `ranks=[2, 4]`."""
    marker = read_marker(metafunc.definition)
    if marker is None or not marker.several:
        return

    metafunc.fixturenames.append(PARAMETER)
    metafunc.parametrize(
        PARAMETER,
        marker.ranks,
        ids=[f"{number}ranks" for number in marker.ranks],
        indirect=True,
    )


def get_rank(request: pytest.FixtureRequest) -> Rank:
    """Return the value of the fixture `syncheck_rank`. Fails tests without the marker."""
    from syncheck.pytest_plugin.ranks import process_group, session

    if session.TASK not in request.config.stash:
        pytest.fail("the fixture syncheck_rank requires @pytest.mark.syncheck(ranks=2) on the test", pytrace=False)
    return process_group.make_rank(request.config.stash[session.TASK])
