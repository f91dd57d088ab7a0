"""A nested pytest session in a rank's process, for one test: same rootdir, ini, conftests and options."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from syncheck.pytest_plugin.ranks import coverage, group
from syncheck.pytest_plugin.ranks.process import STACK_SIGNAL

if TYPE_CHECKING:
    import warnings
    from collections.abc import Callable, Iterator

    from _pytest._code.code import ExceptionRepr

    Send = Callable[[dict[str, Any]], None]

RANK = pytest.StashKey[dict[str, Any]]()
"""Of a rank's config: the task, as the pytest that gave it wrote it."""
# Seconds after the test's limit; only a rank whose pytest cannot end it, being dead or stuck itself, lives so long.
LAST_RESORT = 300.0
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
    "log_file": None,
    "looponfail": False,
    "dist": "no",
    "distload": False,
    "numprocesses": None,
    "maxprocesses": None,
    "tx": [],
    "reruns": 0,
    "syncheck": [],
    "syncheck_output": [],
}


def run(task: dict[str, Any], send: Send) -> None:
    """Run one test and tell how it went: messages `ready`, `report`, `warning`, `problem`, and at last `done`."""
    before = _alive()
    with _surroundings(task):
        measured = coverage.start(task["coverage"])
        try:
            _session(task, send)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test must be told of it
            if isinstance(error, pytest.UsageError):
                hint = ". Has the test the same id in every process?"
            else:
                import traceback

                traceback.print_exc()
                hint = ""
            send({"problem": f"its pytest session did not start: {type(error).__name__}: {error}{hint}"})
        coverage.save(measured)
    send({"done": {"reusable": _alive() == before}})


def release() -> None:
    """Let go of the process group; all ranks have ended their test."""
    group.destroy()


def no_breakpoint(*_: Any, **__: Any) -> None:
    """Stand in for breakpoint(), which would wait for input that no one can give."""
    __tracebackhide__ = True
    pytest.fail("breakpoint() in a test on several ranks: a rank has no terminal. Print, or run the code in one rank.")


def _session(task: dict[str, Any], send: Send) -> None:
    # As pytest-xdist does for its workers; pytest.main gives no way to change what addopts says.
    from _pytest.config import _prepareconfig

    plugin = _Plugin(task, send)
    config = _prepareconfig(task["args"], [plugin])
    config.pluginmanager.register(object(), "syncheck-rank")  # a name by which the hooks know where they are
    for name, value in _OUTER.items():
        if hasattr(config.option, name):
            setattr(config.option, name, value)
    config.option.basetemp = task["basetemp"]
    config.args = [task["node"]]
    config.args_source = pytest.Config.ArgsSource.ARGS
    # Other plugins take a process with `workerinput` for one that writes no files of the whole run.
    config.workerinput = task["workerinput"]  # type: ignore[attr-defined]
    config.workeroutput = {}  # type: ignore[attr-defined]
    config.stash[RANK] = task
    stdout = sys.stdout
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        sys.stdout = nowhere  # the terminal reporter takes it, and a rank has nothing to report there
        try:
            plugin.stdout = stdout
            config.hook.pytest_cmdline_main(config=config)
        finally:
            sys.stdout = stdout


class _Plugin:
    """What the outer session wants to know of this one."""

    def __init__(self, task: dict[str, Any], send: Send) -> None:
        self.task, self.send = task, send
        self.stdout = sys.stdout

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        sys.stdout = self.stdout
        self.config = session.config

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.send({"problem": f"collecting the test failed:\n{report.longreprtext}"})

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Iterator[None]:
        if len(session.items) != 1 and not session.testsfailed:
            found = ", ".join(item.nodeid for item in session.items[:3]) or "none"
            hint = "Has it the same id in every process?"
            self.send({"problem": f"needs the one test {self.task['nodeid']}, collected: {found}. {hint}"})
            session.items.clear()
        elif session.items:
            try:
                group.prepare(self.task)
                self.send({"ready": True})
            except Exception as error:  # noqa: BLE001 - the test must be told of it
                self.send({"problem": f"no process group: {type(error).__name__}: {error}"})
                session.items.clear()
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.send({"report": data})

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str) -> None:
        if when == "runtest":
            kept = {"text": str(warning_message.message), "category": warning_message.category.__name__}
            self.send({"warning": kept | {"file": warning_message.filename, "line": warning_message.lineno}})

    def pytest_internalerror(self, excrepr: ExceptionRepr) -> None:
        self.send({"problem": f"an error inside pytest or a plugin:\n{excrepr}"})

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self.send({"problem": f"its session was left by {excinfo.typename}: {excinfo.value}"})


def _alive() -> set[object]:
    """Threads and child processes of this process: what a test leaves behind makes the process unfit for the next."""
    found: set[object] = {thread.ident for thread in threading.enumerate()}
    for file in Path("/proc/self/task").glob("*/children"):
        try:
            found |= set(file.read_text().split())
        except OSError:  # the thread has just ended
            continue
    return found


@contextmanager
def _surroundings(task: dict[str, Any]) -> Iterator[None]:
    """Set files, folder, environment and import path as the outer pytest has them now."""
    folder = Path(task["folder"])
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        opened = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(task["cwd"])
    os.environ.clear()
    os.environ.update(task["environment"])
    sys.path[:] = task["path"]
    with (folder / "stacks").open("w") as stacks:
        faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
        faulthandler.dump_traceback_later(task["limit"] + LAST_RESORT, exit=True)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            faulthandler.register(STACK_SIGNAL, all_threads=True)
