"""Rebuild the generated parts of the documents: `python docs/reference/make.py`.

python docs/reference/make.py --check      # exit code 1 if a page is out of date; nothing is written
python docs/reference/make.py --release    # exit code 1 if a number was measured with another version

The pages in `findings/` are made of the rules. Other pages are written by hand except for two kinds of marks. The text
between `<!-- made: NAME -->` and `<!-- /made -->` is a block from `BLOCKS`. A number between `<!-- result: NAME -->`
and `<!-- /result -->` is a measurement from `from_results.NUMBERS`; a line must not begin with this mark, because
Markdown then renders the line as HTML.

The script needs pytest and networkx, and no torch. It compares small files for examples, and reads modules with `ast`
instead of importing modules that need other libraries.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the code of this clone, even if another version is installed

import from_api  # noqa: E402
import from_findings  # noqa: E402
import from_modules  # noqa: E402
import from_options  # noqa: E402
import from_results  # noqa: E402
import from_schema  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

# A page for each finding.
FINDINGS = ROOT / "docs" / "reference" / "findings"
BLOCK = re.compile(r"(<!-- made: ([a-z-]+) -->\n).*?(<!-- /made -->)", re.DOTALL)
NUMBER = re.compile(r"(<!-- result: ([a-z0-9-]+) -->).*?(<!-- /result -->)")
BLOCKS: dict[str, Callable[[], str]] = {
    "commands": from_options.commands,
    "pytest-options": from_options.pytest_options,
    "keys": from_options.keys,
    "ini": from_options.ini,
    "findings-example": from_findings.example,
    "findings-table": from_findings.table_of_findings,
    "findings-order": from_findings.order,
    "json-fields": lambda: from_schema.fields(evidence=False),
    "json-evidence": lambda: from_schema.fields(evidence=True),
    "json-example": from_schema.example,
    "methods": from_results.table_of_methods,
    "measured": from_results.table_of_tools,
    "checks-by-ranks": from_results.table_of_checks,
    "fingerprints-by-tensors": from_results.table_of_fingerprints,
    "modules-syncheck": lambda: from_modules.modules_by_room("syncheck", doors=False),
    "modules-doors": lambda: from_modules.modules_by_room("syncheck", doors=True),
    "rooms-syncheck": lambda: from_modules.rooms("syncheck"),
    "modules-train": lambda: from_modules.modules("train", from_modules.TRAIN),
    "api-syncheck": lambda: from_api.package("syncheck"),
    "api-records": lambda: from_api.package("syncheck", "records"),
    "api-tensors": lambda: from_api.package("syncheck", "tensors"),
    "api-words": from_api.literals,
    "api-live": lambda: from_api.package("syncheck.live"),
    "api-testing": lambda: from_api.package("syncheck.testing"),
    "api-parity": lambda: from_api.package("syncheck.testing", "parity"),
    "api-integrations": from_api.integrations,
    "api-pytest": from_api.fixtures,
}


def fill_in(page: str) -> str:
    """Return a page with its blocks and numbers made anew. Raises KeyError for an unknown name."""

    def make_block(found: re.Match[str]) -> str:
        text = BLOCKS[found[2]]().strip("\n")
        return f"{found[1]}\n{text}\n\n{found[3]}"

    def make_number(found: re.Match[str]) -> str:
        return f"{found[1]}{from_results.NUMBERS[found[2]]()}{found[3]}"

    return NUMBER.sub(make_number, BLOCK.sub(make_block, page))


def check_versions() -> int:
    """Print the sections of the results that were measured with another version, and return 1 if there are any."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    outdated = from_results.list_outdated(project["version"])
    for version, sections in outdated.items():
        print(f"RESULTS.md: measured with syncheck {version}: {', '.join(sections)}; run: python -m benchmarks")
    return 1 if outdated else 0


def main() -> int:
    """Write the pages, compare them with `--check`, or check the measured version with `--release`."""
    if "--release" in sys.argv[1:]:
        return check_versions()
    check = "--check" in sys.argv[1:]
    written = {FINDINGS / name: text for name, text in from_findings.pages().items()}
    by_hand = [path for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")) if path.parent != FINDINGS]
    pages = {path: fill_in(path.read_text(encoding="utf-8")) for path in by_hand} | written
    unknown = [path for path in FINDINGS.glob("*.md") if path not in written]
    stale = sorted(
        path for path, text in pages.items() if not path.exists() or path.read_text(encoding="utf-8") != text
    )
    if not check:
        FINDINGS.mkdir(exist_ok=True)
        for path in stale:
            path.write_text(pages[path], encoding="utf-8")
        for path in unknown:
            path.unlink()
    stale += unknown
    if not check:
        return 0
    for path in stale:
        print(f"{path}: out of date; run: python docs/reference/make.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
