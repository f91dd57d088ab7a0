"""Choose the threshold of parity on one half of right and wrong programs, and report the other half.

Errors of right programs are multiples of the measured floor. The multiple `FLOORS` in syncheck/parity/precision.py must
exceed those of all right programs, and be far below those of wrong ones. Models with even numbers choose, the others
report. Each model is checked in two processes, with two orders of the terms and in three dtypes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.timing import environment

ROUNDS = 1
ROOT = Path(__file__).resolve().parents[1]
MODELS = 12
DTYPES = ("float64", "float32", "bfloat16")
# The weakest fault: one weight is wrong by this factor.
FAULT = 1.01
PROGRAM = """
import json
import torch.distributed as dist
from benchmarks.parity import measure
dist.init_process_group("gloo")
rows = measure()
if dist.get_rank() == 0:
    print("ROWS", json.dumps(rows), flush=True)
dist.destroy_process_group()
"""


def measure() -> list[tuple[int, str, bool, float]]:
    """Return model, dtype, whether the program is right, and its largest error in multiples of the floor."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from syncheck.live.channel import Channel
    from syncheck.parity.precision import unit_roundoff
    from syncheck.parity.program import build_program
    from syncheck.parity.reference import make_reference
    from syncheck.parity.weights import Mechanism
    from syncheck.testing import ParityCase

    class Network(ParityCase):
        """A network of random width and depth; `fault` scales the loss of rank 0."""

        def __init__(self, number: int, fault: float) -> None:
            self.number, self.fault = number, fault

        def build(self) -> nn.Module:
            torch.manual_seed(self.number)
            width, depth = 8 << self.number % 4, 1 + self.number % 5
            layers: list[nn.Module] = [nn.Linear(16, width)]
            for _ in range(depth):
                layers += [nn.LayerNorm(width), nn.Linear(width, width), nn.GELU() if self.number % 2 else nn.Tanh()]
            return nn.Sequential(*layers, nn.Linear(width, 10))

        def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
            generator = torch.Generator().manual_seed(100 + self.number)
            samples = 16 + 7 * self.number
            inputs = torch.randn(samples, 16, generator=generator)
            return inputs, torch.randint(0, 10, (samples,), generator=generator)

        def loss_terms(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

        def parallelize(self, model: nn.Module, mesh: object) -> nn.Module:  # noqa: ARG002
            return DistributedDataParallel(model)

        def backward(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], mesh: object) -> None:  # noqa: ARG002
            rank, ranks = dist.get_rank(), dist.get_world_size()
            share = (batch[0][rank::ranks], batch[1][rank::ranks])
            factor = self.fault if rank == 0 else 1.0
            (factor * self.loss_terms(model, share).sum() * ranks / len(batch[0])).backward()

    rows = []
    for number in range(MODELS):
        for dtype in DTYPES:
            for fault in (1.0, FAULT):
                case = Network(number, fault)
                channel = Channel()
                reference = make_reference(case, dtype)
                mechanism = Mechanism(reference, build_program(reference, channel), channel)
                mechanism.prepare()
                mechanism.program.backward(reference.batch)
                errors = []
                for tensor in mechanism.measure().values():
                    errors += [solution.error for solution in tensor.solutions.values()]
                floor = max(mechanism.floor, unit_roundoff(dtype))
                rows.append((number, dtype, fault == 1.0, max(errors) / floor))
    return rows


def run(_rounds: int) -> tuple[str, bool]:
    """Measure. Returns the section, and whether the threshold separates right from wrong in the half that reports."""
    from syncheck.parity.precision import FLOORS

    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python")
    done = subprocess.run(
        [sys.executable, *launcher, sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment() | {"PYTHONPATH": str(ROOT)},
    )
    printed = [line for line in done.stdout.splitlines() if line.startswith("ROWS ")]
    if done.returncode or not printed:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-500:]}")
    rows = json.loads(printed[0].removeprefix("ROWS "))
    lines = [
        f"Errors of the gradient of {MODELS} networks under DDP on 2 ranks, in multiples of the measured floor. Wrong:",
        f"the loss of one rank is multiplied by {FAULT:g}. Even networks choose the threshold of {FLOORS} floors, odd",
        "networks report. In bfloat16 such a small factor is within rounding.",
        "",
        "| half | dtype | largest error of a right program | smallest error of a wrong program |",
        "|---|---|---|---|",
    ]
    met = True
    for half, name in enumerate(("chooses", "reports")):
        for dtype in DTYPES:
            chosen = [row for row in rows if row[0] % 2 == half and row[1] == dtype]
            right = max(error for _, _, is_right, error in chosen if is_right)
            wrong = min(error for _, _, is_right, error in chosen if not is_right)
            lines.append(f"| {name} | {dtype} | {right:.2g} | {wrong:.2g} |")
            # In bfloat16 a factor of 1.01 is within rounding.
            met &= right < FLOORS and (wrong > FLOORS or dtype == "bfloat16")
    return "\n".join(lines) + "\n", met
