"""`--quick`: comparison by the checksums stored by torch.save, without reading tensors or overstating the result."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest
from support.checkpoints import changed, network, save_pth, save_safetensors
from support.listings import list_fields, list_names

import syncheck
import syncheck as library
from syncheck.api import Options, compare
from syncheck.diagnose import syn203_bn_count_mismatch
from syncheck.messages import Detail, Note, Undecided
from syncheck.records import Reason
from syncheck.report import failure, html, json_document, markdown, words
from syncheck.report.undecided import undecided_reason
from syncheck.tensors.blocks import Files
from syncheck.tensors.digests import compare_checksums

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.checkpoints import Done

    from syncheck.records import Report
    from syncheck.snapshots import Tensor

    Run = Callable[..., Done]

QUICK = Options(quick=True)


def save_ranks(folder: Path, *states: dict[str, Any]) -> list[str]:
    """Write one checkpoint per state, and return the paths."""
    return [str(save_pth(folder / f"run_rank{rank}.pth", state)) for rank, state in enumerate(states)]


def compare_quick(folder: Path, *states: dict[str, Any]) -> Report:
    """Compare states by their stored checksums."""
    return compare(*save_ranks(folder, *states), options=QUICK)


def test_no_tensor_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--quick` reads no tensor, whether replicas are equal or different."""
    monkeypatch.setattr(Files, "read", lambda *_, **__: pytest.fail("a tensor was read"))
    assert compare_quick(tmp_path / "a", network(), network()).verdict == "in_sync"
    assert compare_quick(tmp_path / "b", network(), changed(network(), "fc.bias")).verdict == "out_of_sync"


def test_damage_after_saving(tmp_path: Path) -> None:
    """If bytes change after saving, stored checksums are still equal, and only the full comparison finds the damage."""
    paths = save_ranks(tmp_path, network(), network())
    offset = syncheck.read(paths[1]).tensors["fc.weight"].offset
    with open(paths[1], "r+b") as file:
        file.seek(offset)
        file.write(b"\xff\xff\x7f\x7f")
    by_checksums, by_bytes = compare(*paths, options=QUICK), compare(*paths)
    assert words.verdict_line(by_checksums) == "IN SYNC by stored checksum"
    assert by_checksums.counts.identical == 14
    assert words.verdict_line(by_bytes) == "OUT OF SYNC"
    assert list_names(by_bytes.groups[0].tensors) == ["fc.weight"]


def test_findings_equal_the_full_comparison(tmp_path: Path) -> None:
    """`--quick` reports the tensors, clusters and findings of the full comparison, without sizes of differences."""
    states = (network(), changed(network(), "running_mean", "running_var"), network())
    paths = save_ranks(tmp_path, *states)
    fast, slow = compare(*paths, options=QUICK), compare(*paths)
    for name in ("name", "status", "clusters", "minority", "replica_groups"):
        assert [getattr(d, name) for d in fast.groups[0].tensors] == [getattr(d, name) for d in slow.groups[0].tensors]
    assert list_fields(fast.groups[0].findings, "code", "ranks") == list_fields(
        slow.groups[0].findings, "code", "ranks"
    )
    assert fast.groups[0].counts == slow.groups[0].counts
    assert set(list_fields(fast.groups[0].tensors, "mismatched", "max_abs", "extent", "reason")) == {
        (None, None, None, Reason.CHECKSUM)
    }


def test_different_count_has_no_known_size(tmp_path: Path) -> None:
    """SYN203 from checksums reports an unknown number of batches instead of 0."""
    different = {name: np.array(14) if name.endswith("_tracked") else array for name, array in network().items()}
    (finding,) = compare_quick(tmp_path, network(), different).groups[0].findings
    assert finding.code == "SYN203"
    text = syn203_bn_count_mismatch.Text
    assert finding.facts[0] == text.ALL_RANKS(size=text.BY_UNKNOWN_NUMBER(), layers=2)


