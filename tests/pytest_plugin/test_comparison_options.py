"""The options of a comparison as `--syncheck-*`: which items exist, what they compare, and usage errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.checkpoints import changed, network, save, save_pth
from support.listings import list_codes
from support.sessions import session, sessions

if TYPE_CHECKING:
    from pathlib import Path

BASE = ["-v", "--syncheck", "*.pth"]
PASSED = {".::ddp::parameters": "PASSED", ".::ddp::bn-stats": "PASSED"}
ERROR = int(pytest.ExitCode.USAGE_ERROR)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two ranks that differ in the bias and a running mean, with RNG states and an empty optimizer."""
    for rank in range(2):
        model = changed(network(), "fc.bias", "running_mean", by=1e-6) if rank else network()
        tree = {"model": model, "rng_state": np.full(4, rank, np.int64), "optimizer": {"state": {}, "param_groups": []}}
        save_pth(tmp_path / f"ddp_rank{rank}.pth", tree)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "outcomes", "text"),
    [
        ("", "parameters FAILED bn-stats FAILED", ""),
        ("only=params", "parameters FAILED", "only params"),
        ("only=buffers", "bn-stats FAILED", "only buffers"),
        ("only=params only=buffers", "parameters FAILED bn-stats FAILED", "only params, buffers"),
        ("only=rng", "rng FAILED", "only rng"),
        ("exclude=fc.* exclude=*.running_*", "parameters PASSED bn-stats PASSED", "exclude fc.*, *.running_*"),
        ("include=layer*.bn.weight", "parameters PASSED", "include layer*.bn.weight"),
        ("include=no-such-tensor", "tensors FAILED", "no tensor was compared; options may exclude all"),
        ("buffers=fc.bias", "parameters PASSED bn-stats FAILED buffers FAILED", ""),
        ("allow=syn201", "parameters FAILED bn-stats PASSED", "bn-stats 2/6 differ (SYN201 allowed)"),
        ("allow=SYN101", "parameters FAILED bn-stats FAILED", "bn-stats 2/6 differ (SYN201)"),
        ("rtol=1e-4 atol=0", "parameters PASSED bn-stats PASSED", "options in effect: rtol 0.0001; atol 0"),
        ("rtol=1e-9 atol=1e-9", "parameters FAILED bn-stats FAILED", ""),
        ("ulp=9999", "parameters PASSED bn-stats PASSED", "options in effect: ulp 9999"),
        ("close", "parameters PASSED bn-stats PASSED", "parameters 1/8 close; bn-stats 2/6 close"),
    ],
)
def test_options(folder: Path, options: str, outcomes: str, text: str) -> None:
    """Each option selects the items, their tensors or a tolerance, and the summary contains the option."""
    ended = session(folder, *BASE, *(f"--syncheck-{option}" for option in options.split()))
    words = outcomes.split()
    expected = {f".::ddp::{item}": outcome for item, outcome in zip(words[::2], words[1::2], strict=True)}
    assert ended.outcomes() == expected, ended.out
    assert ended.code == int("FAILED" in words)
    assert text in ended.out


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("only=nonsense", "--syncheck-only nonsense: must be one of params, buffers, optimizer, rng"),
        ("allow=SYN999", "--syncheck-allow SYN999: no such code"),
        ("group-by=(", "--syncheck-group-by '(': not a regular expression"),
        ("reference=7", "--syncheck-reference 7: no replica has this rank or path; there are ranks 0, 1"),
        ("jobs=0", "--syncheck-jobs 0: must be at least 1"),
        ("close ulp=16", "cannot be combined"),
        ("rtol=1e-5", "belong together"),
        ("ulp=-1", "--syncheck-ulp -1: must be at least 0"),
        ("atol=some", "--syncheck-atol: must be a number, not 'some'"),
    ],
)
def test_usage_errors(folder: Path, options: str, error: str) -> None:
    """An invalid value is a usage error with the name of the pytest option."""
    ended = session(folder, *BASE, *(f"--syncheck-{option}" for option in options.split()))
    assert ended.code == ERROR
    assert error in ended.out
    assert "Traceback" not in ended.out


