"""Rendezvous files that are not regular files: pipes, devices, links, and files without write permission."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from typing import TYPE_CHECKING

import pytest
import torch
from programs import TRAIN, errors
from started import wait_for

from train.errors import RankError, UserError
from train.launch import RankContext
from train.launch.group import check_store_file, process_group

if TYPE_CHECKING:
    from pathlib import Path

    from programs import Programs

    from syncheck.testing import Rank

# For root no folder is closed, but for this capability.
CAPABILITIES = "-dac_override,-dac_read_search"
WITHOUT = ("setpriv", f"--inh-caps={CAPABILITIES}", f"--bounding-set={CAPABILITIES}")


def rank_of(path: Path, rank: int = 0, world_size: int = 2) -> RankContext:
    """Describe a rank that meets the others in a file."""
    return RankContext(rank, world_size, rank, backend="gloo", init_method=path.as_uri())


@pytest.mark.timeout(20)
@pytest.mark.parametrize("link", [False, True], ids=["itself", "link"])
@pytest.mark.parametrize(
    ("kind", "device"),
    [(stat.S_IFIFO, (0, 0)), (stat.S_IFCHR, (1, 3))],
    ids=["pipe", "null"],  # under a name of ours; and not zero, which would fill the memory if it were read
)
def test_pipes_and_devices_are_refused(tmp_path: Path, kind: int, device: tuple[int, int], link: bool) -> None:
    """A pipe, which has no end, and a device, which must not be removed, are refused at once and left there."""
    node = path = tmp_path / "node"
    try:
        os.mknod(node, kind | 0o600, os.makedev(*device))
        os.close(os.open(node, os.O_RDWR | os.O_NONBLOCK))
    except OSError as error:
        pytest.skip(f"there can be no such thing here: {error.strerror}")
    if link:
        path = tmp_path / "link"
        path.symlink_to(node)
    with pytest.raises(RankError) as caught, process_group(rank_of(path), 1.0):
        pass
    assert f"file://{path}" in str(caught.value)
    assert stat.S_IFMT(node.lstat().st_mode) == kind
    assert path.is_symlink() == link


@pytest.mark.slow
def test_a_folder_that_one_may_not_write(programs: Programs, tmp_path: Path) -> None:
    """A user who may not write in the folder is told so in one line, with exit code 2."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    user = WITHOUT if os.geteuid() == 0 else ()
    if user and (shutil.which("setpriv") is None or programs.run(*user, "test", "!", "-w", closed).returncode):
        pytest.skip("root cannot become a user for whom folders are closed")
    where = ("--rank", 0, "--world-size", 2, "--init-method", f"file://{closed}/meeting")
    run = programs.run(*user, *TRAIN, *where)
    assert (run.returncode, run.stdout) == (2, "")
    (line,) = errors([run])
    assert f"file://{closed}/meeting" in line
    assert "Permission denied" in line
    assert list(closed.iterdir()) == []


@pytest.mark.syncheck(ranks=2, group=False)
def test_a_link_to_the_file(syncheck_rank: Rank) -> None:
    """If the path is a link, the last rank removes the target, so that the ranks can use the link again."""
    me = syncheck_rank
    link, target = me.shared / "link", me.shared / "file"
    if me.rank == 0:
        link.symlink_to(target)
    wait_for(link.is_symlink)
    ctx = rank_of(link, me.rank)
    with process_group(ctx, 20.0):
        assert ctx.sum_over_ranks(torch.ones(1)).item() == 2
        assert target.exists()
    wait_for(lambda: not target.exists())


def test_a_link_after_a_timeout(tmp_path: Path) -> None:
    """A rank that waited in vain removes the target of a link, not only the link."""
    link, target = tmp_path / "link", tmp_path / "file"
    link.symlink_to(target)
    with pytest.raises(UserError, match="rank 1 did not join"), process_group(rank_of(link), 0.1):
        pass
    assert not target.exists()


def test_ranks_that_create_the_file_at_once(tmp_path: Path) -> None:
    """Four ranks may create the file at the same moment; none of them takes it for another kind of file."""
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
