"""Files of different runs are SYN108, and files of one run are not."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.groups import facts_of
from support.listings import find_all, index_by, list_codes, list_fields
from torch import nn

import syncheck
from syncheck.diagnose.syn108_different_runs import Text
from syncheck.messages import Note, Undecided
from syncheck.report.undecided import undecided_reason

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.records import Finding, Group

STEPS = 4


def train(seed: int, lr: float = 0.01, width: int = 8, data: int | None = None) -> dict[str, Any]:
    """Return model and optimizer of a short training. data: seed of the batches, by default as of the model."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    batches = torch.Generator().manual_seed(seed if data is None else data)
    for _ in range(STEPS):
        x = torch.randn(8, 5, generator=batches)
        nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def block(rank: int, **given: Any) -> dict[str, Any]:
    """Return a metadata block of a run with two ranks."""
    return syncheck.metadata(**{"run": "exp", "rank": rank, "world_size": 2, "step": STEPS} | given)


def diagnose(folder: Path, **options: Any) -> tuple[Group, dict[str, Finding]]:
    """Compare a folder with a single group; return it and its findings by code."""
    (group,) = syncheck.compare(folder, options=syncheck.Options(**options)).groups
    return group, index_by(group.findings, "code")


def settings_of(finding: Finding) -> dict[str, dict[int, Any]]:
    """Return the differing settings in the evidence, by name."""
    first = next(parameters["setting"] for code, parameters in facts_of(finding).items() if "setting" in parameters)
    settings = [first, *find_all(finding.facts, code=Text.SETTING)]
    return {fact.parameters["name"]: fact.parameters["values"] for fact in settings}


def test_a_sweep_over_seeds(tmp_path: Path) -> None:
    """seed3.pth and seed11.pth with their arguments look like ranks 3 and 11 of one run."""
    for seed in (3, 11):
        torch.save(train(seed) | {"args": {"seed": seed, "lr": 0.01}}, tmp_path / f"seed{seed}.pth")
    group, findings = diagnose(tmp_path)
    assert group.verdict == "out_of_sync"
    assert list(findings) == ["SYN108"]
    assert findings["SYN108"].certainty == "consistent"
    assert settings_of(findings["SYN108"]) == {"args.seed": {3: 3, 11: 11}}


def test_nested_configurations_of_other_widths(tmp_path: Path) -> None:
    """Nested settings explain different shapes: no finding about shapes in one run."""
    for name, width in (("narrow", 8), ("wide", 12)):
        config = {"model": {"width": width}, "optim": {"lr": 0.01}}
        torch.save(train(1, width=width) | {"cfg": config}, tmp_path / f"{name}.pth")
    _, findings = diagnose(tmp_path)
    assert list(findings) == ["SYN108"]
    assert settings_of(findings["SYN108"]) == {"cfg.model.width": {0: 8, 1: 12}}


def test_one_file_of_another_launch(tmp_path: Path) -> None:
    """Of four files of one pattern, one is of another launch: it is the suspect, with certainty."""
    for rank in range(4):
        is_own = rank == 2
        settings = {"world_size": 4, "run_id": "b" if is_own else "a", "config": {"lr": 0.02 if is_own else 0.01}}
        content = train(5, lr=0.02 if is_own else 0.01, data=9 if is_own else 5)
        torch.save(content | {"syncheck": block(rank, **settings)}, tmp_path / f"rank{rank}.pth")
    _, findings = diagnose(tmp_path, group_by="")
    assert list(findings) == ["SYN108"]
    assert (findings["SYN108"].ranks, findings["SYN108"].certainty) == ((2,), "proved")
    assert settings_of(findings["SYN108"])["run_id"] == {0: "a", 1: "a", 2: "b", 3: "a"}


def test_two_launches_paired_by_rank(tmp_path: Path) -> None:
    """--group-by pairs rank 0 of two launches; a difference within a launch keeps its own finding."""
    for launch in ("a", "b"):
        for rank in (0, 1):
            content = train(1 if launch == "a" else 2)
            if (launch, rank) == ("b", 1):
                content["model"]["0.weight"][0, 0] += 1
            settings = {"run_id": launch, "config": {"seed": 1 if launch == "a" else 2}}
            path = tmp_path / launch / f"rank{rank}.pth"
            path.parent.mkdir(exist_ok=True)
            torch.save(content | {"syncheck": block(rank, **settings)}, path)
    for group in syncheck.compare(tmp_path, options=syncheck.Options(group_by=r"rank(\d)")).groups:
        assert list_codes(group.findings) == ["SYN108"]
        assert group.evidence.repeated_ranks == (0,) or group.evidence.repeated_ranks == (1,)
    group, findings = diagnose(tmp_path, group_by="")
    assert set(findings) > {"SYN108"}
    assert findings["SYN108"].ranks == (0, 1, 2, 3)
    assert all(set(finding.ranks) <= {2, 3} for code, finding in findings.items() if code != "SYN108")
    assert Note.TOO_MANY_RANKS in list_codes(group.notes)


