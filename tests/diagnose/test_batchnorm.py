"""BatchNorm in depth: variances alone (SYN204), one step's lag (SYN201) against free-running statistics (SYN202)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import save_pth
from test_rules import COUNT, MEAN, VAR, WEIGHT, diff, found, group

import syncheck
from syncheck.records import Evidence, FreeRunning
from syncheck.snapshots import Metadata

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from syncheck.records import Finding, Group

DIGEST = {"mismatched": None, "max_abs": None, "index": None, "extent": None, "reason": "digest"}


@pytest.mark.parametrize("ranks", [2, 4])
def test_204(ranks: int) -> None:
    """Variances that differ where all means agree are SYN204, on the minority where there is one."""
    clusters = ((0,), (1,)) if ranks == 2 else ((0, 1, 2), (3,))
    odd = diff("bn.running_var", "bn_var", clusters, max_rel=0.004)
    fitted = found(group(odd, ranks=ranks))
    assert set(fitted) == {"SYN204"}
    assert fitted["SYN204"].ranks == ((0, 1) if ranks == 2 else (3,))
    assert fitted["SYN204"].evidence.startswith(
        "1 of 4 running variances differs, largest gap 0.5 in bn.running_var[1], at most 0.004 of their size; all 4 "
        "running means agree"
    )


def test_204_of_digests() -> None:
    """Digests tell which tensors differ, and that is the signature; no size is claimed."""
    fitted = found(group(diff("bn.running_var", "bn_var", **DIGEST)))
    assert set(fitted) == {"SYN204"}
    assert "by how much is not known; all 4 running means agree" in fitted["SYN204"].evidence


@pytest.mark.parametrize("other", [MEAN, COUNT, WEIGHT, diff("optimizer.fc.weight.exp_avg", "optimizer")])
def test_not_204(other: Any) -> None:
    """With a mean, a count, a parameter or the optimizer apart, it is other data or another fault."""
    assert "SYN204" not in found(group(VAR, other))


SEEN = FreeRunning((3, 6, 9, 12), cosine=0.6, growth=1.6, misfit_free=0.5, misfit_lag=1.5)
SYNCED = Metadata(buffers_synced=True)


def told(seen: FreeRunning, metadata: Metadata | None = SYNCED) -> Finding:
    """Return what is said of statistics that differ alone, at several steps that show this."""
    (finding,) = found(group(MEAN, VAR, metadata=metadata, free_running=seen)).values()
    return finding


def test_202_against_the_metadata() -> None:
    """Gaps that grow and keep their direction outweigh metadata that says that buffers are synchronized."""
    finding = told(SEEN)
    assert (finding.code, finding.ranks) == ("SYN202", (0, 1))
    assert (
        "from step 3 to 12 the gaps grew 1.6 times and kept their direction (cosine 0.60 from step to step), as "
        "statistics do that run freely; the metadata says that buffers are synchronized once a step, which these files "
        "do not bear out"
    ) in finding.evidence
    assert told(SEEN, None).code == "SYN202"
    assert "metadata" not in told(SEEN, None).evidence


def test_202_by_the_momentum_bound() -> None:
    """Variances below what a synchronization leaves prove it at any step; a single one may be a flipped bit."""
    late = FreeRunning((50, 52), cosine=0.9, growth=1.0, below=7)
    assert told(late).code == "SYN202"
    assert "7 running variances are lower than one batch after another can make them" in told(late).evidence
    assert told(replace(late, below=1)).code == "SYN201"


@pytest.mark.parametrize(
    "changes",
    [
        {"growth": 1.1},  # a lag whose direction stays: shards of unlike data
        {"cosine": 0.1},  # a lag that grows with the activations
        {"misfit_lag": 0.2},  # explained by a lag
        {"misfit_free": None, "misfit_lag": None},  # steps too late or too far apart
    ],
)
def test_201_where_the_steps_do_not_show_free_running(changes: Any) -> None:
    """Each sign alone leaves it at SYN201, whether or not the metadata says that buffers are synchronized."""
    seen = replace(SEEN, **changes)
    assert told(seen).code == "SYN201"
    assert told(seen, None).code == "SYN201"
    if seen.misfit_lag is None:
        assert "look alike at steps 3, 6, 9, 12: save at three or more early steps" in told(seen, None).evidence
    else:
        assert f"over 4 early steps the gaps grew {seen.growth:.1f} times" in told(seen).evidence


def test_growth_alone_is_no_sign_where_directions_are_known() -> None:
    """The mean gap grew threefold over the steps, and its direction did not stay: SYN201, not SYN202."""
    earlier = group(diff("bn.running_mean", "bn_mean", max_abs=0.1), step=1)
    seen = replace(SEEN, cosine=0.0, misfit_lag=0.2)
    assert set(found(group(MEAN, free_running=seen), earlier)) == {"SYN201"}


LAYERS, CHANNELS, MOMENTUM = 6, 32, 0.1


def train(
    folder: Path,
    steps: Sequence[int],
    *,
    synced: bool,
    constant: float = 0.0,
    scale: float = 1.0,
    forwards: int = 1,
    momentum: float | None = MOMENTUM,
    ranks: int = 2,
) -> Group:
    """Update running statistics as BatchNorm under DDP does, save some steps, and compare them.

    constant: what batches of unlike shards differ by, as a multiple of what they differ by at random. scale: of the
    last rank's variances. forwards: in each step. momentum: as the metadata records it. The metadata always says that
    buffers are synchronized. Returns the group of the last step.
    """
    random = np.random.default_rng(0)
    shift = constant * random.normal(size=(ranks, LAYERS, CHANNELS))
    mean, var = np.zeros((ranks, LAYERS, CHANNELS)), np.ones((ranks, LAYERS, CHANNELS))
    for step in range(1, max(steps) + 1):
        if synced:
            mean[:], var[:] = mean[0].copy(), var[0].copy()
        for _ in range(forwards):
            noise = random.normal(size=(2, ranks, LAYERS, CHANNELS))
            batch = 1 + 0.1 * np.abs(noise[1] + shift)
            batch[-1] *= scale
            mean += MOMENTUM * (0.1 * (noise[0] + shift) - mean)
            var += MOMENTUM * (batch - var)
        if step in steps:
            for rank in range(ranks):
                save(folder, step, rank, mean[rank], var[rank], step * forwards, momentum)
    return syncheck.compare(folder).groups[-1]


def save(folder: Path, step: int, rank: int, mean: Any, var: Any, count: int, momentum: float | None) -> None:
    """Write one rank's file of one step."""
    state: dict[str, Any] = {"fc.weight": np.ones(3, np.float32)}
    for layer in range(LAYERS):
        state[f"bn{layer}.running_mean"] = mean[layer].astype(np.float32)
        state[f"bn{layer}.running_var"] = var[layer].astype(np.float32)
        state[f"bn{layer}.num_batches_tracked"] = np.array(count)
    block = syncheck.metadata(run="ddp", run_id="1", rank=rank, world_size=8, step=step, buffers_synced=True)
    block["bn_momentum"] = {f"bn{layer}": momentum for layer in range(LAYERS)}
    (folder / f"step_{step}").mkdir(exist_ok=True)
    save_pth(folder / f"step_{step}" / f"rank_{rank}.pth", {"model": state, "syncheck": block})


