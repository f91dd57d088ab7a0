"""`reference`: which replica differences are described against, what that changes and what it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import changed, compare_ranks, network, save

import syncheck
from syncheck.errors import OptionError
from syncheck.messages import Note
from syncheck.testing import compare

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.records import TensorDiff


def written(folder: Path, *values: Any, name: str = "rank{}.pth") -> list[Path]:
    """Write one tensor `w` for each rank."""
    folder.mkdir(parents=True, exist_ok=True)
    return [save(folder / name.format(i), {"w": np.array(value, np.float32)}) for i, value in enumerate(values)]


def against(folder: Path, reference: str | int | None, **options: Any) -> TensorDiff:
    """Compare what is in a folder with a reference, and return the only difference."""
    report = syncheck.compare(folder, options=syncheck.Options(reference=reference, **options))
    (diff,) = report.groups[0].tensors
    return diff


def test_numbers_and_minority_are_those_of_the_reference(tmp_path: Path) -> None:
    """Of ranks 0, 0, 1 and 10 each is taken in turn: gaps and odd ranks follow, clusters and verdict stay."""
    written(tmp_path, [0, 0], [0, 0], [1, 0], [0, 10])
    expected = {
        None: (10.0, (1,), (2, 3)),
        0: (10.0, (1,), (2, 3)),
        2: (10.0, (1,), (0, 1, 3)),
        3: (10.0, (1,), (0, 1, 2)),
    }
    for reference, told in expected.items():
        diff = against(tmp_path, reference)
        assert (diff.max_abs, diff.index, diff.minority) == told
        assert (diff.clusters, diff.status, diff.mismatched) == (((0, 1), (2,), (3,)), "different", 2)
    written(tmp_path, [0], [0], [3], [10])
    gaps = {reference: against(tmp_path, reference).max_abs for reference in (None, 0, 1, 2, 3)}
    assert gaps == {None: 10.0, 0: 10.0, 1: 10.0, 2: 7.0, 3: 10.0}


def test_without_a_majority_the_reference_is_the_base(tmp_path: Path) -> None:
    """Three ranks that all differ: the farthest two give the gap, and with a reference its own distance does."""
    written(tmp_path, [0], [3], [4])
    assert (against(tmp_path, None).max_abs, against(tmp_path, None).minority) == (4.0, ())
    assert (against(tmp_path, 1).max_abs, against(tmp_path, 1).minority) == (3.0, (0, 2))


def test_the_verdict_is_the_same_whatever_the_reference(tmp_path: Path) -> None:
    """A tolerance that excuses each rank against one of them, but not the others among themselves, is no pass."""
    written(tmp_path, [0], [1], [2])
    options = {"rtol": 0.0, "atol": 1.0}
    statuses = {against(tmp_path, reference, **options).status for reference in (None, 0, 1, 2)}
    assert statuses == {"different"}


def test_findings_name_the_ranks_that_are_not_the_reference(tmp_path: Path) -> None:
    """The odd rank is suspected by default; described against it, the others are, and the note says why."""
    states = network(), network(), changed(network(), "fc.bias")
    for reference, ranks in ((None, (2,)), (0, (2,)), (2, (0, 1))):
        (group,) = compare_ranks(tmp_path, *states, reference=reference).groups
        assert group.findings[0].ranks == ranks
        assert (Note.REFERENCE(rank=reference) in group.notes) == (reference is not None)


@pytest.mark.parametrize(("reference", "minority"), [(0, (1, 2)), (1, (0,)), (2, (0,))])
def test_missing_tensors(tmp_path: Path, reference: int, minority: tuple[int, ...]) -> None:
    """Where the reference has a tensor, those without it are odd; where it lacks it, those that have it are."""
    state = {"w": np.ones(2, np.float32)}
    report = compare_ranks(tmp_path, state | {"extra": np.ones(1, np.float32)}, state, state, reference=reference)
    assert report.groups[0].tensors[0].minority == minority


def test_shapes_that_differ(tmp_path: Path) -> None:
    """A shape that most have is odd where the reference has another one."""
    written(tmp_path, [0], [0], [0, 0])
    assert (against(tmp_path, None).minority, against(tmp_path, 2).minority) == ((2,), (0, 1))


def test_a_path_names_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is named as it was given or in any other way that leads to it; a file called like a number is a file."""
    written(tmp_path, [0], [3], [4])
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
    # By their order "0" is the first, and as a rank 0 would be too.
    (group,) = syncheck.compare("5", "6", "0", options=syncheck.Options(reference="6")).groups
    assert [replica.path for replica in group.replicas if replica.rank not in group.tensors[0].minority] == ["6"]


def test_a_folder_is_the_reference_of_every_group(tmp_path: Path) -> None:
    """Of copies in several folders, one folder is the reference: in each group the file that lies in it."""
    for copy in ("a", "b", "c"):
        for part, value in (("x.pth", 0), ("y.pth", 1)):
            save(tmp_path / copy / part, {"w": np.array([value + 2.0 * "abc".index(copy)], np.float32)})
    folders = [tmp_path / copy for copy in "abc"]
    report = syncheck.compare(*folders, options=syncheck.Options(reference=str(tmp_path / "b")))
    assert len(report.groups) == 2
    for group in report.groups:
        odd = [replica.path for replica in group.replicas if replica.rank in group.tensors[0].minority]
        assert len(odd) == 2
        assert not any("/b/" in path for path in odd)


def test_a_rank_counts_in_every_group_that_has_it(tmp_path: Path) -> None:
    """Runs of two and of three ranks: rank 2 is the reference of the one that has it, and no error for the other."""
    written(tmp_path, [0], [1], name="small_rank{}.pth")
    written(tmp_path, [0], [0], [1], name="wide_rank{}.pth")
    report = syncheck.compare(tmp_path, options=syncheck.Options(reference=2))
    noted = {group.name for group in report.groups if Note.REFERENCE(rank=2) in group.notes}
    assert noted == {"wide"}
    minorities = {group.name: group.tensors[0].minority for group in report.groups}
    assert minorities == {"small": (), "wide": (0, 1)}


@pytest.mark.parametrize("reference", [7, "7", "no/such.pth", "-1", ".", "a\0b", "1" * 5000])
def test_an_unknown_reference_lists_what_there_is(
    tmp_path: Path, reference: str | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reference that no replica has, even one refused by the system or by int(), is an error with ranks and paths."""
    written(tmp_path, [0], [1])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError) as caught:
        syncheck.compare("rank*.pth", options=syncheck.Options(reference=reference))
    assert "no replica has this rank or path; there are ranks 0, 1: rank0.pth, rank1.pth" in str(caught.value)


def test_a_reference_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says that the file is broken, and not that there is none."""
    written(tmp_path, [0], [1])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rank2.pth").write_bytes(b"")
    with pytest.raises(OptionError, match=r"reference='rank2\.pth': it cannot be read: .*empty"):
        syncheck.compare("rank*.pth", options=syncheck.Options(reference="rank2.pth"))


def test_things_in_memory(tmp_path: Path) -> None:
    """Things have their positions as ranks, files beside them too; what is none of them is an error."""
    things = [{"w": np.full(1, value, np.float32)} for value in (0, 3)]
    (file,) = written(tmp_path, [4])
    (group,) = compare(*things, file, reference=1).groups
    assert (group.tensors[0].max_abs, group.tensors[0].minority) == (3.0, (0, 2))
    with pytest.raises(syncheck.UsageError, match="reference=3: no replica has this rank"):
        compare(*things, file, reference=3)
