"""Integer ids of an optimizer are mapped to parameters, beside buffers and frozen parameters, or stay unnamed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.listings import find_all

from syncheck.readers.formats import read_file

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

torch = pytest.importorskip("torch")


def net(*sizes: tuple[int, int], buffers: tuple[tuple[str, tuple[int, ...]], ...] = ()) -> nn.Sequential:
    """Return linear layers of (inputs, outputs), with named buffers."""
    model = torch.nn.Sequential(*(torch.nn.Linear(inputs, outputs) for inputs, outputs in sizes))
    for name, shape in buffers:
        module, _, last = name.rpartition(".")
        model.get_submodule(module).register_buffer(last, torch.zeros(shape))
    return model


def names(model: nn.Sequential, path: Path, *, split: bool = False) -> set[str]:
    """Train one step, save, and return the parameters whose first moments are read from the file."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [[p for p in trained if p.ndim > 1], find_all(trained, ndim=1)] if split else [trained]
    optimizer = torch.optim.AdamW([{"params": part} for part in groups])
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    result = read_file(str(path)).tensors
    return {name.removeprefix("optimizer.").removesuffix(".exp_avg") for name in result if name.endswith(".exp_avg")}


ALIKE = ((8, 8), (8, 8), (8, 8))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("buffer", ["freq", "0.freq", "2.freq"])
def test_a_buffer_beside_the_parameters(tmp_path: Path, buffer: str, split: bool) -> None:
    """A buffer with a unique shape gets no optimizer state, with one parameter group and with two."""
    model = net((8, 8), (8, 8), (8, 4), buffers=((buffer, (3,)),))
    assert names(model, tmp_path / "a.pth", split=split) == {name for name, _ in model.named_parameters()}


def test_a_buffer_with_the_shape_of_a_parameter(tmp_path: Path) -> None:
    """A module lists parameters before buffers, so a buffer with the bias's shape is recognized."""
    model = net(*ALIKE, buffers=(("0.freq", (8,)), ("1.table", (8, 8)), ("2.freq", (8,))))
    assert names(model, tmp_path / "a.pth") == {name for name, _ in model.named_parameters()}


def test_frozen_parameters(tmp_path: Path) -> None:
    """Frozen layers of other shapes are skipped."""
    model = net((3, 8), (8, 8), (8, 4), buffers=(("freq", (5,)),))
    model[0].requires_grad_(requires_grad=False)
    assert names(model, tmp_path / "a.pth") == {"1.weight", "1.bias", "2.weight", "2.bias"}


def test_ambiguous_ids_stay_unnamed(tmp_path: Path) -> None:
    """If one layer of three equal layers is frozen, no id gets a name."""
    model = net(*ALIKE)
    model[1].requires_grad_(requires_grad=False)
    assert names(model, tmp_path / "a.pth") == {"0", "1", "2", "3"}
