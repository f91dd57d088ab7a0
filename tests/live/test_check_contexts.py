"""`check` in every context of a training: torch modes, compiled code, backward."""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.agreement import Net, all_pass, each_rank, flip, trained
from support.listings import list_names
from support.states import clone_parameters
from torch.nn.parallel import DistributedDataParallel

from syncheck.live import check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from syncheck.records import Report


@contextmanager
def setting(change: Callable[[Any], None], value: Any, usual: Any) -> Iterator[None]:
    """Change a global setting of torch in a context."""
    change(value)
    try:
        yield
    finally:
        change(usual)


CONTEXTS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic algorithms": lambda: setting(torch.use_deterministic_algorithms, True, False),
    "default dtype float64": lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
    "default device meta": lambda: setting(torch.set_default_device, "meta", None),
    "with torch.device('meta')": lambda: torch.device("meta"),
    "saved tensors elsewhere": torch.autograd.graph.save_on_cpu,
    "anomaly detection": torch.autograd.detect_anomaly,
}


@pytest.mark.syncheck(ranks=2)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("fault", [False, True])
def test_check_is_independent_of_torch_modes(fault: bool) -> None:
    """In each torch mode, the report including RNG states equals the report without the mode."""
    model, optimizer = trained()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(7)
    wide = torch.arange(1 << 16, dtype=torch.float32).reshape(256, 256).t()
    outlier = {"wide": wide, "complex": torch.ones(5, dtype=torch.complex64).conj(), "half": torch.ones(7).bfloat16()}
    if fault and dist.get_rank() == 1:
        flip(model.module.fc.weight, index=6)
        wide[3, 5] += 1
    items = model.module, optimizer, outlier
    usual = check(items, rng=True)
    assert usual.verdict == ("out_of_sync" if fault else "in_sync")
    assert list_names(usual.groups[0].tensors) == (["fc.weight", "wide"] if fault else [])
    assert usual.groups[0].kinds["rng"].identical == 5
    for name, context in CONTEXTS.items():

        def within(context: Any = context) -> Report:
            with context():
                return check(items, rng=True)

        assert all_pass(each_rank(within)) == usual, name


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.slow
def test_a_check_within_compiled_code(fault: bool) -> None:
    """A check within compiled code, on a compiled model, runs uncompiled and uses unwrapped names."""
    model, optimizer = trained()
    if fault and dist.get_rank() == 1:
        flip(model.module.fc.weight)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    reports = []

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        y = compiled(x).square()
        reports.append(check(compiled, optimizer))
        return y + 1

    def within() -> Report:
        result = step(torch.ones(3, 4))
        assert result.shape == (3, 2)
        return reports[-1]

    report = all_pass(each_rank(within))
    assert report.counts.tensors == 16
    assert list_names(report.groups[0].tensors) == (["fc.weight"] if fault else [])


@pytest.mark.syncheck(ranks=2)
def test_a_check_between_backward_and_step_and_inside_backward() -> None:
    """In a gradient hook during DDP's reduction, and before the step, ranks are in sync and training is unaffected."""
    result: list[str] = []

    def run(checked: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = DistributedDataParallel(Net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if checked:
            model.module.head.weight.register_hook(lambda grad: result.append(check(model, optimizer).verdict))
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((3, 4), 1.0 + dist.get_rank())).sum().backward()
            if checked:
                result.append(check(model, optimizer).verdict)
            optimizer.step()
        return clone_parameters(model)

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))
    assert result == ["in_sync"] * 4
