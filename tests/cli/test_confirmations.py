"""Each file that a command writes is confirmed in one line on stderr, before the report, and never with `--quiet`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.checkpoints import network, save_pth

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.checkpoints import Done

    Run = Callable[..., Done]

# Commands after which the file `made` exists.
COMMANDS = {
    "compare": ("compare", "run_rank0.pth", "run_rank1.pth", "-o", "made.html"),
    "report": ("report", "run_rank0.pth", "run_rank1.pth", "-o", "made.json"),
    "diff": ("diff", "run_rank0.pth", "run_rank1.pth", "-o", "made.md"),
    "fingerprint": ("fingerprint", "run_rank0.pth", "-o", "made.json"),
    "baseline": ("compare", "run_rank0.pth", "run_rank1.pth", "--baseline", "made.json", "--update-baseline"),
}


@pytest.fixture(autouse=True)
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write two checkpoints with equal tensors to the working directory."""
    monkeypatch.chdir(tmp_path)
    for rank in range(2):
        save_pth(tmp_path / f"run_rank{rank}.pth", network())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_written_file_is_confirmed(cli: Run, name: str) -> None:
    """One line on stderr names the file, and `--quiet` suppresses it."""
    done = cli(*COMMANDS[name])
    assert (done.code, done.err.count("\n")) == (0, 1)
    assert "made" in done.err
    done = cli(*COMMANDS[name], "--quiet")
    assert (done.code, done.out, done.err) == (0, "", "")


def test_the_line_has_the_size(cli: Run, tmp_path: Path) -> None:
    """The line has the size of the file with a unit."""
    done = cli(*COMMANDS["compare"])
    size = (tmp_path / "made.html").stat().st_size
    assert done.err == f"syncheck: wrote made.html, {size / 1000:.1f} kB\n"


def test_a_map_is_confirmed_if_it_was_written(cli: Run, tmp_path: Path) -> None:
    """`--write-map` confirms a map, and no map for models of equal names."""
    renamed = {name.replace("fc.", "head."): tensor for name, tensor in network().items()}
    save_pth(tmp_path / "renamed.pth", renamed)
    assert "syncheck: wrote map.toml, " in cli("diff", "run_rank0.pth", "renamed.pth", "--write-map", "map.toml").err
    done = cli("diff", "run_rank0.pth", "run_rank1.pth", "--write-map", "none.toml")
    assert (done.err, (tmp_path / "none.toml").exists()) == ("", False)
