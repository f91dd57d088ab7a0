"""A process that has imported torch, and forks for each program that it is asked for over a socket.

An import of torch takes most of the processor time of a short program, and the tests start thousands. A program of this
server runs as under `python`: it has its own session, files, folder, variables, arguments, `__main__`, seeds and exit
code. It becomes a child of the process that asked, which waits for it and kills it as any other.

The ranks that such a program starts, as torchrun or with multiprocessing's spawn, begin in the same way: each program
has a server of its own, forked before it has threads.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import io
import json
import multiprocessing.process
import multiprocessing.util
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

_LAUNCHER = "torch.distributed.run"
_HANDLER = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
_PRELOADED = (
    "numpy",
    "torch",
    _HANDLER,
    _LAUNCHER,
    "torch._dynamo",  # which the first optimizer imports
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch.utils.data",
)
_OF_TESTS = ("WAIT_FOR_GLOO", "SYNCHECK_LIKE_MACOS")  # read by tests/quick_start
# Libraries read variables with these starts when they are imported, so a program with other values is no fork.
_READ_AT_IMPORT = ("PYTHON", "TORCH", "PYTORCH", "OMP_", "MKL_", "CUDA", "LC_", "LANG", "LD_", *_OF_TESTS)
# Read here for each program, or by libraries when a program uses them.
_READ_LATER = ("PYTHONPATH", "PYTHONUNBUFFERED", "TORCHELASTIC_", "TORCH_NCCL_", "TORCH_CPP_LOG_LEVEL")
_COMMANDS = (["-m", "syncheck", "watch"], ["-m", "syncheck", "parity"])  # which import torch in any case
_SPAWNED = "--multiprocessing-fork"  # an argument of the processes that multiprocessing spawns
# Of these, a process inherits that its parent ignores them.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# Names of processes, for tests that list them.
SERVER = "fork_server"
SPAWNED = "spawn_main"
_SUBREAPER, _NAME = 36, 15  # PR_SET_CHILD_SUBREAPER and PR_SET_NAME of prctl(2)
_LENGTH = 4  # bytes of the length of a message
_FILES = 16  # at most, of one program


# Without the folders of this process, which have no part in a program: that of `-c`, and tests/quick_start.
_PATH_OF_PYTHON = [folder for folder in sys.path if folder and folder != os.environ.get("PYTHONPATH")]


class ForkServer:
    """The side that asks. variables: of the server's process."""

    def __init__(self, connection: socket.socket, variables: Mapping[str, str]) -> None:
        self._connection = connection
        self._variables = _select_variables(variables)
        self._owner = os.getpid()

    def can_start(self, command: Sequence[str], variables: Mapping[str, str]) -> bool:
        """Whether a command is a program of Python that uses torch, without options that matter at Python's start."""
        program, *arguments = command
        if program != sys.executable or not self.fits(variables):
            return False
        arguments = arguments[arguments[:1] == ["-u"] :]
        return arguments[0].endswith(".py") or arguments[:2] == ["-m", _LAUNCHER] or arguments[:3] in _COMMANDS

    def fits(self, variables: Mapping[str, str]) -> bool:
        """Whether libraries would be the same if they were imported with these variables."""
        # A fork of the owner would share the connection.
        return self._owner == os.getpid() and _select_variables(variables) == self._variables

    def start(self, request: Mapping[str, Any], files: Sequence[int]) -> int:
        """Start a program, and return its process id. files: its open files, which get the numbers of the request."""
        prctl = ctypes.CDLL(None).prctl
        ignored = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
        # For a moment, since other orphans belong to init, which waits for them.
        prctl(_SUBREAPER, 1, 0, 0, 0)
        try:
            _send(self._connection, {**request, "ignored": ignored}, files)
            answer, _ = _receive(self._connection)
        finally:
            prctl(_SUBREAPER, 0, 0, 0, 0)
        if not answer:
            raise ChildProcessError(f"the server of forks has ended before {request['arguments']}")
        return int(answer["pid"])


class ForkedProgram(subprocess.Popen[Any]):
    """A program of a server, with the interface of every other child process."""

    def __init__(self, server: ForkServer, command: Sequence[str], **options: Any) -> None:
        self._server = server
        super().__init__(command, **options)

    def _execute_child(self, args: Sequence[str], *given: Any) -> None:
        """Start the program. given: what Popen passes to this method, by position."""
        (_, _, _, _, folder, variables, _, _, _), descriptors = given[:9], given[9:15]
        stdin, _, _, stdout, _, stderr = descriptors
        request = {"arguments": list(args[1:]), "folder": str(folder or os.getcwd()), "variables": dict(variables)}
        files = [number if given < 0 else given for number, given in enumerate((stdin, stdout, stderr))]
        self.pid = self._server.start(request | {"numbers": [0, 1, 2], "new_session": True}, files)
        self._child_created = True
        self._close_pipe_fds(*descriptors)  # type: ignore[attr-defined]


