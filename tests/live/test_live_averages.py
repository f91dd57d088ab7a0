"""SYN219 in a running job: averaging classes of libraries, however they are passed to `check`, and their repair."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from support.agreement import all_pass, each_rank
from support.imports import import_or_skip
from support.listings import get_failing, list_codes
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from syncheck.diagnose.syn219_averaged_copy_stale import Text
from syncheck.live import check

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncheck.records import Finding

DECAY = 0.9


class TeacherModel(AveragedModel):
    """A class derived from torch's."""


class EMAModel:
    """A class with the state of diffusers' EMAModel."""

    def __init__(self, parameters: Any) -> None:
        self.shadow_params = [parameter.clone().detach() for parameter in parameters]
        self.optimization_step = 0

    def step(self, parameters: Any) -> None:
        self.optimization_step += 1
        for mine, parameter in zip(self.shadow_params, parameters, strict=True):
            mine.sub_((1 - DECAY) * (mine - parameter.detach()))

    def state_dict(self) -> dict[str, Any]:
        return {
            "decay": DECAY, "min_decay": 0.0, "optimization_step": self.optimization_step, "update_after_step": 0,
            "use_ema_warmup": False, "inv_gamma": 1.0, "power": 2 / 3, "shadow_params": self.shadow_params,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimization_step = state["optimization_step"]
        self.shadow_params = copy.deepcopy(state["shadow_params"])


def averaged_model(model: nn.Module) -> tuple[Any, Callable[[], Any]]:
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    return ema, partial(ema.update_parameters, model)


def derived(model: nn.Module) -> tuple[Any, Callable[[], Any]]:
    ema = TeacherModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True)
    return ema, partial(ema.update_parameters, model)


def ema_pytorch(model: nn.Module) -> tuple[Any, Callable[[], Any]]:
    library = import_or_skip("ema_pytorch")
    ema = library.EMA(model, beta=DECAY, update_after_step=0, update_every=1)
    return ema, ema.update


def without_online_model(model: nn.Module) -> tuple[Any, Callable[[], Any]]:
    library = import_or_skip("ema_pytorch")
    ema = library.EMA(model, beta=DECAY, update_after_step=0, update_every=1, include_online_model=False)
    return ema, ema.update


def post_hoc(model: nn.Module) -> tuple[Any, Callable[[], Any]]:
    library = import_or_skip("ema_pytorch")
    ema = library.PostHocEMA(model, sigma_rels=(0.05, 0.3), update_every=1, checkpoint_every_num_steps="manual")
    return ema, ema.update


def torch_ema(model: nn.Module) -> tuple[Any, Callable[[], Any]]:
    library = pytest.importorskip("torch_ema")
    ema = library.ExponentialMovingAverage(model.parameters(), DECAY)
    return ema, ema.update


def timm_v2(model: nn.Module) -> tuple[Any, Callable[[], Any]]:
    library = import_or_skip("timm.utils")
    ema = library.ModelEmaV2(model, decay=DECAY)
    return ema, partial(ema.update, model)


def timm_v3(model: nn.Module) -> tuple[Any, Callable[[], Any]]:
    library = import_or_skip("timm.utils")
    ema = library.ModelEmaV3(model, decay=DECAY)
    return ema, partial(ema.update, model)


def update_from(ema: Any, model: nn.Module) -> None:
    """Update a copy that takes the parameters at each step."""
    ema.step(model.parameters())


def skip_update() -> None:
    """Leave a copy as it is."""


def diffusers(model: nn.Module) -> tuple[Any, Callable[[], Any]]:
    ema = EMAModel(model.parameters())
    return ema, partial(update_from, ema, model)


LIBRARIES = [
    averaged_model,
    derived,
    ema_pytorch,
    without_online_model,
    post_hoc,
    torch_ema,
    timm_v2,
    timm_v3,
    diffusers,
]
CALLS: dict[str, Callable[[Any, Any, Any], tuple[Any, ...]]] = {
    "scaler": lambda model, optimizer, ema: (model, optimizer, ema),
    "tuple": lambda model, optimizer, ema: ((model, ema), optimizer),
    "dict": lambda model, optimizer, ema: ({"model": model, "slow": ema}, optimizer),
    "alone": lambda model, optimizer, ema: ({"net": model, "optimizer": optimizer, "ema": ema},),
}


