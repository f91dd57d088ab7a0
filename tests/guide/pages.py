"""Read the pages of docs/guide as a user does: files to save, commands to type, and their output.

A code block is a file if its fence has a title (```python title=hello.py), and a list of commands if its language is
`console`: a line with the prefix `$ ` is a command, and the next lines are its output. In an output, `...` alone on a
line matches any lines, and `...` within a line matches any characters; all other characters must be equal.
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
    """A command and the lines of its output on the page."""

    typed: str
    printed: tuple[str, ...]

    @property
    def code(self) -> int:
        """The expected exit code: N of a comment `# exit code N` after the command, or 0."""
        match = re.search(r"# exit code (\d+)", self.typed)
        return int(match[1]) if match else 0


@dataclass
class Page:
    """The commands and files of a page, in order. A file is (name, text)."""

    steps: list[Command | tuple[str, str]] = field(default_factory=list)
    others: list[str] = field(default_factory=list)  # other code blocks, which a page must not have


def read(path: Path) -> Page:
    """Split a page into commands and files."""
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
    """Split a block into commands with their output."""
    head, *remainder = re.split(r"^\$ ", block, flags=re.MULTILINE)
    if head.strip():
        raise ValueError(f"a console block begins with a line that is typed ($ ...): {head[:60]!r}")
    result = []
    for part in remainder:
        typed, _, printed = part.partition("\n")
        while typed.endswith("\\"):  # a continued line
            more, _, printed = printed.partition("\n")
            typed = f"{typed[:-1].rstrip()} {more.strip()}"
        result.append(Command(typed, tuple(printed.rstrip("\n").splitlines())))
    return result


def matches(expected: tuple[str, ...], printed: str) -> bool:
    """Return whether the output of a command matches the output on the page."""
    if not expected:
        return True  # the page omits the output
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == "..." else ".*".join(map(re.escape, line.rstrip().split("..."))) + r"[ ]*\n"
        for line in expected
    )
    return re.fullmatch(pattern + r"\n*", printed if printed.endswith("\n") else printed + "\n") is not None
