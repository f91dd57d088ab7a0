"""`--syncheck GLOB` and the ini value `syncheck_checkpoints`: test items that judge checkpoints."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import pytest

from syncheck.errors import PYTEST, spelling
from syncheck.pytest_plugin import options
from syncheck.pytest_plugin.checkpoints.arguments import Asked, asked_for, is_same

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator
    from pathlib import Path

    from syncheck.pytest_plugin.checkpoints.arguments import Asked
    from syncheck.pytest_plugin.checkpoints.judge import Judge
    from syncheck.pytest_plugin.checkpoints.plan import Planned
    from syncheck.pytest_plugin.checkpoints.update import Update


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


class Header:
    """Adds lines to pytest's header: checkpoints that are not judged, and options that excuse differences."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked

    def pytest_report_header(self, config: pytest.Config) -> list[str]:
        """Tell what would be missed in silence, and options that excuse differences where nobody remembers them."""
        lines = [
            f"syncheck: only tests are taken from {path}: --syncheck {path} judges its checkpoints too"
            for path in self.asked.passed
        ]
        if self.asked.unused:
            lines.append(f"syncheck_checkpoints: not judged, {self.asked.unused}")
        lines += _of_the_project(config)
        if not lines:
            return []
        from syncheck.errors import one_line

        return [one_line(line) for line in lines]


def _of_the_project(config: pytest.Config) -> list[str]:
    """Name the options of [tool.syncheck]: the fixture takes them, and so do the tests of checkpoints."""
    if not any(map(_mentions_us, (config.rootpath, *config.rootpath.parents))):
        return []  # as in most projects, and then nothing is imported
    from syncheck import config as project
    from syncheck.errors import SyncheckError

    try:
        found = project.load(config.rootpath)
    except SyncheckError as error:
        return [f"syncheck: {error}"]  # what needs the options fails; nothing else has to
    parts = [
        f"{key} {options.format_value(found.comparison[key.replace('-', '_')])}"
        for key in project.list_applied_keys(found, **options.read_options(config))
    ]
    if not parts or found.path is None:
        return []
    return [f"syncheck: options from {os.path.relpath(found.path, config.rootpath)}: {'; '.join(parts)}"]


def _mentions_us(folder: Path) -> bool:
    try:
        return b"syncheck" in (folder / "pyproject.toml").read_bytes()
    except FileNotFoundError:
        return False
    except OSError:
        return True


_MOST_IDS = 6


def configure(config: pytest.Config) -> None:
    """Find the checkpoints that this run has to judge, and register what judges them; without any, nothing.

    Each process of pytest-xdist does this, and all get the same items; wrong usage is told before a worker starts.
    """
    # A rank runs one test of the session that started it, which judges the checkpoints itself.
    if config.getoption("help") or config.pluginmanager.hasplugin("syncheck-rank"):
        return
    asked = asked_for(config)
    config.pluginmanager.register(Header(asked), "syncheck-header")
    outputs: list[str] = config.getoption("syncheck_output")
    if asked.paths:
        with _usage():
            config.pluginmanager.register(_plugin(config, asked, outputs), "syncheck-checkpoints")
    elif config.getoption("syncheck_update_baseline"):
        option = PYTEST.name("update_baseline")
        raise pytest.UsageError(f"{option}: there is no checkpoint to compare; name some with --syncheck GLOB")
    elif outputs:
        option = PYTEST.pair("output", outputs[0])
        raise pytest.UsageError(f"{option}: there is no checkpoint to report on; name some with --syncheck GLOB")


@contextlib.contextmanager
def _usage() -> Iterator[None]:
    """Turn an error of syncheck into pytest's: one line, and exit code 4."""
    from syncheck.errors import SyncheckError

    try:
        with spelling(PYTEST):
            yield
    except SyncheckError as error:
        with spelling(PYTEST):
            raise pytest.UsageError(str(error)) from None


def _plugin(config: pytest.Config, asked: Asked, outputs: list[str]) -> CheckpointPlugin:
    from syncheck import api
    from syncheck import config as project
    from syncheck.pytest_plugin.checkpoints import judge as judging
    from syncheck.pytest_plugin.checkpoints.plan import plan
    from syncheck.pytest_plugin.checkpoints.text import terminal_width
    from syncheck.report.files import asks_for_histograms, check_endings

    start = config.invocation_params.dir
    check_endings(outputs, option=PYTEST.name("output"))
    # As the fixture does; pytest's own options are those of the rootdir too.
    how = project.merge_options(project.load(config.rootpath), **options.read_options(config))
    update = None
    with judging.folder(start):
        if config.getoption("syncheck_update_baseline"):
            from syncheck.pytest_plugin.checkpoints.update import begun

            how, update = begun(how, asked)
        found = api.find(*asked.paths, options=how)
    root = start if is_same(start, config.rootpath) else config.rootpath
    planned = plan(found, how, start, root)
    width = getattr(config, "workerinput", {}).get("syncheck_width") or terminal_width()
    writes = not _is_worker(config)
    judge = judging.Judge(
        found,
        how,
        start,
        whole=(bool(outputs) or update is not None) and writes,
        width=width,
        histograms=asks_for_histograms(outputs) and writes,
        accepting=update is not None,
    )
    return CheckpointPlugin(judge, _chosen(planned, asked, config), outputs, update)


