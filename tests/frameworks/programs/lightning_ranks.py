"""Train with Lightning on all ranks, and save each rank's own checkpoint."""

from __future__ import annotations

import sys
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy


class Preprocessing:
    """A class known only to this program, as in the hyperparameters of users."""

    def __init__(self) -> None:
        self.scale = torch.ones(2)


class Net(lightning.LightningModule):
    """A small network with BatchNorm."""

    def __init__(self, width: int = 8, preprocessing: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 2)
        )

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        """Return the loss."""
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """Return the optimizer and its schedule."""
        optimizer = torch.optim.AdamW(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class SaveEveryRank(DDPStrategy):
    """DDP with a save on every rank; Lightning's DDP saves on rank 0."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save this rank's checkpoint under its rank."""
        self.checkpoint_io.save_checkpoint(checkpoint, str(filepath).replace(".ckpt", f"-rank{self.global_rank}.ckpt"))


def main(folder: str) -> None:
    """Train two steps on each of two nodes."""
    lightning.seed_everything(0)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 4)), batch_size=4)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, num_nodes=2, strategy=SaveEveryRank(process_group_backend="gloo"), max_epochs=1,
        logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder, filename="best", monitor="loss"), EarlyStopping("loss")],
    )  # fmt: skip
    trainer.fit(Net(preprocessing=Preprocessing()), data)
    trainer.save_checkpoint(f"{folder}/last.ckpt")


main(sys.argv[1])
