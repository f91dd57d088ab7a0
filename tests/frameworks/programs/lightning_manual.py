"""Lightning with manual optimization: two optimizers, whose backward pass is within the forward pass of the wrapper.

torchrun ... lightning_manual.py FAULT
"""

from __future__ import annotations

import sys
from typing import Any

import lightning
import torch

FAULT = sys.argv[1]
FAULTY_BATCH = 5


class Model(lightning.LightningModule):
    """Two layers with an optimizer each, and a buffer that nothing changes."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)
        self.register_buffer("scale", torch.ones(2))

    def training_step(self, batch: Any, index: int) -> None:
        """Step both optimizers; on rank 1, skip a step of the second one or change the buffer once."""
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(self.down(self.up(batch[0]).relu()).square().mean())
        is_faulty = (index, self.global_rank) == (FAULTY_BATCH, 1)
        self.scale[0] += is_faulty and FAULT == "buffer"
        for number, optimizer in enumerate(optimizers):
            if not (is_faulty and number == 1 and FAULT == "skip"):
                optimizer.step()

    def configure_optimizers(self) -> Any:
        """Return the optimizers of the layers."""
        return [torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9) for layer in (self.up, self.down)]


torch.manual_seed(0)
model = Model()
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(96, 4)), batch_size=4)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=lightning.pytorch.strategies.DDPStrategy(process_group_backend="gloo", broadcast_buffers=False),
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, data)
