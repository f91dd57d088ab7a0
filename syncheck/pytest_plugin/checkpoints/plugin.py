"""Hooks and test items for checkpoints in a pytest run."""

from __future__ import annotations

import contextlib
import os
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest

from syncheck.pytest_plugin import options
from syncheck.pytest_plugin.checkpoints.arguments import is_same, select_checkpoints
from syncheck.text import TYPED_IN_PYTEST, options_as_typed

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable
    from pathlib import Path

    from syncheck.options import Options
    from syncheck.pytest_plugin.checkpoints.arguments import CheckpointArguments
    from syncheck.pytest_plugin.checkpoints.judge import Judge
    from syncheck.pytest_plugin.checkpoints.plan import Planned


class Checkpoints(pytest.Collector):
    """A folder of checkpoints, or a run in a folder: the levels of an id above the items."""

    def __init__(self, *, planned: list[Planned], judge: Judge, **fields: Any) -> None:
        super().__init__(**fields)
        self.planned = planned
        self.judge = judge

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        """Return the runs of a folder, the items of a run."""
        if isinstance(self.parent, Checkpoints):
            return [
                CheckpointItem.from_parent(
                    self,
                    name=planned.item,
                    planned=planned,
                    judge=self.judge,
                )
                for planned in self.planned
            ]
        return [
            Checkpoints.from_parent(
                self,
                name=owner,
                planned=planned,
                judge=self.judge,
            )
            for owner, planned in _group_by(self.planned, "owner").items()
        ]


def _group_by(planned: list[Planned], field: str) -> dict[str, list[Planned]]:
    """Return the items by the value of a field."""
    groups: dict[str, list[Planned]] = {}
    for item in planned:
        groups.setdefault(getattr(item, field), []).append(item)
    return groups


class CheckpointItem(pytest.Item):
    """Judges one kind of tensor of one group of replicas."""

    def __init__(self, *, planned: Planned, judge: Judge, **fields: Any) -> None:
        super().__init__(**fields)
        self.planned = planned
        self.judge = judge
        self._headline = ""

    def runtest(self) -> None:
        """Compare, and fail or skip with a report instead of a traceback."""
        __tracebackhide__ = True
        from syncheck.pytest_plugin.checkpoints.judge import judge_planned

        with options_as_typed(TYPED_IN_PYTEST):
            outcome = judge_planned(self.planned, self.judge)
        # Plugins like pytest-rerunfailures run the same item again.
        foreign_properties = [entry for entry in self.user_properties if not entry[0].startswith("syncheck_")]
        self.user_properties[:] = [*foreign_properties, *outcome.properties]
        self._headline = outcome.headline
        if outcome.status == "failed":
            pytest.fail(outcome.body, pytrace=False)

        if outcome.status == "skipped":
            pytest.skip(outcome.body)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return pytest's representation, with the headline in the short summary instead of `Failed: ...`."""
        representation = super().repr_failure(excinfo, style)
        crash = getattr(representation, "reprcrash", None)
        if isinstance(excinfo.value, pytest.fail.Exception) and crash is not None:
            crash.message = self._headline
            # --tb=line prints the folder.
            crash.path, crash.lineno = str(self.reportinfo()[0]), 0
        return representation

    def reportinfo(self) -> tuple[Path, None, str]:
        """Return the item's folder and the title of its failure.

        The folder is escaped, because not every name can be sent to another process or written to XML. The title is
        more than the id, because pytest -v would interpret dots in an id as attributes.
        """
        return self.config.rootpath / self.planned.folder_in_id, None, f"syncheck {self.nodeid}"


SELECTION = pytest.StashKey["CheckpointArguments"]()


def header_lines(config: pytest.Config) -> list[str]:
    """Return warnings about ignored checkpoints, and the options in pyproject.toml."""
    selection = config.stash.get(SELECTION, None)
    if selection is None:
        return []

    lines = [*_list_warnings(selection), *_project_options(config)]
    # Most runs have no line, and do not need the module.
    if not lines:
        return []

    from syncheck.text import one_line

    return [one_line(line) for line in lines]


