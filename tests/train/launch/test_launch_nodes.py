"""Two machines, simulated by two connected network namespaces."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.listings import list_fields
from support.namespaces import ip, two_hosts
from support.programs import SHORT, TRAIN, assert_trained, errors
from support.required import unavailable
from support.started import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.namespaces import Host
    from support.programs import Programs

MULTI_NODE = ROOT / "train" / "scripts" / "multi_node.sh"


def test_required_resources_are_not_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test with a missing resource is skipped with the reason, or fails if SYNCHECK_REQUIRE names the resource."""
    monkeypatch.setenv("SYNCHECK_REQUIRE", "slurm")
    with pytest.raises(pytest.skip.Exception, match="netns: no permission"):
        unavailable("netns", "no permission")
    monkeypatch.setenv("SYNCHECK_REQUIRE", "slurm,netns")
    with pytest.raises(pytest.fail.Exception, match=r"SYNCHECK_REQUIRE names netns, .* here: no permission"):
        unavailable("netns", "no permission")


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Yield two machines in one network, and remove both after the test."""
    with two_hosts() as two:
        yield two


@pytest.mark.slow
def test_two_machines(programs: Programs, hosts: list[Host], tmp_path: Path) -> None:
    """multi_node.sh on two machines trains four ranks with DDP, and only the first machine prints."""
    started = [
        programs.start(*host.command(MULTI_NODE, 2, node, hosts[0].address, 29700, *SHORT), NPROC="2")
        for node, host in enumerate(hosts)
    ]
    runs = programs.finish_all(started)
    assert list_fields(runs, "returncode") == [0, 0], list_fields(runs, "stderr")
    assert runs[0].stdout.splitlines()[1] == "saved 4 files: ckpts/ddp_rank0.pth to ckpts/ddp_rank3.pth"
    assert runs[1].stdout == ""
    assert_trained(tmp_path / "ckpts", 4)


@pytest.mark.slow
def test_two_machines_by_hand(programs: Programs, hosts: list[Host], tmp_path: Path) -> None:
    """--ip and --port connect two ranks on two machines."""
    options = ("--world-size", 2, "--ip", hosts[0].address, "--port", 29700)
    started = [
        programs.start(*host.command(*TRAIN, "--rank", rank, *options, *SHORT)) for rank, host in enumerate(hosts)
    ]
    runs = programs.finish_all(started)
    assert (list_fields(runs, "returncode"), errors(runs)) == ([0, 0], [])
    assert_trained(tmp_path / "ckpts", 2)


@pytest.mark.slow
def test_unreachable_machine(programs: Programs, hosts: list[Host]) -> None:
    """If rank 0's machine does not answer, a rank reports rank 0's address after the timeout."""
    ip("-n", hosts[0].name, "link", "set", hosts[0].device, "down")
    options = ("--world-size", 2, "--ip", hosts[0].address, "--port", 29700, "--timeout", 2)
    run = programs.run(*hosts[1].command(*TRAIN, "--rank", 1, *options))
    assert run.returncode == 2
    (line,) = errors([run])
    assert "tcp://10.77.0.1:29700" in line