def code(last: Group) -> str:
    """Return the one finding's code."""
    (finding,) = last.findings
    return finding.code


EARLY = [(3, 6, 9, 12), (1, 2, 3, 4, 5, 6), (2, 4, 6, 8, 10)]


@pytest.mark.parametrize("steps", EARLY)
@pytest.mark.parametrize("constant", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("ranks", [2, 4])
def test_files_of_free_running_statistics(tmp_path: Path, steps: Any, constant: float, ranks: int) -> None:
    """Without any synchronization early steps show SYN202, with shards alike and unlike, against the metadata."""
    assert code(train(tmp_path, steps, synced=False, constant=constant, ranks=ranks)) == "SYN202"


@pytest.mark.parametrize("steps", [*EARLY, (10, 20, 30), (50, 51, 52, 53), (1, 10, 100)])
@pytest.mark.parametrize("constant", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("forwards", [1, 4])
def test_files_of_a_lag(tmp_path: Path, steps: Any, constant: float, forwards: int) -> None:
    """With a synchronization before each step it is SYN201 at all steps, with unlike shards and accumulation too."""
    last = train(tmp_path, steps, synced=True, constant=constant, forwards=forwards)
    assert code(last) == "SYN201"
    assert last.evidence.free_running is not None
    assert last.evidence.free_running.below == 0


def test_files_of_late_steps_prove_it_by_the_bound(tmp_path: Path) -> None:
    """At steps 50 and 52 a rank's variances of half the others' cannot have started from rank 0's; a lag's have."""
    free, lag = tmp_path / "free", tmp_path / "lag"
    free.mkdir()
    lag.mkdir()
    last = train(free, (50, 52), synced=False, scale=0.5)
    assert (code(last), last.evidence.free_running and last.evidence.free_running.misfit_free) == ("SYN202", None)
    assert last.evidence.free_running is not None
    assert last.evidence.free_running.below == LAYERS * CHANNELS
    assert code(train(lag, (50, 52), synced=True, scale=0.5)) == "SYN201"


def test_the_bound_needs_rank_0(tmp_path: Path) -> None:
    """Without rank 0's file nothing bounds the variances, for those that are copied are not there."""
    train(tmp_path, (50, 52), synced=False, scale=0.5, ranks=3)
    for path in tmp_path.glob("*/rank_0.pth"):
        path.unlink()
    last = syncheck.compare(tmp_path).groups[-1]
    assert last.evidence.free_running is not None
    assert (code(last), last.evidence.free_running.below) == ("SYN201", 0)


def test_averages_over_all_batches_are_not_judged(tmp_path: Path) -> None:
    """With momentum=None the statistics are no moving average, and nothing is concluded from the steps."""
    last = train(tmp_path, (3, 6, 9, 12), synced=False, momentum=None)
    assert (code(last), last.evidence.free_running) == ("SYN201", None)


def test_a_flipped_bit_beside_the_usual_drift_is_two_findings() -> None:
    """What has a cause of its own does not explain the statistics: SYN220 for the bit, SYN201 for the drift."""
    flip = diff(
        "fc.weight", "parameter", mismatched=1, extent="one", index=(1,), evidence=Evidence(flipped_bits=1, bit=3)
    )
    fitted = found(group(MEAN, VAR, flip))
    assert set(fitted) == {"SYN201", "SYN220"}
    assert "1 of 10 parameters differs for another reason" in fitted["SYN201"].evidence
