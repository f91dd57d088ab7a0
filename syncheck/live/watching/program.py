"""Run a script or a module as Python would, watched; also the processes that it starts to train.

The script is `__main__`, its folder is first in sys.path, its arguments are sys.argv, and its exit code and traceback
are the same as of `python SCRIPT`.
"""

from __future__ import annotations

import builtins
import functools
import importlib.util
import io
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import types
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, NoReturn

from syncheck.errors import UsageError
from syncheck.live.watching.full_checks import FullChecks
from syncheck.live.watching.launching import describe_launch
from syncheck.live.watching.session import start_session
from syncheck.live.watching.wrappers import hide_frames, skip_frame, wrap
from syncheck.suggestions import suggest_path

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncheck.live.watching.session import Session
    from syncheck.live.watching.settings import WatchSettings

# Workers that load data have no model.
_UNWATCHED = ("torch.utils.data",)


def check_target(target: str, *, is_module: bool) -> None:
    """Raise UsageError if there is no such script or module."""
    if not is_module:
        # Python runs a folder by the __main__.py in it.
        script = os.path.join(target, "__main__.py") if os.path.isdir(target) else target
        if not os.path.exists(script):
            raise UsageError(f"watch: {target}: no such script; pass the path of a Python file{suggest_path(target)}")
        return
    # As `python -m` finds modules.
    sys.path[0] = os.getcwd()
    try:
        module = importlib.util.find_spec(target)
    except (ImportError, ValueError) as error:
        raise UsageError(f"watch: -m {target}: {error}") from None
    if module is None:
        raise UsageError(f"watch: -m {target}: no such module; run it from the folder that holds it")


def run_program(target: str, arguments: Sequence[str], settings: WatchSettings, *, is_module: bool) -> int:
    """Run a program to its end, and return its exit code.

    target: path of a script, or with `is_module` the name of a module.
    """
    session = _start_session(settings)
    # The command line of syncheck, from `watch` on.
    command = sys.argv[1:]
    _watch_restarts(target, command[: -len(arguments) or None], is_module=is_module)
    sys.argv = [target, *arguments]
    # Python replaces the folder of the running program, that of syncheck, by the folder of the script, behind links.
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(target))
    try:
        if is_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            _run_script(target)
    except SystemExit as end:
        # Many scripts end with sys.exit(main()).
        # No code is success, as 0 is; a text is printed, and is a failure.
        if not end.code:
            return session.choose_exit_code(0)
        session.finish(normally=False)
        raise
    except KeyboardInterrupt as error:
        # Launchers send the signal once more, within the last moments of watching.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _print_error(error)
        session.finish(normally=False)
        # Shells and launchers expect the end by the signal, as of any Python program.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:  # noqa: BLE001 - printed as Python would
        # First, as without watching: a launcher may end this process while the last steps are judged.
        _print_error(error)
        session.finish(normally=False)
        session.print_advice(describe_launch(error, command))
        return 1
    return session.choose_exit_code(0)


def _run_script(target: str) -> None:
    """Run a file, or a folder or archive with a __main__.py.

    For a file, runpy makes no absolute path of __file__, which scripts that change the folder need, and ends the
    models of the script before they are compared.
    """
    if pkgutil.get_importer(target) is not None or target.endswith(".pyc"):
        runpy.run_path(target, run_name="__main__")
        return
    path = os.path.join(os.getcwd(), target)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __cached__=None, __builtins__=builtins)
    _programs.append(sys.modules["__main__"])
    sys.modules["__main__"] = module
    exec(code, module.__dict__)  # noqa: S102 - the purpose of the command


# The program that started the script: Python would clear it, and it is still running.
_programs: list[types.ModuleType] = []


def _print_error(error: BaseException) -> None:
    """Print an error of the script as Python would: the traceback begins in the script."""
    trace = error.__traceback__
    while trace is not None and _is_of_launch(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    # The script may have replaced the hook.
    shown = hide_frames(error.with_traceback(trace))
    sys.excepthook(type(shown), shown, shown.__traceback__)


def _is_of_launch(path: str) -> bool:
    return path == __file__ or path in (runpy.__file__, "<frozen runpy>")


# The session of this process; a forked process inherits that of its parent, with its hooks.
_sessions: list[Session] = []


def _start_session(settings: WatchSettings) -> Session:
    if not _sessions:
        # A script that calls `syncheck.live.watch()` gets the same session.
        _sessions.append(start_session(settings, FullChecks))
        _watch_processes(settings)
        _watch_exit(_sessions[0])
    return _sessions[0]


def _watch_exit(session: Session) -> None:
    """Finish a session before os._exit() too, with which many programs end after they have destroyed process groups."""
    exit_now = os._exit
    process = os.getpid()

    @wrap(exit_now)
    def exit_watched(status: int) -> NoReturn:
        # A forked process, which inherits this function, has no session of its own.
        if os.getpid() == process:
            status = session.choose_exit_code(status)
        exit_now(status)

    os._exit = exit_watched


class WatchedTarget:
    """The function of a started process, watched. It is pickled for a spawned process, which imports this module.

    target: the function.
    """

    def __init__(self, target: Callable[..., Any], settings: WatchSettings) -> None:
        self.target, self.settings = target, settings
        # Names for logs and errors.
        if hasattr(target, "__name__"):
            functools.update_wrapper(self, target)

    def __getstate__(self) -> dict[str, Any]:
        return {"target": self.target, "settings": self.settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @skip_frame
    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the function in the started process."""
        session = _start_session(self.settings)
        ended = False
        try:
            result = self.target(*arguments, **named)
            ended = True
            return result
        except BaseException as error:
            hide_frames(error)
            raise
        finally:
            session.finish(normally=ended)


def _note_children() -> None:
    """Note that the program has started a watched process."""
    for session in _sessions:
        session.has_children = True


def _watch_restarts(target: str, command: Sequence[str], *, is_module: bool) -> None:
    """Watch every process in which the program runs itself with subprocess, as Lightning does for each rank.

    command: the arguments of syncheck without those of the program.
    """
    create = subprocess.Popen.__init__
    program = ["-m", target] if is_module else [os.path.realpath(target)]

    @wrap(create)
    def create_watched(process: Any, args: Any, *arguments: Any, **named: Any) -> None:
        words = list(args) if isinstance(args, (list, tuple)) else []
        started = words[1 : 1 + len(program)]
        if started and not is_module:
            started = [os.path.realpath(started[0])]
        if words[:1] == [sys.executable] and started == program:
            args = [sys.executable, "-m", "syncheck", *command, *words[1 + len(program) :]]
            _note_children()
        create(process, args, *arguments, **named)

    subprocess.Popen.__init__ = create_watched  # type: ignore[method-assign]


def _watch_processes(settings: WatchSettings) -> None:
    """Watch every process that multiprocessing starts from now on, by any start method."""
    create = BaseProcess.__init__

    @wrap(create)
    def create_watched(
        process: BaseProcess, group: None = None, target: Any = None, *arguments: Any, **named: Any
    ) -> None:
        module = getattr(target, "__module__", None) or ""
        if target is not None and not module.startswith(_UNWATCHED) and not isinstance(target, WatchedTarget):
            target = WatchedTarget(target, settings)
            _note_children()
        create(process, group, target, *arguments, **named)

    BaseProcess.__init__ = create_watched  # type: ignore[method-assign]