def train(model: nn.Module, optimizer: Any, update: Callable[[], Any], steps: int = 4) -> None:
    """Train on equal data, and update the copy after each step."""
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        update()


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def run_fix(finding: Finding, ema: Any, rank: int) -> None:
    """Run the code in a fix."""
    start = "state = [ema.state_dict()]"
    code = str(finding.fix).partition(start)[2].removesuffix(".")
    exec(start + code, {"ema": ema, "torch": torch, "rank": rank})


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("library", LIBRARIES)
def test_updates_on_rank_0_only(syncheck_rank: Any, library: Callable[..., Any]) -> None:
    """A copy updated on rank 0 only is SYN219 in each call; the fix makes the ranks equal."""
    model = DistributedDataParallel(make_net())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    ema, update = library(model.module)
    train(model, optimizer, update if syncheck_rank.rank == 0 else skip_update)
    for call in CALLS.values():
        report = all_pass(each_rank(check, *call(model, optimizer, ema)))
        finding = get_failing(report)
        assert finding.code == "SYN219"
        assert {name.rpartition(".")[2] for name in finding.tensors} >= {"weight", "bias"} or "shadow" in str(finding)

    run_fix(finding, ema, rank=0)
    for call in CALLS.values():
        assert all_pass(each_rank(check, *call(model, optimizer, ema))).verdict == "in_sync"
    train(model, optimizer, update)
    assert all_pass(each_rank(check, model, optimizer, ema)).verdict == "in_sync"


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("selected", ["params", "buffers"])
@pytest.mark.parametrize("library", [averaged_model, timm_v3])
def test_selected_kinds_include_copies(syncheck_rank: Any, library: Callable[..., Any], selected: str) -> None:
    """Parameters and buffers of a copy are compared if only parameters or buffers are selected."""
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    ema, update = library(model)
    train(model, optimizer, update if syncheck_rank.rank == 0 else skip_update)
    assert all_pass(each_rank(check, model, optimizer, ema, only=selected)).verdict == "out_of_sync"


class WithTeacher(nn.Module):
    """A model that contains its average, and attention with the name of an average."""

    def __init__(self, library: Callable[..., Any]) -> None:
        super().__init__()
        self.net = make_net()
        self.ema = nn.Linear(2, 2)
        self.slow, self.update = library(self.net)
        self.slow.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.ema(self.net(x))
        return result


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("library", [averaged_model, derived, without_online_model, timm_v2, timm_v3])
def test_a_copy_inside_the_model(syncheck_rank: Any, library: Callable[..., Any]) -> None:
    """A copy of a part of the model, inside the model, is recognized by its class."""
    torch.manual_seed(0)
    model = WithTeacher(library)
    wrapped = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    train(wrapped, optimizer, model.update if syncheck_rank.rank == 1 else skip_update)
    finding = get_failing(all_pass(each_rank(check, wrapped, optimizer)))
    assert finding.code == "SYN219"
    assert all(name.startswith("slow.") for name in finding.tensors)


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("library", [timm_v3, torch_ema, diffusers])
def test_a_copy_created_before_the_broadcast(syncheck_rank: Any, library: Callable[..., Any]) -> None:
    """Equal counts of updates show an unequal start; without counts, the cause names both. The fix repairs both."""
    torch.manual_seed(syncheck_rank.rank)
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    ema, update = library(net)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    train(model, optimizer, update)
    finding = get_failing(all_pass(each_rank(check, model, optimizer, ema)))
    assert finding.code == "SYN219"
    assert finding.cause.code is (Text.CAUSE if library is timm_v3 else Text.CAUSE_START)
    run_fix(finding, ema, rank=0)
    assert all_pass(each_rank(check, model, optimizer, ema)).verdict == "in_sync"


@pytest.mark.slow
@pytest.mark.syncheck(ranks=3)
def test_three_different_starts(syncheck_rank: Any) -> None:
    """If no two of three ranks agree, no majority updated the copy alike: the copies were unequal at the start."""
    torch.manual_seed(syncheck_rank.rank)
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    ema, update = timm_v3(net)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    train(model, optimizer, update)
    finding = get_failing(all_pass(each_rank(check, model, optimizer, ema)))
    assert finding.code == "SYN219"
    assert finding.cause.code is Text.CAUSE_START
    assert finding.certainty == "consistent"


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("library", [averaged_model, derived, ema_pytorch, timm_v3])
def test_local_statistics_of_a_copy(syncheck_rank: Any, library: Callable[..., Any]) -> None:
    """Running statistics of the model and of its copy, from each rank's own data, are one finding on statistics."""
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    ema, update = library(model)
    train(model, optimizer, update)
    for module in (model[1], *(m for m in ema.modules() if isinstance(m, nn.BatchNorm1d))):
        module.running_mean.add_(0.1 * syncheck_rank.rank)
    report = all_pass(each_rank(check, model, optimizer, ema))
    (finding,) = [finding for finding in report.groups[0].findings if finding.code != "SYN105"]
    assert finding.code == "SYN201"


@pytest.mark.syncheck(ranks=2)
def test_a_frozen_reference_model_is_no_average(syncheck_rank: Any) -> None:
    """A frozen copy without an averaging class or key stays a frozen model, and a difference in it is no SYN219."""
    model = make_net()
    reference = copy.deepcopy(model).requires_grad_(False)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn(parameter.shape) * syncheck_rank.rank)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    train(model, optimizer, skip_update)
    report = all_pass(each_rank(check, {"policy": model, "reference": reference}, optimizer))
    assert report.verdict == "out_of_sync"
    assert "SYN219" not in list_codes(report.groups[0].findings)
    dist.barrier()