def _list_warnings(selection: CheckpointArguments) -> list[str]:
    """Return sentences about checkpoints that are not judged."""
    if not selection.not_judged and not selection.unused:
        return []

    # Most runs do not need the texts.
    from syncheck.pytest_plugin.texts import PytestText

    lines = [str(PytestText.NOT_COMPARED(path=path)) for path in selection.not_judged]
    if selection.unused:
        lines.append(str(PytestText.CHECKPOINTS_UNUSED(reason=selection.unused)))

    return lines


def _project_options(config: pytest.Config) -> list[str]:
    """Return a line with the options of [tool.syncheck], the defaults of the fixture and of tests of checkpoints."""
    folders = [config.rootpath, *config.rootpath.parents]
    # The configuration is not imported in projects that do not use syncheck.
    if not any(_mentions_syncheck(folder) for folder in folders):
        return []

    from syncheck import config as project
    from syncheck.errors import SyncheckError
    from syncheck.options import Options

    try:
        path, values = project.load(config.rootpath)
    except SyncheckError as error:
        # Only tests of checkpoints and tests with the fixture fail.
        return [f"syncheck: {error}"]

    applied = project.list_applied(values, Options, options.read_options(config))
    if not applied or path is None:
        return []

    parts = [f"{name} {options.format_value(values[name])}" for name in applied]
    return [f"syncheck: options from {os.path.relpath(path, config.rootpath)}: {'; '.join(parts)}"]


def _mentions_syncheck(folder: Path) -> bool:
    try:
        return b"syncheck" in (folder / "pyproject.toml").read_bytes()
    except FileNotFoundError:
        return False
    except OSError:
        return True


_MOST_IDS = 6
# Exit codes of runs that pytest has not interrupted.
_FINISHED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)


def configure(config: pytest.Config) -> None:
    """Register CheckpointPlugin if this run has checkpoints to judge.

    Each process of pytest-xdist calls this function and plans the same items. Usage errors are raised before workers
    start.
    """
    # In a rank's session, there are no checkpoints to judge: the outer session judges them.
    if config.getoption("help") or config.pluginmanager.hasplugin("syncheck-rank"):
        return

    selection = select_checkpoints(config)
    config.stash[SELECTION] = selection
    outputs: list[str] = config.getoption("syncheck_output")
    if not selection.paths:
        _refuse_outputs(config, outputs)
        return

    from syncheck.errors import SyncheckError

    try:
        plugin = _plugin(config, selection, outputs)
    except SyncheckError as error:
        # One line and exit code 4.
        with options_as_typed(TYPED_IN_PYTEST):
            raise pytest.UsageError(str(error)) from None

    config.pluginmanager.register(plugin, "syncheck-checkpoints")


def _refuse_outputs(config: pytest.Config, outputs: list[str]) -> None:
    """Raise UsageError for options that write a file, in a run without checkpoints."""
    updates = config.getoption("syncheck_update_baseline")
    if not outputs and not updates:
        return

    from syncheck.pytest_plugin.texts import PytestText

    if updates:
        raise pytest.UsageError(str(PytestText.UPDATE_NEEDS_CHECKPOINTS()))

    raise pytest.UsageError(str(PytestText.OUTPUT_NEEDS_CHECKPOINTS(path=outputs[0])))


def _plugin(config: pytest.Config, selection: CheckpointArguments, outputs: list[str]) -> CheckpointPlugin:
    from syncheck import api
    from syncheck import config as project
    from syncheck.options import Options
    from syncheck.pytest_plugin.checkpoints.judge import Judge
    from syncheck.pytest_plugin.checkpoints.plan import plan_items
    from syncheck.report.formats import check_extensions, needs_histograms

    start = config.invocation_params.dir
    check_extensions(outputs)
    # The project's options are searched from the rootdir, like pytest's own options.
    _, values = project.load(config.rootpath)
    compare_options = project.merge_options(values, Options, options.read_options(config))
    updates: bool = bool(config.getoption("syncheck_update_baseline"))
    with contextlib.chdir(start):
        if updates:
            _require_all_checkpoints(compare_options, selection)
        api.check_baseline(compare_options, update=updates)
        _protect_inputs(
            config,
            written=outputs,
            selection=selection,
            baseline=compare_options.baseline,
        )
        checkpoints = api.find(*selection.paths, options=compare_options)
    # pytest does not resolve a link in --rootdir.
    root = start if is_same(start, config.rootpath) else config.rootpath
    planned = plan_items(
        checkpoints,
        compare_options,
        start,
        root,
    )
    # A worker of pytest-xdist writes no file.
    needs_report = (bool(outputs) or updates) and not _is_worker(config)
    judge = Judge(
        checkpoints,
        compare_options,
        start,
        at_once=needs_report,
        histograms=needs_report and needs_histograms(outputs),
        accepting=updates,
    )
    return CheckpointPlugin(
        judge,
        _select_items(planned, selection, config),
        outputs,
        updates=updates,
    )


