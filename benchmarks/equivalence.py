"""Measure how closely each parallel method follows a single process, and compare its files with syncheck."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.timing import SYNCHECK, environment
from train.bench.cases import LEAST

ROUNDS = 1
STEPS = 20
LIMIT = 1e-6  # nats per token, the largest difference of the mean training loss of any step
RUN = Path(__file__).resolve().parents[1] / "train" / "run.py"
COMMON = [
    *("--data", "text", "--max-steps", str(STEPS), "--batch-size", "32", "--log-interval", "1", "--save-per-rank"),
    *("--lr", "0.1", "--grad-clip", "1"),
]


@dataclass(frozen=True)
class Case:
    """A row: a method with options. exact: whether it must follow a single process; otherwise it differs by design."""

    method: str
    options: tuple[str, ...] = ()
    exact: bool = True

    @property
    def name(self) -> str:
        """Return the options as typed."""
        return " ".join([self.method, *self.options])

    @property
    def model(self) -> str:
        """Return the model: with experts for expert parallelism."""
        return "gpt-tiny-moe" if self.method == "ep" else "gpt-tiny"

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return 1 if self.method in ("single", "dp") else LEAST.get(self.method, 2)


CASES = (
    Case("dp"),
    Case("ddp"),
    Case("ddp", ("--accumulate", "2")),
    Case("ddp", ("--static-graph",)),
    Case("ddp", ("--bucket-view",)),
    Case("replicate"),
    Case("zero"),
    Case("fsdp"),
    Case("fsdp", ("--reshard-after-forward", "false")),
    Case("fsdp", ("--cpu-offload",)),
    Case("hsdp"),
    Case("tp"),
    Case("tp", ("--sequence-parallel",)),
    Case("tp", ("--loss-parallel",)),
    Case("fsdp_tp"),
    Case("hsdp_tp"),
    Case("ddp_tp"),
    *(Case("pp", ("--pipeline-schedule", schedule)) for schedule in ("gpipe", "1f1b", "interleaved", "zbv")),
    Case("pp_fsdp"),
    *(Case("cp", ("--context-mode", mode)) for mode in ("allgather", "ulysses")),
    Case("ep"),
    Case("localsgd", exact=False),
    Case("diloco", exact=False),
)


def run(_rounds: int) -> tuple[str, bool]:
    """Train with every method. Returns the section, and whether all losses are within the limit."""
    header = f"""{STEPS} steps of gpt-tiny (ep: gpt-tiny-moe) on text with SGD, --grad-clip 1, a global batch of 32,
each method on gloo with the fewest ranks that it needs. Differences are the largest over all steps to a single process,
for the loss in nats per token. The limit of the loss is {LIMIT:g}. localsgd and diloco differ by design.

| method and options | ranks | loss | gradient norm | `syncheck compare` |
|---|---|---|---|---|"""
    lines = [header]
    met = True
    baselines = {model: train(Case("single"), model)[0] for model in ("gpt-tiny", "gpt-tiny-moe")}
    for case in CASES:
        records, verdict = train(case, case.model)
        loss, norm = (compare(baselines[case.model], records, key) for key in ("loss", "grad_norm"))
        within = not case.exact or loss <= LIMIT
        met &= within
        cells = (f"{loss:.1e}{'' if within else ', **over the limit**'}", f"{norm:.1e}", verdict)
        lines.append(f"| `{case.name}` | {case.ranks} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n", met


def train(case: Case, model: str) -> tuple[list[dict[str, Any]], str]:
    """Run a case. Returns the record of each step, and the verdict of syncheck on the files of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        launch = ["--spawn", str(case.ranks)] if case.ranks > 1 else []
        command = [sys.executable, str(RUN), "--method", case.method, *case.options, *launch, *COMMON, "--model", model]
        command += ["--log-dir", f"{folder}/logs", "--out", f"{folder}/ckpts"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
        if done.returncode:
            raise RuntimeError(f"{case.name}: exit code {done.returncode}: {done.stderr[-500:]}")
        (metrics,) = Path(folder, "logs").glob("*/metrics.jsonl")
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        files = sorted(map(str, Path(folder, "ckpts").glob("*.pth")))
        check = subprocess.run(
            [SYNCHECK, "compare", *files], capture_output=True, text=True, check=False, env=environment()
        )
        verdict = check.stdout.strip().splitlines()[-1] if check.stdout.strip() else check.stderr.strip()
        return [record for record in records if record["event"] == "step"], f"exit {check.returncode}: {verdict}"


def compare(expected: list[dict[str, Any]], found: list[dict[str, Any]], key: str) -> float:
    """Return the largest difference of a metric over all steps. Raises RuntimeError if a step is missing."""
    if len(expected) != STEPS or len(found) != STEPS:
        raise RuntimeError(f"expected {STEPS} records, found {len(expected)} and {len(found)}")
    return max(abs(a[key] - b[key]) for a, b in zip(expected, found, strict=True))
