"""List and read files of a folder."""

from __future__ import annotations

import os
import re
from typing import Any

from syncheck.errors import MalformedFile, UnreadableFile
from syncheck.readers.json_text import InvalidJson, parse_json_object
from syncheck.readers.regular_file import open_regular_file

MAX_JSON = 100_000_000  # bytes, the limit of a safetensors header. An index of 50,000 tensors has 5 MB.


def list_names(folder: str) -> list[str]:
    """List the names in a folder in a fixed order. Raises OSError."""
    return sorted(os.listdir(folder))


def read_json(path: str) -> dict[str, Any]:
    """Read a JSON object from a file. Raises MalformedFile for other content and for files above the limit."""
    again = "save or copy it again"
    try:
        with open_regular_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_JSON:
                raise MalformedFile(path, found=f"{size} bytes", needed=f"at most {MAX_JSON}", next_step=again)
            raw = file.read(size)
    except OSError as error:  # a listed name can be a dangling link
        raise UnreadableFile.because(path, error) from None
    try:
        return parse_json_object(raw)
    except InvalidJson as wrong:
        raise MalformedFile(
            path, found=wrong.found, needed=wrong.needed, next_step=f"it is cut short or damaged: {again}"
        ) from None


def match_in_order(pattern: re.Pattern[str], names: list[str]) -> list[re.Match[str]]:
    """Return the matching names in numeric order: part 10 comes after part 9."""
    found = [match for name in names if (match := pattern.fullmatch(name))]
    return sorted(found, key=lambda m: [int(part) for part in re.findall(r"\d+", m.string)])