def _protect_inputs(
    config: pytest.Config, written: list[str], selection: CheckpointArguments, baseline: str | None
) -> None:
    """Raise OptionError, before the comparison, if an output file would replace an input or a checkpoint.

    written: the reports.
    baseline: the file to read or to update.
    """
    from syncheck.readers.outputs import protect_all

    named = [("output", path) for path in written]
    inputs = list(selection.paths)
    if baseline is not None:
        # An update writes the baseline, and every other run reads it.
        if config.getoption("syncheck_update_baseline"):
            named.append(("baseline", baseline))
        else:
            inputs.append(baseline)

    for side in chain.from_iterable(config.getoption("syncheck_diff")):
        inputs += side.split(",")

    # Tests may create the folders of the outputs.
    protect_all(named, inputs)


def _require_all_checkpoints(options: Options, selection: CheckpointArguments) -> None:
    """Raise OptionError unless there is a baseline, and its update would see the tests of all checkpoints."""
    from syncheck.errors import OptionError

    if options.baseline is None:
        from syncheck.messages import Usage

        raise OptionError(Usage.UPDATE_NEEDS_BASELINE(), update_baseline=True)
    if selection.ids:
        raise OptionError(f"requires the tests of all checkpoints: remove {selection.ids[0]}", update_baseline=True)


def _select_items(planned: list[Planned], selection: CheckpointArguments, config: pytest.Config) -> list[Planned]:
    """Return the items whose ids were given, or all items."""
    if not selection.ids:
        return planned

    selected: set[str] = set()
    for nodeid in selection.ids:
        start = config.invocation_params.dir
        matching = [item.nodeid for item in planned if _matches_id(item, nodeid, start)]
        if not matching:
            raise _make_id_error(nodeid, planned, config)

        selected.update(matching)

    return [item for item in planned if item.nodeid in selected]


def _make_id_error(nodeid: str, planned: list[Planned], config: pytest.Config) -> pytest.UsageError:
    """Return the error for an id that selects no item, with the ids of the items."""
    from syncheck.pytest_plugin.checkpoints.plan import relative_id
    from syncheck.pytest_plugin.texts import PytestText
    from syncheck.text import names_text

    start = config.invocation_params.dir
    available = [relative_id(start, config.rootpath, item.nodeid) for item in planned]
    tests = names_text(available, _MOST_IDS)
    return pytest.UsageError(str(PytestText.NO_SUCH_TEST(nodeid=nodeid, tests=tests)))


def _matches_id(item: Planned, nodeid: str, start: Path) -> bool:
    """Whether an id from the command line selects an item: the id of the item, of its run, or its folder."""
    folder, _, names = nodeid.partition("::")
    if os.path.realpath(item.folder) != os.path.realpath(start / folder):
        return False
    return f"{item.owner}::{item.item}::".startswith(f"{names}::")


def _is_worker(config: pytest.Config) -> bool:
    """Whether this process is a worker of pytest-xdist."""
    return hasattr(config, "workerinput")


