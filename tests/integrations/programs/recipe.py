"""Run the recipe of a library in docs/integrations.md on all ranks, and write the findings of its monitor."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from outcome import write

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from support.recipes import blocks


def names(heading: str) -> dict[str, Any]:
    """Return the names that a recipe assumes: a model, its data, an optimizer."""
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randint(0, 2, (32,)))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
    if heading == "Lightning":
        import lightning

        class Classifier(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = model

            def training_step(self, batch: Any, _: int) -> torch.Tensor:
                return F.cross_entropy(self.net(batch[0]), batch[1])

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.AdamW(self.parameters())

        return {"model": Classifier(), "loader": loader}
    if heading == "transformers":
        from transformers import BertConfig, BertForSequenceClassification

        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        bert = BertForSequenceClassification(BertConfig(vocab_size=50, max_position_embeddings=16, **sizes))
        return {"model": bert, "data": [{"input_ids": torch.arange(i, i + 8), "labels": i % 2} for i in range(32)]}
    return {
        "model": model,
        "loader": loader,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "F": F,
        "torch": torch,
    }


def main(folder: str, heading: str) -> None:
    """Run the recipe in the folder."""
    os.chdir(folder)
    (code,) = blocks()[heading]
    namespace = names(heading)
    exec(compile(code, heading, "exec"), namespace)
    trainer = namespace.get("trainer")
    handler = getattr(trainer, "callback_handler", trainer)  # of transformers
    watches = [
        callback for callback in getattr(handler, "callbacks", ()) if type(callback).__name__ == "SyncCheckCallback"
    ]
    write(folder, heading, watches[0].monitor if watches else namespace["watched"], None)


if __name__ == "__main__":
    main(*sys.argv[1:])
