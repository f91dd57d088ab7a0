"""Search one target with atheris: `python -m fuzz.search TARGET FINDINGS SCRATCH [options of libFuzzer]`.

A broken property does not end the search. The smallest input of each kind is kept in the folder FINDINGS, with a text
file. Only a timeout, the memory limit or a crash of the interpreter makes libFuzzer stop.
"""

from __future__ import annotations

import hashlib
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import atheris

with atheris.instrument_imports(include=["syncheck"], enable_loader_override=False):
    from fuzz import guard
    from fuzz.judge import Broken
    from fuzz.targets import TARGETS
    from syncheck.readers.pickles import tree

    guard.preload()
    # Measuring the coverage makes the readers about ten times slower; the limit of parts is as many times lower, so
    # that a file that unfolds up to this limit takes a second.
    guard.MAX_SECONDS = 60.0
    tree.MAX_NODES = 20_000

if TYPE_CHECKING:
    from fuzz.targets import Target

# Beyond this number, most kinds have the same cause.
_MAX_KINDS = 50


class Search:
    """Checks each input. findings: an existing folder."""

    def __init__(self, target: Target, findings: Path, scratch: Path) -> None:
        self.target, self.findings, self.scratch = target, findings, scratch
        self.smallest: dict[str, int] = {}

    def check(self, data: bytes) -> None:
        """Check one input, and keep it if it breaks the property."""
        try:
            self.target.check(data, self.scratch)
        except Broken as error:
            self.keep(data, error)

    def keep(self, data: bytes, error: Broken) -> None:
        """Write an input to the findings if it is the smallest of its kind."""
        known = self.smallest.get(error.kind)
        if known is None and len(self.smallest) == _MAX_KINDS:
            return
        if known is None or len(data) < known:
            self.smallest[error.kind] = len(data)
            name = f"{self.target.name}-{hashlib.sha256(error.kind.encode()).hexdigest()[:10]}"
            (self.findings / name).write_bytes(data)
            (self.findings / f"{name}.txt").write_text(f"{error}\n", encoding="utf-8", errors="backslashreplace")


def main() -> None:
    """Search until the time or the number of runs is over."""
    name, findings, scratch, *options = sys.argv[1:]
    target = TARGETS[name]

    def mutate(data: bytes, size: int, seed: int) -> bytes:
        assert target.mutate is not None
        mutated = target.mutate(data, lambda part, most: atheris.Mutate(part, min(most, size)), random.Random(seed))
        return mutated[:size]

    extra = {} if target.mutate is None else {"custom_mutator": mutate}
    atheris.Setup([sys.argv[0], *options], Search(target, Path(findings), Path(scratch)).check, **extra)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
