"""Two ranks of 2 GiB with another last element, against cmp, h5diff and sha256sum. Whole processes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from benchmarks.files import GIB, folder, layers, ranks, write
from benchmarks.timing import SYNCHECK, bar, median, section, table, take_turns

ROUNDS = 5
LAYOUT = """PATH w
INPUT-CLASS FP
INPUT-SIZE 32
INPUT-BYTE-ORDER LE
RANK 1
DIMENSION-SIZES {elements}
OUTPUT-CLASS FP
OUTPUT-SIZE 32
OUTPUT-ARCHITECTURE IEEE
OUTPUT-BYTE-ORDER LE
"""


def _change_last(path: Path) -> None:
    """Change the last element of a file of float32."""
    with path.open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\0\0\x80\x3f")  # 1.0


def _hdf5(raw: Path) -> list[str]:
    """Write the numbers of a file, unchanged and with another last element, as two HDF5 files."""
    layout = raw.with_suffix(".layout")
    layout.write_text(LAYOUT.format(elements=raw.stat().st_size // 4), encoding="ascii")
    made = []
    for i in range(2):
        path = str(raw.with_name(f"rank{i}.h5"))
        subprocess.run(["h5import", str(raw), "-c", str(layout), "-o", path], check=True, stdout=subprocess.DEVNULL)
        made.append(path)
        _change_last(raw)
    raw.unlink()
    return made


def run(rounds: int) -> tuple[str, bool]:
    """Measure; return a section of RESULTS.md and whether all limits are met."""
    has_hdf5 = bool(shutil.which("h5diff") and shutil.which("h5import"))
    with folder((10 if has_hdf5 else 4) * GIB) as where:
        files = write(ranks(where, 2), layers(32, 4096, 4096))
        commands = {"syncheck compare": [SYNCHECK, "compare", *files], "cmp": ["cmp", *files]}
        if has_hdf5:
            raw = where / "raw"
            with raw.open("wb") as file, Path(files[0]).open("rb") as source:
                source.seek(-2 * GIB, 2)
                shutil.copyfileobj(source, file, 1 << 20)
            commands["h5diff"] = ["h5diff", *_hdf5(raw)]
        _change_last(Path(files[1]))
        commands["sha256sum"] = ["sha256sum", *files]
        times = take_turns(commands, rounds)
    of = median(times)
    bars = [bar("`syncheck compare` / `cmp`", of["syncheck compare"] / of["cmp"], 1.5)]
    note = "h5diff was not measured: it and h5import (Debian's hdf5-tools) are not installed here."
    if has_hdf5:
        bars.append(bar("`syncheck compare` / `h5diff`", of["syncheck compare"] / of["h5diff"], 1))
        note = "h5diff reads the same numbers from HDF5 files; sha256sum is the usual way to compare copies."
    return section(
        "Two ranks of 2 GiB (32 tensors of float32), all equal but the last element, whole processes, files in the "
        "page cache.",
        table(times),
        bars,
        note,
    )
