"""Addresses and ports that cannot be: what the command line answers, without starting anything."""

from __future__ import annotations

import pytest

from train.run import main

pytestmark = pytest.mark.usefixtures("no_launcher")


@pytest.mark.parametrize("port", ["0", "70000"])
def test_a_port_of_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, port: str
) -> None:
    """A MASTER_PORT that cannot be, set by hand, is one line and exit code 2 before anybody waits."""
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["--timeout", "1"]) == 2
    assert capsys.readouterr().err == f"run.py: error: port {port}: needs 1 to 65535; see --port and MASTER_PORT\n"


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("name", ["a..b", "a" * 64])
def test_a_name_that_cannot_be(capsys: pytest.CaptureFixture[str], name: str, rank: str) -> None:
    """A name that no machine can have, and which Python cannot even ask for, is one line and exit code 2 as well."""
    assert main(["--rank", rank, "--world-size", "2", "--ip", name, "--port", "29500", "--timeout", "1"]) == 2
    message = f"cannot find the machine {name!r}: this cannot be a name; give rank 0's (--ip or MASTER_ADDR)"
    assert capsys.readouterr().err == f"run.py: error: {message}\n"
