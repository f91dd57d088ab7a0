"""SYN105: names that share one tensor on some ranks only, in formats that preserve sharing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.checkpoints import compare_ranks
from support.listings import list_codes, list_fields

import syncheck

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.records import Group


def language_model(*, tied: bool, value: float = 1.0) -> dict[str, Any]:
    """Return embedding and output layer, as one tensor or as two equal tensors."""
    embedding = torch.full((5, 3), value)
    return {"embed.weight": embedding, "head.weight": embedding if tied else embedding.clone(), "bias": torch.ones(3)}


def compare_states(folder: Path, *states: dict[str, Any], zipped: bool = True) -> Group:
    """Save a file for each rank and compare the files."""

    def write(path: Path, state: Any) -> None:
        torch.save(state, path, _use_new_zipfile_serialization=zipped)

    (group,) = compare_ranks(folder, *states, write=write).groups
    return group


@pytest.mark.parametrize("zipped", [True, False])
def test_a_tie_on_some_ranks_only_is_reported(tmp_path: Path, zipped: bool) -> None:
    """Weights tied on ranks 0 and 2 but copied on rank 1 are SYN105 on rank 1, and the group is still in sync."""
    states = [language_model(tied=rank != 1) for rank in range(3)]
    group = compare_states(tmp_path, *states, zipped=zipped)
    (finding,) = group.findings
    assert (group.verdict, finding.code, finding.fails, finding.ranks) == ("in_sync", "SYN105", False, (1,))
    (tie,) = group.ties
    assert (set(tie.names), tie.ranks) == ({"embed.weight", "head.weight"}, (0, 2))


@pytest.mark.parametrize("tied", [True, False])
def test_equal_ties_on_all_ranks_are_no_finding(tmp_path: Path, tied: bool) -> None:
    """Weights tied on all ranks, or on no rank, are no finding."""
    group = compare_states(tmp_path, language_model(tied=tied), language_model(tied=tied))
    assert (group.findings, group.ties) == ((), ())


def test_views_and_empty_tensors_are_no_ties(tmp_path: Path) -> None:
    """A slice, a transposed view and an empty tensor that share one storage are not ties."""
    complete, clones = torch.ones(4, 4), [torch.ones(4, 4) for _ in range(3)]
    views = {"w": complete, "part": complete[:2], "t": complete.t(), "none": complete[:0], "no": complete[:0]}
    separate = {"w": clones[0], "part": clones[1][:2].clone(), "t": clones[2].t(), "none": clones[0][:0].clone()}
    group = compare_states(tmp_path, views, separate | {"no": torch.ones(0, 4)})
    assert group.ties == ()


def test_a_rank_without_the_tied_copy_is_no_evidence(tmp_path: Path) -> None:
    """If one rank's file lacks the tied copy, the finding is a missing tensor and not a broken tie."""
    state = language_model(tied=False)
    del state["head.weight"]
    group = compare_states(tmp_path, language_model(tied=True), state)
    assert list_codes(group.findings) == ["SYN101"]


def test_a_format_without_ties_is_no_evidence(tmp_path: Path) -> None:
    """Beside a safetensors file, which stores each name separately, a tie in a torch file is no finding."""
    from safetensors.torch import save_file

    torch.save(language_model(tied=True), tmp_path / "m_rank0.pth")
    save_file(language_model(tied=False), tmp_path / "m_rank1.safetensors")
    (group,) = syncheck.compare(tmp_path).groups
    assert (group.verdict, group.ties) == ("in_sync", ())


def test_a_partly_broken_tie(tmp_path: Path) -> None:
    """If rank 0 ties three names and rank 1 only two of them, the reported tie contains all three names."""
    first, second = language_model(tied=True), language_model(tied=True)
    first["third"], second["third"] = first["head.weight"], second["head.weight"].clone()
    group = compare_states(tmp_path, first, second)
    assert list_fields(group.ties, "names", "ranks") == [(("embed.weight", "head.weight", "third"), (0,))]
