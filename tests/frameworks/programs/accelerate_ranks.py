"""Train with Accelerate on all nodes, and save the state on each of them."""

from __future__ import annotations

import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration


def main(folder: str, *endings: str) -> None:
    """Train four steps and save the state in ENDING/node<rank>/. endings: of the weights' file."""
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(save_on_each_node=True))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 4)), batch_size=4, shuffle=True)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    for (x,) in data:
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    for ending in endings:
        saved = f"{folder}/{ending}/node{os.environ['RANK']}"
        accelerator.save_state(saved, safe_serialization=ending == "safetensors")
    accelerator.end_training()


main(*sys.argv[1:])