class CheckpointPlugin:
    """The hooks of a run with checkpoints. updates: whether to update the baseline."""

    def __init__(self, judge: Judge, planned: list[Planned], outputs: list[str], *, updates: bool) -> None:
        self.judge = judge
        self.planned = planned
        self.outputs = outputs
        self.updates = updates
        self.updated = ""
        self.ran: set[str] = set()
        self.written: list[str] = []
        self.errors: list[str] = []

    def pytest_report_header(self) -> str:
        """Return the number of checkpoints: https://docs.pytest.org/en/stable/reference/reference.html#reporting-hooks."""
        from syncheck.pytest_plugin.checkpoints.summary import describe_options

        checkpoints = self.judge.checkpoints
        files = sum(len(group.ranks) for group in checkpoints.groups) + len(checkpoints.unreadable)
        groups = len(checkpoints.groups)
        line = f"syncheck: {files} checkpoint{'s' * (files != 1)}, {groups} group{'s' * (groups != 1)}"
        if checkpoints.skipped:
            line += f", {checkpoints.skipped} other files skipped"
        if checkpoints.aliases:
            line += f", {len(checkpoints.aliases)} links to other files not compared"
        options_text = describe_options(self.judge.options)
        return f"{line}; options: {options_text}" if options_text else line

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Add the checkpoints to the collected items; pytest then counts and selects them like tests."""
        report = yield
        if isinstance(collector, pytest.Session) and report.passed:
            for folder, planned in _group_by(self.planned, "folder_in_id").items():
                fields = {"name": folder, "nodeid": folder, "path": planned[0].folder}
                report.result.append(
                    Checkpoints.from_parent(
                        collector,
                        **fields,
                        planned=planned,
                        judge=self.judge,
                    )
                )
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Set the location of a skipped item to its folder instead of a line in this plugin."""
        report = yield
        if isinstance(item, CheckpointItem) and report.skipped and isinstance(report.longrepr, tuple):
            reason: Any = (str(item.reportinfo()[0]), None, report.longrepr[2])
            report.longrepr = reason
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record which items ran, in any process."""
        if report.when == "call":
            self.ran.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the report. After a run of several processes this compares again, because no process compared all."""
        # Workers of pytest-xdist write nothing, and an interrupted run is not complete.
        writes = exitstatus in _FINISHED and not _is_worker(session.config)
        if not writes or session.config.getoption("collectonly"):
            return

        with options_as_typed(TYPED_IN_PYTEST):
            for path in self.outputs:
                with self._record_errors():
                    self._write(path)

            if self.updates:
                with self._record_errors():
                    self.updated = self._update_baseline()

        if self.errors and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    @contextlib.contextmanager
    def _record_errors(self) -> Generator[None]:
        """Record an error for the summary, so that the next file is still written."""
        from syncheck.errors import SyncheckError

        try:
            yield
        except SyncheckError as error:
            self.errors.append(str(error))

    def _write(self, path: str) -> None:
        from syncheck.report.formats import write_file

        report = self.judge.report()
        with contextlib.chdir(self.judge.start):
            write_file(path, report, self.judge.options)
        self.written.append(path)

    def _update_baseline(self) -> str:
        """Write the baseline and return a description of the change."""
        from syncheck import api
        from syncheck.errors import UsageError

        not_run = [item.nodeid for item in self.planned if item.nodeid not in self.ran]
        if not_run:
            raise UsageError(
                f"the baseline was not updated, because {len(not_run)} tests of checkpoints did not run, for example "
                f"{not_run[0]}"
            )
        path = self.judge.options.baseline
        assert path is not None
        with contextlib.chdir(self.judge.start):
            return api.update_baseline(self.judge.report(), path)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the results by group: https://docs.pytest.org/en/stable/reference/reference.html#reporting-hooks."""
        from syncheck.pytest_plugin.checkpoints import summary

        order = {item.nodeid: number for number, item in enumerate(self.planned)}
        groups = summary.collect_groups(terminalreporter, order)
        # A run that only collects has neither.
        if not groups and not self.errors and not self.written:
            return

        terminalreporter.write_sep("=", "syncheck")
        summary.write_groups(terminalreporter, groups)
        summary.write_notes(terminalreporter, groups)
        options_text = summary.describe_options(self.judge.options)
        if options_text:
            terminalreporter.line(f"options in effect: {options_text}")

        self._write_files(terminalreporter)

    def _write_files(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print which files were written, and which could not be written."""
        if self.updated:
            terminalreporter.line(f"baseline written: {self.updated}")

        for path in self.written:
            terminalreporter.line(f"report written: {path}")

        for error in self.errors:
            terminalreporter.line(f"ERROR: {error}", red=True, bold=True)