def test_equal_runs_are_in_sync(tmp_path: Path) -> None:
    """Two launches with equal bytes are in sync, whatever their metadata records."""
    for launch in ("a", "b"):
        torch.save(train(1) | {"syncheck": block(0, run_id=launch)}, tmp_path / f"{launch}.pth")
    group, findings = diagnose(tmp_path, group_by="")
    assert (group.verdict, findings) == ("in_sync", {})


def test_a_flipped_bit_between_equal_runs(tmp_path: Path) -> None:
    """Two runs that differ in a single bit should be equal: SYN220."""
    content = train(1)
    torch.save(content | {"syncheck": block(0, run_id="a")}, tmp_path / "a.pth")
    content = deepcopy(content)
    content["model"]["0.weight"].view(torch.int32)[0, 0] ^= 1 << 20
    torch.save(content | {"syncheck": block(0, run_id="b")}, tmp_path / "b.pth")
    assert list(diagnose(tmp_path, group_by="")[1]) == ["SYN220"]


@pytest.mark.parametrize("slope", [1, 1000])
@pytest.mark.parametrize("ranks", [2, 3])
def test_seeds_of_ranks_are_no_other_run(tmp_path: Path, slope: int, ranks: int) -> None:
    """Each rank saves its own seed, device, folder and log flag, and trains alone: SYN211, not another run."""
    for rank in range(ranks):
        own_values = {"seed": 7 + slope * rank, "device": f"cuda:{rank}", "out": f"logs/{rank}", "name": f"exp-{rank}"}
        torch.save(
            train(1, data=rank) | {"args": own_values | {"verbose": int(rank == 0)}}, tmp_path / f"rank{rank}.pth"
        )
    _, findings = diagnose(tmp_path)
    assert list(findings) == ["SYN211"]


def test_a_setting_of_one_rank_with_common_gradients(tmp_path: Path) -> None:
    """Another learning rate on one rank of a run is SYN107 if the gradients are equal."""
    for rank, lr in enumerate((0.01, 0.02)):
        content = train(1, lr=lr) | {"args": {"lr": lr}}
        torch.save(content, tmp_path / f"rank{rank}.pth")
    _, findings = diagnose(tmp_path)
    assert "SYN108" not in findings
    assert "SYN107" in findings


def test_world_sizes_that_differ(tmp_path: Path) -> None:
    """Files that record different numbers of ranks are of different launches, and a note lists the numbers."""
    for i, world in enumerate((2, 4)):
        torch.save(train(i) | {"syncheck": block(0, world_size=world)}, tmp_path / f"{'ab'[i]}.pth")
    group, findings = diagnose(tmp_path, group_by="")
    assert list(findings) == ["SYN108"]
    assert [note.parameters["sizes"] for note in group.notes if note.code is Note.WORLD_SIZES] == [{0: 2, 1: 4}]


def test_more_files_than_ranks(tmp_path: Path) -> None:
    """Three equal files of a run of two ranks are in sync, with a note about their number."""
    for i in range(3):
        torch.save(train(1) | {"syncheck": block(i % 2)}, tmp_path / f"{'abc'[i]}.pth")
    group, _ = diagnose(tmp_path, group_by="")
    assert group.verdict == "in_sync"
    assert list_fields(find_all(group.notes, code=Note.TOO_MANY_RANKS), "parameters") == [{"files": 3, "world_size": 2}]


@pytest.mark.parametrize(
    ("second", "claimed"),
    [
        ({"rank": 0}, (0,)),
        ({"rank": 1}, ()),
        ({"rank": 0, "world_size": 1}, ()),  # independent processes
        ({"rank": 0, "run_id": "b"}, ()),
    ],
)
def test_files_that_claim_one_rank(tmp_path: Path, second: dict[str, Any], claimed: tuple[int, ...]) -> None:
    """Equal files of one rank, run and step do not show that two ranks are in sync, unless the user grouped them."""
    for i, settings in enumerate(({"rank": 0} | ({"world_size": 1} if "world_size" in second else {}), second)):
        torch.save(train(1) | {"syncheck": block(**settings)}, tmp_path / f"rank{i}.pth")
    report = syncheck.compare(tmp_path)
    (group, *_) = report.groups
    assert group.evidence.claimed_twice == claimed
    assert list_fields(find_all(group.notes, code=Note.RANKS_TWICE), "parameters") == (
        [{"ranks": claimed}] if claimed else []
    )
    if claimed:
        assert (report.verdict, report.exit_code) == ("undecided", 2)
        assert undecided_reason(report).code is Undecided.RANKS_TWICE
    grouped, _ = diagnose(tmp_path, group_by="")
    assert (grouped.verdict, grouped.evidence.claimed_twice) == ("in_sync", ())
