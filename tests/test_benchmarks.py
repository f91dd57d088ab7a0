"""The benchmarks of live checks and of scale say what was measured, and when a bar is missed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from checkpoints import Done

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process import the benchmarks, which are not installed."""
    if str(ROOT) not in sys.path:
        monkeypatch.syspath_prepend(str(ROOT))


@pytest.fixture
def live() -> ModuleType:
    """The benchmark of live checks."""
    from benchmarks import live

    return live


def found(check: float, sent: int = 100, **more: Any) -> dict[str, Any]:
    """What two ranks measured: reading takes 10 ms, a step 50 ms. check: seconds; sent: bytes, for 10 tensors."""
    times = {"read": [0.01], "check": [check], "read parameters": [0.005], "check parameters": [check]}
    times |= {"megatron": [0.1], "naive": [0.2]}
    of = {"tensors": 10, "parameters": 5, "bytes": 8e7, "times": times, "phases": {"digests": [0.008]}}
    traffic = {"sent": [sent, sent - 1], "calls": {"all_gather": 4}, "tensors": 10, "bytes": 0}
    return {
        "models": {"a model": of, "5,000 small tensors": of},
        "traffic": {"a model": {"in sync": traffic}},
        "training": {"check": [check], "step": [0.05]},
        **more,
    }


@pytest.mark.parametrize(
    ("check", "sent", "missed"), [(0.03, 640, 0), (0.031, 640, 1), (0.02, 641, 1), (0.06, 100, 2), (0.06, 700, 3)]
)
def test_a_bar_that_is_missed_is_said(
    live: ModuleType, monkeypatch: pytest.MonkeyPatch, check: float, sent: int, missed: int
) -> None:
    """More than 3 x reading, 64 bytes a tensor or 1 % of step time is MISSED, and the benchmark fails."""
    monkeypatch.setattr(live, "measured", lambda _: found(check, sent))
    text, met = live.run(1)
    assert met == (missed == 0)
    assert text.count("MISSED") == missed


def test_where_there_is_no_gpu_that_is_said(live: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU the section says that nothing was measured there; with one it has a bar of its own."""
    monkeypatch.setattr(live, "measured", lambda _: found(0.01))
    assert "No GPU here" in live.run(1)[0]
    case = {"bytes": 1e9, "times": {"copy": [0.001], "digests": [0.0011]}, "bar": True}
    monkeypatch.setattr(live, "measured", lambda _: found(0.01, cuda={"device": "G1", "cases": {"big": case}}))
    text, met = live.run(1)
    # A copy reads half the time: 1.1 ms of digests are 2.2 x its reading.
    assert "| big on the GPU: digests / a device copy's read | 2.200 | at most 2 | MISSED |" in text
    assert not met
    assert "No GPU here" not in text


def test_a_rank_that_fails_fails_the_benchmark(live: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a rank ends with an error, its last lines are in the error raised, and no process is left."""
    monkeypatch.setattr(live, "environment", lambda: {"PATH": "", "PYTHONHOME": "/nowhere"})
    with pytest.raises(RuntimeError, match="ended with 1"):
        live.measured(1)


def test_fingerprints_of_the_benchmark_differ_on_the_last_rank(tmp_path: Path, cli: Callable[..., Done]) -> None:
    """Of eight ranks as written for the benchmark the last one is named, with one tensor of five."""
    from benchmarks.scale import write_fingerprints

    size = write_fingerprints(tmp_path, 8, 5)
    files = sorted(map(str, tmp_path.glob("*.fp.json")))
    assert len(files) == 8
    assert size == sum(Path(file).stat().st_size for file in files)
    done = cli("compare", *files)
    assert done.code == 1
    assert "5 tensors: 4 identical, 0 close, 1 different, 0 not compared" in done.out
    assert "rank 7" in done.out
