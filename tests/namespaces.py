"""Two simulated machines: network namespaces connected by a virtual cable."""

from __future__ import annotations

import shutil
import subprocess
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from required import unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator


def ip(*words: str) -> None:
    """Configure the network. Raises CalledProcessError with the output of ip."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclass(frozen=True)
class Host:
    """A namespace, its network device, and its address."""

    name: str
    device: str
    address: str

    def command(self, *words: object) -> list[object]:
        """Return a command for this namespace. gloo needs the device, because the host name has no address here."""
        inside = ["ip", "netns", "exec", self.name]
        return [*inside, "env", f"GLOO_SOCKET_IFNAME={self.device}", *words]


@contextmanager
def two_hosts() -> Iterator[list[Host]]:
    """Yield two machines in one network and remove them at the end. Skips the test if creating them fails."""
    if shutil.which("ip") is None:
        unavailable("netns", "there is no program ip")
    mark = uuid.uuid4().hex[:8]
    two = [Host(f"train-{mark}-{i}", f"v{i}{mark}", f"10.77.0.{i}") for i in (1, 2)]
    try:
        try:
            for host in two:
                ip("netns", "add", host.name)
                ip("-n", host.name, "link", "set", "lo", "up")
            a, b = two
            ip("link", "add", a.device, "netns", a.name, "type", "veth", "peer", "name", b.device, "netns", b.name)
            for host in two:
                ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.device)
                ip("-n", host.name, "link", "set", host.device, "up")
        except subprocess.CalledProcessError as error:
            unavailable("netns", f"'{' '.join(error.cmd)}' failed: {error.stderr.strip()}")
        yield two
    finally:
        for host in two:  # this removes both ends of the cable
            subprocess.run(["ip", "netns", "delete", host.name], check=False, capture_output=True)
