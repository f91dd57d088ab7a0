"""`--syncheck-reference`, `--syncheck-jobs` and `--syncheck-quick`, also in [tool.syncheck]."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from checkpoints import changed, network, save
from sessions import sessions

if TYPE_CHECKING:
    from pathlib import Path


def test_reference(tmp_path: Path) -> None:
    """Findings contain the ranks that differ from the reference; an unknown reference is a usage error."""
    for rank, state in enumerate((network(), network(), changed(network(), "fc.bias"))):
        save(tmp_path / f"wide_rank{rank}.pth", state)
    for rank in range(2):
        save(tmp_path / f"small_rank{rank}.pth", network())
    base = ["-v", "--syncheck", "*.pth"]
    plain, second, path, unknown = sessions(
        (tmp_path, base),
        (tmp_path, [*base, "--syncheck-reference", "2"]),
        (tmp_path, [*base, "--syncheck-reference", "wide_rank2.pth"]),
        (tmp_path, [*base, "--syncheck-reference", "7"]),
    )
    assert plain.outcomes() == second.outcomes() == path.outcomes()
    assert plain.code == second.code == path.code == 1
    assert "SYN299 unexplained-difference (error) on rank 2" in plain.out
    for run in (second, path):
        assert "SYN299 unexplained-difference (error) on ranks 0-1" in run.out
    assert unknown.code == pytest.ExitCode.USAGE_ERROR
    assert "--syncheck-reference 7: no replica has this rank or path; there are ranks 0, 1, 2" in unknown.out


def test_quick_and_jobs(tmp_path: Path) -> None:
    """--syncheck-quick misses damage after saving and is reported; jobs changes nothing and must be positive."""
    whole = save(tmp_path / "ddp_rank0.pth", network()).read_bytes()
    weight = network()["fc.weight"].tobytes()
    (tmp_path / "ddp_rank1.pth").write_bytes(whole)
    (tmp_path / "ddp_rank0.pth").write_bytes(whole.replace(weight, bytes(len(weight))))
    base = ["-v", "--syncheck", "*.pth"]
    plain, quick, threads, none = sessions(
        (tmp_path, base),
        (tmp_path, [*base, "--syncheck-quick"]),
        (tmp_path, [*base, "--syncheck-jobs", "2"]),
        (tmp_path, [*base, "--syncheck-jobs", "0"]),
    )
    assert [run.code for run in (plain, quick, threads)] == [1, 0, 1]
    assert "options in effect: quick\n" in quick.out
    assert "options in effect" not in threads.out
    assert none.code == pytest.ExitCode.USAGE_ERROR
    assert "--syncheck-jobs 0: must be at least 1" in none.out


def test_a_table_with_all_options(tmp_path: Path) -> None:
    """The plugin uses the tolerances of [tool.syncheck], and ignores keys of the command line."""
    for rank, state in enumerate((network(), changed(network(), "running_mean"))):
        save(tmp_path / f"ddp_rank{rank}.pth", state)
    (tmp_path / "pyproject.toml").write_text(
        "[tool.pytest.ini_options]\n[tool.syncheck]\nreference = 1\njobs = 2\nformat = 'json'\noutput = ['no.pdf']\n"
        "limit = 1\nquiet = true\nexit-zero = true\ncolor = 'always'\n"
        "[tool.syncheck.tolerance]\nbn_mean = {rtol = 0, atol = 2}\n"
    )
    ((inside, bitwise)) = sessions(
        (tmp_path, ["-v", "--syncheck", "*.pth"]),
        (tmp_path, ["-v", "--syncheck", "*.pth", "--syncheck-ulp", "0"]),
    )
    assert (inside.code, bitwise.code) == (0, 1)
    assert "syncheck: options from pyproject.toml: reference 1; jobs 2; tolerance bn_mean" in inside.lines
    assert "options in effect: tolerance bn_mean\n" in inside.out
    assert not (tmp_path / "no.pdf").exists()
