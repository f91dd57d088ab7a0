"""Models for benchmarks of live checks, each with an optimizer after one step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torchvision

if TYPE_CHECKING:
    from collections.abc import Callable

SMALL = 5_000  # tensors
ELEMENTS = 64  # of a small tensor

Case = tuple[torch.nn.Module, Any]


def _stepped(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Case:
    """Make one step with zero gradients to create the state of the optimizer."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def resnet18() -> Case:
    """Return torchvision's resnet18 with SGD with momentum: 184 tensors, 94 MB."""
    model = torchvision.models.resnet18()
    return _stepped(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def resnet50() -> Case:
    """Return torchvision's resnet50 with AdamW: 803 tensors, 307 MB."""
    model = torchvision.models.resnet50()
    return _stepped(model, torch.optim.AdamW(model.parameters()))


def transformer() -> Case:
    """Return an encoder of 8 layers of width 1,024 (403 MB of parameters) with AdamW, 1.2 GB in all."""
    layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
    return _stepped(model, torch.optim.AdamW(model.parameters()))


def small() -> Case:
    """Return a model of many small tensors, without an optimizer, to measure the time per tensor."""
    parameters = {f"p{i:05}": torch.nn.Parameter(torch.randn(ELEMENTS)) for i in range(SMALL)}
    return torch.nn.ParameterDict(parameters), None


MODELS: dict[str, Callable[[], Case]] = {
    "resnet18, SGD": resnet18,
    "resnet50, AdamW": resnet50,
    "transformer, AdamW": transformer,
    "5,000 small tensors": small,
}


def tensors_of(model: torch.nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """Return the tensors of a replica: parameters, buffers, and optimizer state."""
    found = [*model.parameters(), *model.buffers()]
    for state in optimizer.state.values() if optimizer is not None else ():
        found += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return [tensor.detach() for tensor in found]
