"""Errors of the command line for invalid addresses, invalid ports and a missing rank."""

from __future__ import annotations

import pytest

from train.run import main

pytestmark = pytest.mark.usefixtures("no_launcher")


@pytest.mark.parametrize("port", ["0", "70000"])
def test_invalid_master_port(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    """An invalid MASTER_PORT is reported in one line with exit code 2."""
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["--timeout", "1"]).code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"port {port}: " in line


@pytest.mark.parametrize("address", ["127.0.0.1", pytest.param("192.0.2.1", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_rank_zero_times_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, free_port: int, address: str
) -> None:
    """Rank 0, which serves the store, waits only until --timeout at any address, and reports the address."""
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(free_port)}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["--timeout", "1"]).code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"run.py: error: rank 0 of 2 could not join the other ranks at tcp://{address}:{free_port}")


@pytest.mark.parametrize("name", ["a..b", "a" * 64])
def test_an_invalid_host_name(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """A host name that Python cannot encode is reported in one line with exit code 2."""
    assert main(["--rank", "1", "--world-size", "2", "--ip", name, "--port", "29500", "--timeout", "1"]).code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"tcp://{name}:29500" in line
