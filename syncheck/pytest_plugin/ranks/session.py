"""The pytest session in a rank's process, with the rootdir, ini file, conftests and options of the outer session.

As in a worker of pytest-xdist, modules and conftests are imported once. Fixtures of all scopes are torn down after
every test, because the ranks of the next test may be other processes.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import resource
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from syncheck.loaded import find_loaded
from syncheck.pytest_plugin.ranks import process_group
from syncheck.pytest_plugin.ranks.guard import descendants
from syncheck.pytest_plugin.ranks.process import STACK_SIGNAL

if TYPE_CHECKING:
    import warnings
    from collections.abc import Callable, Iterator

    from _pytest._code.code import ExceptionRepr

    Task = dict[str, Any]
    Send = Callable[[dict[str, Any]], None]
    Receive = Callable[[], dict[str, Any]]

_STREAMS = (sys.stdin, sys.stdout, sys.stderr)
_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGALRM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCHLD,
    signal.SIGPIPE,
)
_LIMITS = (
    resource.RLIMIT_NOFILE,
    resource.RLIMIT_AS,
    resource.RLIMIT_FSIZE,
    resource.RLIMIT_STACK,
    resource.RLIMIT_CPU,
)
_stacks: list[Any] = []


def _enter(task: dict[str, Any]) -> None:
    """Set output files, folder, environment and import path to those of the outer pytest."""
    folder = Path(task["folder"])
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        opened = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = _STREAMS
    os.chdir(task["cwd"])
    os.environ.clear()
    os.environ.update(task["environment"])
    sys.path[:] = task["path"]
    # Pytest has enabled it with the stderr of the first test.
    if faulthandler.is_enabled():
        faulthandler.enable(file=2)
    stacks = (folder / "stacks").open("w")
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    while _stacks:
        _stacks.pop().close()
    _stacks.append(stacks)


def _fingerprint() -> tuple[Any, ...]:
    """Return the state of the process, which is equal before and after a test without side effects."""
    umask = os.umask(0o22)
    os.umask(umask)
    torch = find_loaded("torch")
    return (
        {thread.ident for thread in threading.enumerate()},
        set(descendants(os.getpid())),
        [signal.getsignal(number) for number in _SIGNALS],
        signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        [resource.getrlimit(limit) for limit in _LIMITS],
        umask,
        gc.isenabled(),
        sys.getrecursionlimit(),
        [stream is None or stream.closed for stream in _STREAMS],
        # The number of threads of torch after its import.
        torch.get_num_threads() if torch is not None else int(os.environ.get("OMP_NUM_THREADS", "1") or "1"),
    )


TASK = pytest.StashKey["Task"]()
"""In a rank's config: the task of the running test."""
# Options of the outer session only: selection of tests, output files, debuggers, workers, repetition.
_OUTER_ONLY: dict[str, Any] = {
    "capture": "no",
    "usepdb": False,
    "trace": False,
    "keyword": "",
    "markexpr": "",
    "maxfail": 0,
    "lf": False,
    "failedfirst": False,
    "newfirst": False,
    "stepwise": False,
    "stepwise_skip": False,
    "cacheclear": False,
    "cacheshow": None,
    "xmlpath": None,
    "pastebin": None,
    "log_file": os.devnull,
    "looponfail": False,
    "dist": "no",
    "distload": False,
    "numprocesses": None,
    "maxprocesses": None,
    "tx": [],
    "syncheck": [],
    "syncheck_output": [],
}
# Plugins with harmful effects in a rank: the same seed on all ranks, repetition of a test on one rank only.
_DISABLED_PLUGINS = ("randomly", "rerunfailures")


def serve(task: Task, receive: Receive, send: Send) -> None:
    """Run tests until the session ends because of an error or pytest.exit.

    task: the first test. receive: waits for the next message. send: sends for each test

    - `joining` and `ready`, before and after the process group is created,
    - after `begin` was received, `report`, `warning` and `problem`, then `done`,
    - after `release` was received, `released`.
    """
    _enter(task)
    measured = _start_coverage(task["coverage"])
    plugin = _Plugin(task, receive, send, measured)
    try:
        _session(task, plugin)
        problem = "its pytest session ended"
    except BaseException as error:  # noqa: BLE001 - every error must reach the outer session
        if not isinstance(error, pytest.UsageError):
            traceback.print_exc()
        problem = f"its pytest session failed: {type(error).__name__}: {error}"
    if not plugin.problem_sent:
        send({"problem": problem})
    if measured is not None:
        measured.save()
    send({"done": {"reusable": False}})


def _start_coverage(settings: dict[str, Any] | None) -> Any:
    """Start or reuse a measurement of this process, which pytest-cov combines; None without settings."""
    if settings is None:
        return None
    import coverage

    running = coverage.Coverage.current()
    if running is None:
        running = coverage.Coverage(**settings, data_suffix=True)
        running.start()
    return running


