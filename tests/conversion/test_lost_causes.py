"""B is a copy of the model in A, or lacks layers and numbers the next ones again: the cause states which."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.found_causes import compare, draw, find

from syncheck.diagnose.model_positions import WrongShard

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from support.found_causes import State

    from syncheck.records import Finding


def make_model(layers: int = 3, seed: int = 0, prefix: str = "layers.") -> State:
    """Return layers with a matrix and a bias of few elements."""
    state: State = {"embed.weight": draw(20, 16, seed=seed)}
    for layer in range(layers):
        state[f"{prefix}{layer}.fc.weight"] = draw(16, 16, seed=seed + 10 * layer + 1)
        state[f"{prefix}{layer}.fc.bias"] = draw(8, seed=seed + 10 * layer + 2)
        state[f"{prefix}{layer}.norm.weight"] = draw(16, seed=seed + 10 * layer + 3)
    return state


def get_names(finding: Finding, statement: WrongShard) -> set[str]:
    """Return the names of a statement; empty without it."""
    for message in finding.facts:
        if message.code is statement:
            return set(message.parameters["names"])
    return set()


@pytest.mark.parametrize("prefix", ["ema.", "ema_model.module.", "teacher."])
def test_a_copy_of_the_model(tmp_path: Path, prefix: str) -> None:
    """All tensors of B are those of an average or another model in A, also those with few elements."""
    model, average = make_model(), make_model(seed=500)
    a = {"model": model | {prefix + name: tensor for name, tensor in average.items()}}
    findings, _ = compare(tmp_path, a, average, subset=True)
    finding = findings["SYN313"]
    assert set(finding.tensors) >= set(average)
    assert get_names(finding, WrongShard.COPY) == set(average)
    assert finding.cause.code is WrongShard.CAUSE_COPY


def test_a_copy_in_some_layers(tmp_path: Path) -> None:
    """The average reached a part of B: its tensors are named, and the rest agrees."""
    model, average = make_model(), make_model(seed=500)
    averaged = {name for name in model if "layers.1" in name}
    a = {"model": model | {f"ema.{name}": tensor for name, tensor in average.items()}}
    b = {"model": model | {name: average[name] for name in averaged}}
    findings, _ = compare(tmp_path, a, b, subset=True)
    assert get_names(findings["SYN313"], WrongShard.COPY) == averaged


def test_an_exchanged_average(tmp_path: Path) -> None:
    """Model and average are exchanged in B: pairs of names state it."""
    model, average = make_model(), make_model(seed=500)
    states = []
    for first, second in ((model, average), (average, model)):
        states.append({"model": first | {f"ema.{name}": tensor for name, tensor in second.items()}})
    findings, _ = compare(tmp_path, *states)
    assert not get_names(findings["SYN313"], WrongShard.COPY)


def drop_layers(state: State, dropped: Collection[int], prefix: str) -> State:
    """Return the state without some layers, whose numbers the next ones take."""
    remaining: State = {}
    for name, tensor in state.items():
        if name.startswith(prefix):
            number, rest = name.removeprefix(prefix).split(".", 1)
            layer = int(number)
            if layer in dropped:
                continue
            shift = sum(other < layer for other in dropped)
            name = f"{prefix}{layer - shift}.{rest}"
        remaining[name] = tensor
    return remaining


@pytest.mark.parametrize("dropped", [[2], [0], [1, 3]])
@pytest.mark.parametrize("prefix", ["model.layers.", "features."])
def test_lost_layers(tmp_path: Path, dropped: list[int], prefix: str) -> None:
    """The lost layers are named, and the last numbers, which B lacks, are no loss of their own."""
    state = {name: w for name, w in make_model(6, prefix=prefix).items() if not name.endswith("bias")}
    findings, _ = compare(tmp_path, state, drop_layers(state, dropped, prefix))
    assert findings.keys() == {"SYN313"}
    finding = findings["SYN313"]
    lost = {name for name in state for layer in dropped if name.startswith(f"{prefix}{layer}.")}
    assert get_names(finding, WrongShard.LOST) == lost
    assert finding.cause.code is WrongShard.CAUSE_LOST


def test_a_missing_last_layer(tmp_path: Path) -> None:
    """B lacks the last layer, and no other layer was renumbered."""
    state = make_model(4)
    names = {name for name in state if ".3." in name}
    assert find(tmp_path, state, drop_layers(state, [3], "layers.")) == {"SYN101": names}
