"""`pytest -s`: what the ranks write, while they write it, each line behind its rank."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.pytest_plugin.ranks.results import Result


class Tail:
    """Called again and again, it passes on what came since the last time, whole lines only. live: else does nothing."""

    def __init__(self, results: Sequence[Result], live: bool) -> None:
        self._results = results if live else ()
        self._read: dict[tuple[int, str], int] = defaultdict(int)  # bytes

    def __call__(self) -> None:
        """Pass on what is new."""
        for result in self._results:
            for stream in ("stdout", "stderr"):
                try:
                    with (result.folder / stream).open("rb") as file:
                        file.seek(self._read[result.rank, stream])
                        new = file.read()
                except OSError:
                    continue
                whole = new if result.over else new[: new.rfind(b"\n") + 1]
                self._read[result.rank, stream] += len(whole)
                for line in whole.decode(errors="replace").splitlines():
                    getattr(sys, stream).write(f"[rank {result.rank}] {line}\n")
