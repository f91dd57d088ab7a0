"""`syncheck demo`, run for real."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.listings import find_texts, list_fields, list_files, list_starts

from syncheck.cli import demo
from syncheck.errors import DemoFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.checkpoints import Done

EXTERNAL_RESOURCES = re.compile(r"<link|src=|@import|url\((?!#)")


def run_demo(folder: Path, timeout: float = 170) -> subprocess.CompletedProcess[str]:
    """Run the demo in a folder."""
    command = [sys.executable, "-m", "syncheck", "demo"]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=timeout)


def without_time(page: str) -> str:
    """Return a page without the part on how it was made, and without times."""
    return re.sub(r"\d\d:\d\d:\d\d", "", re.sub(r'<h2 id="about">.*?</dl>', "", page, flags=re.DOTALL))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_demo_shows_drift_and_remedy(tmp_path: Path, cli: Callable[..., Done]) -> None:
    """Both runs reach 97%, SYN201 is the only finding, and SyncBatchNorm reduces the drift to exactly 0.0."""
    done = run_demo(tmp_path)
    assert done.returncode == 0, done.stderr
    accuracies = re.findall(r"^(ddp|ddp-syncbn): ([\d.]+)% test accuracy", done.stdout, flags=re.MULTILINE)
    assert list_fields(accuracies, 0) == ["ddp", "ddp-syncbn"]
    assert all(float(accuracy) >= 97 for _, accuracy in accuracies)
    assert set(re.findall(r"SYN\d{3} [a-z-]+ \(", done.stdout)) == {"SYN201 bn-local-stats ("}
    assert re.search(r"SyncBatchNorm closed the gap: .* was 0\.\d+ in ddp .* and is 0\.0 in ddp-syncbn\.", done.stdout)
    page = (tmp_path / "syncheck-demo" / "index.html").read_text(encoding="utf-8")
    # The printed commands reproduce the printed output and the page.
    typed = re.findall(r"^\$ syncheck (.+)$", done.stdout, flags=re.MULTILINE)
    assert list_starts(typed) == ["compare", "report"]
    for line in typed:
        assert cli(*line.split()).out in done.stdout
    again = (tmp_path / "syncheck-demo" / "index.html").read_text(encoding="utf-8")
    assert without_time(again) == without_time(page)
    assert "SyncBatchNorm closed the gap" in page
    assert "echarts" in page  # there is something to draw
    page = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert EXTERNAL_RESOURCES.search(page) is None
    assert list_files(tmp_path) == ["syncheck-demo"]


def find_session_commands(session: int) -> list[str]:
    """Return the command lines of the running processes of a session."""
    commands = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                commands.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:  # the process has just ended
            continue
    return commands


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_interrupted_demo_leaves_no_process_behind(tmp_path: Path) -> None:
    """Ctrl-C during training ends torchrun and its ranks before the demo, and the demo exits with 130."""
    command = [sys.executable, "-m", "syncheck", "demo"]
    with (tmp_path / "out").open("w+") as out:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            deadline = time.monotonic() + 60
            while "epoch  1/" not in (tmp_path / "out").read_text() and time.monotonic() < deadline:
                time.sleep(0.1)
            assert find_texts(find_session_commands(process.pid), "train/run.py")
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(timeout=60) == 130
            assert find_session_commands(process.pid) == []
        finally:
            if find_session_commands(process.pid):
                os.killpg(process.pid, signal.SIGKILL)
    assert (tmp_path / "out").read_text().rstrip().endswith("syncheck: interrupted")


def test_demo_in_a_clone_with_the_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clone must be installed itself; anywhere else, it must be cloned first."""
    monkeypatch.setattr(demo, "__file__", str(tmp_path / "site-packages" / "syncheck" / "cli" / "demo.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DemoFailed, match="clone the repository") as elsewhere:
        demo.run("auto")
    for path in (Path("train/run.py"), Path("syncheck/cli/demo.py")):
        path.parent.mkdir(parents=True)
        path.touch()
    with pytest.raises(DemoFailed) as in_clone:
        demo.run("auto")
    assert "clone the repository" not in str(in_clone.value)
    for error in (elsewhere, in_clone):
        assert "pip install -e '.[train]' && syncheck demo" in str(error.value)


def test_demo_refuses_a_folder_with_other_files(tmp_path: Path) -> None:
    """The demo refuses a syncheck-demo/ folder from another source and leaves its content unchanged."""
    mine = tmp_path / "syncheck-demo" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    done = run_demo(tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("syncheck: error: syncheck-demo/ exists and was not created by the demo")
    assert list(mine.parent.iterdir()) == [mine]
