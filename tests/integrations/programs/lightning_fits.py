"""Train with Lightning and the callback on all ranks, once per case, and write the outcomes.

Writes CASE.rank<r>.json for each case: checked steps, verdicts, a digest of the training. A case that raises ends the
program with its error.
"""

from __future__ import annotations

import os
import sys
from itertools import chain
from typing import Any

import torch
from outcome import RANK, digest, written
from torch.distributed.fsdp import FSDPModule, fully_shard

if "old" in sys.argv:
    import pytorch_lightning as lightning
    from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
    from pytorch_lightning.loggers import Logger
    from pytorch_lightning.plugins import MixedPrecision
    from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy
else:
    import lightning.pytorch as lightning
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from syncheck.integrations.lightning import SyncCheckCallback

SILENT: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}


class Net(lightning.LightningModule):
    """A small network. fault: called on rank 1 before its batch 3."""

    def __init__(
        self, norm: type[torch.nn.Module] = torch.nn.LayerNorm, *, fault: str = "", manual: bool = False
    ) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), norm(8), torch.nn.Linear(8, 2))
        self.fault, self.automatic_optimization = fault, not manual

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """Return the loss; with manual optimization, step both optimizers."""
        if index == 3 and self.global_rank == 1 and self.fault == "weight":
            self.net[2].weight.data[0, 1] += 1
        if index == 3 and self.global_rank == 1 and self.fault == "raise":
            raise ZeroDivisionError("planted")
        # Each rank has its own data.
        loss = self.net(batch[0] + self.global_rank).square().mean()
        if not self.automatic_optimization:
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def configure_model(self) -> None:
        """Shard the model if the strategy has a mesh."""
        if self.device_mesh is not None and not isinstance(self.net, FSDPModule):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def validation_step(self, batch: Any, _: int) -> None:
        """Evaluate through the wrapper, like Lightning."""
        self.net(batch[0])

    def configure_optimizers(self) -> Any:
        """Return one optimizer, or two with manual optimization."""
        if self.automatic_optimization:
            return torch.optim.AdamW(self.parameters())
        return [torch.optim.SGD(self.net[i].parameters(), 0.1, momentum=0.9) for i in (0, 2)]


class TensorBoardStandIn(Logger):
    """A logger like TensorBoard's, whose writer records scalars."""

    name, version = "stand-in", 0

    def __init__(self) -> None:
        super().__init__()
        self.scalars: list[Any] = []
        self.experiment = self

    def add_scalar(self, *scalar: Any) -> None:
        """Record a scalar."""
        self.scalars.append(scalar)

    def log_metrics(self, *_: Any, **__: Any) -> None:
        """Ignore Lightning's metrics."""

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Ignore hyperparameters."""


def fit(folder: str, case: str, model: Net, *, watched: dict[str, Any] | None, **training: Any) -> None:
    """Train and write the outcome.

    watched: options of the callback; None for a training without it. more: other callbacks. resume: a checkpoint.
    """
    more, resume = training.pop("more", []), training.pop("resume", None)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(48, 4)), batch_size=4)
    again = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 4)), batch_size=4)
    events = f"{folder}/{case}.jsonl"
    callbacks = [] if watched is None else [SyncCheckCallback(**{"events": events, **watched})]
    training = {"max_epochs": 1, "logger": False, **SILENT, "default_root_dir": folder, **training}
    if "TORCHELASTIC_RUN_ID" in os.environ:  # the test has started both ranks; otherwise Lightning starts them
        training = {"num_nodes": 2, "devices": 1, "strategy": DDPStrategy(process_group_backend="gloo"), **training}
    trainer = lightning.Trainer(accelerator="cpu", callbacks=[*callbacks, *more], **training)

    def result() -> dict[str, Any]:
        return {
            "monitor": callbacks[0].monitor if callbacks else None,
            "scalars": list(chain.from_iterable(getattr(log, "scalars", ()) for log in trainer.loggers)),
            "trained": digest(model, *trainer.optimizers),
        }

    with written(folder, case, result):
        trainer.fit(model, data, again, ckpt_path=resume)


# Cases of the network's and the training's options alone.
WARNING: dict[str, Any] = {"every": 100, "on_desync": "warn"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {"watched": None}),
    "accumulated": ({}, {"watched": {"every": 2}, "accumulate_grad_batches": 3}),
    "two_epochs": ({"norm": torch.nn.BatchNorm1d}, {"watched": WARNING, "max_epochs": 2}),
    "max_steps": ({"norm": torch.nn.BatchNorm1d}, {"watched": WARNING, "max_epochs": 5, "max_steps": 8}),
    "raise": ({"fault": "raise"}, {"watched": {"every": 100}}),
    "manual": ({"manual": True}, {"watched": {"every": 3}}),
    "launched": ({"fault": "weight"}, {"watched": {"every": 5}, "devices": 2, "strategy": "ddp"}),
    "spawned": ({}, {"watched": {"every": 5}, "devices": 2, "strategy": "ddp_spawn"}),
    "single": ({}, {"watched": {"every": 5}, "devices": 1}),
}


def fit_with_objects(folder: str, case: str) -> None:
    """Run a case with a logger, callbacks, a plugin or a strategy."""
    if case == "healthy":  # 12 batches
        fit(folder, case, Net(), watched={"every": 5}, logger=TensorBoardStandIn())
    elif case == "weight":
        save = [ModelCheckpoint(folder, "weight.{step}", every_n_train_steps=n, save_top_k=-1) for n in (4, 5)]
        fit(folder, case, Net(fault="weight"), watched={"every": 5}, enable_checkpointing=True, more=save)
    elif case == "stopped":
        stop = EarlyStopping("never", check_on_train_epoch_end=False, strict=False)
        stop.on_validation_end = lambda trainer, _: setattr(trainer, "should_stop", not trainer.sanity_checking)
        fit(folder, case, Net(), watched={"every": 100}, max_epochs=5, more=[stop])
    elif case == "resumed":
        save = ModelCheckpoint(folder, filename="saved")
        fit(folder, "saved", Net(), watched=None, enable_checkpointing=True, more=[save])
        fit(folder, case, Net(), watched={"every": 4}, max_epochs=2, resume=f"{folder}/saved.ckpt")
    elif case == "scaled":
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10 * (1 + RANK))
        mixed = MixedPrecision("16-mixed", "cpu", scaler)
        fit(folder, case, Net(), watched={"every": 3, "on_desync": "warn"}, plugins=[mixed])
    elif case == "sharded":
        sharding = ModelParallelStrategy(2, 1, process_group_backend="gloo")
        fit(folder, case, Net(), watched={"every": 5}, strategy=sharding)


def main(folder: str, *cases: str) -> None:
    """Run the cases in order."""
    for case in cases:
        torch.manual_seed(0)
        if case in CASES:
            network, training = CASES[case]
            fit(folder, case, Net(**network), **training)
        else:
            fit_with_objects(folder, case)


if __name__ == "__main__":
    main(*(word for word in sys.argv[1:] if word != "old"))
