"""Train with the transformers Trainer and the callback on all ranks, once per case, and write the outcomes.

A case that raises ends the program with its error.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from outcome import RANK, digest, written
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from syncheck.integrations.transformers import SyncCheckCallback

RANKS = int(os.environ.get("WORLD_SIZE", "1"))


class Net(torch.nn.Module):
    """A small network that returns its loss, as the Trainer requires."""

    def __init__(self, norm: type[torch.nn.Module] = torch.nn.LayerNorm) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), norm(8), torch.nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss of a batch; each rank has its own data."""
        out = self.net(x + RANK)
        return {"loss": out.square().mean(), "logits": out}


class Fault(TrainerCallback):
    """A fault on rank 1 before its fourth step."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Inject the fault."""
        if state.global_step == 3 and RANK == 1:
            if self.kind == "raise":
                raise ZeroDivisionError("planted")
            kwargs["model"].net[2].weight.data[0, 1] += 1


def train(folder: str, case: str, model: Net, *, watched: dict[str, Any] | None, fault: str = "", **given: Any) -> None:
    """Train and write the outcome. watched: options of the callback; None for a training without it."""
    resume = given.pop("resume", None)
    data = [{"x": torch.randn(4)} for _ in range(48)]
    callbacks: list[Any] = [Fault(fault)] if fault in ("weight", "raise") else []
    if watched is not None:
        callbacks.append(SyncCheckCallback(**{"events": f"{folder}/{case}.jsonl", **watched}))
    arguments = TrainingArguments(
        f"{folder}/{case}.run", report_to=[], use_cpu=True, disable_tqdm=True, seed=0,
        ddp_backend="gloo" if RANKS > 1 else None, remove_unused_columns=False, per_device_train_batch_size=4,
        **{"num_train_epochs": 1, "save_strategy": "no", **given},
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:8], callbacks=callbacks)
    if fault == "scaler":  # as with mixed precision on a GPU
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10 * (1 + RANK))

    def result() -> dict[str, Any]:
        monitor = callbacks[-1].monitor if watched is not None else None
        return {"monitor": monitor, "trained": digest(model, trainer.optimizer)}

    with written(folder, case, result):
        trainer.train(resume_from_checkpoint=resume)


def main(folder: str, *cases: str) -> None:
    """Run the cases in order."""
    batchnorm = torch.nn.BatchNorm1d
    for case in cases:
        set_seed(0)
        if case == "plain":
            train(folder, case, Net(), watched=None)
        elif case == "healthy":  # 6 steps
            train(folder, case, Net(), watched={"every": 4})
        elif case == "accumulated":
            train(folder, case, Net(), watched={"every": 2}, gradient_accumulation_steps=2)
        elif case == "evaluated":  # after each epoch, including the last
            watched = {"every": 100, "on_desync": "warn"}
            train(folder, case, Net(batchnorm), watched=watched, num_train_epochs=2, eval_strategy="epoch")
        elif case == "resumed":
            train(folder, "saved", Net(), watched=None, max_steps=3, save_strategy="steps", save_steps=3)
            train(folder, case, Net(), watched={"every": 5}, resume=f"{folder}/saved.run/checkpoint-3")
        elif case == "scaled":
            train(folder, case, Net(), watched={"every": 4, "on_desync": "warn"}, fault="scaler")
        elif case == "weight":
            train(folder, case, Net(), watched={"every": 5}, fault="weight", save_strategy="steps", save_steps=5)
        elif case == "raise":
            train(folder, case, Net(), watched={"every": 100}, fault="raise")
        elif case == "single":
            train(folder, case, Net(), watched={"every": 4})


if __name__ == "__main__":
    main(*sys.argv[1:])
