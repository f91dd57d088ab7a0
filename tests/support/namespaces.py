"""Two simulated machines: network namespaces connected by a virtual cable."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from benchmarks.nodes import Node, ip, two_nodes
from support.required import unavailable
from train.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Host", "ip", "two_hosts"]


class Host(Node):
    """A node for the commands of a test."""

    def command(self, *words: object) -> list[object]:
        """Return a command for this namespace."""
        return [*self.prefix, *words]


@contextmanager
def two_hosts() -> Iterator[list[Host]]:
    """Yield two machines in one network and remove them at the end. Skips the test if creating them fails."""
    with ExitStack() as stack:
        try:
            nodes = stack.enter_context(two_nodes())
        except UserError as error:
            unavailable("netns", str(error))
        yield [Host(*node) for node in nodes]
