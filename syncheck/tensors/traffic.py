"""Count the bytes that this process has read from checkpoints. A terminal shows them as progress."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from syncheck.snapshots import Snapshot


class Traffic:
    """Bytes of tensors.

    read: bytes read so far. Threads add to it without a lock, so that a few blocks may be missing.
    expected: bytes of all tensors that a comparison may read; 0 if they are unknown.
    """

    def __init__(self) -> None:
        self.read = 0
        self.expected = 0

    def expect(self, snapshots: Iterable[Snapshot]) -> None:
        """Add the tensors of checkpoints to the bytes to read."""
        self.expected += sum(snapshot.bytes for snapshot in snapshots)


TRAFFIC = Traffic()
