"""Optimizer state that only its owner holds: sharded by design, unless the evidence shows that a state was lost."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import save_pth
from support.listings import find_all, list_codes, list_fields

import syncheck

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from syncheck.records import Group

MATRICES, BIASES = [f"layers.{i}.weight" for i in range(5)], [f"layers.{i}.bias" for i in range(5)]
# The ranks that own a matrix, one after the other.
IN_TURN = [{0}, {1}]
MOMENTUM, ADAM = ("momentum_buffer",), ("exp_avg", "exp_avg_sq")


def value_of(name: str, state: str = "") -> Any:
    """Return an array that depends on the names only, so that copies are equal."""
    shape = (3, 2) if name.endswith("weight") else (3,)
    start = float(sum(map(ord, name + state)))
    return np.arange(start, start + np.prod(shape), dtype=np.float32).reshape(shape)


def map_values(names: Iterable[str]) -> dict[str, Any]:
    """Return the array of each name."""
    return {name: value_of(name) for name in names}


def make_states(name: str, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Return the optimizer state of a parameter."""
    return {state: value_of(name, state) for state in kinds}


def save_ranks(
    folder: Path,
    owners: list[set[int]],
    world: int = 2,
    *,
    described: bool | None = None,
    adam: tuple[str, ...] = ADAM,
    lost: frozenset[tuple[int, str]] = frozenset(),
) -> None:
    """Save a file for each rank: Muon for matrices, and Adam for biases on all ranks.

    owners: the ranks with the state of a matrix, by its number; the list repeats.
    described: with metadata, and whether it calls the optimizer sharded.
    lost: ranks and parameters whose state is not in the file.
    """
    for rank in range(world):
        states: dict[int, Any] = {}
        for i, name in enumerate((*BIASES, *MATRICES)):
            contents = name in BIASES or rank in owners[(i - len(BIASES)) % len(owners)]
            if contents and (rank, name) not in lost:
                kinds = adam if name in BIASES else MOMENTUM
                states[i] = make_states(name, kinds)
        numbers = [*range(len(BIASES))], [*range(len(BIASES), len(BIASES) + len(MATRICES))]
        groups = [{"lr": 0.1, "params": numbers[0]}, {"lr": 0.2, "params": numbers[1]}]
        model = map_values(chain.from_iterable(zip(MATRICES, BIASES, strict=True)))
        content = {"step": 10, "model": model, "optimizer": {"state": states, "param_groups": groups}}
        if described is not None:
            block = syncheck.metadata(run="r", rank=rank, world_size=world, step=10, optimizer_sharded=described)
            content["syncheck"] = block | {"buffers": [], "optimizer_parameters": [*BIASES, *MATRICES]}
        save_pth(folder / f"rank{rank}.pth", content)


def compare(folder: Path) -> Group:
    """Compare the files of the ranks."""
    (group,) = syncheck.compare(folder).groups
    return group


@pytest.mark.parametrize("described", [None, False, True], ids=["plain", "metadata", "called sharded"])
@pytest.mark.parametrize(
    ("world", "owners"),
    [
        (2, IN_TURN),
        (4, [{0}, {1}, {2}, {3}]),
        (4, [{0, 2}, {1, 3}]),  # owners within a node, and a copy on the other node
        (8, [{0}, {1}, {2}, {3}, {4}]),  # three ranks own nothing
    ],
    ids=["two", "four", "copies", "idle ranks"],
)
def test_state_of_owners_is_sharded_by_design(
    tmp_path: Path, world: int, owners: list[set[int]], described: bool | None
) -> None:
    """Momentum on its owners only is no difference; Adam's state on all ranks is still compared."""
    save_ranks(tmp_path, owners, world, described=described)
    group = compare(tmp_path)
    adam, copies = 2 * len(BIASES), len(MATRICES) if len(owners[0]) > 1 else 0
    codes = [] if copies else ["SYN104"]
    assert (group.verdict, list_codes(group.findings)) == ("in_sync", codes)
    assert group.kinds["optimizer"].identical == adam + copies


