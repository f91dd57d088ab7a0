"""Rendezvous files that are not regular files: pipes, devices, links, and files without write permission."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from typing import TYPE_CHECKING

import pytest
import torch
from support.programs import TRAIN, errors
from support.started import is_gone, wait_for

from train.errors import RankError
from train.launch import RankContext
from train.launch.process_group import check_store_file, process_group

if TYPE_CHECKING:
    from pathlib import Path

    from support.programs import Programs

    from syncheck.testing import Rank

# Without these capabilities, root cannot write to a read-only folder.
CAPABILITIES = "-dac_override,-dac_read_search"
WITHOUT = ("setpriv", f"--inh-caps={CAPABILITIES}", f"--bounding-set={CAPABILITIES}")


def make_context(path: Path, rank: int = 0, world_size: int = 2) -> RankContext:
    """Return the context of a rank with a rendezvous file."""
    return RankContext(rank, world_size, rank, backend="gloo", init_method=path.as_uri())


@pytest.mark.timeout(20)
@pytest.mark.parametrize("link", [False, True], ids=["itself", "link"])
@pytest.mark.parametrize(
    ("kind", "device"),
    [(stat.S_IFIFO, (0, 0)), (stat.S_IFCHR, (1, 3))],
    ids=["pipe", "null"],  # not /dev/zero, because reading it would fill the memory
)
def test_pipes_and_devices_are_rejected(tmp_path: Path, kind: int, device: tuple[int, int], link: bool) -> None:
    """A pipe or a device is rejected at once and not removed, given by its path or through a link."""
    node = path = tmp_path / "node"
    try:
        os.mknod(node, kind | 0o600, os.makedev(*device))
        os.close(os.open(node, os.O_RDWR | os.O_NONBLOCK))
    except OSError as error:
        pytest.skip(f"there can be no such thing here: {error.strerror}")
    if link:
        path = tmp_path / "link"
        path.symlink_to(node)
    with pytest.raises(RankError) as caught, process_group(make_context(path), 1.0):
        pass
    assert f"file://{path}" in str(caught.value)
    assert stat.S_IFMT(node.lstat().st_mode) == kind
    assert path.is_symlink() == link


@pytest.mark.slow
def test_read_only_folder(programs: Programs, tmp_path: Path) -> None:
    """A folder without write permission is reported in one line with exit code 2."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    user = WITHOUT if os.geteuid() == 0 else ()
    if user and (shutil.which("setpriv") is None or programs.run(*user, "test", "!", "-w", closed).returncode):
        pytest.skip("root cannot become a user for whom folders are closed")
    arguments = ("--rank", 0, "--world-size", 2, "--init-method", f"file://{closed}/meeting")
    run = programs.run(*user, *TRAIN, *arguments)
    assert (run.returncode, run.stdout) == (2, "")
    (line,) = errors([run])
    assert f"file://{closed}/meeting" in line
    assert "Permission denied" in line
    assert list(closed.iterdir()) == []


@pytest.mark.syncheck(ranks=2, group=False)
def test_link_to_the_rendezvous_file(syncheck_rank: Rank) -> None:
    """If the path is a link, the ranks use its target, and the last rank removes the target."""
    folder, rank = syncheck_rank.shared, syncheck_rank.rank
    link, target = folder / "link", folder / "file"
    if rank == 0:
        link.symlink_to(target)
    wait_for(link.is_symlink)
    ctx = make_context(link, rank)
    with process_group(ctx, 20.0):
        assert ctx.sum_over_ranks(torch.ones(1)).item() == 2
        assert target.exists()
    wait_for(is_gone, target)


def test_ranks_create_the_file_concurrently(tmp_path: Path) -> None:
    """If four ranks create the rendezvous file at the same moment, every rank accepts the file."""
    barrier = threading.Barrier(4)

    def check(number: int) -> None:
        for attempt in range(500):
            barrier.wait(60)
            try:
                check_store_file(tmp_path / str(attempt))
            except RankError as error:
                failures.append((number, attempt, str(error)))

    failures: list[tuple[int, int, str]] = []
    threads = [threading.Thread(target=check, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