def start_program(server: ForkServer, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a program in a session of its own: by a fork if nothing speaks against it."""
    words = [str(word) for word in command]
    if server.can_start(words, options["env"]):
        return ForkedProgram(server, words, **options)
    return subprocess.Popen(words, **options)


def main(descriptor: int) -> None:
    """Import torch, and fork for each request until the other side closes the connection."""
    for name in _PRELOADED:
        importlib.import_module(name)
    # What is imported stays to the end of each program. A search for garbage would copy all its pages.
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=descriptor))


def _serve(connection: socket.socket) -> None:
    """Fork for each request. Only the process of a program returns, after the program."""
    # They are for the programs of this session. The server ends with its connection.
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    while True:
        request, files = _receive(connection)
        if not request:
            os._exit(0)
        pids, told = os.pipe()
        between = os.fork()
        if between == 0:
            program = os.fork()
            if program:
                os.write(told, str(program).encode())
                os._exit(0)
            for descriptor in (pids, told, connection.detach()):
                os.close(descriptor)
            _run(request, files)
            return
        # The program is the child of the process that asked as soon as the one between has ended.
        os.waitpid(between, 0)
        _send(connection, {"pid": int(os.read(pids, 20))}, ())
        for descriptor in (pids, told, *files):
            os.close(descriptor)


def _run(request: Mapping[str, Any], files: Sequence[int]) -> None:
    """Run a program in this process."""
    _set_name("python")
    for number in set(_SIGNALS) - set(request["ignored"]):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if request["new_session"]:
        os.setsid()
    _number_files(files, request["numbers"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["variables"])
    arguments = request["arguments"]
    sys.orig_argv = [sys.executable, *arguments]
    # What the imported modules have read of another process.
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    tempfile.tempdir = None
    # Programs draw different numbers.
    random.seed()
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].default_generator.seed()
    if arguments[0] == "-u" or os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout = _open_unbuffered(sys.stdout)
        arguments = arguments[arguments[0] == "-u" :]
    _serve_children()
    try:
        _run_main(arguments)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - printed as Python would
        error.__traceback__ = _skip_own_frames(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            _end_by_interrupt()
        sys.exit(1)


def _end_by_interrupt() -> None:
    """End this process by SIGINT, as Python does after KeyboardInterrupt."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def _open_unbuffered(stream: Any) -> io.TextIOWrapper:
    """Return a text stream to the same file without a buffer."""
    file = io.FileIO(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(file, stream.encoding, stream.errors, write_through=True)


def _run_main(arguments: Sequence[str]) -> None:
    """Run a script or a module in the namespace of `__main__`, as Python does."""
    namespace = sys.modules["__main__"].__dict__
    namespace.clear()
    namespace.update(__name__="__main__", __builtins__=sys.modules["builtins"], __spec__=None, __doc__=None)
    if _SPAWNED in arguments:
        _set_name(SPAWNED)
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1], namespace)
        return
    is_module = arguments[0] == "-m"
    target, *rest = arguments[is_module:]
    sys.argv = [target, *rest]
    first = os.getcwd() if is_module else os.path.dirname(os.path.realpath(target))
    others = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    folders = [*map(os.path.abspath, others), *_PATH_OF_PYTHON]
    sys.path[:] = [first, *dict.fromkeys(folders)]
    importlib.invalidate_caches()
    if is_module:
        # The server has imported torchrun, which Python would mention.
        sys.modules.pop(target, None)
        runpy._run_module_as_main(target)  # type: ignore[attr-defined]
        return
    path = os.path.join(os.getcwd(), target)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    namespace.update(__file__=path, __cached__=None, __package__=None)
    exec(code, namespace)


def _skip_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins in the program."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _number_files(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Give open files their numbers, which children inherit."""
    # No file gets the number of another one that is still to be moved.
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, max(*files, *numbers) + 1) for file in files]
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
    for file in {*files, *moved} - set(numbers):
        os.close(file)


def _serve_children() -> None:
    """Let this process start its ranks by a server that is forked now."""
    own, other = socket.socketpair()
    if os.fork() == 0:
        _set_name(SERVER)
        own.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        # Whoever reads the output of the program waits for the end of all processes that could write it.
        for number in range(3):
            os.dup2(nothing, number)
        _serve(other)
        sys.exit()
    other.close()
    server = ForkServer(own, os.environ)
    sys.modules[_HANDLER].Popen = functools.partial(_start_rank, server)  # type: ignore[attr-defined]
    multiprocessing.util.spawnv_passfds = functools.partial(_spawn, server, multiprocessing.util.spawnv_passfds)


def _start_rank(server: ForkServer, args: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a rank as torchrun's Popen does."""
    return start_program(server, args, **options)


def _spawn(server: ForkServer, otherwise: Any, path: Any, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """Start a process as multiprocessing.util.spawnv_passfds does."""
    words = list(map(os.fsdecode, args))
    if _SPAWNED not in words or not server.fits(os.environ):
        return int(otherwise(path, args, passfds))
    arguments = words[words.index("-c") :]
    numbers = sorted({0, 1, 2, *passfds})
    request = {"arguments": arguments, "folder": os.getcwd(), "variables": dict(os.environ)}
    return server.start(request | {"numbers": numbers, "new_session": False}, numbers)


def _set_name(name: str) -> None:
    """Name this process, whose command line is that of the server."""
    ctypes.CDLL(None).prctl(_NAME, name.encode(), 0, 0, 0)


def _select_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that matter when libraries are imported."""
    selected = {}
    for name, value in variables.items():
        if name.startswith(_READ_AT_IMPORT) and not name.startswith(_READ_LATER):
            selected[name] = value
    return selected


def _send(connection: socket.socket, message: Mapping[str, Any], files: Sequence[int]) -> None:
    """Send a message with descriptors of files."""
    data = json.dumps(message).encode()
    socket.send_fds(connection, [len(data).to_bytes(_LENGTH, "big")], files)
    connection.sendall(data)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Wait for a message, and return it with its descriptors; an empty one if the other side has closed."""
    length, files, _, _ = socket.recv_fds(connection, _LENGTH, _FILES)
    data = b""
    while length and len(data) < int.from_bytes(length, "big"):
        received = connection.recv(1 << 20)
        if not received:
            return {}, files
        data += received
    return (json.loads(data) if length else {}), files
