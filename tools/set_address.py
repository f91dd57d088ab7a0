"""Add the addresses of the project to the clone: a step of a release.

    python tools/set_address.py https://OWNER.github.io/syncheck https://github.com/OWNER/syncheck

Until then the project has no address, and nothing prints one. Afterwards, reports link to the pages of the findings,
the package has links on its page, the site links to the repository, and the jobs of docs/ci.md can be copied.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Words of the jobs in docs/ci.md for the repository and for its name.
REPOSITORY, NAME = "<repository>", "<owner>/syncheck"
URLS = """\
[project.urls]
Documentation = "{site}"
Repository = "{repository}"
Changelog = "{site}/latest/project/changelog/"

"""


def set_address(site: str, repository: str, root: Path = ROOT) -> list[str]:
    """Write both addresses to the files of a clone, and return the changed files.

    Raises SystemExit if a file already has an address, before any file is changed.
    """
    site, repository = site.rstrip("/"), repository.rstrip("/")
    name = "/".join(repository.split("/")[-2:])
    urls = URLS.format(site=site, repository=repository)
    changes = {
        "syncheck/report/words.py": [('SITE = ""', f'SITE = "{site}/latest"')],
        "docs/site.py": [('REPOSITORY = ""', f'REPOSITORY = "{repository}"')],
        "pyproject.toml": [("[project.optional-dependencies]", f"{urls}[project.optional-dependencies]")],
        "docs/ci.md": [(REPOSITORY, repository), (NAME, name)],
    }
    texts = {}
    for path, replacements in changes.items():
        text = (root / path).read_text(encoding="utf-8")
        for old, new in replacements:
            if old not in text or "[project.urls]" in text:
                raise SystemExit(f"{path}: no {old}, so an address was set before; start from a fresh clone")
            text = text.replace(old, new)
        # The sentence that explains the words of the jobs.
        texts[path] = re.sub(r"^- `[^`]+` with the address .*\n(?:  .*\n)*", "", text, flags=re.MULTILINE)
    for path, text in texts.items():
        (root / path).write_text(text, encoding="utf-8")
    return list(texts)


def main() -> None:
    """Add the addresses, and print the changed files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("site", help="the address of the documentation site")
    parser.add_argument("repository", help="the address of the repository: https://github.com/OWNER/NAME")
    arguments = parser.parse_args()
    print("\n".join(set_address(arguments.site, arguments.repository)))


if __name__ == "__main__":
    main()
