"""Two nodes with separate disks: two network namespaces with a folder each."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from support.checkpoints import changed, network, save
from support.listings import list_fields, list_files
from support.namespaces import two_hosts
from support.programs_of_ranks import RECORD_EXIT_CODE, SYNCHECK, TORCHRUN, finish, finish_all

import syncheck

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.checkpoints import Done
    from support.namespaces import Host
    from support.programs_of_ranks import Jobs

pytestmark = pytest.mark.slow
# Run a command with a host name of its own, as printed by `uname -n`.
WITH_HOST_NAME = ("unshare", "--uts", "sh", "-c", 'echo "$0" > /proc/sys/kernel/hostname; exec "$@"')


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Create two machines in one network for the duration of the test."""
    with two_hosts() as two:
        yield two


@pytest.fixture
def nodes(tmp_path: Path) -> list[Path]:
    """Write a folder for each node: ranks 0 and 1 on the first, 2 and 3 on the second; a weight of rank 3 differs."""
    folders = [tmp_path / "node0", tmp_path / "node1"]
    for rank in range(4):
        block = syncheck.metadata(run="mine", rank=rank, world_size=4, step=5, run_id="4f1c", host=f"gpu{rank // 2}")
        state: dict[str, Any] = changed(network(), "fc.weight", by=float(rank == 3))
        save(folders[rank // 2] / "ckpts" / f"rank_{rank}.pth", state | {"syncheck": block})
    return folders


def run_on_both(jobs: Jobs, hosts: list[Host], folders: list[Path], *arguments: Any) -> list[Done]:
    """Run torchrun with two processes on each of two nodes, and wait for the end."""
    processes = []
    for node, (host, folder) in enumerate(zip(hosts, folders, strict=True)):
        launcher = [*TORCHRUN, "--nnodes", 2, "--node-rank", node, "--nproc-per-node", 2, "--no-python"]
        launcher += ["--master-addr", hosts[0].address, "--master-port", 29700, "bash", "-c", RECORD_EXIT_CODE, "bash"]
        words = host.command(*WITH_HOST_NAME, f"gpu{node}", *launcher, *SYNCHECK, *arguments)
        processes.append(jobs.start(*words, cwd=folder))
    return finish_all(processes)


def test_each_node_has_its_own_files(jobs: Jobs, hosts: list[Host], nodes: list[Path]) -> None:
    """If no node has all files, the differing tensor is found with its rank, and each path has the name of its host."""
    done = run_on_both(jobs, hosts, nodes, "compare", "ckpts/rank_{rank}.pth", "--format", "json")
    assert [jobs.codes(folder) for folder in nodes] == [{0: 1, 1: 1}, {2: 1, 3: 1}], done
    assert done[1].out == ""
    assert all("syncheck: " not in result.err for result in done)
    (group,) = json.loads(done[0].out)["groups"]
    assert list_fields(group["tensors"], "name", "clusters") == [("fc.weight", [[0, 1, 2], [3]])]
    assert [finding["ranks"] for finding in group["findings"] if finding["severity"] != "info"] == [[3]]
    locations = list_fields(group["replicas"], "path", "host")
    assert locations == [(f"gpu{rank // 2}:ckpts/rank_{rank}.pth", f"gpu{rank // 2}") for rank in range(4)]


def test_a_file_on_the_wrong_node(jobs: Jobs, hosts: list[Host], nodes: list[Path]) -> None:
    """If a file is missing on the node of its rank, all processes exit with 2, and the first node names the path."""
    (nodes[1] / "ckpts" / "rank_3.pth").rename(nodes[0] / "ckpts" / "rank_3.pth")
    done = run_on_both(jobs, hosts, nodes, "compare", "ckpts/rank_{rank}.pth")
    assert [jobs.codes(folder) for folder in nodes] == [{0: 2, 1: 2}, {2: 2, 3: 2}], done
    assert "syncheck: error: rank 3: ckpts/rank_3.pth: no such file or directory. Check the path.\n" in done[0].err
    assert "syncheck: " not in done[1].err


def test_two_nodes_with_one_disk(jobs: Jobs, hosts: list[Host], nodes: list[Path]) -> None:
    """If nodes share a disk, {local_rank} gives two ranks the same file, which is an error and not in sync."""
    done = run_on_both(jobs, hosts, [nodes[0], nodes[0]], "compare", "ckpts/rank_{local_rank}.pth")
    assert "syncheck: error: ranks 0 and 2 read the same file: ckpts/rank_0.pth; " in done[0].err
    assert jobs.codes(nodes[0]) == dict.fromkeys(range(4), 2)


def test_fingerprints_of_each_node(jobs: Jobs, hosts: list[Host], nodes: list[Path], tmp_path: Path) -> None:
    """A comparison of fingerprints from both nodes finds the same tensor and rank."""
    desk = tmp_path / "desk"
    desk.mkdir()
    for host, folder in zip(hosts, nodes, strict=True):
        created = finish(jobs.start(*host.command(*SYNCHECK, "fingerprint", "ckpts", "-o", "made"), cwd=folder))
        assert created.code == 0
        assert all(line.startswith("syncheck: wrote ") for line in created.err.splitlines())
        for file in (folder / "made").rglob("*.json"):
            shutil.copy(file, desk)
    files = list_files(desk)
    done = finish(jobs.start(*SYNCHECK, "compare", *files, "--format", "json", cwd=desk))
    assert (done.code, len(files)) == (1, 4)
    (group,) = json.loads(done.out)["groups"]
    assert list_fields(group["tensors"], "name", "clusters") == [("fc.weight", [[0, 1, 2], [3]])]
    assert [finding["ranks"] for finding in group["findings"] if finding["severity"] != "info"] == [[3]]
