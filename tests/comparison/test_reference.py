"""`reference`: the replica to measure differences against, and its effect on numbers, minority and verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import changed, compare_ranks, network, save
from support.listings import find_texts

import syncheck
from syncheck.errors import OptionError
from syncheck.messages import Note
from syncheck.testing import compare

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.records import TensorDiff


def write_ranks(folder: Path, *values: Any, name: str = "rank{}.pth") -> list[Path]:
    """Write one file per rank with a tensor `w`."""
    folder.mkdir(parents=True, exist_ok=True)
    return [save(folder / name.format(i), {"w": np.array(value, np.float32)}) for i, value in enumerate(values)]


def compare_with(folder: Path, reference: str | int | None, **options: Any) -> TensorDiff:
    """Compare the files of a folder with a reference. Return the only difference."""
    report = syncheck.compare(folder, options=syncheck.Options(reference=reference, **options))
    (diff,) = report.groups[0].tensors
    return diff


def test_numbers_and_minority_depend_on_the_reference(tmp_path: Path) -> None:
    """max_abs and minority are relative to the reference; clusters and the verdict do not depend on the reference."""
    write_ranks(tmp_path, [0, 0], [0, 0], [1, 0], [0, 10])
    expected = {
        None: (10.0, (1,), (2, 3)),
        0: (10.0, (1,), (2, 3)),
        2: (10.0, (1,), (0, 1, 3)),
        3: (10.0, (1,), (0, 1, 2)),
    }
    for reference, numbers in expected.items():
        diff = compare_with(tmp_path, reference)
        assert (diff.max_abs, diff.index, diff.minority) == numbers
        assert (diff.clusters, diff.status, diff.mismatched) == (((0, 1), (2,), (3,)), "different", 2)
    write_ranks(tmp_path, [0], [0], [3], [10])
    largest = {reference: compare_with(tmp_path, reference).max_abs for reference in (None, 0, 1, 2, 3)}
    assert largest == {None: 10.0, 0: 10.0, 1: 10.0, 2: 7.0, 3: 10.0}


def test_without_a_majority_the_reference_is_the_base(tmp_path: Path) -> None:
    """Without a majority, max_abs is the largest distance between two ranks, or from the reference to another rank."""
    write_ranks(tmp_path, [0], [3], [4])
    assert (compare_with(tmp_path, None).max_abs, compare_with(tmp_path, None).minority) == (4.0, ())
    assert (compare_with(tmp_path, 1).max_abs, compare_with(tmp_path, 1).minority) == (3.0, (0, 2))


def test_the_verdict_does_not_depend_on_the_reference(tmp_path: Path) -> None:
    """If a tolerance accepts each rank against one rank, but not all pairs, the tensor differs for every reference."""
    write_ranks(tmp_path, [0], [1], [2])
    options = {"rtol": 0.0, "atol": 1.0}
    statuses = {compare_with(tmp_path, reference, **options).status for reference in (None, 0, 1, 2)}
    assert statuses == {"different"}


def test_findings_list_ranks_that_differ_from_the_reference(tmp_path: Path) -> None:
    """The odd rank is the suspect; if it is the reference, the other ranks are suspects, and a note explains this."""
    states = network(), network(), changed(network(), "fc.bias")
    for reference, ranks in ((None, (2,)), (0, (2,)), (2, (0, 1))):
        (group,) = compare_ranks(tmp_path, *states, reference=reference).groups
        assert group.findings[0].ranks == ranks
        assert (Note.REFERENCE(rank=reference) in group.notes) == (reference is not None)


@pytest.mark.parametrize(("reference", "minority"), [(0, (1, 2)), (1, (0,)), (2, (0,))])
def test_missing_tensors(tmp_path: Path, reference: int, minority: tuple[int, ...]) -> None:
    """If the reference has a tensor, ranks without the tensor are odd; if the reference lacks it, ranks with it are."""
    state = {"w": np.ones(2, np.float32)}
    report = compare_ranks(tmp_path, state | {"extra": np.ones(1, np.float32)}, state, state, reference=reference)
    assert report.groups[0].tensors[0].minority == minority


def test_different_shapes(tmp_path: Path) -> None:
    """If the reference has another shape than the majority, the majority is odd."""
    write_ranks(tmp_path, [0], [0], [0, 0])
    assert (compare_with(tmp_path, None).minority, compare_with(tmp_path, 2).minority) == ((2,), (0, 1))


def test_a_path_selects_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference can be a rank, any path to a file, or a link; a number can be the name of a file."""
    write_ranks(tmp_path, [0], [3], [4])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.pth").symlink_to("rank1.pth")
    (tmp_path / "sub").mkdir()
    ways = ("rank1.pth", "./sub/../rank1.pth", str(tmp_path / "rank1.pth"), "link.pth", "1", 1)
    for way in ways:
        report = syncheck.compare("rank*.pth", options=syncheck.Options(reference=way))
        assert report.groups[0].tensors[0].minority == (0, 2), way
    for name, value in (("5", 0), ("6", 3), ("0", 4)):
        save(tmp_path / "numbers" / name, {"w": np.array([value], np.float32)})
    monkeypatch.chdir(tmp_path / "numbers")
    (group,) = syncheck.compare("5", "6", "0", options=syncheck.Options(reference="6")).groups
    assert [replica.path for replica in group.replicas if replica.rank not in group.tensors[0].minority] == ["6"]


