"""Compare one step of every method of the trainer with one process, by `syncheck.testing.ParityCase`."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.timing import environment
from train.bench.cases import LEAST

ROUNDS = 1
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Row:
    """A row: a method with options. local: whether each rank has the gradient of its own samples by design."""

    method: str
    options: tuple[tuple[str, Any], ...] = ()
    local: bool = False

    @property
    def name(self) -> str:
        """Return the options as typed."""
        words = [f"--{name.replace('_', '-')} {value}" for name, value in self.options]
        return " ".join([self.method, *words])

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return 1 if self.method in ("single", "dp") else LEAST.get(self.method, 2)


ROWS = (
    Row("single", (("accumulate", 2),)),
    Row("dp", (("accumulate", 2),)),
    Row("ddp"),
    Row("ddp", (("accumulate", 2),)),
    Row("ddp", (("static_graph", True),)),
    Row("ddp", (("bucket_view", True),)),
    Row("replicate"),
    Row("zero"),
    Row("localsgd"),
    Row("fsdp"),
    Row("fsdp", (("accumulate", 2),)),
    Row("fsdp", (("reshard_after_forward", "false"),)),
    Row("fsdp", (("cpu_offload", True),)),
    Row("hsdp"),
    Row("tp"),
    Row("tp", (("sequence_parallel", True),)),
    Row("tp", (("loss_parallel", True),)),
    Row("fsdp_tp"),
    Row("hsdp_tp"),
    Row("ddp_tp"),
    Row("pp", (("pipeline_schedule", "gpipe"),)),
    Row("pp", (("pipeline_schedule", "1f1b"),)),
    Row("pp", (("pipeline_schedule", "interleaved"), ("depth", 4))),
    Row("pp", (("pipeline_schedule", "zbv"), ("depth", 4))),
    Row("pp_fsdp"),
    Row("cp", (("context_mode", "allgather"),)),
    Row("cp", (("context_mode", "ulysses"),)),
    Row("ep"),
    Row("diloco", local=True),
)
# The program of each rank. Its arguments: the number of the row.
PROGRAM = """
import json, os, sys
import torch.distributed as dist
from benchmarks.equivalence import ROWS, check_row
report = check_row(ROWS[int(sys.argv[1])])
if not dist.is_initialized() or dist.get_rank() == 0:
    print("ROW", json.dumps(report), flush=True)
if dist.is_initialized():
    dist.destroy_process_group()
# Threads of gloo may abort a process at its regular exit.
os._exit(0)
"""


def check_row(row: Row) -> dict[str, Any]:
    """Check a row on this rank. Returns the codes of the findings, the threshold, and the largest error."""
    import torch
    import torch.distributed as dist

    from benchmarks.trainer_case import SMALL, TrainerCase
    from syncheck.parity.check import check_parity
    from train.launch import RankContext

    ctx = RankContext()
    if row.ranks > 1:
        dist.init_process_group("gloo")
        ctx = RankContext(dist.get_rank(), row.ranks, dist.get_rank(), torch.device("cpu"), "gloo")
    model = "gpt-tiny-moe" if row.method == "ep" else "gpt-tiny"
    settings = replace(SMALL, method=row.method, model=model, batch_size=16, grad_clip=0.1, **dict(row.options))
    report = check_parity(TrainerCase(settings, ctx))
    parameters = report.groups[0].notes[0].parameters
    codes = [finding.code for finding in report.findings]
    return {"codes": codes, **{name: parameters[name] for name in ("threshold", "floor")}}


def run(_rounds: int) -> tuple[str, bool]:
    """Check every row. Returns the section, and whether all findings are the expected ones."""
    header = """One step of gpt-tiny (ep: gpt-tiny-moe) on text in float64, with SGD and --grad-clip 0.1, a global batch
of 16, each method on gloo with the fewest ranks that it needs. `syncheck parity` compares gradient, norm, clipping and
parameters after the step with one process. An error below the threshold, relative to the whole gradient, is rounding.
Ranks of diloco have the gradients of their own samples by design, which is SYN443.

| method and options | ranks | threshold | verdict |
|---|---|---|---|"""
    lines = [header]
    met = True
    for number, row in enumerate(ROWS):
        result = start(number, row)
        expected = ["SYN443"] if row.local else []
        met &= result["codes"] == expected
        verdict = ", ".join(result["codes"]) or "as one process"
        lines.append(f"| `{row.name}` | {row.ranks} | {result['threshold']:.1e} | {verdict} |")
    return "\n".join(lines) + "\n", met


def start(number: int, row: Row) -> dict[str, Any]:
    """Run the program of a row. Raises RuntimeError if it fails."""
    command = [sys.executable, "-c", PROGRAM, str(number)]
    if row.ranks > 1:
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(row.ranks), "--no-python")
        command = [sys.executable, *launcher, *command]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment() | {"PYTHONPATH": str(ROOT)}
    )
    printed = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if done.returncode or not printed:
        raise RuntimeError(f"{row.name}: exit code {done.returncode}: {done.stderr[-500:]}")
    result: dict[str, Any] = json.loads(printed[0].removeprefix("ROW "))
    return result
