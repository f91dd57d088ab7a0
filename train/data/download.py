"""Downloads with torchvision; failed or simultaneous downloads never leave partial files in the folder."""

from __future__ import annotations

import io
import os
import socket
import sys
import tarfile
import zlib
from contextlib import redirect_stderr, redirect_stdout
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from train.data.vision import SOURCES
from train.errors import UserError, join_lines

if TYPE_CHECKING:
    from train.data.vision import Source

SOCKET_TIMEOUT = 30.0  # seconds
# Exceptions for network errors, full disks and damaged archives.
FAILURES = (OSError, RuntimeError, ValueError, EOFError, HTTPException, tarfile.TarError, zlib.error)


def download(name: str, folder: Path | None) -> None:
    """Download the data set `name` into `folder`, unless the folder has a valid copy. Raises UserError.

    The files are downloaded and verified in a temporary folder, then moved to `folder`. Machines that share the folder
    may download at the same time, because they move equal files.
    """
    source = next((source for source in SOURCES if source.name == name), None)
    if source is None:
        raise UserError(f"--download: --data {name} needs no download; omit --download")
    try:
        source.read(folder)
        return
    except UserError:
        if folder is None:
            raise
    # Show torchvision's progress on a terminal only.
    stream = sys.stderr if sys.stderr.isatty() else io.StringIO()
    before = socket.getdefaulttimeout()
    try:
        socket.setdefaulttimeout(SOCKET_TIMEOUT)  # torchvision sets no timeout
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".download-", dir=folder) as temporary:
            _link_archives(source, folder, Path(temporary))
            with redirect_stdout(stream), redirect_stderr(stream):
                source.import_class()(temporary, download=True)
            source.read(Path(temporary))
            moves = zip(source.list_files(Path(temporary)), source.list_files(folder), strict=True)
            for (path, _), (target, _) in moves:
                target.parent.mkdir(parents=True, exist_ok=True)
                path.replace(target)
    except FAILURES as error:
        advice = f"try again, or get {source.contents} from {source.address}"
        problem = f"cannot download {source.name} to {folder}: {join_lines(error)}"
        raise UserError(f"--download: {problem}; {advice}") from error
    finally:
        socket.setdefaulttimeout(before)


def _link_archives(source: Source, folder: Path, temporary: Path) -> None:
    """Link valid archives in `folder` into the temporary folder, so that torchvision does not download them again."""
    from torchvision.datasets.utils import check_integrity  # type: ignore[import-untyped]

    for (path, md5), (link, _) in zip(source.list_archives(folder), source.list_archives(temporary), strict=True):
        if check_integrity(path, md5):
            link.parent.mkdir(parents=True, exist_ok=True)
            os.symlink(path.absolute(), link)
