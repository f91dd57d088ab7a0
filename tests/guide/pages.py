"""The pages of docs/guide as a reader uses them: files that are saved, commands that are typed, output that is shown.

A block of code is a file when its fence names one (```python title=hello.py), and commands when its language is
`console`: a line that begins with `$ ` is typed, with the lines after it as what it prints. In what is printed, `...`
alone on a line stands for any lines, and within a line for any characters; every other digit counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guide"
FENCE = re.compile(r"^```(\w*)(?: title=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    """A line that the reader types, and what stands below it, line by line; exit code 1 where the page says so."""

    typed: str
    printed: tuple[str, ...]

    @property
    def code(self) -> int:
        """The exit code that the command has to end with: that of a comment `# exit code N` behind it, or 0."""
        said = re.search(r"# exit code (\d+)", self.typed)
        return int(said[1]) if said else 0


@dataclass
class Page:
    """What of a page is executed, in the order in which it stands: files are (name, text)."""

    steps: list[Command | tuple[str, str]] = field(default_factory=list)
    others: list[str] = field(default_factory=list)  # Python blocks that are neither: a page must not have any


def read(path: Path) -> Page:
    """Take a page apart."""
    page = Page()
    for language, title, body in FENCE.findall(path.read_text(encoding="utf-8")):
        if title:
            page.steps.append((title, body))
        elif language == "console":
            page.steps += commands(body)
        elif language in ("python", "bash", "sh"):
            page.others.append(body)
    return page


def commands(block: str) -> list[Command]:
    """Split a block into the lines that are typed, each with what it prints."""
    head, *rest = re.split(r"^\$ ", block, flags=re.MULTILINE)
    if head.strip():
        raise ValueError(f"a console block begins with a line that is typed ($ ...): {head[:60]!r}")
    found = []
    for part in rest:
        typed, _, printed = part.partition("\n")
        while typed.endswith("\\"):  # a long line, folded
            more, _, printed = printed.partition("\n")
            typed = f"{typed[:-1].rstrip()} {more.strip()}"
        found.append(Command(typed, tuple(printed.rstrip("\n").splitlines())))
    return found


def agrees(expected: tuple[str, ...], printed: str) -> bool:
    """Tell whether what was printed is what the page shows."""
    if not expected:
        return True  # the page does not show it
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == "..." else ".*".join(map(re.escape, line.rstrip().split("..."))) + r"[ ]*\n"
        for line in expected
    )
    return re.fullmatch(pattern + r"\n*", printed if printed.endswith("\n") else printed + "\n") is not None
