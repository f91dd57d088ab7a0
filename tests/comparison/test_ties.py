"""Names that are one tensor on some ranks and several on others: SYN105, for formats that keep it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from checkpoints import compare_ranks

import syncheck

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.records import Group


def language_model(*, tied: bool, value: float = 1.0) -> dict[str, Any]:
    """Return embedding and output layer, one tensor or two equal ones."""
    embedding = torch.full((5, 3), value)
    return {"embed.weight": embedding, "head.weight": embedding if tied else embedding.clone(), "bias": torch.ones(3)}


def compared(folder: Path, *states: dict[str, Any], zipped: bool = True) -> Group:
    """Save a file for each rank and compare them."""

    def write(path: Path, state: Any) -> None:
        torch.save(state, path, _use_new_zipfile_serialization=zipped)

    (group,) = compare_ranks(folder, *states, write=write).groups
    return group


@pytest.mark.parametrize("zipped", [True, False])
def test_a_tie_on_some_ranks_only_is_told(tmp_path: Path, zipped: bool) -> None:
    """Weights that are tied on ranks 0 and 2 and equal copies on rank 1 are SYN105 on rank 1, and still in sync."""
    states = [language_model(tied=rank != 1) for rank in range(3)]
    group = compared(tmp_path, *states, zipped=zipped)
    (finding,) = group.findings
    assert (group.verdict, finding.code, finding.fails, finding.ranks) == ("in_sync", "SYN105", False, (1,))
    (tie,) = group.ties
    assert (set(tie.names), tie.ranks) == ({"embed.weight", "head.weight"}, (0, 2))


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_alike_on_all_ranks_is_no_finding(tmp_path: Path, tied: bool) -> None:
    """Weights tied everywhere, or nowhere, are as they should be, with other values too."""
    group = compared(tmp_path, language_model(tied=tied), language_model(tied=tied))
    assert (group.findings, group.ties) == ((), ())


def test_views_and_empty_tensors_are_no_ties(tmp_path: Path) -> None:
    """A part, a transposed view and an empty tensor of one storage begin where it does, and are other tensors."""
    whole, lone = torch.ones(4, 4), [torch.ones(4, 4) for _ in range(3)]
    views = {"w": whole, "part": whole[:2], "t": whole.t(), "none": whole[:0], "no": whole[:0]}
    apart = {"w": lone[0], "part": lone[1][:2].clone(), "t": lone[2].t(), "none": lone[0][:0].clone()}
    group = compared(tmp_path, views, apart | {"no": torch.ones(0, 4)})
    assert group.ties == ()


def test_a_rank_that_lacks_one_of_the_names_says_nothing(tmp_path: Path) -> None:
    """Where a rank left the tied copy out of its file, that is a missing tensor and no broken tie."""
    state = language_model(tied=False)
    del state["head.weight"]
    group = compared(tmp_path, language_model(tied=True), state)
    assert [finding.code for finding in group.findings] == ["SYN101"]


def test_a_format_without_ties_says_nothing(tmp_path: Path) -> None:
    """Beside a safetensors file, which writes each name's bytes, a tie in a torch file is no finding."""
    from safetensors.torch import save_file

    torch.save(language_model(tied=True), tmp_path / "m_rank0.pth")
    save_file(language_model(tied=False), tmp_path / "m_rank1.safetensors")
    (group,) = syncheck.compare(tmp_path).groups
    assert (group.verdict, group.ties) == ("in_sync", ())


def test_a_part_of_a_tie_is_told_apart(tmp_path: Path) -> None:
    """Of three names that are one tensor on rank 0 and two and one on rank 1, the tie of all three is broken."""
    first, second = language_model(tied=True), language_model(tied=True)
    first["third"], second["third"] = first["head.weight"], second["head.weight"].clone()
    group = compared(tmp_path, first, second)
    assert [(tie.names, tie.ranks) for tie in group.ties] == [(("embed.weight", "head.weight", "third"), (0,))]
