"""The benchmarks of live checks and of scale report measurements and missed limits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from support.checkpoints import Done

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process import the benchmarks, which are not installed."""
    if str(ROOT) not in sys.path:
        monkeypatch.syspath_prepend(str(ROOT))


@pytest.fixture
def live() -> ModuleType:
    """Return the benchmark of live checks."""
    from benchmarks import live

    return live


def measurements(check: float, sent: int = 100, **more: Any) -> dict[str, Any]:
    """Return numbers of two ranks: reading takes 10 ms, a step 50 ms. check: seconds; sent: bytes of 10 tensors."""
    times = {"read": [0.01], "check": [check], "read parameters": [0.005], "check parameters": [check]}
    times |= {"megatron": [0.1], "naive": [0.2]}
    source_value = {"tensors": 10, "parameters": 5, "bytes": 8e7, "times": times, "phases": {"digests": [0.008]}}
    traffic = {"sent": [sent, sent - 1], "calls": {"all_gather": 4}, "tensors": 10, "bytes": 0}
    return {
        "models": {"a model": source_value, "5,000 small tensors": source_value},
        "traffic": {"a model": {"in sync": traffic}},
        "training": {"check": [check], "step": [0.05]},
        **more,
    }


@pytest.mark.parametrize(
    ("check", "sent", "missed"), [(0.03, 640, 0), (0.031, 640, 1), (0.02, 641, 1), (0.06, 100, 2), (0.06, 700, 3)]
)
def test_a_missed_limit_is_reported(
    live: ModuleType, monkeypatch: pytest.MonkeyPatch, check: float, sent: int, missed: int
) -> None:
    """More than 3 x reading, 64 bytes a tensor or 1 % of step time is MISSED, and the benchmark fails."""
    monkeypatch.setattr(live, "measured", lambda _: measurements(check, sent))
    text, met = live.run(1)
    assert met == (missed == 0)
    assert text.count("MISSED") == missed


def test_a_missing_gpu_is_reported(live: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, the section reports no GPU measurement; with a GPU, the section has a limit for it."""
    monkeypatch.setattr(live, "measured", lambda _: measurements(0.01))
    assert "No GPU here" in live.run(1)[0]
    case = {"bytes": 1e9, "times": {"copy": [0.001], "digests": [0.0011]}, "bar": True}
    monkeypatch.setattr(live, "measured", lambda _: measurements(0.01, cuda={"device": "G1", "cases": {"big": case}}))
    text, met = live.run(1)
    # Half of a copy is reading, so 1.1 ms of digests are 2.2 x the reading.
    assert "| big on the GPU: digests / a device copy's read | 2.200 | at most 2 | MISSED |" in text
    assert not met
    assert "No GPU here" not in text


def test_a_failed_rank_fails_the_benchmark(live: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a rank fails, the benchmark raises an error with its exit code."""
    monkeypatch.setattr(live, "environment", lambda: {"PATH": "", "PYTHONHOME": "/nowhere"})
    with pytest.raises(RuntimeError, match="ended with 1"):
        live.measured(1)


def test_fingerprints_of_the_benchmark_differ_on_the_last_rank(tmp_path: Path, cli: Callable[..., Done]) -> None:
    """The benchmark writes fingerprints of eight ranks that differ only on the last rank, in one tensor of five."""
    from benchmarks.scale import write_fingerprints

    size = write_fingerprints(tmp_path, 8, 5)
    files = sorted(map(str, tmp_path.glob("*.fp.json")))
    assert len(files) == 8
    assert size == sum(Path(file).stat().st_size for file in files)
    done = cli("compare", *files)
    assert done.code == 1
    assert "5 tensors: 4 identical, 0 close, 1 different, 0 not compared" in done.out
    assert "rank 7" in done.out
