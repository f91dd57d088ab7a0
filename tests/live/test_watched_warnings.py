"""The warnings of a watched script are those of the unwatched script: the same lines of the same files, as often."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import pytest
from support.started import CLONE, Processes, free_port

if TYPE_CHECKING:
    from pathlib import Path

# Each construct warns about the line that uses it: of the script, or of the library below it.
SCRIPT = """
import logging
import sys
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset

RANKS = 2

class Stream(IterableDataset):
    def __len__(self):
        return 2

    def __iter__(self):
        return iter(torch.arange(64.0).reshape(8, 8).sin())

class Layer(torch.nn.Linear):
    def __deepcopy__(self, memo):
        # Below it are copy.deepcopy, AveragedModel, and the script.
        warnings.warn("a copy", stacklevel=4)
        return self

class Noisy(torch.optim.SGD):
    def step(self, closure=None):
        # Below it are three functions of the scaler and of the optimizer, and the script.
        warnings.warn("a step", stacklevel=5)
        return super().step(closure)

def train(rank, port):
    # The functions that start processes call this one.
    warnings.warn("a rank", stacklevel=2)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    layer = Layer(8, 2)
    model = DistributedDataParallel(layer, broadcast_buffers=True)
    again = DistributedDataParallel(torch.nn.Linear(8, 2), broadcast_buffers=False)
    parameter = next(again.parameters())
    torch.optim.SGD([parameter, parameter], lr=0.1)
    AveragedModel(layer)
    optimizer = Noisy(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for batch in DataLoader(Stream(), batch_size=2):
        scaler.scale(model(batch).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    dist.destroy_process_group()

if __name__ == "__main__":
    processes = [mp.get_context("fork").Process(target=train, args=(rank, sys.argv[1])) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(process.exitcode for process in processes))
"""


@pytest.mark.slow
def test_warnings_name_the_lines_of_the_script(tmp_path: Path) -> None:
    """Watching wraps functions of torch, and no warning counts the wrapper as the caller."""
    (tmp_path / "script.py").write_text(SCRIPT)
    processes = Processes(tmp_path)
    try:
        unwatched = list_warnings(processes)
        watched = list_warnings(processes, "-m", "syncheck", "watch")
    finally:
        processes.kill()
    assert watched == unwatched
    lines = {text.partition("Warning: ")[0] for text in unwatched if text.startswith(str(tmp_path))}
    assert len(lines) == 4


def list_warnings(processes: Processes, *watch: str) -> list[str]:
    """Run the script; return the path, the line, the category and the start of the text of each warning."""
    process = processes.start(sys.executable, "-W", "always", *watch, "script.py", str(free_port()), PYTHONPATH=CLONE)
    _, errors = process.communicate(timeout=110)
    assert process.returncode == 0, errors
    return sorted(re.findall(r"^\S+:\d+: \w*Warning: .*", errors, re.MULTILINE))
