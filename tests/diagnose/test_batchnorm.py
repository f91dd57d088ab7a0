"""BatchNorm: different variances (SYN204), one update (SYN201) and unsynchronized statistics (SYN202)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.cases import DIGEST, diagnose_case, diff, group
from support.checkpoints import save_pth
from support.listings import list_codes

import syncheck
from syncheck.diagnose import syn201_bn_local_stats, syn202_bn_drift_growing, syn204_bn_variance_only
from syncheck.diagnose.bn import Statistics
from syncheck.diagnose.statements import Common
from syncheck.records import Evidence, FreeRunning
from syncheck.snapshots import Metadata

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from syncheck.records import Finding, Group

LOCAL, DRIFT = syn201_bn_local_stats.Text, syn202_bn_drift_growing.Text
VARIANCES = syn204_bn_variance_only.Text
MEAN, VAR = diff("bn.running_mean", "bn_mean"), diff("bn.running_var", "bn_var")
COUNT, WEIGHT = diff("bn.num_batches_tracked", "bn_count", max_abs=3), diff("fc.weight", "parameter")


@pytest.mark.parametrize("ranks", [2, 4])
def test_204(ranks: int) -> None:
    """Different variances beside equal means are SYN204, on the minority or on both ranks."""
    clusters = ((0,), (1,)) if ranks == 2 else ((0, 1, 2), (3,))
    outlier = diff("bn.running_var", "bn_var", clusters, max_rel=0.004)
    fitted = diagnose_case(group(outlier, ranks=ranks))
    assert set(fitted) == {"SYN204"}
    assert fitted["SYN204"].ranks == ((0, 1) if ranks == 2 else (3,))
    size = Common.LARGEST(difference=0.5, element="bn.running_var[1]")
    assert fitted["SYN204"].facts[:3] == (
        VARIANCES.VARIANCES(count=1, total=4, size=size),
        VARIANCES.RELATIVE(ratio=0.004),
        VARIANCES.MEANS_AGREE(count=4),
    )


def test_204_by_digests() -> None:
    """Digests are sufficient for SYN204, and the evidence reports no size."""
    fitted = diagnose_case(group(diff("bn.running_var", "bn_var", **DIGEST)))
    assert set(fitted) == {"SYN204"}
    assert list_codes(fitted["SYN204"].facts) == [VARIANCES.VARIANCES, VARIANCES.MEANS_AGREE]
    assert fitted["SYN204"].facts[0].parameters["size"] == Common.SIZE_UNKNOWN()


@pytest.mark.parametrize("other", [MEAN, COUNT, WEIGHT, diff("optimizer.fc.weight.exp_avg", "optimizer")])
def test_not_204(other: Any) -> None:
    """If a mean, a count, a parameter or optimizer state differs too, the finding is not SYN204."""
    assert "SYN204" not in diagnose_case(group(VAR, other))


FREE_RUNNING = FreeRunning((3, 6, 9, 12), cosine=0.6, growth=1.6, misfit_free=0.5, misfit_lag=1.5)
SYNCED = Metadata(buffers_synced=True)


def diagnose_steps(free_running: FreeRunning, metadata: Metadata = SYNCED) -> Finding:
    """Return the finding for differing statistics. free_running: the course of the differences over the steps."""
    (finding,) = diagnose_case(group(MEAN, VAR, metadata=metadata, free_running=free_running)).values()
    return finding


def test_202_against_the_metadata() -> None:
    """Differences growing in one direction are SYN202, even if the metadata records synchronized buffers."""
    finding = diagnose_steps(FREE_RUNNING)
    assert (finding.code, finding.ranks) == ("SYN202", (0, 1))
    assert finding.facts[0].code is DRIFT.STATISTICS
    assert finding.facts[-2:] == (
        DRIFT.GREW_IN_ONE_DIRECTION(first=3, last=12, growth=1.6, cosine=0.6),
        DRIFT.METADATA_CONTRADICTED(),
    )
    finding = diagnose_steps(FREE_RUNNING, Metadata())
    assert finding.code == "SYN202"
    assert finding.facts[-1].code is DRIFT.GREW_IN_ONE_DIRECTION


def test_202_by_the_momentum_bound() -> None:
    """Several variances below the momentum bound prove SYN202 at any step; a single low variance may be a bit flip."""
    late = FreeRunning((50, 52), cosine=0.9, growth=1.0, below=7)
    assert diagnose_steps(late).code == "SYN202"
    assert DRIFT.TOO_LOW(count=7) in diagnose_steps(late).facts
    assert diagnose_steps(replace(late, below=1)).code == "SYN201"


@pytest.mark.parametrize(
    "changes",
    [
        {"growth": 1.1},  # one update in a constant direction: dissimilar shards
        {"cosine": 0.1},  # one update, growing with the activations
        {"misfit_lag": 0.1},  # explained by one update
        {"misfit_lag": 0.2},  # explained better by one update, but not clearly
        {"misfit_free": None, "misfit_lag": None},  # steps too late or too far from each other
    ],
)
def test_201_if_the_steps_do_not_show_missing_synchronization(changes: Any) -> None:
    """If a sign of missing synchronization is absent, the finding is SYN201, whatever the metadata records."""
    free_running = replace(FREE_RUNNING, **changes)
    with_metadata, without_metadata = diagnose_steps(free_running), diagnose_steps(free_running, Metadata())
    assert with_metadata.code == without_metadata.code == "SYN201"
    assert LOCAL.SYNCHRONIZED_BY_METADATA() in with_metadata.facts
    if free_running.misfit_lag is None:
        assert without_metadata.facts[-2:] == (LOCAL.STEPS_UNSUITABLE(first=3, last=12), LOCAL.SAVE_EARLY_STEPS())
    else:
        sentence = LOCAL.ONE_UPDATE if free_running.misfit_lag == 0.1 else LOCAL.INCONCLUSIVE
        fact = sentence(steps=4, growth=free_running.growth, cosine=free_running.cosine)
        assert with_metadata.facts[-1] == without_metadata.facts[-1] == fact
        # Steps that show nothing leave the metadata to decide.
        assert with_metadata.certainty == "likely"
        assert without_metadata.alternatives == (() if sentence is LOCAL.ONE_UPDATE else ("SYN202",))


def test_201_without_usable_steps() -> None:
    """A single step, or growth in a changing direction, does not prove missing synchronization and is SYN201."""
    (finding,) = diagnose_case(group(MEAN)).values()
    assert finding.facts[-2:] == (LOCAL.UNKNOWN(), LOCAL.SAVE_EARLY_STEPS())
    earlier = group(diff("bn.running_mean", "bn_mean", max_abs=0.1), step=1)
    free_running = replace(FREE_RUNNING, cosine=0.0, misfit_lag=0.2)
    assert set(diagnose_case(group(MEAN, free_running=free_running), earlier)) == {"SYN201"}


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
    """Simulate running statistics of BatchNorm under DDP, save the given steps, and compare the files.

    constant: the constant difference between shards, as a multiple of the random difference between batches. scale:
    factor of the last rank's variances. forwards: forward passes per step. momentum: the recorded momentum. The
    metadata always records synchronized buffers. Returns the group of the last step.
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
    (folder / f"step_{step}").mkdir(exist_ok=True, parents=True)
    save_pth(folder / f"step_{step}" / f"rank_{rank}.pth", {"model": state, "syncheck": block})


