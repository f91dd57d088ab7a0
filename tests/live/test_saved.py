"""Tensors that modules save by custom code are part of the replica."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.agreement import all_pass, all_raise, each_rank
from support.listings import find_all, list_names
from torch import nn

from syncheck.live.memory import snapshot
from syncheck.messages import Note
from syncheck.testing import OutOfSync, assert_in_sync

if TYPE_CHECKING:
    from pathlib import Path


class Keeps(nn.Linear):
    """Saves an unregistered tensor."""

    def __init__(self, value: float) -> None:
        super().__init__(2, 2)
        nn.init.ones_(self.weight)
        nn.init.ones_(self.bias)
        self.table = torch.full((3,), value)
        self.register_buffer("cache", torch.ones(1), persistent=False)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}table"] = self.table


class Adds(Keeps):
    """Adds a tensor to the whole state dict."""

    _save_to_state_dict = nn.Module._save_to_state_dict

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().state_dict(*args, **kwargs) | {"table": self.table}


def hooked(value: float) -> nn.Module:
    module = Adds(value)
    module.__class__ = type("Plain", (nn.Linear,), {})
    module.register_state_dict_post_hook(
        lambda module, state, prefix, _: state.update({f"{prefix}table": module.table})
    )
    return module


@pytest.mark.parametrize("make", [Keeps, Adds, hooked])
def test_custom_saved_tensors_are_compared(make: Any, tmp_path: Path) -> None:
    """A difference in a custom-saved tensor is found, also in submodules and files."""
    first = nn.Sequential(nn.ReLU(), make(1.0))
    is_same = nn.Sequential(nn.ReLU(), make(1.0))
    second = nn.Sequential(nn.ReLU(), make(2.0))
    assert_in_sync(first, is_same)
    with pytest.raises(OutOfSync) as caught:
        assert_in_sync(first, second)
    assert list_names(caught.value.report.groups[0].tensors) == ["1.table"]
    torch.save(make(1.0).state_dict(), tmp_path / "saved.pth")
    assert_in_sync(make(1.0), tmp_path / "saved.pth")


@pytest.mark.filterwarnings("ignore")
def test_quantized_layers_never_pass_in_silence() -> None:
    """A dynamically quantized layer has no parameters; a different scale or a missing weight is reported."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("needs a quantized engine")
    nets = [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2)]
    first, second = (torch.ao.quantization.quantize_dynamic(net, {nn.Linear}) for net in nets)
    assert "0.scale" in snapshot(first).tensors
    with pytest.raises(OutOfSync, match="_packed_params"):
        assert_in_sync(first, second)


@pytest.mark.syncheck(ranks=2)
def test_custom_state_across_ranks(syncheck_rank: Any) -> None:
    """Custom state is compared across ranks; a state_dict() that may communicate is not called but reported."""
    assert "table" in all_raise(each_rank(assert_in_sync, Keeps(float(syncheck_rank.rank)))).text
    report = all_pass(each_rank(assert_in_sync, Adds(float(syncheck_rank.rank))))
    [note] = find_all(report.groups[0].notes, code=Note.NOT_READ_IN_FULL)
    assert "Adds.state_dict()" in note.parameters["objects"]