def test_missing_checksums_are_2(tmp_path: Path) -> None:
    """Without stored checksums, as in safetensors files, the exit code is 2, and the verdict names `quick`."""
    paths = [str(save_safetensors(tmp_path / f"run_rank{rank}.safetensors", network())) for rank in range(2)]
    report = compare(*paths, options=QUICK)
    assert (report.exit_code, report.counts.not_compared) == (2, 14)
    assert undecided_reason(report) == Undecided.NO_CHECKSUMS(unknown=14, tensors=14)
    assert "without quick" in words.verdict_line(report)
    mixed = compare(save_ranks(tmp_path, network())[0], paths[1], options=QUICK)
    assert mixed.exit_code == 2


def test_checksums_of_0_are_ignored(tmp_path: Path) -> None:
    """Checksums of 0, from files saved without checksums, are not compared."""
    paths = save_ranks(tmp_path, network(), changed(network(), "fc.bias"))
    for path in paths:
        _erase_checksums(path)
    report = compare(*paths, options=QUICK)
    assert (report.exit_code, report.counts.not_compared) == (2, 14)


def test_tensors_without_checksum_are_counted(tmp_path: Path) -> None:
    """A single tensor without a checksum leads to exit code 2, and the reason counts the tensors without checksum."""
    paths = save_ranks(tmp_path, network(), network())
    _erase_checksums(paths[1], "fc.bias")
    report = compare(*paths, options=QUICK)
    assert report.exit_code == 2
    assert undecided_reason(report) == Undecided.NO_CHECKSUMS(unknown=1, tensors=14)
    assert (report.counts.identical, report.counts.not_compared) == (13, 1)
    # An assertion is stricter and fails if a tensor was not compared.
    assert list_names(failure.uncompared_tensors(report)) == ["fc.bias"]


def _erase_checksums(path: str, tensor: str = "") -> None:
    """Set the CRC-32 of all records, or of one tensor's record, to 0 in the directory of the zip file."""
    offset = syncheck.read(path).tensors[tensor].offset if tensor else 0
    with open(path, "rb") as file:
        data = bytearray(file.read())
    done = 0
    with zipfile.ZipFile(path) as archive:
        position = archive.start_dir
        for info in archive.infolist():  # in the order of the directory
            assert data[position + 16 : position + 20] == info.CRC.to_bytes(4, "little")
            if "/data/" in info.filename and (not tensor or 0 < offset - info.header_offset < 100):
                data[position + 16 : position + 20] = bytes(4)
                done += 1
            position += 46 + len(info.filename) + len(info.extra) + len(info.comment)
    assert done == (1 if tensor else 14)
    with open(path, "wb") as file:
        file.write(data)


def test_outputs_report_the_comparison_by_checksum(tmp_path: Path) -> None:
    """JSON document, page and comment report the comparison by checksum, and contain no unknown numbers."""
    report = compare_quick(tmp_path, network(), changed(network(), "fc.bias"))
    document = json.loads(json_document.render(report, "1"))
    schema = Path(library.__file__).parent / "report" / "schema.json"
    jsonschema.validate(document, json.loads(schema.read_text()))
    assert document["quick"] is True
    assert not compare(*save_ranks(tmp_path, network(), network())).quick
    for text in (html.render(report, "1"), markdown.render(report)):
        assert "OUT OF SYNC by stored checksum" in text
        assert str(Detail.CHECKSUMS()) in text
        assert "None" not in text.partition("<script")[0]
    assert Note.QUICK() in report.groups[0].notes


def test_empty_tensors_need_no_checksum(tmp_path: Path) -> None:
    """A tensor without elements is identical, and does not prevent the comparison of other tensors."""
    state = {"w": np.ones(3, np.float32), "empty": np.zeros((0, 4), np.float32)}
    report = compare_quick(tmp_path, state, state)
    assert (report.verdict, report.counts.identical) == ("in_sync", 2)


def test_option_and_project_default(cli: Run, tmp_path: Path) -> None:
    """`--quick` and `quick = true` compare by checksum, also in `report`, and `--no-quick` overrides the default."""
    save_ranks(tmp_path, network(), network())
    done = cli("compare", "--quick", "*.pth")
    assert (done.code, done.lines[-2]) == (0, "IN SYNC by stored checksum")
    assert cli("report", "--quick", "run_rank0.pth", "run_rank1.pth").lines[-2] == "IN SYNC by stored checksum"
    (tmp_path / "pyproject.toml").write_text("[tool.syncheck]\nquick = true\n")
    assert cli("compare", "*.pth").lines[-2] == "IN SYNC by stored checksum"
    assert cli("compare", "--no-quick", "*.pth").lines[-2] == "IN SYNC"


