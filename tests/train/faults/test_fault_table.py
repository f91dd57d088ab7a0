"""The table of injected faults, and settings that give a fault no effect."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from planted import QUIET
from support.listings import measure_width
from support.scenarios import SMALLEST
from support.states import clone_parameters
from torch import nn

from train import faults
from train.data import load_data
from train.engine import Job
from train.errors import UserError
from train.faults import FAULTS, Fault, make_fault
from train.faults.start import InitNotBroadcast, copy_parameters, find_first_layer
from train.launch import RankContext
from train.models import MODELS
from train.options import list_faults
from train.parts import make_model
from train.settings import Settings

TWO = RankContext(0, 2)
DDP = Settings(method="ddp")
BASES = {"Fault", "BatchNormFault", "DataFault", "FileFault", "LocalGradients", "MemoryFault", "UnequalGradients"}


def test_every_fault_is_in_the_table() -> None:
    """Each fault class has a name in FAULTS, a one-line summary and a code."""
    classes = set()
    for path in Path(faults.__file__).parent.glob("*.py"):
        module = importlib.import_module(f"train.faults.{path.stem}" if path.stem != "__init__" else "train.faults")
        fault_classes = [kind for _, kind in inspect.getmembers(module, inspect.isclass) if issubclass(kind, Fault)]
        classes |= {kind for kind in fault_classes if kind.__name__ not in BASES}
    assert classes == set(FAULTS.values()), "each needs a line in FAULTS; a base class, one in BASES above"
    assert len(FAULTS) == len(classes)
    for name, kind in FAULTS.items():
        assert re.fullmatch(r"[a-z]+(-[a-z0-9]+)*", name), f"{name}: words and hyphens"
        assert re.fullmatch(r"SYN[12]\d\d" if kind.in_files else r"SYN4\d\d", kind.code)
        assert kind.summary
        assert "\n" not in kind.summary
        assert kind.when in ("always", "half", "last")
        assert "summary" in vars(kind)  # not inherited from another fault
        assert "code" in vars(kind)


def test_list_faults_prints_a_line_per_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """--list-faults prints the name, finding and summary of each fault on one line, wrapped on a terminal."""
    lines = list_faults().splitlines()
    assert [line.split(maxsplit=2) for line in lines] == [[name, f.code, f.summary] for name, f in FAULTS.items()]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    folded = list_faults().splitlines()
    assert measure_width(folded) <= 80
    assert [line.split()[0] for line in folded if not line.startswith(" ")] == list(FAULTS)


# Fault, settings, and a part of the message: the problem, or the option to change.
REFUSALS: list[tuple[str | None, dict[str, Any], str]] = [
    ("nothing", {}, "--fault nothing: unknown; choose from adapter-on-one-rank, "),
    ("late-head", {"method": "single"}, "add --spawn 2, or start with torchrun"),
    ("late-head", {"grad_clip": 1.0}, "; remove --grad-clip"),
    ("late-head", {"fault_step": 3}, "--fault-step: --fault late-head "),
    ("skipped-step", {"fault_step": 11}, "--fault-step 11: the run ends after 10 steps"),
    ("optimizer-on-one-rank", {"fault_step": 1}, "; use --fault-step 2 or more"),
    ("stale-rank", {"fault_step": 1}, "; use --fault-step 2 or more"),
    ("optimizer-on-one-rank", {"momentum": 0.0}, "; use --momentum 0.9 or --optimizer adamw"),
    ("forward-through-module", {"amp": "fp16"}, "; use --amp bf16"),
    ("late-head", {"amp": "fp16"}, "; use --amp bf16"),
    ("differs-by-node", {"amp": "fp16"}, "; use --amp bf16"),
    ("scaler-diverged", {}, "--fault scaler-diverged: --amp off has no loss scaler; add --amp fp16"),
    ("bit-flip-exp-avg", {"momentum": 0.0}, "; use --optimizer adamw"),
    ("extra-forward", {"sync_bn": True}, "; remove --sync-bn"),
    ("buffers-never-synced", {"sync_bn": True}, "; remove --sync-bn"),
    ("buffers-never-synced", {"buffer_sync": False}, "--no-buffer-sync has the same effect"),
    ("variance-only-bn", {}, "; add --sync-bn"),
    ("other-dtype-on-one-rank", {}, "; add --save-per-rank"),
    ("last-save-failed", {"save_per_rank": True, "fault_step": 10}, "; use a smaller --fault-step"),
    ("damaged-on-disk", {"save_per_rank": True, "save_format": "safetensors"}, "; use --save-format pth"),
    ("adapter-on-one-rank", {"grad_clip": 1.0}, "; remove --grad-clip"),
    ("average-not-updated", {}, "; add --ema 0.9"),
    ("differs-by-node", {}, "on each of 2 nodes; start 4 or more"),
    ("grad-not-reduced-once", {"amp": "fp16"}, "; use --amp bf16"),
]


@pytest.mark.parametrize(("fault", "changes", "message"), REFUSALS, ids=lambda value: str(value)[:40])
def test_faults_without_an_effect_are_rejected(fault: str, changes: dict[str, Any], message: str) -> None:
    """A fault without an effect is rejected in one line, with the reason or a fix, before the run starts."""
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        make_fault(replace(DDP, fault=fault, **changes), TWO, steps=10)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("--fault")


def test_a_single_rank_is_rejected() -> None:
    """A fault needs at least two ranks, because a single rank has no peer to differ from."""
    with pytest.raises(UserError, match="needs at least 2 ranks"):
        make_fault(replace(DDP, fault="late-head"), RankContext(), steps=10)


@pytest.mark.syncheck(ranks=2, timeout=60)
def test_models_without_batchnorm_are_rejected(ctx: RankContext) -> None:
    """For a model without BatchNorm, BatchNorm faults raise an error on both ranks and leave no pending collective."""
    for fault, sync_bn in (("buffers-never-synced", False), ("extra-forward", False), ("variance-only-bn", True)):
        settings = replace(QUIET, model="convnet", fault=fault, sync_bn=sync_bn, save_per_rank=False)
        with pytest.raises(UserError, match=r"--model convnet has no BatchNorm layers; use --model resnet8$"):
            Job(settings, ctx)
    assert ctx.gather(ctx.rank) == [0, 1]


@pytest.mark.syncheck(ranks=2, timeout=60)
def test_tensor_without_a_suitable_bit_is_rejected_on_both_ranks(ctx: RankContext) -> None:
    """If the chosen tensor has no suitable element, both ranks raise an error and neither rank waits."""
    settings = replace(DDP, fault="bit-flip-weight", fault_step=1)
    fault = make_fault(settings, ctx, steps=1)
    model = nn.Linear(2, 2)
    nn.init.zeros_(model.weight)
    with pytest.raises(UserError, match="no element of the tensor lies between"):
        fault.after_step(1, SimpleNamespace(module=model), torch.optim.SGD(model.parameters(), lr=0.1))
    assert ctx.gather(ctx.rank) == [0, 1]


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("tv_")])
def test_second_model_has_the_same_shapes(name: str) -> None:
    """A second model from another seed has the same shapes and other weights, and leaves the RNG state unchanged."""
    data = "text" if MODELS[name].text else "digits"
    settings = replace(DDP, model=name, data=data, width=8, **SMALLEST.get(name, {}))
    fault = InitNotBroadcast(settings, TWO, 10)
    fault.build_model = partial(make_model, settings, load_data(data, None, None))
    torch.manual_seed(0)
    model = fault.build_model()
    assert isinstance(find_first_layer(model), nn.Embedding if data == "text" else nn.Conv2d)
    before = clone_parameters(model)
    state = torch.get_rng_state()
    second = fault.build_other_model()
    assert torch.equal(torch.get_rng_state(), state)
    copy_parameters(second, model)
    pairs = list(zip(before, model.parameters(), strict=True))
    assert all(old.shape == new.shape for old, new in pairs)
    assert all(not torch.equal(old, new) for old, new in pairs if old.dim() > 1)
