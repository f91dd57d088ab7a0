"""Replace the placeholder addresses of the project in all files of the clone: a step of a release.

    python tools/set_address.py https://OWNER.github.io/syncheck https://github.com/OWNER/syncheck

The placeholders are in the reserved domain syncheck.invalid, which nobody can register. `https://syncheck.invalid/docs`
is the documentation site, `https://syncheck.invalid/syncheck` the repository, and `syncheck.invalid/syncheck` its name
in the jobs of docs/ci.md.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOST = "syncheck.invalid"
# Files about the placeholder itself.
_KEPT = ("tools/set_address.py", "tests/docs/test_addresses.py", "CONTRIBUTING.md")


def set_address(site: str, repository: str, root: Path = ROOT) -> list[str]:
    """Replace the placeholders in the tracked text files under root; return the changed files."""
    name = "/".join(repository.rstrip("/").split("/")[-2:])
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True).stdout
    changed = []
    for path in filter(None, listed.decode().split("\0")):
        file = root / path
        if path in _KEPT or file.is_symlink() or not file.is_file():
            continue
        data = file.read_bytes()
        if HOST.encode() not in data:
            continue
        text = data.decode()
        text = text.replace(f"https://{HOST}/docs", site.rstrip("/"))
        text = text.replace(f"https://{HOST}/syncheck", repository.rstrip("/")).replace(f"{HOST}/syncheck", name)
        file.write_bytes(text.encode())
        changed.append(path)
    return changed


def main() -> None:
    """Replace the placeholders, and print the changed files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("site", help="the address of the documentation site")
    parser.add_argument("repository", help="the address of the repository: https://github.com/OWNER/NAME")
    arguments = parser.parse_args()
    print("\n".join(set_address(arguments.site, arguments.repository)))


if __name__ == "__main__":
    main()