class TestLayouts:
    """The layout of a tensor in its record limits the conclusions from a checksum."""

    @pytest.fixture
    def tensor(self, tmp_path: Path) -> Tensor:
        """Return a 2 x 3 tensor that fills its record."""
        return syncheck.read(save_ranks(tmp_path, {"w": np.arange(6.0).reshape(2, 3)})[0]).tensors["w"]

    def test_equal_records_with_different_layouts(self, tensor: Tensor) -> None:
        """Equal records with different strides, byte orders or lazy operations give an unknown result."""
        transposed = replace(tensor, strides=(1, 2))
        assert compare_checksums([tensor, replace(tensor, path="b")]).clusters == ((0, 1),)
        assert compare_checksums([transposed, transposed]).clusters == ((0, 1),)
        assert compare_checksums([transposed, replace(transposed, crc32=1)]).clusters == ((0,), (1,))
        for second in (transposed, replace(tensor, big_endian=True), replace(tensor, lazy="neg")):
            assert compare_checksums([tensor, second]).clusters == ()

    def test_views_of_equal_and_unequal_records(self, tensor: Tensor) -> None:
        """Views at the same offset of equal records are equal; other offsets or unequal records prove nothing."""
        assert tensor.record is not None
        crc, start, size = tensor.record
        view = replace(tensor, shape=(3,), strides=(1,), crc32=None)
        assert compare_checksums([view, view]).clusters == ((0, 1),)
        moved = replace(view, offset=view.offset + 100, record=(crc, start + 100, size))
        assert compare_checksums([view, moved]).clusters == ((0, 1),)
        for second in (replace(view, offset=view.offset + 8), replace(view, record=(crc + 1, start, size))):
            result = compare_checksums([view, second])
            assert (result.clusters, result.reason, result.detail) == ((), Reason.CHECKSUM, Detail.VIEW())
        assert compare_checksums([view, replace(view, record=None)]).clusters == ()

    def test_overlapping_elements_prove_no_difference(self, tensor: Tensor) -> None:
        """A tensor that skips elements of its record may be equal even if the records differ."""
        overlapping = replace(tensor, shape=(2, 2), strides=(5, 0))
        assert compare_checksums([overlapping, replace(overlapping, crc32=1, record=(1, 0, 48))]).clusters == ()


def test_torch_files(tmp_path: Path) -> None:
    """Whole, transposed, tied and viewed tensors of torch.save files are compared, except views of changed storages."""
    torch = pytest.importorskip("torch")

    def state(change: int | None = None) -> Any:
        base = torch.arange(12.0).reshape(3, 4)
        flat = torch.arange(20.0)
        if change is not None:
            flat[change] = -1
        tied = torch.ones(5)
        return {
            "whole": base,
            "transposed": torch.arange(6.0).reshape(2, 3).T,
            "tied.a": tied,
            "tied.b": tied,
            "view.a": flat[:10],
            "view.b": flat[10:],
            "step": torch.tensor(3),
        }

    for rank in range(2):
        torch.save(state(), tmp_path / f"same_rank{rank}.pth")
        torch.save(state(None if rank == 0 else 12), tmp_path / f"apart_rank{rank}.pth")
    equal_copy = compare(str(tmp_path / "same_rank*.pth"), options=QUICK)
    assert (equal_copy.verdict, equal_copy.counts.identical) == ("in_sync", 7)
    different = compare(str(tmp_path / "apart_rank*.pth"), options=QUICK)
    assert dict(list_fields(different.groups[0].tensors, "name", "status")) == {
        "view.a": "not_compared",
        "view.b": "not_compared",
    }
    assert list_names(compare(str(tmp_path / "apart_rank*.pth")).groups[0].tensors) == ["view.b"]
