"""Up to 1,024 ranks: live checks of a simulated job, and fingerprints compared by the command line."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.files import GIB, folder, header
from benchmarks.timing import SYNCHECK, bar, environment, median, peak_anonymous, section, table, take_turns

if TYPE_CHECKING:
    from collections.abc import Sequence

ROUNDS = 1
RANKS = (2, 8, 64, 1024)
TENSORS = (500, 5_000)
FINGERPRINTS = (500, 2_000)  # tensors
ELEMENTS = 64  # float32, of one tensor
# The states of the ranks; see `benchmarks.scale_ranks`.
IN_SYNC, ONE_DIFFERS = "in sync", "one tensor of one rank differs"
HSDP, HSDP_DIFFERS = "HSDP, in sync", "HSDP, one shard of one rank differs"
# HSDP with as many replicas as shards. Each shard has two kinds of ranks to play, so there are few tensors.
JOBS = (
    *((ranks, tensors, case) for tensors in TENSORS for ranks in RANKS for case in (IN_SYNC, ONE_DIFFERS)),
    *((ranks, 50, case) for ranks in (64, 256) for case in (HSDP, HSDP_DIFFERS)),
)
ROOT = Path(__file__).resolve().parent.parent
# Bytes of the report, which rank 0 sends to all: per rank, and per tensor besides its name.
RANK, TENSOR = 94, 9
DIFFERENCES = 1700  # bytes of the report for the description of one tensor and one finding
READY = 118  # bytes sent by a rank in the gather before broadcasts or answers
MOST_BYTES = 64.0  # sent per tensor and rank, in sync
MOST_MEMORY = 150.0  # MB of a comparison with up to 40,000 tensors times ranks; 200 bytes for each more
UP_TO, MORE = 40_000, 200
MOST_TIME = 20.0  # microseconds per tensor and rank


def run(rounds: int) -> tuple[str, bool]:
    """Measure; return a section of RESULTS.md and whether all limits are met."""
    lines = [
        "| ranks | tensors | ranks hold | CPU s | bytes sent | bytes received | collectives |",
        "|---|---|---|---|---|---|---|",
    ]
    bars = []
    for ranks, tensors, case in JOBS:
        found = played(ranks, tensors, case, rounds)
        seconds = statistics.median(found["seconds"])
        lines.append(
            f"| {ranks:,} | {tensors:,} | {case} | {seconds:.3f} | {found['sent']:,} | {found['received']:,} | "
            f"{found['calls']} |"
        )
        if ranks == max(RANKS) and case == IN_SYNC:
            what = f"{ranks:,} ranks of {tensors:,} tensors in sync: bytes sent a tensor and rank"
            bars.append(bar(what, found["sent"] / tensors, MOST_BYTES))
    times, memory = _fingerprints(rounds, bars)
    return section(
        f"Simulated job: one process plays each kind of rank in turn, all messages are real, nothing is sent. Tensors "
        f"of {ELEMENTS} float32. Time: CPU seconds of the slowest rank, without the first check.",
        lines,
        "`syncheck compare *.fp.json`, one rank with another tensor; whole processes.",
        table(times),
        memory,
        bars,
    )


def received(ranks: int, tensors: int, *, answers: int, letters: int, each: int) -> float:
    """Return the bytes received by a rank for a check, according to the formula in docs/scale.md.

    answers: number of different states of ranks; letters: length of a tensor's name; each: bytes sent by a rank to all
    ranks if the state is in sync.
    """
    first = each * (ranks - 1)
    if answers == 1:
        return first
    # A few ranks broadcast their digests; more than a quarter of the ranks use one gather on all ranks.
    few = 4 * answers <= ranks
    digests = 16 * tensors * (answers if few else ranks - 1)
    ready = READY * (2 if few else 1) * (ranks - 1)
    return first + ready + digests + DIFFERENCES + RANK * ranks + (TENSOR + letters) * tensors


def played(ranks: int, tensors: int, case: str, rounds: int) -> dict[str, Any]:
    """Run one simulated check, `rounds` times, in a separate process. Raises RuntimeError if the process fails."""
    command = [sys.executable, "-m", "benchmarks.scale_ranks", str(ranks), str(tensors), case, str(rounds)]
    path = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment() | path, timeout=1800
    )
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr[-1500:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _fingerprints(rounds: int, bars: list[tuple[str, bool]]) -> tuple[dict[str, list[float]], Sequence[str]]:
    """Compare fingerprints of 1,024 ranks, with a differing tensor on one rank; return times and lines on memory."""
    ranks = max(RANKS)
    times: dict[str, list[float]] = {}
    lines = []
    for tensors in FINGERPRINTS:
        peaks: list[float] = []

        def watched(command: Sequence[str], peaks: list[float] = peaks) -> float:
            start = time.perf_counter()
            peaks.append(peak_anonymous(command))
            return time.perf_counter() - start

        with folder(2 * GIB) as where:
            size = write_fingerprints(where, ranks, tensors)
            what = f"{ranks:,} fingerprints of {tensors:,} tensors"
            command = ["sh", "-c", f"exec {SYNCHECK} compare -q {where}/*.fp.json"]
            # No warm-up, which would take minutes: the new files are still in the page cache.
            times |= take_turns({what: command}, rounds, warm=False, measure=watched)
        lines.append(f"{what} are {size / 1e6:.0f} MB; peak of RssAnon {max(peaks):.0f} MB.")
        bars.append(
            bar(f"{what}: microseconds a tensor and rank", median(times)[what] / (ranks * tensors) * 1e6, MOST_TIME)
        )
        most = MOST_MEMORY + MORE * max(0, ranks * tensors - UP_TO) / 1e6
        bars.append(bar(f"{what}: RssAnon, MB", max(peaks), most))
    return times, lines


def write_fingerprints(where: Path, ranks: int, tensors: int) -> int:
    """Write `rank<r>.fp.json` for all ranks, with a differing tensor on the last rank; return the total bytes.

    `syncheck fingerprint` writes two fingerprints; equal ranks get copies of the same text.
    """
    texts = []
    for changed in (False, True):
        checkpoint = where / "one.safetensors"
        shapes = {f"layers.{i}.weight": (ELEMENTS,) for i in range(tensors)}
        values = bytearray(4 * ELEMENTS * tensors)
        values[0:4] = b"\0\0\x80\x3f" if changed else b"\0\0\0\0"  # 1.0 in place of 0.0
        checkpoint.write_bytes(header(shapes) + bytes(values))
        made = where / "one.json"
        command = [SYNCHECK, "fingerprint", str(checkpoint), "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True, env=environment())
        texts.append(made.read_text(encoding="utf-8"))
        made.unlink()
        checkpoint.unlink()
    for rank in range(ranks):
        text = texts[rank == ranks - 1]
        (where / f"rank{rank}.fp.json").write_text(text, encoding="utf-8")
    return sum(path.stat().st_size for path in where.iterdir())
