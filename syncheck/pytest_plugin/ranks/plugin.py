"""Arguments of `@pytest.mark.syncheck(ranks=4)`, and hooks for tests on several ranks.

The implementation is imported when the first test with the marker is collected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.testing import Rank

NAME = "syncheck"
# User property of a test whose ranks were started again.
RETRIED = "syncheck_retried_start"
# The fixture for the parametrization of `ranks=[2, 4]`, which the test does not request.
PARAMETER = "_syncheck_ranks"
# Each rank is a process with torch, so a larger number is most likely a mistake.
MOST_RANKS = 64


@dataclass(frozen=True, slots=True)
class Settings:
    """Arguments of the marker. ranks: numbers of ranks. several: whether `ranks` was a list.

    timeout: seconds, None for the default of the run. group: whether to create a process group; if not, torch is not
    imported.
    """

    ranks: tuple[int, ...]
    several: bool = False
    timeout: float | None = None
    group: bool = True


def read_marker(node: Any) -> Settings | None:
    """Return the settings of a node's closest marker, or None. Fails the test if the marker is invalid."""
    mark = node.get_closest_marker(NAME)
    return None if mark is None else _read(mark.args, mark.kwargs, node.nodeid)


def ranks_of(item: Any) -> int:
    """Return the number of ranks of one test."""
    settings = read_marker(item)
    assert settings is not None
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if settings.several and PARAMETER not in parameters:
        _fail(item.nodeid, "with a list of ranks must be on the test, its class or module, not on a parameter")
    number: int = parameters[PARAMETER] if settings.several else settings.ranks[0]
    return number


def default_timeout(config: pytest.Config) -> float:
    """Return the time limit in seconds of tests without a limit in their marker: the option, then the ini value."""
    given = config.getoption("syncheck_timeout")
    text = config.getini("syncheck_timeout") if given is None else given
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        from syncheck.pytest_plugin.texts import PytestText

        name = "syncheck_timeout" if given is None else "--syncheck-timeout"
        raise pytest.UsageError(str(PytestText.TIMEOUT(option=name, value=text)))
    return seconds


def _read(args: Sequence[Any], kwargs: Mapping[str, Any], node: str) -> Settings:
    given = dict(kwargs)
    if args:
        given.setdefault("ranks", args[0])
    unknown = sorted(given.keys() - {"ranks", "timeout", "group"})
    if unknown or len(args) > 1:
        _fail(node, f"has no argument {', '.join(unknown) or args[1]!r}; it takes ranks, timeout and group")
    ranks = given.get("ranks", 2)
    several = isinstance(ranks, (list, tuple))
    listed = tuple(ranks) if several else (ranks,)
    if not listed or not all(type(n) is int and 1 <= n <= MOST_RANKS for n in listed) or len(set(listed)) < len(listed):
        _fail(node, f"ranks={ranks!r}: must be a number from 1 to {MOST_RANKS}, or a list of different numbers")
    timeout = given.get("timeout")
    if timeout is not None and (not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf")):
        _fail(node, f"timeout={timeout!r}: must be a number of seconds above 0")
    return Settings(listed, several, timeout, bool(given.get("group", True)))


def _fail(node: str, problem: str) -> NoReturn:
    pytest.fail(f"{node}: @pytest.mark.syncheck {problem}", pytrace=False)


class RanksPlugin:
    """Hooks of the outer pytest session, which starts the ranks and reports the tests."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: Sequence[pytest.Item]) -> None:
        """Make items with the marker run on ranks."""
        marked = [item for item in items if item.get_closest_marker(NAME)]
        if not marked or config.pluginmanager.hasplugin("syncheck-rank"):  # inside a rank, run the test itself
            return
        from syncheck.pytest_plugin.ranks import item as on_ranks
        from syncheck.pytest_plugin.ranks.pool import Pool

        def load_report(data: object) -> pytest.TestReport:
            report: pytest.TestReport = config.hook.pytest_report_from_serializable(config=config, data=data)
            return report

        config.stash[on_ranks.LIMIT] = default_timeout(config)
        if on_ranks.POOL not in config.stash:
            pool = Pool(config.invocation_params.dir, load_report)
            config.stash[on_ranks.POOL] = pool
            config.add_cleanup(pool.close)
        for item in marked:
            on_ranks.run_on_ranks(item)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Raise UsageError for --pdb and --trace, because ranks have no terminal."""
        marked = [item for item in session.items if item.get_closest_marker(NAME)]
        for option in ("usepdb", "trace"):
            if marked and session.config.getoption(option, False):
                from syncheck.pytest_plugin.texts import PytestText

                name = f"--{option.removeprefix('use')}"
                raise pytest.UsageError(str(PytestText.NO_DEBUGGER(option=name, test=marked[0].nodeid)))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the tests whose ranks had to be started again, even if they passed."""
        reports = [r for kind in terminalreporter.stats.values() for r in kind if getattr(r, "when", "") == "call"]
        retried = [(r.nodeid, reason) for r in reports for name, reason in r.user_properties if name == RETRIED]
        for nodeid, reason in retried:
            terminalreporter.write_line(f"{nodeid}: {reason}; the ranks were started again")


def parametrize_ranks(metafunc: pytest.Metafunc) -> None:
    """Create one test for each entry of `ranks=[2, 4]`."""
    settings = read_marker(metafunc.definition)
    if settings is not None and settings.several:
        metafunc.fixturenames.append(PARAMETER)
        ids = [f"{number}ranks" for number in settings.ranks]
        metafunc.parametrize(PARAMETER, settings.ranks, ids=ids, indirect=True)


def get_rank(request: pytest.FixtureRequest) -> Rank:
    """Return the value of the fixture `syncheck_rank`. Fails tests without the marker."""
    from syncheck.pytest_plugin.ranks import group, session

    if session.TASK not in request.config.stash:
        pytest.fail("the fixture syncheck_rank requires @pytest.mark.syncheck(ranks=2) on the test", pytrace=False)
    return group.make_rank(request.config.stash[session.TASK])
