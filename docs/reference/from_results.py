"""The numbers of a comparison with other tools: those of benchmarks/RESULTS.md, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from marks import code, table

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "RESULTS.md"
# What is compared, the section, the row of syncheck, and those of the others with what they are called here.
TIMED = (
    ("two ranks of resnet18", "compare", "syncheck compare", {"torch.load + torch.allclose": "", "import torch": ""}),
    ("eight ranks of resnet50", "many_ranks", "syncheck compare", {"torch.load + torch.allclose": ""}),
    ("two ranks of 2 GiB, last element different", "last_element", "syncheck compare",
     {"cmp": "", "h5diff": "", "sha256sum": ""}),
    ("two ranks of 16 GiB, sparse files that are not in memory", "sparse", "syncheck compare", {"cmp": ""}),
    ("20 tests on two ranks", "distributed_tests", "syncheck(ranks=2)", {"spawn": "torch.multiprocessing.spawn"}),
)  # fmt: skip
# Of the check inside a job: the other columns of the table that has Megatron-LM's.
LIVE = ("Megatron-LM", "broadcast")


def measured() -> str:
    """Return a table of medians in seconds. Raises KeyError for a section or row that RESULTS.md does not have."""
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", RESULTS.read_text(encoding="utf-8"), re.M | re.S))
    rows = []
    for what, section, own, others in TIMED:
        found = {cells[0].strip("`"): cells[1] for cells in _rows(sections[section]) if len(cells) == 4}
        rows += [(what, _in(found[own]), code(name or other), _in(found[other])) for other, name in others.items()]
    for cells in _rows(sections["live"].partition("Parameters only")[2]):
        if len(cells) == 6 and cells[1].replace(".", "").isdigit():
            milliseconds = dict(zip(LIVE, cells[3:5], strict=True))
            what = f"parameters of {re.sub(', (?=[A-Z])', ' with ', cells[0])}, two ranks in a job"
            rows += [(what, _in(cells[2], 1e-3), name, _in(time, 1e-3)) for name, time in milliseconds.items()]
    return table(("compared", "syncheck, s", "with", "s"), rows)


def _rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def _in(number: str, unit: float = 1.0) -> str:
    """Write seconds with two digits that count."""
    return f"{float(number) * unit:#.2g}".rstrip(".")
