"""A live check on two gloo ranks, against reading the bytes once, Megatron-LM's method, and a training step."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.timing import bar, environment, section

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROUNDS = 9
RANKS = 2
EVERY = 100  # steps between checks by default
LIMIT = 1800  # seconds for both ranks
ROOT = Path(__file__).resolve().parent.parent
PHASES = ("snapshot", "digests", "messages", "judging")
# For many small tensors, the cost of a check depends on the number of tensors, not on the bytes.
BY_TENSOR = "5,000 small tensors"
# Limits: reads of the bytes, bytes sent per tensor, % of a step, reads of a copy on a GPU.
MOST_READS, MOST_BYTES, MOST_SHARE, MOST_COPY_READS = 3.0, 64.0, 1.0, 2.0


def run(rounds: int) -> tuple[str, bool]:
    """Measure; return a section of RESULTS.md and whether all limits are met."""
    found = measured(rounds)
    bars = [
        bar(f"{name}: check / reading the bytes once", _ratio(of["times"], "check", "read"), MOST_READS)
        for name, of in found["models"].items()
        if name != BY_TENSOR
    ]
    bars += [
        bar(f"{name}: bytes sent a tensor and rank, in sync", _sent(of["in sync"]), MOST_BYTES)
        for name, of in found["traffic"].items()
    ]
    training = found["training"]
    share = 100 * _ratio(training, "check", "step") / EVERY
    bars.append(bar(f"resnet18 under DDP: a check every {EVERY} steps, % of step time", share, MOST_SHARE))
    parts: list[str | Sequence[str] | Sequence[tuple[str, bool]]] = [
        (
            "Two gloo ranks at the same time on one machine, one thread each, all in sync; medians in ms. Reading: a "
            "sum over 8-byte words of every tensor of model and optimizer, views made beforehand. A check's phases are "
            "of other calls than the check beside them; messages have the waiting for the other rank in them; where "
            "judging is -, the previous report was reused, because no name had changed."
        ),
        _checks(found["models"]),
        _by_tensor(found["models"]),
        (
            "Parameters only, as others compare them. Megatron-LM's check_param_hashes_across_dp_replicas: SHA-1 of "
            "each parameter as float32, then an all_gather. Broadcast: rank 0's parameters, and torch.equal."
        ),
        _others(found["models"]),
        "Bytes that a rank hands to collectives for a check, counted at the process group.",
        _traffic(found["traffic"]),
        _step(training),
        *_cuda(found.get("cuda"), bars),
        bars,
    ]
    return section(*parts)


def measured(rounds: int) -> dict[str, Any]:
    """Run both ranks and return the numbers printed by rank 0. Raises RuntimeError if a rank fails."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.live_rank", str(rank), f"{folder}/store", str(rounds)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env=environment() | {"PYTHONPATH": str(ROOT), "LOCAL_WORLD_SIZE": str(RANKS)},
            )
            for rank in range(RANKS)
        ]
        try:
            printed = [rank.communicate(timeout=LIMIT) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    for rank, (_, errors) in zip(ranks, printed, strict=True):
        if rank.returncode:
            raise RuntimeError(f"{rank.args} ended with {rank.returncode}: {errors[-1500:]}")
    found: dict[str, Any] = json.loads(printed[0][0].splitlines()[-1])
    return found


def _ms(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f}"


def _ratio(times: Mapping[str, Sequence[float]], one: str, other: str) -> float:
    return statistics.median(times[one]) / statistics.median(times[other])


def _sent(of: Mapping[str, Any]) -> float:
    """Return the maximum over ranks of bytes sent per tensor."""
    return float(max(of["sent"]) / of["tensors"])


def _checks(models: Mapping[str, Any]) -> list[str]:
    lines = [
        f"| model and optimizer | tensors | MB | reading | check | {' | '.join(PHASES)} | check / reading |",
        "|" + "---|" * (6 + len(PHASES)),
    ]
    for name, of in models.items():
        phases = " | ".join(_ms(of["phases"][phase]) if phase in of["phases"] else "-" for phase in PHASES)
        times = of["times"]
        lines.append(
            f"| {name} | {of['tensors']:,} | {of['bytes'] / 1e6:.0f} | {_ms(times['read'])} | {_ms(times['check'])} | "
            f"{phases} | {_ratio(times, 'check', 'read'):.2f} |"
        )
    return lines


def _by_tensor(models: Mapping[str, Any]) -> str:
    of = models[BY_TENSOR]
    each = statistics.median(of["times"]["check"]) / of["tensors"] * 1e6
    return f"{BY_TENSOR} take {each:.1f} microseconds a tensor; the bar goes by bytes and is set for the other models."


def _others(models: Mapping[str, Any]) -> list[str]:
    lines = [
        "| model | reading | `check(model, only=('params',))` | Megatron-LM | broadcast | check / Megatron-LM |",
        "|---|---|---|---|---|---|",
    ]
    for name, of in models.items():
        times = of["times"]
        numbers = " | ".join(_ms(times[what]) for what in ("read parameters", "check parameters", "megatron", "naive"))
        lines.append(f"| {name} | {numbers} | {_ratio(times, 'check parameters', 'megatron'):.2f} |")
    return lines


def _traffic(traffic: Mapping[str, Any]) -> list[str]:
    lines = [
        "| model and optimizer | ranks hold | bytes sent | a tensor | collectives | bytes that differ |",
        "|---|---|---|---|---|---|",
    ]
    for name, cases in traffic.items():
        for what, of in cases.items():
            lines.append(
                f"| {name} | {what} | {max(of['sent']):,} | {_sent(of):.1f} | {sum(of['calls'].values())} | "
                f"{of['bytes']:,} |"
            )
    return lines


def _step(training: Mapping[str, Sequence[float]]) -> str:
    check, step = _ms(training["check"]), _ms(training["step"])
    return (
        f"A training step of resnet18 under DDP, 32 pictures of 32 x 32 a rank, takes {step} ms, a check beside it "
        f"{check} ms. With a check every {EVERY} steps its share is check / ({EVERY} x step): under 1 % as long as a "
        "check takes no longer than a step."
    )


def _cuda(found: Mapping[str, Any] | None, bars: list[tuple[str, bool]]) -> list[str | Sequence[str]]:
    """Return a table of GPU measurements and add their limits to `bars`; without a GPU, return a remark."""
    if found is None:
        return ["No GPU here: the digests of tensors on a device were not measured."]
    lines = ["| tensors on the GPU | MB | copy, ms | digests, ms | digests / a copy's read |", "|---|---|---|---|---|"]
    for name, of in found["cases"].items():
        # A copy reads and writes equally many bytes, so reading is half of its time.
        ratio = 2 * _ratio(of["times"], "digests", "copy")
        times = of["times"]
        lines.append(
            f"| {name} | {of['bytes'] / 1e6:.0f} | {_ms(times['copy'])} | {_ms(times['digests'])} | {ratio:.2f} |"
        )
        if of["bar"]:
            bars.append(bar(f"{name} on the GPU: digests / a device copy's read", ratio, MOST_COPY_READS))
    return [f"On one {found['device']}:", lines]
