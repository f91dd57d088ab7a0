"""SYN206 in files: states of metrics, which each rank accumulates, and modules with similar names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.imports import import_or_skip
from support.listings import list_codes, list_failing
from torch import nn

from syncheck import Options, compare

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from syncheck.records import Report

torchmetrics = import_or_skip("torchmetrics")


class Net(nn.Module):
    """A model with a metric."""

    def __init__(self, metric: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 3)
        self.metric = metric


def persistent(metric: Any) -> Any:
    metric.persistent(True)
    return metric


def accuracy() -> Any:
    return persistent(torchmetrics.classification.MulticlassAccuracy(3, average="micro"))


def update_classes(metric: Any, rank: int) -> None:
    for _ in range(2 + rank):
        metric.update(torch.rand(8, 3), torch.randint(0, 3, (8,)))


def update_values(metric: Any, rank: int) -> None:
    for _ in range(2 + rank):
        metric.update(torch.rand(()))


def update_pairs(metric: Any, rank: int) -> None:
    metric.update(torch.rand(8 + rank), torch.rand(8 + rank))


def collection() -> Any:
    parts = {
        "matrix": torchmetrics.classification.MulticlassConfusionMatrix(3),
        "f1": torchmetrics.classification.MulticlassF1Score(3),
    }
    return persistent(torchmetrics.MetricCollection(parts))


METRICS: dict[str, tuple[Callable[[], Any], Callable[[Any, int], None]]] = {
    "accuracy": (accuracy, update_classes),
    "collection": (collection, update_classes),
    "list of another length": (lambda: persistent(torchmetrics.CatMetric()), update_values),
    "mean": (lambda: persistent(torchmetrics.MeanMetric()), update_values),
    "sum": (lambda: persistent(torchmetrics.SumMetric()), update_values),
    "maximum": (lambda: persistent(torchmetrics.MaxMetric()), update_values),
    "squared error": (lambda: persistent(torchmetrics.MeanSquaredError()), update_pairs),
    "correlation": (lambda: persistent(torchmetrics.PearsonCorrCoef()), update_pairs),
    "explained variance": (lambda: persistent(torchmetrics.R2Score()), update_pairs),
    "retrieval curve": (lambda: persistent(torchmetrics.classification.BinaryAUROC()), update_pairs),
}


def save(folder: Path, models: list[nn.Module]) -> Report:
    """Save one file per rank, and compare them."""
    for rank, model in enumerate(models):
        optimizer = torch.optim.AdamW(model.fc.parameters())
        model.fc(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        states = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(states, folder / f"rank{rank}.pt")
    return compare(*sorted(folder.glob("*.pt")), options=Options())


def codes(report: Report) -> list[str]:
    return list_codes(list_failing(report))


@pytest.mark.parametrize("name", [name for name in METRICS if name != "retrieval curve"])
def test_states_of_metrics(name: str, tmp_path: Path) -> None:
    """States of metrics are SYN206; both fixes make the files equal."""
    make, update = METRICS[name]
    models = []
    for rank in range(2):
        model = Net(make())
        torch.manual_seed(10 + rank)
        update(model.metric, rank)
        models.append(model)
    assert codes(save(tmp_path, models)) == ["SYN206"]

    for model in models:
        model.metric.persistent(False)
    assert save(tmp_path, models).verdict == "in_sync"
    for model in models:
        model.metric.persistent(True)
        model.metric.reset()
    assert save(tmp_path, models).verdict == "in_sync"


class Layer(nn.Module):
    """A layer with tensors of the given names."""

    def __init__(self, rank: int, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(100 + rank)
        for name, shape in shapes.items():
            self.register_buffer(name, torch.randn(shape) + 1)


LAYERS = [
    {"value": (4, 4), "target": (4, 4)},
    {"min_value": (), "max_value": ()},
    {"weight": (4,), "value": (4,)},
    {"embed": (3, 2), "count": (3,), "total": ()},
    {"score": (4, 2)},
]


@pytest.mark.parametrize("shapes", LAYERS)
def test_layers_with_names_of_states(shapes: dict[str, tuple[int, ...]], tmp_path: Path) -> None:
    """Layers, observers and codebooks with names of states are no metrics."""
    report = save(tmp_path, [Net(Layer(rank, **shapes)) for rank in range(2)])
    assert report.verdict == "out_of_sync"
    assert "SYN206" not in codes(report)


def test_a_difference_of_the_model_is_another_finding(tmp_path: Path) -> None:
    """States of metrics hide no difference of the model."""
    models = [Net(accuracy()) for _ in range(2)]
    for rank, model in enumerate(models):
        torch.manual_seed(10 + rank)
        update_classes(model.metric, rank)
    with torch.no_grad():
        models[1].fc.weight.add_(0.5)
    found_codes = codes(save(tmp_path, models))
    assert found_codes[0] == "SYN206"
    assert len(found_codes) == 2


def test_integers_are_no_parameters(tmp_path: Path) -> None:
    """Counts of integers are buffers, also without an optimizer, and are compared with parameters and with buffers."""
    for rank in range(2):
        torch.manual_seed(0)
        model = {"fc.weight": torch.ones(2, 2), "fc.seen": torch.tensor(5 + rank), "fc.used": torch.ones(3).bool()}
        torch.save({"model": model}, tmp_path / f"rank{rank}.pt")
    paths = sorted(tmp_path.glob("*.pt"))
    for only in ((), ("params",), ("buffers",)):
        report = compare(*paths, options=Options(only=only))
        assert report.verdict == "out_of_sync"
    assert report.groups[0].evidence.names["fc.seen"] == "buffer"
