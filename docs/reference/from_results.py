"""Numbers and tables measured by `python -m benchmarks`, read from benchmarks/RESULTS.md.

The times of training methods come from the table of `python -m train.bench` in docs/bench.md.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from marks import code, table
from sources import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = ROOT / "benchmarks" / "RESULTS.md"
MEDIAN = "median wall s"
IN_SYNC, ONE_DIFFERS = "in sync", "one tensor of one rank differs"
METHOD_COLUMNS = ("resnet18-ms", "resnet18-speed", "resnet18-mb", "resnet8-ms", "resnet8-speed", "resnet8-accuracy")
# Rows of the "measured" table: workload, section, row of syncheck, rows of the other tools and their names on the page.
TIMED = (
    ("two ranks of resnet18", "compare", "syncheck compare", {"torch.load + torch.allclose": "", "import torch": ""}),
    ("eight ranks of resnet50", "many_ranks", "syncheck compare", {"torch.load + torch.allclose": ""}),
    ("two ranks of 2 GiB, last element different", "last_element", "syncheck compare",
     {"cmp": "", "h5diff": "", "sha256sum": ""}),
    ("two ranks of 16 GiB, sparse files that are not in memory", "sparse", "syncheck compare", {"cmp": ""}),
    ("20 tests on two ranks", "distributed_tests", "syncheck(ranks=2)", {"spawn": "torch.multiprocessing.spawn"}),
)  # fmt: skip


@dataclass(frozen=True)
class Table:
    """One table of RESULTS.md: the column names and the cells of each row, without backticks."""

    columns: list[str]
    rows: list[list[str]]


@cache
def methods() -> dict[str, list[str]]:
    """Return the cells of the table in docs/bench.md by case; the columns are those of `METHOD_COLUMNS`."""
    lines = (ROOT / "docs" / "bench.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if re.match(r"\| [a-z]", line)]
    return {row[0]: row[3:] for row in rows if len(row) == 3 + len(METHOD_COLUMNS)}


@cache
def sections() -> dict[str, str]:
    """Return the text of each section of RESULTS.md by its heading."""
    text = RESULTS.read_text(encoding="utf-8")
    return dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))


@cache
def tables(section: str) -> list[Table]:
    """Return the tables of a section. Raises KeyError for an unknown section."""
    found = []
    for lines in re.findall(r"(?:^\|.*\n?)+", sections()[section], re.MULTILINE):
        head, _, *rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines.splitlines()]
        found.append(Table(head, rows))
    return found


def read_number(section: str, row: str, column: str, *more: str) -> float:
    """Return the number in a row. Raises KeyError for an unknown row.

    row, more: the first cells of the row.
    """
    for found in tables(section):
        if column in found.columns:
            for cells in found.rows:
                if cells[: 1 + len(more)] == [row, *more]:
                    return float(cells[found.columns.index(column)].replace(",", ""))
    raise KeyError(f"{RESULTS.name}: {section}: no row {', '.join((row, *more))!r} with a column {column!r}")


def list_outdated(current: str) -> dict[str, list[str]]:
    """Return the sections that were measured with another version of syncheck than the current one, by version."""
    outdated: dict[str, list[str]] = {}
    for name, text in sections().items():
        versions = set(re.findall(r"\bsyncheck (\d[\w.]*\w)", text))
        for version in sorted(versions - {current}):
            outdated.setdefault(version, []).append(name)
    return outdated


def format_number(value: float, digits: int = 2) -> str:
    """Round a number to significant digits, and write it without an exponent."""
    places = digits - 1 - math.floor(math.log10(abs(value))) if value else 0
    return f"{round(value, places):,.{max(places, 0)}f}"


def _seconds(section: str, row: str) -> Callable[[], str]:
    return lambda: format_number(read_number(section, row, MEDIAN))


def _measured(section: str, row: str, factor: float = 1.0) -> Callable[[], str]:
    return lambda: format_number(factor * read_number(section, row, "measured"))


def _live_ratios(column: str) -> list[float]:
    """Return the ratios of a column for the models with tensors of common sizes."""
    models = ("resnet18, SGD", "resnet50, AdamW", "transformer, AdamW")
    return [read_number("live", model, column) for model in models]


def _simulated(ranks: str, tensors: str, case: str, column: str) -> float:
    return read_number("scale", ranks, column, tensors, case)


def _microseconds_per_tensor() -> str:
    seconds = [_simulated("2", tensors, IN_SYNC, "CPU s") for tensors in ("500", "5,000")]
    return format_number(1e6 * (seconds[1] - seconds[0]) / (5_000 - 500))


def _microseconds_per_rank() -> str:
    seconds = [_simulated(ranks, "5,000", IN_SYNC, "CPU s") for ranks in ("2", "1,024")]
    return format_number(1e6 * (seconds[1] - seconds[0]) / (1_024 - 2))


def _microseconds_per_digest() -> str:
    seconds = [_simulated("1,024", "5,000", case, "CPU s") for case in (IN_SYNC, ONE_DIFFERS)]
    return format_number(1e6 * (seconds[1] - seconds[0]) / (1_024 * 5_000), 1)


def _hsdp_microseconds(ranks: int) -> str:
    return format_number(1e6 * _simulated(str(ranks), "50", "HSDP, in sync", "CPU s") / (ranks * 50))


@cache
def _fingerprints() -> dict[str, tuple[float, float]]:
    """Return MB on disk and MB of memory by the number of tensors, for fingerprints of 1,024 ranks."""
    line = r"1,024 fingerprints of ([\d,]+) tensors are ([\d.]+) MB; peak of RssAnon ([\d.]+) MB"
    return {tensors: (float(disk), float(memory)) for tensors, disk, memory in re.findall(line, sections()["scale"])}


def _fingerprint_bytes(which: int) -> str:
    """Return the bytes of a tensor and rank, on disk (0) or in memory (1)."""
    return format_number(1e6 * _fingerprints()["500"][which] / (1_024 * 500))


# Numbers that hand-written pages may contain, as `<!-- result: NAME -->0.23<!-- /result -->`.
NUMBERS: dict[str, Callable[[], str]] = {
    "resnet18-s": _seconds("compare", "syncheck compare"),
    "resnet18-script-s": _seconds("compare", "torch.load + torch.allclose"),
    "import-torch-s": _seconds("compare", "import torch"),
    "resnet50-s": _seconds("many_ranks", "syncheck compare"),
    "resnet50-script-s": _seconds("many_ranks", "torch.load + torch.allclose"),
    "2-gib-s": _seconds("last_element", "syncheck compare"),
    "2-gib-cmp-s": _seconds("last_element", "cmp"),
    "memory-identical-mb": _measured("memory", "4 ranks of 1 GiB, identical, MB"),
    "memory-different-mb": _measured("memory", "4 ranks of 1 GiB, all different, MB"),
    "diff-memory-mb": _measured("diff", "columns: peak of RssAnon, MB"),
    "diff-per-cmp": _measured("diff", "columns: ratio to cmp of equal bytes"),
    "rank-test-s": _measured("distributed_tests", "a test after the first, s"),
    "rank-tests-s": _seconds("distributed_tests", "syncheck(ranks=2)"),
    "rank-tests-spawn-s": _seconds("distributed_tests", "spawn"),
    "check-per-read-least": lambda: format_number(min(_live_ratios("check / reading"))),
    "check-per-read-most": lambda: format_number(max(_live_ratios("check / reading"))),
    "check-per-sha1-least": lambda: format_number(min(_live_ratios("check / Megatron-LM"))),
    "check-per-sha1-most": lambda: format_number(max(_live_ratios("check / Megatron-LM"))),
    "check-step-percent": _measured("live", "resnet18 under DDP: a check every 100 steps, % of step time"),
    "check-us-per-tensor": _microseconds_per_tensor,
    "check-us-per-rank": _microseconds_per_rank,
    "check-us-per-digest": _microseconds_per_digest,
    "check-sent-bytes": lambda: format_number(_simulated("2", "500", IN_SYNC, "bytes sent"), 1),
    "hsdp-64-s": lambda: format_number(_simulated("64", "50", "HSDP, in sync", "CPU s")),
    "hsdp-256-s": lambda: format_number(_simulated("256", "50", "HSDP, in sync", "CPU s")),
    "hsdp-64-us": lambda: _hsdp_microseconds(64),
    "hsdp-256-us": lambda: _hsdp_microseconds(256),
    "fingerprint-bytes": lambda: _fingerprint_bytes(0),
    "fingerprint-memory-bytes": lambda: _fingerprint_bytes(1),
    "fingerprint-us": _measured("scale", "1,024 fingerprints of 500 tensors: microseconds a tensor and rank"),
}
NUMBERS |= {
    f"{case}-{column}": lambda cell=cell: cell  # type: ignore[misc]  # the value of this round
    for case, cells in methods().items()
    for column, cell in zip(METHOD_COLUMNS, cells, strict=True)
}


def table_of_methods() -> str:
    """Return the table of page 10 of the guide. Efficiency has no meaning for bfloat16, which changes the work too."""
    names = {"single": "single (one process)", "ddp": "ddp", "ddp-sync-bn": "ddp with SyncBatchNorm", "fsdp": "fsdp",
             "ddp-amp-bf16": "ddp, bfloat16"}  # fmt: skip
    rows = []
    for case, name in names.items():
        row = [name]
        for model in ("resnet18", "resnet8"):
            one, two = (float(NUMBERS[f"{method}-{model}-ms"]()) for method in ("single", case))
            efficiency = "" if case in {"single", "ddp-amp-bf16"} else f"{one / two / 2:.2f}"
            row += [NUMBERS[f"{case}-{model}-ms"](), NUMBERS[f"{case}-{model}-speed"](), efficiency]
        rows.append(row)
    columns = ("speed-up", "efficiency")
    return table(("two processes", "ResNet-18: ms", *columns, "ResNet-8: ms", *columns), rows)


def table_of_tools() -> str:
    """Return the table of medians in seconds of syncheck and other tools."""
    rows = []
    for workload, section, own, others in TIMED:
        seconds = _seconds(section, own)()
        rows += [(workload, seconds, code(name or row), _seconds(section, row)()) for row, name in others.items()]
    for found in tables("live"):
        if "Megatron-LM" not in found.columns:
            continue
        for model, _, check, *others in found.rows:
            workload = f"parameters of {re.sub(', (?=[A-Z])', ' with ', model)}, two ranks in a job"
            for name, milliseconds in zip(("Megatron-LM", "broadcast"), others, strict=False):
                rows.append((workload, _from_ms(check), name, _from_ms(milliseconds)))
    return table(("workload", "syncheck, s", "compared with", "s"), rows)


def _from_ms(milliseconds: str) -> str:
    return format_number(float(milliseconds) / 1000)


def table_of_checks() -> str:
    """Return the table of time and traffic of one check, by the number of ranks and tensors."""
    rows = []
    for ranks, tensors in [(row[0], row[1]) for found in tables("scale") for row in found.rows if IN_SYNC in row]:
        cells = [ranks, tensors]
        for case in (IN_SYNC, ONE_DIFFERS):
            sent, received = (_simulated(ranks, tensors, case, f"bytes {way}") for way in ("sent", "received"))
            cells += [f"{_simulated(ranks, tensors, case, 'CPU s'):.3f}", _kilobytes(sent), _kilobytes(received)]
        rows.append(cells)
    head = ("ranks", "tensors", "in sync: CPU s", "sent", "received", "one tensor differs: CPU s", "sent", "received")
    return table(head, rows)


def _kilobytes(number: float) -> str:
    return f"{number:.0f} B" if number < 1000 else f"{format_number(number / 1000, 2 if number < 1e5 else 3)} kB"


def table_of_fingerprints() -> str:
    """Return the table of size, time and memory of the fingerprints of 1,024 ranks."""
    rows = []
    for tensors, (disk, memory) in _fingerprints().items():
        seconds = _seconds("scale", f"1,024 fingerprints of {tensors} tensors")()
        rows.append((f"{tensors} tensors", f"{disk:.0f} MB", f"{seconds} s", f"{format_number(memory / 1000)} GB"))
    return table(("1,024 ranks of", "files", "wall time", "peak memory (RssAnon)"), rows)
