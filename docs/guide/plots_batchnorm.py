"""Plots for page 6: differences of BatchNorm's running statistics between two ranks of train/run.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
WAYS = {  # options added to `train/run.py --spawn 2`, and the colour of the line
    "": "#d55e00",
    "--no-buffer-sync": "#cc79a7",
    "--sync-bn": "#0072b2",
}
LAST = 8  # saved steps to average over, per batch size
EVERY = 4  # steps between saved steps, enough to be nearly independent


def train(out: Path, *options: str) -> list[Path]:
    """Train on two ranks and return the folders of the saved steps in order."""
    line = ["train/run.py", "--spawn", "2", "--out", str(out), "--progress", "none", *options]
    subprocess.run([sys.executable, *line], cwd=ROOT, check=True)
    return sorted(out.glob("history/*/step_*"), key=step_of)


def step_of(folder: Path) -> int:
    """Return the step number of a folder such as step_12."""
    return int(folder.name.removeprefix("step_"))


def gap_of(folder: Path) -> tuple[float, float]:
    """Return the rms difference of running means and running variances over all channels of all layers.

    Means are scaled by the standard deviation (the root of the running variance) and variances by the variance, so
    layers with different scales can be averaged.
    """
    a, b = (torch.load(folder / f"rank_{rank}.pth", weights_only=True)["model"] for rank in range(2))
    means, variances = [], []
    for name in a:
        if name.endswith("running_mean"):
            of_var = name.replace("running_mean", "running_var")
            variance = (a[of_var] + b[of_var]).double() / 2
            means.append((a[name] - b[name]).double() / variance.sqrt())
            variances.append((a[of_var] - b[of_var]).double() / variance)
    return rms(means), rms(variances)


def rms(parts: list[torch.Tensor]) -> float:
    """Return the root mean square of all elements."""
    return round(torch.cat(parts).square().mean().sqrt().item(), 6)


def spreads_of(out: Path) -> dict[int, float]:
    """Return the accuracy difference between the two ranks per step, in percentage points."""
    line = [sys.executable, "-m", "train.evaluate", str(out), "--json"]
    done = subprocess.run(line, cwd=ROOT, check=True, capture_output=True, text=True)
    return {run["step"]: round(100 * run["spread"], 4) for run in json.loads(done.stdout)["runs"]}


def measure_drift(folder: Path) -> dict[str, Any]:
    """Train two epochs with each set of options and measure every second step."""
    found = {}
    for number, way in enumerate(WAYS):
        steps = train(folder / str(number), "--epochs", "2", "--save-every", "2", *way.split())
        gaps = [gap_of(step) for step in steps]
        means, variances = zip(*gaps, strict=True)
        found[way] = {"step": [step_of(step) for step in steps], "mean": means, "var": variances}
    return found


def draw_drift(data: Mapping[str, Any]) -> Figure:
    """Plot the drift over steps: running mean on the left, running variance on the right."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4))
    units = {"mean": "standard deviations", "var": "% of the variance"}
    titles = {"mean": "running mean", "var": "running variance"}
    for at, (kind, unit) in zip(axes, units.items(), strict=True):
        scale = 100 if kind == "var" else 1
        for way, colour in WAYS.items():
            numbers = [scale * gap for gap in data[way][kind]]
            at.plot(data[way]["step"], numbers, color=colour, label=f"ddp {way}", linewidth=1.8, clip_on=False)
        at.set(title=titles[kind], ylabel=f"rms difference\n({unit})", xlabel="optimizer steps", xlim=0)
        at.set_ylim(0)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    return figure


def measure_batch(folder: Path) -> dict[str, Any]:
    """Train plain DDP for 60 steps per batch size and average over the last saved steps."""
    found: dict[str, Any] = {"batch": [], "mean": [], "var": [], "spread": []}
    for size in (4, 8, 16, 32, 64, 128):  # samples per rank
        options = f"--batch-size {2 * size} --epochs 60 --max-steps 60 --eval-every 60 --save-every {EVERY}"
        out = folder / str(size)
        steps = train(out, *options.split())[-LAST:]
        gaps = [gap_of(step) for step in steps]
        spreads = spreads_of(out)
        found["batch"].append(size)
        found["mean"].append(sum(mean for mean, _ in gaps) / LAST)
        found["var"].append(sum(var for _, var in gaps) / LAST)
        found["spread"].append(sum(spreads[step_of(step)] for step in steps) / LAST)
    return found


def draw_batch(data: Mapping[str, Any]) -> Figure:
    """Plot drift (with the theoretical slope) and accuracy difference over the samples per rank."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    sizes = data["batch"]
    left.loglog(sizes, [100 * gap for gap in data["mean"]], "o-", color="#0072b2", label="running mean (% of a std.)")
    left.loglog(sizes, [100 * gap for gap in data["var"]], "s-", color="#d55e00", label="running variance (%)")
    theory = [100 * data["var"][0] * (sizes[0] / size) ** 0.5 for size in sizes]
    left.loglog(sizes, theory, "--", color="#777777", label="1 / sqrt(samples)")
    left.set(title="difference between the ranks", ylabel="rms (%)", ylim=(0.2, 12))
    left.set_yticks([0.3, 1, 3, 10], ["0.3", "1", "3", "10"])
    left.legend(loc="upper right", fontsize=9)
    right.semilogx(sizes, data["spread"], "o-", color="#009e73")
    right.set(title="accuracy difference between the ranks", ylabel="percentage points")
    right.set_ylim(0)
    for at in (left, right):
        at.set_xlabel("samples per rank in a batch")
        at.set_xticks(sizes, [str(size) for size in sizes])
        at.minorticks_off()
    figure.tight_layout()
    return figure
