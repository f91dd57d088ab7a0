"""A pair of sparse 16 GiB safetensors files, possibly larger than memory."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.files import GIB, folder, header, layers, ranks
from benchmarks.timing import SYNCHECK, bar, median, peak_anonymous, section, table, take_turns

ROUNDS = 3  # the first run may take three times as long, because it allocates the memory
SIZE = 16 * GIB


def run(rounds: int) -> tuple[str, bool]:
    """Measure; return a section of RESULTS.md and whether all limits are met."""
    with folder(0) as where:
        tensors = layers(SIZE // (4 * 4096 * 4096), 4096, 4096)
        files = [str(path) for path in ranks(where, 2)]
        for path in files:
            Path(path).write_bytes(header(tensors))
            os.truncate(path, len(header(tensors)) + SIZE)
        commands = {"syncheck compare": [SYNCHECK, "compare", *files], "cmp": ["cmp", *files]}
        times = take_turns(commands, rounds, warm=False)
        peak = peak_anonymous(commands["syncheck compare"])
    of = median(times)
    return section(
        "Two ranks of 16 GiB (256 tensors of float32), sparse files, whole processes, nothing kept from a run before.",
        table(times),
        [bar("`syncheck compare` / `cmp`", of["syncheck compare"] / of["cmp"], 1.5), bar("RssAnon, MB", peak, 150)],
    )
