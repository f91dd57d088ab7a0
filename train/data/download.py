"""Fetches a data set by torchvision; neither a broken download nor two machines at once leave half a file."""

from __future__ import annotations

import io
import os
import socket
import sys
import tarfile
import zlib
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from train.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from train.data.vision import Source

SILENCE = 30.0  # seconds without a byte until a server is given up
# What a network, a full disk and a broken archive raise.
FAILURES = (OSError, RuntimeError, ValueError, EOFError, HTTPException, tarfile.TarError, zlib.error)


def fetch(source: Source, folder: Path | None) -> None:
    """Download the data set into `folder`, unless it is there and can be read. Raises UserError.

    torchvision unpacks in a folder of its own within `folder`; what is right is then moved over, file by file.
    Machines that share the folder may do so at once: each puts the same bytes there.
    """
    try:
        source.read(folder)
    except UserError:
        if folder is None:
            raise
    else:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".download-", dir=folder) as made:
            own = Path(made)
            _link_archives(source, folder, own)
            with _patient():
                source.dataset()(own, download=True)
            source.read(own)
            for (path, _), (target, _) in zip(source.files(own), source.files(folder), strict=True):
                target.parent.mkdir(parents=True, exist_ok=True)
                path.replace(target)
    except FAILURES as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        advice = f"mend that, or put into the folder {source.holds} of {source.address}"
        raise UserError(f"--download: {source.name} did not come to {folder}: {reason}; {advice}") from error


def _link_archives(source: Source, folder: Path, own: Path) -> None:
    """Offer torchvision the archives that lie in `folder` already and are whole."""
    from torchvision.datasets.utils import check_integrity  # type: ignore[import-untyped]

    for (path, md5), (link, _) in zip(source.archives(folder), source.archives(own), strict=True):
        if check_integrity(path, md5):
            link.parent.mkdir(parents=True, exist_ok=True)
            os.symlink(path.absolute(), link)


@contextmanager
def _patient() -> Iterator[None]:
    """Give up servers that fall silent; show torchvision's progress on terminals only."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SILENCE)
    shown = sys.stderr if sys.stderr.isatty() else io.StringIO()
    try:
        with redirect_stdout(shown), redirect_stderr(shown):
            yield
    finally:
        socket.setdefaulttimeout(before)
