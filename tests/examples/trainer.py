"""A typical trainer: DistributedDataParallel, a network with BatchNorm, and a checkpoint from every rank.

torchrun --nproc-per-node 2 trainer.py
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def network():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))


def batches(steps):
    """Each rank's own images: (16, 1, 8, 8) and labels (16,)."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        images = torch.rand(16, 1, 8, 8, generator=generator)
        yield images, (images.mean(dim=(1, 2, 3)) * 1000).long() % 10


def train(steps=5):
    """Train from scratch; return the wrapped model and its optimizer."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for images, labels in batches(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model, optimizer


def fine_tune(model, classes=2, steps=5):
    """Train a new last layer on the features of the trained model; return it."""
    head = nn.Linear(4 * 36, classes)  # the bug: not wrapped, so every rank trains its own
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    for images, labels in batches(steps):
        with torch.no_grad():
            features = model.module[:-1](images)
        optimizer.zero_grad()
        nn.functional.cross_entropy(head(features), labels % classes).backward()
        optimizer.step()
    return head


def save(folder, model, optimizer):
    """Write this rank's checkpoint."""
    Path(folder).mkdir(exist_ok=True)
    content = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(content, Path(folder) / f"digits_rank{dist.get_rank()}.pth")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    save("ckpts", *train())
    dist.destroy_process_group()