def _chosen(planned: list[Planned], asked: Asked, config: pytest.Config) -> list[Planned]:
    """Return the items whose ids were given, in the order of all; all of them where none was."""
    if not asked.ids:
        return planned
    from syncheck.pytest_plugin.checkpoints.plan import seen_from

    start, known = config.invocation_params.dir, [one.nodeid for one in planned]
    wanted: set[str] = set()
    for given in asked.ids:
        folder, _, rest = given.partition("::")
        absolute = os.path.realpath(start / folder)
        matching = [
            one.nodeid
            for one in planned
            if os.path.realpath(one.folder) == absolute and f"{one.owner}::{one.item}::".startswith(f"{rest}::")
        ]
        if not matching:
            more = f" and {len(known) - _MOST_IDS} more" if len(known) > _MOST_IDS else ""
            shown = ", ".join(seen_from(start, config.rootpath, nodeid) for nodeid in known[:_MOST_IDS])
            raise pytest.UsageError(f"not found: {given}; there are {shown}{more} (--collect-only -q lists all)")
        wanted.update(matching)
    return [one for one in planned if one.nodeid in wanted]


def _is_worker(config: pytest.Config) -> bool:
    """Whether this is a process that pytest-xdist started."""
    return hasattr(config, "workerinput")


class CheckpointPlugin:
    """The hooks of a run that judges checkpoints."""

    def __init__(self, judge: Judge, planned: list[Planned], outputs: list[str], update: Update | None = None) -> None:
        self.judge = judge
        self.planned = planned
        self.outputs = outputs
        self.update = update
        self.updated = ""
        self.ran: set[str] = set()
        self.written: list[str] = []
        self.errors: list[str] = []

    def pytest_report_header(self) -> str:
        """Say what will be judged: https://docs.pytest.org/en/stable/reference/reference.html#reporting-hooks."""
        from syncheck.pytest_plugin.checkpoints.summary import in_force

        found = self.judge.found
        files = sum(len(group.ranks) for group in found.groups) + len(found.unreadable)
        how = in_force(self.judge.options)
        what = f"{files} checkpoint{'s' * (files != 1)}, {len(found.groups)} group{'s' * (len(found.groups) != 1)}"
        skipped = f", {found.skipped} other files skipped" if found.skipped else ""
        links = f", {len(found.aliases)} links to others not compared" if found.aliases else ""
        return f"syncheck: {what}{skipped}{links}{f'; options: {how}' if how else ''}"

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a process of pytest-xdist how wide the terminal is: it sees none itself."""
        node.workerinput["syncheck_width"] = self.judge.width

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Add the checkpoints to what the session collects, so that pytest counts and selects them as its own."""
        report = yield
        if isinstance(collector, pytest.Session) and report.passed:
            from syncheck.pytest_plugin.checkpoints import tree

            report.result.extend(tree(collector, self.planned, self.judge))
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Name the folder as the place of a skip of ours, where pytest would name a line of its own."""
        from syncheck.pytest_plugin.checkpoints import CheckpointItem

        report = yield
        if isinstance(item, CheckpointItem) and report.skipped and isinstance(report.longrepr, tuple):
            reason: Any = (str(item.reportinfo()[0]), None, report.longrepr[2])
            report.longrepr = reason
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember what ran, in any process."""
        if report.when == "call":
            self.ran.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the report; a run of several processes compares once more here, for no process has seen all."""
        finished = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
        if _is_worker(session.config) or session.config.getoption("collectonly") or exitstatus not in finished:
            return
        for path in self.outputs:
            self._write(path)
        if self.update is not None:
            self._update(self.update)
        if self.errors and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    @spelling(PYTEST)
    def _write(self, path: str) -> None:
        from syncheck.errors import SyncheckError
        from syncheck.readers import refuse_overwrite
        from syncheck.report.files import write_file

        try:
            report = self.judge.report()
            with self.judge.here():
                refuse_overwrite(path, PYTEST.name("output"))
                write_file(path, report, option=PYTEST.name("output"))
            self.written.append(path)
        except SyncheckError as error:
            self.errors.append(str(error))

    @spelling(PYTEST)
    def _update(self, update: Update) -> None:
        from syncheck.errors import SyncheckError

        try:
            self.updated = update.write(self.judge, [one for one in self.planned if one.nodeid not in self.ran])
        except SyncheckError as error:
            self.errors.append(str(error))

    @spelling(PYTEST)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what was found, by group: https://docs.pytest.org/en/stable/reference/reference.html#reporting-hooks."""
        from syncheck.pytest_plugin.checkpoints import summary

        summary.write(terminalreporter, self)
