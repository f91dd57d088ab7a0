"""Limits and mounts of a user: file size, threads, and a read-only bind mount."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import save_pth, select_summary
from support.required import unavailable

pytestmark = pytest.mark.usefixtures("two_ranks")
# Forbid threads in a separate process of another user, because the limit does not apply to root. The imports come
# first, because that user may be unable to read the modules.
LIMITED = """
import os, resource, sys, threading
import numpy
from syncheck.cli import main
devnull, kept = os.open(os.devnull, os.O_WRONLY), os.dup(1)
os.dup2(devnull, 1)
main(sys.argv[1:])
os.dup2(kept, 1)
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
try:
    threading.Thread(target=print).start()
except RuntimeError:
    sys.exit(main(sys.argv[1:]))
sys.exit(77)
"""


@pytest.mark.parametrize("limit", [0, 100])
def test_file_size_limit(tmp_path: Path, limit: int) -> None:
    """A report above the file size limit is an error; the old report stays, without a temporary file beside it."""
    (tmp_path / "out.json").write_text("old")
    done = subprocess.run(
        [sys.executable, "-B", "-m", "syncheck", "compare", ".", "-o", "out.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 2
    assert done.stderr == "syncheck: error: --output out.json: cannot be written: File too large\n"
    assert select_summary(done.stdout)[0] == "OUT OF SYNC"
    assert (tmp_path / "out.json").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["out.json", "run_rank0.pth", "run_rank1.pth"]


def test_thread_limit() -> None:
    """If the user cannot start threads, --jobs 4 compares in the main thread."""
    with tempfile.TemporaryDirectory() as folder:  # other users cannot enter the folders of pytest
        os.chmod(folder, 0o755)
        paths = []
        for rank in range(2):
            large = np.zeros(3 << 20, np.float32)
            large[-1] = rank
            paths.append(str(save_pth(Path(folder) / f"run_rank{rank}.pth", {"w": large})))
        command = [sys.executable, "-c", LIMITED, "compare", *paths, "--jobs", "4"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 77:
        unavailable("nproc", "the limit of threads binds nobody here")
    assert (done.returncode, done.stderr) == (1, "")
    verdict, _, counts = select_summary(done.stdout)
    assert (verdict, counts) == ("OUT OF SYNC", "1 tensors: 0 identical, 0 close, 1 different, 0 not compared")


@pytest.mark.slow
def test_read_only_bind_mount(tmp_path: Path) -> None:
    """A read-only bind mount of a writable folder, as in containers, is reported before anything is compared."""
    script = """
    mount --bind . . && mount -o remount,bind,ro . || exit 77
    cd "$PWD"
    for out in out.json new.html; do "$1" -B -m syncheck compare . -o $out; echo $?; done
    "$1" -B -m syncheck fingerprint run_rank0.pth -o prints; echo $?
    """
    command = ["unshare", "-m", "bash", "-c", script, "bash", sys.executable]
    (tmp_path / "out.json").write_text("old")
    try:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        unavailable("unshare", "there is no such program")
    if done.returncode:
        unavailable("unshare", done.stderr.strip())
    assert done.stdout == "2\n2\n2\n"
    lines = done.stderr.splitlines()
    assert [line.rpartition(": ")[2] for line in lines] == ["Read-only file system"] * 3
    assert lines[0] == "syncheck: error: --output out.json: cannot be written: Read-only file system"
    assert sorted(os.listdir(tmp_path)) == ["out.json", "run_rank0.pth", "run_rank1.pth"]
    assert (tmp_path / "out.json").read_text() == "old"
