"""Train with transformers' Trainer on one process, and keep its checkpoint folders."""

from __future__ import annotations

import sys

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


def train(node: str) -> None:
    """Train four steps with a checkpoint every two, and save the model in shards too."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    data = [{"input_ids": torch.randint(0, 50, (8,)), "labels": torch.tensor(i % 2)} for i in range(16)]
    arguments = TrainingArguments(
        f"{node}/run", max_steps=4, save_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        disable_tqdm=True, seed=0,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=data).train()
    model.save_pretrained(f"{node}/sharded", max_shard_size="10KB")


for run in sys.argv[2:]:
    train(f"{sys.argv[1]}/{run}")
