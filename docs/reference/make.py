"""Rebuild what is generated in docs/reference from the code: `python docs/reference/make.py`.

python docs/reference/make.py --check    # exit code 1 when a page is not what the code says today

A page is written by hand but for its blocks: what stands between `<!-- made: NAME -->` and `<!-- /made -->` is replaced
by what `BLOCKS` makes of that name. pytest is needed, torch is not: nothing is run but a comparison of two small files,
and modules are read, not imported, where importing them would need more.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # the code of this clone, whatever is installed

import from_api  # noqa: E402
import from_findings  # noqa: E402
import from_modules  # noqa: E402
import from_options  # noqa: E402
import from_results  # noqa: E402
import from_schema  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK = re.compile(r"(<!-- made: ([a-z-]+) -->\n).*?(<!-- /made -->)", re.DOTALL)
# What makes each block, by the name that stands in the page.
BLOCKS: dict[str, Callable[[], str]] = {
    "commands": from_options.commands,
    "pytest-options": from_options.pytest_options,
    "keys": from_options.keys,
    "ini": from_options.ini,
    "findings-table": from_findings.table_made,
    "findings-order": from_findings.order,
    "findings": from_findings.sections,
    "json-fields": from_schema.fields,
    "json-example": from_schema.example,
    "measured": from_results.measured,
    "modules-syncheck": lambda: from_modules.modules("syncheck", from_modules.SYNCHECK),
    "modules-train": lambda: from_modules.modules("train", from_modules.TRAIN),
    "api-syncheck": lambda: from_api.package("syncheck"),
    "api-words": from_api.literals,
    "api-live": lambda: from_api.package("syncheck.live"),
    "api-testing": lambda: from_api.package("syncheck.testing"),
    "api-integrations": from_api.integrations,
    "api-pytest": from_api.fixtures,
}


def filled(page: str) -> str:
    """Return a page with its blocks made anew. Raises KeyError for a block that nothing makes."""

    def made(found: re.Match[str]) -> str:
        text = BLOCKS[found[2]]().strip("\n")
        return f"{found[1]}\n{text}\n\n{found[3]}"

    return BLOCK.sub(made, page)


def main() -> int:
    """Write the pages, or with --check compare them."""
    stale = []
    for path in sorted(HERE.glob("*.md")):
        page = path.read_text(encoding="utf-8")
        made = filled(page)
        if made != page:
            stale.append(path)
            if "--check" not in sys.argv[1:]:
                path.write_text(made, encoding="utf-8")
    if "--check" not in sys.argv[1:]:
        return 0
    for path in stale:
        print(f"{path}: not what the code says today; run: python docs/reference/make.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
