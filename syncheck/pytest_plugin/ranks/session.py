"""The pytest session in a rank's process: same rootdir, ini, conftests and options, and one test after another.

As in a worker of pytest-xdist, modules and conftests are imported once. Every test is followed by the teardown of the
fixtures of all scopes, for what the other ranks run next may be another test.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import resource
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from syncheck.pytest_plugin.ranks import coverage, group
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
    """Set files, folder, environment and import path as the outer pytest has them now."""
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
    stacks = (folder / "stacks").open("w")
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    while _stacks:
        _stacks.pop().close()
    _stacks.append(stacks)


def _fingerprint() -> tuple[Any, ...]:
    """Return the same before and after a test that leaves nothing behind: threads, processes, signals, limits, ..."""
    umask = os.umask(0o22)
    os.umask(umask)
    torch = sys.modules.get("torch")
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
        # Before torch is there, it has the threads that OMP_NUM_THREADS says.
        torch.get_num_threads() if torch is not None else int(os.environ.get("OMP_NUM_THREADS", "1") or "1"),
    )


TASK = pytest.StashKey["Task"]()
"""Of a rank's config: the test that runs, as the pytest that gave it wrote it."""
# What belongs to the outer session alone: choosing tests, writing files, debuggers, other processes, repeating.
_OUTER: dict[str, Any] = {
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
# They would seed all ranks alike, and run a test again on one rank that the others have ended.
_REPLACED = ("randomly", "rerunfailures")


def serve(task: Task, receive: Receive, send: Send) -> None:
    """Run tests as they come; return when the session is over, which only an error or pytest.exit makes it.

    task: the first. receive: waits for the next message. Sent for each test: `joining` and `ready`, before and after
    the process group is made; after `begin`, `report`s, `warning`s, `problem`s, at last `done`; `released` without it.
    """
    _enter(task)
    measured = coverage.start(task["coverage"])
    plugin = _Plugin(task, receive, send, measured)
    try:
        _session(task, plugin)
        problem = "its pytest session ended"
    except BaseException as error:  # noqa: BLE001 - whatever it is, the test must be told of it
        if not isinstance(error, pytest.UsageError):
            traceback.print_exc()
        problem = f"its pytest session failed: {type(error).__name__}: {error}"
    if not plugin.told:
        send({"problem": problem})
    coverage.save(measured)
    send({"done": {"reusable": False}})


def no_breakpoint(*_: Any, **__: Any) -> None:
    """Stand in for breakpoint(), which would wait for input that no one can give."""
    __tracebackhide__ = True
    pytest.fail("breakpoint() in a test on several ranks: a rank has no terminal. Print, or run the code in one rank.")


def _session(task: Task, plugin: _Plugin) -> None:
    # As pytest-xdist does for its workers; pytest.main gives no way to change what addopts says.
    from _pytest.config import _prepareconfig

    config = _prepareconfig(task["args"], [plugin])
    config.pluginmanager.register(object(), "syncheck-rank")  # a name by which the hooks know where they are
    for name in _REPLACED:
        if config.pluginmanager.hasplugin(name):
            config.pluginmanager.unregister(name=name)
    for name, value in _OUTER.items():
        if hasattr(config.option, name):
            setattr(config.option, name, value)
    config.option.basetemp = task["basetemp"]
    # All that this run has for ranks, at once: fixtures belong to the nodes of one collection.
    config.args = task["files"]
    config.args_source = pytest.Config.ArgsSource.ARGS
    if task["workerinput"] is not None:
        config.workerinput = task["workerinput"]  # type: ignore[attr-defined]
        config.workeroutput = {}  # type: ignore[attr-defined]
    stdout = sys.stdout
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        sys.stdout = nowhere  # the terminal reporter takes it, and a rank has nothing to report there
        try:
            plugin.stdout = stdout
            config.hook.pytest_cmdline_main(config=config)
        finally:
            sys.stdout = stdout


class _Plugin:
    """Runs the tests of a session, and tells the outer one of them. told: of what ended the session, if anything."""

    def __init__(self, task: Task, receive: Receive, send: Send, measured: Any) -> None:
        self.task, self.receive, self.send, self.measured = task, receive, send, measured
        self.stdout = sys.stdout
        self.told = False
        self.items: dict[str, pytest.Item] = {}
        self.broken: dict[str, str] = {}

    def problem(self, text: str) -> None:
        """Tell of what went wrong outside the test itself."""
        self.told = True
        self.send({"problem": text})

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        sys.stdout = self.stdout
        self.config = session.config

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Iterator[None]:
        # Which test runs is decided already: hooks may mark them here, but not choose, or double them.
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
            self.task, self.told = message["run"], False
            _enter(self.task)

    def _run(self, session: pytest.Session) -> None:
        """Run the test of the task, and tell how it went."""
        item = self.items.get(self.task["nodeid"])
        before = _fingerprint()
        if item is not None:
            self.config.stash[TASK] = self.task
            settings = group.settings()
            if self._prepared():
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            group.restore(settings)
        else:
            self.problem(self._missing())
        coverage.save(self.measured)
        stopped = session.shouldfail or session.shouldstop
        self.send({"done": {"reusable": not stopped and _fingerprint() == before}})

    def _missing(self) -> str:
        nodeid = self.task["nodeid"]
        broken = [text for node, text in self.broken.items() if nodeid.startswith(node)]
        if broken:
            return "\n".join(["collecting the test failed:", *broken])
        return f"there is no test {nodeid} in it. Has the test the same id in every process?"

    def _prepared(self) -> bool:
        self.send({"joining": True})
        try:
            group.prepare(self.task)
        except Exception as error:  # noqa: BLE001 - the test must be told of it
            traceback.print_exc()
            self.problem(f"no process group: {type(error).__name__}: {error}")
            return False
        self.send({"ready": True})
        while "begin" not in self.receive():
            pass
        return True

    def _release(self) -> None:
        try:
            group.destroy()
        except Exception:  # noqa: BLE001
            os._exit(1)  # another process is started in its place
        self.send({"released": True})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.send({"report": data if data is not None else report._to_json()})  # noqa: SLF001

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str) -> None:
        if when == "runtest":
            kept = {"text": str(warning_message.message), "category": warning_message.category.__name__}
            self.send({"warning": kept | {"file": warning_message.filename, "line": warning_message.lineno}})

    def pytest_internalerror(self, excrepr: ExceptionRepr) -> None:
        self.problem(f"an error inside pytest or a plugin:\n{excrepr}")

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self.problem(f"its session was left by {excinfo.typename}: {excinfo.value}")
