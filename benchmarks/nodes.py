"""Two nodes on this machine: network namespaces connected by a virtual cable. Requires Linux, `ip`, and root."""

from __future__ import annotations

import shutil
import subprocess
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from train.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator


def ip(*words: str) -> None:
    """Configure the network. Raises UserError with the output of ip."""
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"'ip {' '.join(words)}' failed: {done.stderr.strip()}")


class Node(NamedTuple):
    """A namespace, its network device, and its address."""

    name: str
    device: str
    address: str

    @property
    def prefix(self) -> list[str]:
        """The start of a command in this namespace. gloo needs the device: the host name has no address here."""
        return ["ip", "netns", "exec", self.name, "env", f"GLOO_SOCKET_IFNAME={self.device}"]


@contextmanager
def two_nodes() -> Iterator[list[Node]]:
    """Yield two nodes in one network and remove them at the end. Raises UserError if they cannot be created."""
    if shutil.which("ip") is None:
        raise UserError("there is no program ip to create network namespaces")
    mark = uuid.uuid4().hex[:8]
    nodes = a, b = [Node(f"train-{mark}-{i}", f"v{i}{mark}", f"10.77.0.{i}") for i in (1, 2)]
    try:
        for node in nodes:
            ip("netns", "add", node.name)
        ip("link", "add", a.device, "netns", a.name, "type", "veth", "peer", "name", b.device, "netns", b.name)
        for node in nodes:
            ip("-n", node.name, "addr", "add", f"{node.address}/24", "dev", node.device)
            for device in ("lo", node.device):
                ip("-n", node.name, "link", "set", device, "up")
        yield nodes
    finally:
        for node in nodes:  # this removes both ends of the cable
            subprocess.run(["ip", "netns", "delete", node.name], check=False, capture_output=True)