def _json_value(value: object) -> object:
    """Return a value, or its repr if JSON cannot contain it, for example a list that contains itself."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return repr(value)
    return value


def no_breakpoint(*_: Any, **__: Any) -> None:
    """Replace breakpoint(), which would wait for input without a terminal."""
    __tracebackhide__ = True
    pytest.fail("breakpoint() in a test on several ranks: ranks have no terminal; use print, or run one rank only")


def _session(task: Task, plugin: _Plugin) -> None:
    # pytest-xdist uses the same function for its workers, because pytest.main cannot override addopts.
    from _pytest.config import _prepareconfig

    config = _prepareconfig(task["args"], [plugin])
    # Marks this session as a rank for the hooks of this plugin.
    config.pluginmanager.register(object(), "syncheck-rank")
    for name in _DISABLED_PLUGINS:
        if config.pluginmanager.hasplugin(name):
            config.pluginmanager.unregister(name=name)
    for name, value in _OUTER_ONLY.items():
        if hasattr(config.option, name):
            setattr(config.option, name, value)
    config.option.basetemp = task["basetemp"]
    # The files of all tests on ranks, because fixtures belong to the nodes of one collection.
    config.args = task["files"]
    config.args_source = pytest.Config.ArgsSource.ARGS
    if task["workerinput"] is not None:
        config.workerinput = task["workerinput"]  # type: ignore[attr-defined]
        config.workeroutput = {}  # type: ignore[attr-defined]
    stdout = sys.stdout
    with open(os.devnull, "w", encoding="utf-8") as null:
        # Discards the output of the rank's terminal reporter.
        sys.stdout = null
        try:
            plugin.stdout = stdout
            config.hook.pytest_cmdline_main(config=config)
        finally:
            sys.stdout = stdout


class _Plugin:
    """Runs the tests of a session and sends the results. problem_sent: whether a problem of this test was sent."""

    def __init__(self, task: Task, receive: Receive, send: Send, measured: Any) -> None:
        self.task, self.receive, self.send, self.measured = task, receive, send, measured
        self.stdout = sys.stdout
        self.problem_sent = False
        self.items: dict[str, pytest.Item] = {}
        self.broken: dict[str, str] = {}

    def send_problem(self, text: str) -> None:
        """Send an error outside the test itself."""
        self.problem_sent = True
        self.send({"problem": text})

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        sys.stdout = self.stdout
        self.config = session.config

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Iterator[None]:
        # The outer session has selected the tests, so items removed or repeated by hooks are restored.
        before = list(items)
        result = yield
        for item in [*items, *before]:
            self.items.setdefault(item.nodeid, item)
        return result

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.broken[report.nodeid] = report.longreprtext

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        while True:
            self._run(session)
            while "run" not in (message := self.receive()):
                self._release()
            self.task, self.problem_sent = message["run"], False
            _enter(self.task)

    def _run(self, session: pytest.Session) -> None:
        """Run the test of the task and send its results."""
        item = self.items.get(self.task["nodeid"])
        before = _fingerprint()
        if item is not None:
            self.config.stash[TASK] = self.task
            settings = process_group.settings()
            if self._prepare():
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            process_group.restore(settings)
        else:
            self.send_problem(self._describe_missing_test())
        if self.measured is not None:
            # The process may be killed later.
            self.measured.save()
        stopped = session.shouldfail or session.shouldstop
        self.send({"done": {"reusable": not stopped and _fingerprint() == before}})

    def _describe_missing_test(self) -> str:
        nodeid = self.task["nodeid"]
        # A file or class that cannot be collected hides all of its tests.
        broken = [text for node, text in self.broken.items() if nodeid.startswith(node)]
        if broken:
            return "\n".join(["collecting the test failed:", *broken])
        return f"the rank collected no test {nodeid}; its id must be the same in every process"

    def _prepare(self) -> bool:
        self.send({"joining": True})
        try:
            process_group.prepare(self.task)
        except Exception as error:  # noqa: BLE001 - every error must reach the outer session
            traceback.print_exc()
            self.send_problem(f"no process group: {type(error).__name__}: {error}")
            return False
        self.send({"ready": True})
        while "begin" not in self.receive():
            pass
        return True

    def _release(self) -> None:
        try:
            process_group.destroy()
        except Exception:  # noqa: BLE001
            # The pool starts a new process.
            os._exit(1)
        self.send({"released": True})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        report.user_properties = [(name, _json_value(value)) for name, value in report.user_properties]
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.send({"report": data if data is not None else report._to_json()})  # noqa: SLF001

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str) -> None:
        if when == "runtest":
            warning = {"text": str(warning_message.message), "category": warning_message.category.__name__}
            self.send({"warning": warning | {"file": warning_message.filename, "line": warning_message.lineno}})

    def pytest_internalerror(self, excrepr: ExceptionRepr) -> None:
        self.send_problem(f"an error inside pytest or a plugin:\n{excrepr}")

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self.send_problem(f"its session was ended by {excinfo.typename}: {excinfo.value}")
