"""The code blocks in docs/integrations.md by heading."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs" / "integrations.md"


def blocks() -> dict[str, list[str]]:
    """Return the Python blocks under each heading."""
    text = DOCS.read_text(encoding="utf-8")
    sections = re.split(r"^## (.*)$", text, flags=re.MULTILINE)[1:]
    result = {
        heading: re.findall(r"^```python\n(.*?)^```$", body, flags=re.MULTILINE | re.DOTALL)
        for heading, body in zip(sections[::2], sections[1::2], strict=True)
    }
    return {heading: code for heading, code in result.items() if code}