def judge(last: Group) -> tuple[str, int | None]:
    """Return the code of the only finding and the number of variances below the bound, or None without evidence."""
    (finding,) = last.findings
    free_running = last.evidence.free_running
    return finding.code, free_running and free_running.below


EARLY = [(3, 6, 9, 12), (1, 2, 3, 4, 5, 6), (2, 4, 6, 8, 10)]


@pytest.mark.parametrize("steps", EARLY)
@pytest.mark.parametrize("constant", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("ranks", [2, 4])
def test_files_with_unsynchronized_statistics(tmp_path: Path, steps: Any, constant: float, ranks: int) -> None:
    """Without synchronization, early steps are SYN202 with similar and dissimilar shards, despite the metadata."""
    assert judge(train(tmp_path, steps, synced=False, constant=constant, ranks=ranks))[0] == "SYN202"


@pytest.mark.parametrize("steps", [*EARLY, (10, 20, 30), (50, 51, 52, 53), (1, 10, 100)])
@pytest.mark.parametrize("constant", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("forwards", [1, 4])
def test_files_with_synchronized_statistics(tmp_path: Path, steps: Any, constant: float, forwards: int) -> None:
    """With a synchronization before each step, the finding is SYN201 at any step, also with dissimilar shards."""
    last = train(tmp_path, steps, synced=True, constant=constant, forwards=forwards)
    assert judge(last) == ("SYN201", 0)


@pytest.mark.parametrize(("synced", "expected"), [(False, ("SYN202", LAYERS * CHANNELS)), (True, ("SYN201", 0))])
def test_files_with_variances_below_the_bound(tmp_path: Path, synced: bool, expected: tuple[str, int]) -> None:
    """At late steps, variances far below rank 0's variances exclude a broadcast from rank 0 between the steps."""
    last = train(tmp_path, (50, 52), synced=synced, scale=0.5)
    assert judge(last) == expected
    assert last.evidence.free_running is not None
    assert synced or last.evidence.free_running.misfit_free is None


def test_files_without_usable_evidence(tmp_path: Path) -> None:
    """Without rank 0's file, or with momentum=None, the variances have no bound, and the finding is SYN201."""
    assert judge(train(tmp_path / "all", (3, 6, 9, 12), synced=False, momentum=None)) == ("SYN201", None)
    train(tmp_path / "late", (50, 52), synced=False, scale=0.5, ranks=3)
    for path in tmp_path.glob("late/*/rank_0.pth"):
        path.unlink()
    assert judge(syncheck.compare(tmp_path / "late").groups[-1]) == ("SYN201", 0)


def test_bit_flip_beside_drift_is_a_separate_finding() -> None:
    """A flipped bit in a parameter does not explain the drift: SYN220 covers the bit, SYN201 the statistics."""
    flip = diff(
        "fc.weight", "parameter", mismatched=1, extent="one", index=(1,), evidence=Evidence(flipped_bits=1, bit=3)
    )
    fitted = diagnose_case(group(MEAN, VAR, flip))
    assert set(fitted) == {"SYN201", "SYN220"}
    assert Statistics.OTHER_CAUSE(count=1, total=10) in fitted["SYN201"].facts