def test_one_class_of_state_for_all_parameters(tmp_path: Path) -> None:
    """A layer-wise optimizer may use the same state for matrices and biases, in groups of its own."""
    save_ranks(tmp_path, IN_TURN, adam=MOMENTUM)
    assert compare(tmp_path).verdict == "in_sync"


@pytest.mark.parametrize(
    ("world", "owners", "lost"),
    [
        (2, {0, 1}, {(1, MATRICES[3])}),
        (2, {0, 1}, {(1, name) for name in MATRICES}),
        (3, {0, 1, 2}, {(1, MATRICES[3]), (2, MATRICES[3])}),
        (2, {0, 1}, {(1, BIASES[3]), (0, BIASES[2])}),
    ],
    ids=["one state", "a group", "two ranks", "on each rank"],
)
def test_lost_state_is_not_owned(tmp_path: Path, world: int, owners: set[int], lost: set[tuple[int, str]]) -> None:
    """State that some ranks lost, while others have all of it, is missing."""
    save_ranks(tmp_path, [owners], world, lost=frozenset(lost), described=False)
    group = compare(tmp_path)
    missing = {diff.name.rpartition(".")[0] for diff in group.tensors if diff.reason == "missing"}
    assert group.verdict == "out_of_sync"
    assert missing == {f"optimizer.{name}" for _, name in lost}


@pytest.mark.parametrize("described", [None, True])
def test_owner_without_its_state(tmp_path: Path, described: bool | None) -> None:
    """If parameters belong to ranks in turn, state that its owner lost is missing, although no file has it."""
    lost = {(1, name) for name in MATRICES}
    save_ranks(tmp_path, [{0}, {1}, {2}], 3, lost=frozenset(lost), described=described)
    group = compare(tmp_path)
    missing = find_all(group.tensors, reason="missing")
    assert group.verdict == "out_of_sync"
    assert set(list_fields(missing, "minority")) == {(1,)}
    assert len(missing) == 2  # matrices 1 and 4


def test_copy_of_an_owner_without_its_state(tmp_path: Path) -> None:
    """If two ranks own each parameter, state that one of them lost is missing there."""
    save_ranks(tmp_path, [{0, 2}, {1, 3}], 4, lost=frozenset({(2, MATRICES[0])}))
    group = compare(tmp_path)
    (diff,) = find_all(group.tensors, reason="missing")
    assert (group.verdict, diff.clusters) == ("out_of_sync", ((0,),))


def test_owners_differ_in_a_bit_of_the_model(tmp_path: Path) -> None:
    """Owned state hides no difference of parameters, and `diff` finds a changed state."""
    save_ranks(tmp_path / "a", IN_TURN)
    save_ranks(tmp_path / "whole", [{0}], 1)
    save_ranks(tmp_path / "lost", IN_TURN, lost=frozenset({(1, MATRICES[1])}))
    complete = tmp_path / "whole" / "rank0.pth"
    # The file of one rank numbers its optimizer state, so the names of the state are inferred.
    accept = syncheck.DiffOptions(accept_inferred=True)
    assert syncheck.diff(tmp_path / "a", complete, options=accept).verdict == "in_sync"
    report = syncheck.diff(tmp_path / "lost", complete)
    assert report.verdict == "out_of_sync"
    assert list_codes(report.groups[-1].findings) == ["SYN101"]


def test_muon_beside_another_optimizer(tmp_path: Path) -> None:
    """With two optimizers, the owned states of one and the states of the other keep their meaning."""
    for rank in range(2):
        model = map_values((*MATRICES, *BIASES))
        momentum = {i: {"momentum_buffer": value_of(name)} for i, name in enumerate(MATRICES) if i % 2 == rank}
        moments = {i: make_states(name, ADAM) for i, name in enumerate(BIASES)}
        muon = {"state": momentum, "param_groups": [{"lr": 0.1, "params": [*range(5)]}]}
        adam = {"state": moments, "param_groups": [{"lr": 0.1, "params": [*range(5)]}]}
        save_pth(tmp_path / f"rank{rank}.pth", {"model": model, "muon": muon, "adam": adam})
    group = compare(tmp_path)
    assert (group.verdict, group.kinds["optimizer"].identical) == ("in_sync", 2 * len(BIASES))
