"""Cases for the tests of parity: a small language model under data parallelism, with hooks for faults."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncheck.errors import SyncheckError
from syncheck.parity.check import check_parity
from syncheck.testing import ParityCase

LENGTHS = (5, 9, 2, 12, 7, 3, 11, 6)
VOCABULARY, WIDTH, TOKENS = 20, 12, 12


class Tokens(nn.Module):
    """A language model without attention: [samples, tokens] to logits [samples, tokens, VOCABULARY]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.down(F.gelu(self.up(self.norm(hidden))))
        return self.head(hidden) * self.scale


def token_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss of each token, 0 for ignored tokens: [samples, tokens]."""
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none")
    return losses.view_as(targets)


def token_batch(lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets; targets after the length of a sample are ignored."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randint(0, VOCABULARY, (len(lengths), TOKENS), generator=generator)
    targets = torch.randint(0, VOCABULARY, (len(lengths), TOKENS), generator=generator)
    for sample, length in enumerate(lengths):
        targets[sample, length:] = -100
    return inputs, targets


class TokenCase(ParityCase):
    """Data parallelism over tokens of unequal lengths. Each rank has the samples rank, rank + ranks, ...

    Subclasses override `factor`, the divisor of the loss of a micro-batch, or `parallelize`.
    """

    lengths = LENGTHS
    seed = 0

    def __init__(self, micro_batches: int = 1) -> None:
        self.micro_batches = micro_batches

    def build(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return Tokens()

    def batch(self) -> Any:
        return token_batch(self.lengths, self.seed + 1)

    def loss_terms(self, model: Any, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return token_losses(model(inputs), targets)

    def ignored(self, batch: Any) -> torch.Tensor:
        return batch[1] == -100

    def parallelize(self, model: Any, mesh: Any) -> Any:
        return DistributedDataParallel(model)

    def micro(self, batch: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the micro-batches of this rank."""
        inputs, targets = (part[dist.get_rank() :: dist.get_world_size()] for part in batch)
        return list(zip(inputs.tensor_split(self.micro_batches), targets.tensor_split(self.micro_batches), strict=True))

    def factor(self, targets: torch.Tensor, all_targets: torch.Tensor) -> float:
        """Return the factor of the sum of the losses of a micro-batch: DDP divides by the number of ranks."""
        return dist.get_world_size() / count_tokens(all_targets)

    def backward(self, model: Any, batch: Any, mesh: Any) -> None:
        micro_batches = self.micro(batch)
        for number, (inputs, targets) in enumerate(micro_batches, 1):
            with self.accumulating(model, is_last=number == len(micro_batches)):
                loss = token_losses(model(inputs), targets).sum() * self.factor(targets, batch[1])
                loss.backward()

    def accumulating(self, model: Any, *, is_last: bool) -> Any:
        """Return the context in which gradients are not reduced."""
        return nullcontext() if is_last or not hasattr(model, "no_sync") else model.no_sync()


class ManualCase(TokenCase):
    """Manual all-reduce after the backward pass."""

    def parallelize(self, model: Any, mesh: Any) -> Any:
        return model

    def factor(self, targets: torch.Tensor, all_targets: torch.Tensor) -> float:
        return 1 / count_tokens(all_targets)

    def backward(self, model: Any, batch: Any, mesh: Any) -> None:
        super().backward(model, batch, mesh)
        self.reduce(model)

    def reduce(self, model: Any) -> None:
        """Add the gradients of all ranks."""
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)


def count_tokens(targets: torch.Tensor) -> int:
    """Return the number of tokens that count."""
    return int((targets != -100).sum())


def codes(report: Any) -> list[str]:
    """Return the codes of the findings of a report."""
    return [finding.code for finding in report.findings]


def find(report: Any, name: str) -> Any:
    """Return the parameters of the fact with a name in the only finding of a report."""
    [finding] = report.findings
    [parameters] = [fact.parameters for fact in finding.facts if fact.code.name == name]
    return parameters


def refusal(case: ParityCase, dtype: str = "float64") -> str:
    """Return the text of the error that a check raises."""
    with pytest.raises(SyncheckError) as caught:
        check_parity(case, dtype)
    assert caught.value.exit_code == 2
    return str(caught.value)