def test_a_folder_is_the_reference_of_every_group(tmp_path: Path) -> None:
    """If the reference is a folder, each group's reference is the file in this folder."""
    for copy in ("a", "b", "c"):
        for part, value in (("x.pth", 0), ("y.pth", 1)):
            save(tmp_path / copy / part, {"w": np.array([value + 2.0 * "abc".index(copy)], np.float32)})
    folders = [tmp_path / copy for copy in "abc"]
    report = syncheck.compare(*folders, options=syncheck.Options(reference=str(tmp_path / "b")))
    assert len(report.groups) == 2
    for group in report.groups:
        outlier = [replica.path for replica in group.replicas if replica.rank in group.tensors[0].minority]
        assert len(outlier) == 2
        assert not find_texts(outlier, "/b/")


def test_a_rank_is_the_reference_of_each_group_with_this_rank(tmp_path: Path) -> None:
    """With runs of two and three ranks, reference rank 2 applies to the larger run only, without an error."""
    write_ranks(tmp_path, [0], [1], name="small_rank{}.pth")
    write_ranks(tmp_path, [0], [0], [1], name="wide_rank{}.pth")
    report = syncheck.compare(tmp_path, options=syncheck.Options(reference=2))
    noted = {group.name for group in report.groups if Note.REFERENCE(rank=2) in group.notes}
    assert noted == {"wide"}
    minorities = {group.name: group.tensors[0].minority for group in report.groups}
    assert minorities == {"small": (), "wide": (0, 1)}


@pytest.mark.parametrize("reference", [7, "7", "no/such.pth", "-1", ".", "a\0b", "1" * 5000])
def test_an_unknown_reference_lists_ranks_and_paths(
    tmp_path: Path, reference: str | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reference that no replica has is an error with ranks and paths, even if the system or int() refuses it."""
    write_ranks(tmp_path, [0], [1])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError) as caught:
        syncheck.compare("rank*.pth", options=syncheck.Options(reference=reference))
    assert "no replica has this rank or path; there are ranks 0, 1: rank0.pth, rank1.pth" in str(caught.value)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (1, "there is only rank 0: rank0.pth"),
        (2, "there are ranks 0, 1: rank0.pth, rank1.pth"),
        (9, "there are 9 ranks (0, 1, 2, 3, ...): rank0.pth, rank1.pth"),
    ],
)
def test_grammar_of_an_unknown_reference(
    tmp_path: Path, ranks: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence that lists the ranks fits one rank, several ranks, and too many ranks to list."""
    write_ranks(tmp_path, *([0] for _ in range(ranks)))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError) as caught:
        syncheck.compare("rank*.pth", options=syncheck.Options(reference=70))
    assert f"no replica has this rank or path; {expected}" in str(caught.value)


def test_an_unreadable_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error reports that the reference cannot be read, not that the file is missing."""
    write_ranks(tmp_path, [0], [1])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rank2.pth").write_bytes(b"")
    with pytest.raises(OptionError, match=r"reference='rank2\.pth': it cannot be read: .*empty"):
        syncheck.compare("rank*.pth", options=syncheck.Options(reference="rank2.pth"))


def test_objects_in_memory(tmp_path: Path) -> None:
    """Objects and files given to `compare` have their positions as ranks; any other rank is an error."""
    states = [{"w": np.full(1, value, np.float32)} for value in (0, 3)]
    (file,) = write_ranks(tmp_path, [4])
    (group,) = compare(*states, file, reference=1).groups
    assert (group.tensors[0].max_abs, group.tensors[0].minority) == (3.0, (0, 2))
    with pytest.raises(syncheck.UsageError, match="reference=3: no replica has this rank"):
        compare(*states, file, reference=3)
