"""Files that are written whole or not at all."""

from __future__ import annotations

import os


def replace_file(path: str, content: str) -> None:
    """Write a text beside a file and put it in its place, so that the whole new one is there or the old one.

    Raises OSError when it cannot be written.
    """
    import tempfile  # where something is written only

    folder, name = os.path.split(path)
    descriptor, beside = tempfile.mkstemp(dir=folder or ".", prefix=f".{name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(beside, 0o666 & ~umask)  # mkstemp's files are private, a report is not
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise
