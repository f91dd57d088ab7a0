"""What lies in a folder: names in a fixed order, by their numbers, and files of JSON."""

from __future__ import annotations

import os
import re
from typing import Any

from syncheck.errors import MalformedFile, UnreadableFile
from syncheck.readers.json_text import NotTheObject, json_object
from syncheck.readers.opening import regular

MAX_JSON = 100_000_000  # bytes; as much as a safetensors header may have. An index of 50,000 tensors has 5 MB.


def names_in(folder: str) -> list[str]:
    """List what lies in a folder, in a fixed order. Raises OSError."""
    return sorted(os.listdir(folder))


def read_json(path: str) -> dict[str, Any]:
    """Read a JSON object from a file. Raises MalformedFile for anything else, before reading where it is too long."""
    again = "save or copy it again"
    try:
        with regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_JSON:
                raise MalformedFile(path, found=f"{size} bytes", needed=f"at most {MAX_JSON}", next_step=again)
            raw = file.read(size)
    except OSError as error:  # what is listed in the folder may be a dangling link
        raise UnreadableFile.because(path, error) from None
    try:
        return json_object(raw)
    except NotTheObject as wrong:
        raise MalformedFile(
            path, found=wrong.found, needed=wrong.needed, next_step=f"it is cut short or damaged: {again}"
        ) from None


def numbered(pattern: re.Pattern[str], names: list[str]) -> list[re.Match[str]]:
    """Return the names that match, in the order of their numbers: part 10 comes after part 9."""
    found = [match for name in names if (match := pattern.fullmatch(name))]
    return sorted(found, key=lambda m: [int(part) for part in re.findall(r"\d+", m.string)])
