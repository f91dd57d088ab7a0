"""Check that live checks and files give the same findings for the same ranks, on random trials.

The files of a trial are compared as `syncheck compare` does. Real gloo processes then load the same files into modules
and optimizers, and call `syncheck.live.check`. Only the model, or the model and the optimizer, are saved: the history
of several steps and the metadata of a trainer exist in files alone. A live check knows more in two cases, which are
skipped: the hosts of all ranks, and which parameters are frozen, without an optimizer in the file.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.trials.faults import ClippedOnNode, DiffersByNode
from benchmarks.trials.models import MODELS
from benchmarks.trials.simulation import make_optimizers
from benchmarks.trials.trial import compare_files, draw_trajectories, simulate, write_checkpoints
from syncheck.live import check

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchmarks.trials.simulation import Setup
    from syncheck import Finding, Report

# Code, certainty, ranks and number of tensors of each finding.
Summary = list[tuple[str, str, tuple[int, ...], int]]


@dataclass(frozen=True)
class Case:
    """The files of one comparison.

    folder: of the files. setup: of the run. title: for the list of differences. has_optimizer: whether optimizer states
    are saved.
    """

    folder: Path
    setup: Setup
    title: str
    has_optimizer: bool


class SavedState:
    """An object with a saved state, for what is neither a module nor an optimizer."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        """Return the saved state."""
        return self.state


def summarize(report: Report) -> Summary:
    """Return the findings of the last group, without notes."""
    findings: Sequence[Finding] = report.groups[-1].findings
    return [
        (finding.code, finding.certainty, tuple(finding.ranks), len(finding.tensors))
        for finding in findings
        if finding.severity != "info"
    ]


def write_cases(folder: Path, count: int, seed: int) -> list[Case]:
    """Simulate runs of the reported part until there are so many comparisons, and write their files."""
    cases: list[Case] = []
    for trajectory in draw_trajectories(3 * count, seed):
        knows_hosts = trajectory.fault in (DiffersByNode, ClippedOnNode)
        if trajectory.part != "report" or knows_hosts:
            continue
        for saved in simulate(trajectory):
            knows_frozen = saved.saved == "model" and MODELS[trajectory.setup.model].has_frozen
            if saved.saved not in ("model", "optimizer") or not saved.differs or knows_frozen:
                continue
            place = folder / str(len(cases))
            place.mkdir()
            write_checkpoints(place, saved.steps)
            setup = trajectory.setup
            title = f"{trajectory.fault.name}, {setup.model}, {setup.optimizer}, {saved.lag} steps, {saved.saved}"
            cases.append(Case(place, setup, title, saved.saved == "optimizer"))
            if len(cases) == count:
                return cases
    return cases


def load_objects(case: Case, rank: int) -> tuple[Any, Any, Any]:
    """Return the model, optimizer and scaler of a rank for `check`."""
    content: Mapping[str, Any] = torch.load(case.folder / f"rank_{rank}.pth", weights_only=False)
    module = MODELS[case.setup.model].build(case.setup.sizes)
    # A fault may add a buffer to the model.
    for name in content["model"].keys() - module.state_dict().keys():
        module.register_buffer(name, torch.empty_like(content["model"][name]))
    module.load_state_dict(content["model"])
    parts: dict[str, Any] = {"model": module}
    if case.has_optimizer:
        optimizers = make_optimizers(case.setup, module)
        states = content["optimizers"] if "optimizers" in content else [content["optimizer"]]
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        parts |= {f"optimizer{index}": optimizer for index, optimizer in enumerate(optimizers)}
    if "ema" in content:
        parts["ema"] = SavedState(content["ema"])
    scaler = SavedState(content["scaler"]) if "scaler" in content else None
    return parts, None, scaler


def run_rank(rank: int, world_size: int, cases: Sequence[Case], folder: str) -> None:
    """Check all cases as one rank; rank 0 writes the summaries."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1")
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    summaries = [summarize(check(*load_objects(case, rank))) for case in cases]
    if rank == 0:
        Path(folder, "summaries").write_bytes(pickle.dumps(summaries))
    # A rank that leaves early aborts the connections of its peers.
    dist.barrier()
    dist.destroy_process_group()


def check_live(cases: Sequence[Case]) -> Iterator[tuple[Case, Summary]]:
    """Check the cases in gloo processes, as many as the case has ranks."""
    by_size: dict[int, list[Case]] = defaultdict(list)
    for case in cases:
        by_size[case.setup.ranks].append(case)
    for world_size, chosen in sorted(by_size.items()):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run_rank, (world_size, chosen, folder), nprocs=world_size)
            summaries = pickle.loads(Path(folder, "summaries").read_bytes())
        yield from zip(chosen, summaries, strict=True)


def compare_doors(count: int, seed: int) -> int:
    """Print each case whose findings differ between files and live checks; return their number."""
    differing = 0
    with tempfile.TemporaryDirectory() as folder:
        cases = write_cases(Path(folder), count, seed)
        for case, live in check_live(cases):
            from_files = summarize(compare_files(case.folder))
            if from_files != live:
                differing += 1
                print(f"{case.title}:\n  files {from_files}\n  live  {live}", flush=True)
    print(f"{len(cases)} comparisons, {differing} with other findings in a live check than in files")
    return differing
