"""One target in a process of its own: `python -m fuzz.child TARGET FINDINGS SCRATCH [libFuzzer's options]`.

A fault does not end the run: the first and the smallest input of each kind is kept, with its story, and the search
goes on. What libFuzzer itself stops for (no answer in time, too much memory, a crash of the interpreter) ends it.
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
    from fuzz.held import Broken
    from fuzz.targets import TARGETS

    guard.preload()

if TYPE_CHECKING:
    from fuzz.targets import Target

# Of kinds of faults; where there are more, one cause has many faces.
_MOST_KINDS = 50


class Search:
    """What is done with each input. findings: a folder that is there."""

    def __init__(self, target: Target, findings: Path, scratch: Path) -> None:
        self.target, self.findings, self.scratch = target, findings, scratch
        self.smallest: dict[str, int] = {}

    def one(self, data: bytes) -> None:
        """Hold the property for one input, and keep it where the property is broken."""
        try:
            self.target.check(data, self.scratch)
        except Broken as error:
            self.keep(data, error)

    def keep(self, data: bytes, error: Broken) -> None:
        """Write down an input that is the smallest of its kind."""
        known = self.smallest.get(error.kind)
        if known is None and len(self.smallest) == _MOST_KINDS:
            return
        if known is None or len(data) < known:
            self.smallest[error.kind] = len(data)
            name = f"{self.target.name}-{hashlib.sha256(error.kind.encode()).hexdigest()[:10]}"
            (self.findings / name).write_bytes(data)
            (self.findings / f"{name}.txt").write_text(f"{error}\n", encoding="utf-8", errors="backslashreplace")


def main() -> None:
    """Fuzz until libFuzzer's time is over."""
    name, findings, scratch, *options = sys.argv[1:]
    target = TARGETS[name]
    search = Search(target, Path(findings), Path(scratch))

    def mutated(data: bytes, most: int, seed: int) -> bytes:
        assert target.mutate is not None
        changed = target.mutate(data, lambda part, size: atheris.Mutate(part, min(size, most)), random.Random(seed))
        return changed[:most]

    extra = {} if target.mutate is None else {"custom_mutator": mutated}
    atheris.Setup([sys.argv[0], *options], search.one, **extra)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
