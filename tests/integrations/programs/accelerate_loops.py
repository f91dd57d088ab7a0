"""Train with Accelerate and a monitor on all ranks, once per case, and write the outcomes.

A case that raises ends the program with its error.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from outcome import RANK, digest, written

from syncheck.integrations.accelerate import monitor


def loop(
    folder: str, case: str, *, norm: Any = torch.nn.LayerNorm, accumulate: int = 1, fault: str = "", **watched: Any
) -> None:
    """Train six batches and write the outcome. watched: options of the monitor; none for a loop without it."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    if fault == "scaler":  # as with mixed precision on a GPU
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10 * (1 + RANK))
        accelerator.scaler.scale(torch.ones(()))  # creates its state
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), norm(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(48, 4)), batch_size=4)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    watch = monitor(accelerator, model, optimizer, events=f"{folder}/{case}.jsonl", **watched) if watched else None
    with written(
        folder,
        case,
        lambda: {"monitor": watch, "trained": digest(accelerator.unwrap_model(model), optimizer.optimizer)},
    ):
        for index, (x,) in enumerate(data):
            if fault == "weight" and index == 3 and RANK == 1:
                accelerator.unwrap_model(model)[2].weight.data[0, 1] += 1
            with accelerator.accumulate(model):
                accelerator.backward(model(x + RANK).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            if watch is not None and accelerator.sync_gradients:
                watch.step()
        if watch is not None:
            watch.close()


def main(folder: str, *cases: str) -> None:
    """Run the cases in order."""
    for case in cases:
        if case == "plain":
            loop(folder, case)
        elif case in ("healthy", "single"):
            loop(folder, case, every=4)
        elif case == "accumulated":
            loop(folder, case, accumulate=3, every=2)
        elif case == "scaled":
            loop(folder, case, fault="scaler", every=4, on_desync="warn")
        elif case == "drift":
            loop(folder, case, norm=torch.nn.BatchNorm1d, every=3, on_desync="warn")
        elif case == "weight":
            loop(folder, case, fault="weight", every=5)


if __name__ == "__main__":
    main(*sys.argv[1:])