def test_group_by(tmp_path: Path) -> None:
    """Files with equal matches are one group; groups of one file have no verdict and fail."""
    for name, state in {"alice": network(), "bob": network(), "carol": changed(network(), "fc.bias")}.items():
        save(tmp_path / f"final-{name}.pth", state)
    grouped, split = sessions(
        (tmp_path, [*BASE, "--syncheck-group-by", "(final)"]),
        (tmp_path, [*BASE, "--syncheck-group-by", "(alice|bob|carol)"]),
    )
    assert grouped.code == 1
    assert grouped.outcomes() == {".::final::parameters": "FAILED", ".::final::bn-stats": "PASSED"}, grouped.out
    assert set(split.outcomes().values()) == {"FAILED"}
    assert "no replica to compare with" in split.out


def test_reference(tmp_path: Path) -> None:
    """Findings contain the ranks that differ from the reference, a rank or a path; other groups keep none."""
    for rank, state in enumerate((network(), network(), changed(network(), "fc.bias"))):
        save(tmp_path / f"wide_rank{rank}.pth", state)
    for rank in range(2):
        save(tmp_path / f"small_rank{rank}.pth", network())
    plain, second, path = sessions(
        (tmp_path, BASE),
        (tmp_path, [*BASE, "--syncheck-reference", "2"]),
        (tmp_path, [*BASE, "--syncheck-reference", "wide_rank2.pth"]),
    )
    assert plain.outcomes() == second.outcomes() == path.outcomes()
    assert plain.code == second.code == path.code == 1
    assert "SYN299 unexplained-difference (error, consistent) on rank 2" in plain.out
    for run in (second, path):
        assert "SYN299 unexplained-difference (error, consistent) on ranks 0-1" in run.out


def test_quick_and_jobs(tmp_path: Path) -> None:
    """--syncheck-quick misses damage after saving and is reported; jobs changes nothing."""
    complete = save(tmp_path / "ddp_rank0.pth", network()).read_bytes()
    weight = network()["fc.weight"].tobytes()
    (tmp_path / "ddp_rank1.pth").write_bytes(complete)
    (tmp_path / "ddp_rank0.pth").write_bytes(complete.replace(weight, bytes(len(weight))))
    plain, quick, threads = sessions(
        (tmp_path, BASE), (tmp_path, [*BASE, "--syncheck-quick"]), (tmp_path, [*BASE, "--syncheck-jobs", "2"])
    )
    assert list_codes((plain, quick, threads)) == [1, 0, 1]
    assert quick.outcomes() == PASSED
    assert "options in effect: quick\n" in quick.out
    assert "options in effect" not in threads.out


def test_a_table_with_all_options(tmp_path: Path) -> None:
    """The plugin uses the tolerances of [tool.syncheck], and ignores keys of the command line."""
    for rank, state in enumerate((network(), changed(network(), "running_mean"))):
        save(tmp_path / f"ddp_rank{rank}.pth", state)
    (tmp_path / "pyproject.toml").write_text(
        "[tool.pytest.ini_options]\n[tool.syncheck]\nreference = 1\njobs = 2\nformat = 'json'\noutput = ['no.pdf']\n"
        "limit = 1\nquiet = true\nexit-zero = true\ncolor = 'always'\n"
        "[tool.syncheck.tolerance]\nbn_mean = {rtol = 0, atol = 2}\n"
    )
    inner, bitwise = sessions((tmp_path, BASE), (tmp_path, [*BASE, "--syncheck-ulp", "0"]))
    assert (inner.code, bitwise.code) == (0, 1)
    assert "syncheck: options from pyproject.toml: reference 1; jobs 2; tolerance bn_mean" in inner.lines
    assert "options in effect: tolerance bn_mean\n" in inner.out
    assert not (tmp_path / "no.pdf").exists()
