"""The store that rank 0 serves over TCP, or torchrun's agent in its place."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from datetime import timedelta
from urllib.parse import urlsplit

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # torch.distributed has no __all__

from train.errors import RankError, UserError

POLL = 0.1  # seconds
SLACK = 5.0  # seconds beyond the timeout, after which a server that accepts but says nothing is none


def address_of(init_method: str) -> tuple[str, int]:
    """Read host and port of tcp://host:port, or for env:// those in the environment."""
    if init_method == "env://":
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    parts = urlsplit(init_method)
    return parts.hostname or "", parts.port or 0


def agent_serves(init_method: str) -> bool:
    """Tell whether torchrun's agent has the store already, so that rank 0 does not serve one."""
    return init_method == "env://" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def open_tcp_store(init_method: str, rank: int, timeout: float) -> Store:
    """Serve the store, or connect to it. Raises RankError; UserError where rank 0 can tell alone."""
    host, port = address_of(init_method)
    found = _resolve(host, port)
    serve = rank == 0 and not agent_serves(init_method)
    if serve:
        _can_listen(host, port, found)
    else:
        _knock(host, port, timeout, rank)
    store = _connect(host, port, serve, timeout, rank)
    # torchrun starts ranks again under the same store: each attempt has keys of its own.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"train/{attempt}", store)


def _resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "this cannot be a name"
        raise RankError(f"cannot find the machine {host!r}: {reason}; give rank 0's (--ip or MASTER_ADDR)") from error
    return [(family, str(address[0])) for family, _, _, _, address in found]


def _can_listen(host: str, port: int, found: list[tuple[socket.AddressFamily, str]]) -> None:
    """Refuse an address of another machine and a port in use, before torch fills the screen about it."""
    mine = False
    for family, address in found:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As torch's server does it: a connection that has ended does not block the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
                mine = True
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise UserError(_in_use(port)) from error
                if error.errno == errno.EACCES:
                    raise UserError(f"port {port} needs privileges: choose one from 1024 with --port") from error
    if not mine:
        raise UserError(f"{host} is not an address of this machine, where rank 0 serves: give one that is")


def _in_use(port: int) -> str:
    whose = "by another program or another rank 0"
    return f"port {port} is in use, {whose}: choose another with --port, or torchrun's --master-port"


def _knock(host: str, port: int, timeout: float, rank: int) -> None:
    """Wait until somebody listens there. torch would too, but with pages of warnings."""
    start = time.monotonic()
    while True:
        left = timeout - (time.monotonic() - start)
        try:
            socket.create_connection((host, port), timeout=max(left, POLL)).close()
        except OSError as error:
            if left <= POLL:
                reason = error.strerror or "no answer"
                raise RankError(
                    f"rank {rank} waited {timeout:g} s at tcp://{host}:{port}: rank 0 did not come ({reason}); "
                    "start it, or see its own message; if it waits there too, a firewall may be between"
                ) from error
            time.sleep(POLL)
        else:
            return


def _connect(host: str, port: int, serve: bool, timeout: float, rank: int) -> Store:
    """Open the store, in a thread: torch waits without end for a server that is not torch's."""
    result: list[Store | BaseException] = []

    def connect() -> None:
        try:
            wait = timedelta(seconds=timeout)
            result.append(TCPStore(host, port, None, serve, wait, wait_for_workers=False))
        except BaseException as error:  # noqa: BLE001  # whatever it is, the waiting thread raises it
            result.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout + SLACK)
    if not result:
        raise RankError(f"rank {rank}: a program that is no rank 0 answers at {host}:{port}: choose another port")
    if isinstance(result[0], Store):
        return result[0]
    reason = str(result[0]).partition("\n")[0]
    if "EADDRINUSE" in reason:
        raise UserError(_in_use(port)) from result[0]
    raise RankError(f"rank {rank} cannot use the store at {host}:{port}: {reason}") from result[0]
