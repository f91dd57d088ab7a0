"""Fingerprints are compared with each other and with checkpoints."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import changed, network, save_pth, save_safetensors
from support.listings import list_codes, list_fields
from support.states import copy_values

import syncheck
from syncheck.api import Options, compare
from syncheck.diagnose import syn203_bn_count_mismatch
from syncheck.diagnose.statements import Common
from syncheck.messages import Detail, Note
from syncheck.readers.fingerprints import fingerprint, write
from syncheck.report import html, json_document, markdown, plain, text

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.records import Report, TensorDiff

BN = ("running_mean", "running_var")


def replicas(folder: Path, states: list[Any], fingerprints: set[int] | None = None) -> list[str]:
    """Write one replica per state. fingerprints: ranks to write as fingerprints only; by default, all ranks."""
    paths = []
    for rank, state in enumerate(states):
        path = save_pth(folder / f"run_rank{rank}.pth", state)
        if fingerprints is None or rank in fingerprints:
            created = folder / f"run_rank{rank}.fingerprint.json"
            write(str(created), fingerprint(syncheck.read(str(path))))
            path.unlink()
            path = created
        paths.append(str(path))
    return paths


def only(report: Report) -> TensorDiff:
    """Return the only differing tensor of the only group."""
    (group,) = report.groups
    (diff,) = group.tensors
    return diff


@pytest.mark.parametrize("fingerprints", [{0, 1, 2}, {0}, {1, 2}, set()], ids=str)
def test_fingerprints_replace_checkpoints(tmp_path: Path, fingerprints: set[int]) -> None:
    """Fingerprints, checkpoints and mixtures of both give equal verdicts, clusters and odd ranks."""
    equal_copy = replicas(tmp_path / "same", [network()] * 3, fingerprints)
    assert compare(*equal_copy).verdict == "in_sync"
    distance = compare(
        *replicas(tmp_path / "apart", [network(), changed(network(), "fc.bias"), network()], fingerprints)
    )
    diff = only(distance)
    assert distance.verdict == "out_of_sync"
    assert (diff.name, diff.status, diff.clusters, diff.minority) == ("fc.bias", "different", ((0, 2), (1,)), (1,))
    assert distance.groups[0].counts.identical == 13
    assert distance.groups[0].findings[0].ranks == (1,)


def test_one_flipped_bit_is_found(tmp_path: Path) -> None:
    """One flipped bit in any block of a tensor is found, and no other tensor is reported."""
    state = {"big": np.zeros(600_000, np.float32), "small": np.ones(3, np.float32)}
    for position in (0, 262_144, 599_999):
        flipped = copy_values(state)
        flipped["big"].view(np.uint32)[position] ^= 1
        diff = only(compare(*replicas(tmp_path / str(position), [state, flipped], {0})))
        assert (diff.name, diff.status) == ("big", "different")


def test_the_format_of_the_checkpoint_does_not_matter(tmp_path: Path) -> None:
    """A fingerprint of a torch file equals a safetensors file with equal contents."""
    paths = replicas(tmp_path, [network()])
    second = save_safetensors(tmp_path / "run_rank1.safetensors", network())
    report = compare(paths[0], str(second))
    assert (report.verdict, report.counts.identical) == ("in_sync", 14)


def test_unknown_numbers_are_none(tmp_path: Path) -> None:
    """Unknown counts and differences are None, not 0; the moments give a lower bound of the difference."""
    state = network()
    report = compare(*replicas(tmp_path, [state, changed(state, "fc.weight", by=0.5)]))
    diff = only(report)
    assert (diff.mismatched, diff.max_abs, diff.max_rel, diff.max_ulp, diff.index, diff.extent) == (None,) * 6
    assert diff.reason == "digest"
    assert diff.detail is not None
    assert diff.detail.code is Detail.MOMENTS_APART
    assert diff.detail.parameters["least"] == pytest.approx(0.5)
    assert f"max {state['fc.weight'].max():.4g} | {state['fc.weight'].max() + 0.5:.4g}" in str(diff.detail)
    assert Note.FINGERPRINT() in report.groups[0].notes
    assert str(Common.SIZE_UNKNOWN()) in report.groups[0].findings[0].evidence


def test_equal_moments_are_reported(tmp_path: Path) -> None:
    """Permuted values differ by digest although all moments are equal, and the report gives no size."""
    report = compare(*replicas(tmp_path, [{"w": np.array([1.0, 2.0])}, {"w": np.array([2.0, 1.0])}]))
    assert only(report).detail == Detail.MOMENTS_AGREE()


def test_a_nan_on_one_rank_is_counted(tmp_path: Path) -> None:
    """The count of nonfinite elements on each rank is known, and the report gives no lower bound of the difference."""
    state = {"w": np.ones(4)}
    sick = {"w": np.array([1.0, np.nan, np.inf, 1.0])}
    diff = only(compare(*replicas(tmp_path, [state, state, sick], {0, 2})))
    assert dict(diff.nonfinite) == {0: 0, 1: 0, 2: 2}
    assert diff.detail == Detail.MOMENTS(differing="nonfinite 0 | 2")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (([np.int64(12), np.int64(9)]), (1, 3, 0.25)),
        (([np.float32(2.0), np.float32(4.0), np.float32(2.0)]), (1, 2.0, 0.5)),
        (([np.int64(2**60), np.int64(2**60 + 1)]), (None, None, None)),
        (([np.float64(0.0), np.float64(-0.0)]), (None, None, None)),
        (([np.float64(1.0), np.float64(np.nan)]), (None, None, None)),
    ],
    ids=str,
)
def test_scalars_have_exact_differences(tmp_path: Path, values: list[Any], expected: tuple[Any, ...]) -> None:
    """The moments of a scalar give its exact difference, or none if float64 cannot distinguish finite values."""
    diff = only(compare(*replicas(tmp_path, [{"w": np.ones(2), "n": np.array(value)} for value in values])))
    assert (diff.mismatched, diff.max_abs, diff.max_rel) == expected
    assert diff.status == "different"


def test_a_batch_count_is_known(tmp_path: Path) -> None:
    """SYN203 reports the number of batches from fingerprints too."""
    distance = {name: np.array(14) if name.endswith("_tracked") else array for name, array in network().items()}
    (finding,) = compare(*replicas(tmp_path, [network(), distance])).groups[0].findings
    assert finding.code == "SYN203"
    assert finding.facts[0].parameters["size"] == syn203_bn_count_mismatch.Text.BY_UP_TO(batches=2)


def test_shapes_and_missing_tensors_are_reported(tmp_path: Path) -> None:
    """Different shapes and missing tensors are reported as for checkpoints, even if the bytes are equal."""
    a = {"s": np.zeros(6, np.float32), "d": np.zeros(2, np.float32), "m": np.zeros(1)}
    b = {"s": np.zeros((2, 3), np.float32), "d": np.zeros(1, np.float64)}
    report = compare(*replicas(tmp_path, [a, b | {"w": np.zeros(1)}], {0}))
    assert dict(list_fields(report.groups[0].tensors, "name", "reason")) == {
        "s": "shape",
        "d": "shape",
        "m": "missing",
        "w": "missing",
    }
    assert report.verdict == "out_of_sync"


def test_values_are_compared(tmp_path: Path) -> None:
    """A different epoch is found in fingerprints; a value dropped from fingerprints is no difference."""
    state = {"w": np.ones(2), "epoch": 1, "comment": "only in the file"}
    assert compare(*replicas(tmp_path / "a", [state, state], {0})).verdict == "in_sync"
    report = compare(*replicas(tmp_path / "b", [state, state | {"epoch": 2}]))
    assert list_codes(report.groups[0].findings) == ["SYN106"]


def test_other_algorithms_are_never_compared(tmp_path: Path) -> None:
    """Digests of two algorithms are never compared, and the exit code is 2."""
    paths = replicas(tmp_path, [network(), network()])
    document = json.loads((tmp_path / "run_rank1.fingerprint.json").read_text())
    (tmp_path / "run_rank1.fingerprint.json").write_text(json.dumps(document | {"algorithm": "xxh3-128"}))
    report = compare(*paths)
    assert (report.exit_code, report.counts.not_compared) == (2, 14)
    diff = report.groups[0].tensors[0]
    assert (diff.status, diff.reason) == ("not_compared", "digest")
    assert diff.detail is not None
    assert diff.detail == Detail.OTHER_ALGORITHMS(algorithms="blake2b-128, xxh3-128")


def test_digests_of_an_unknown_algorithm_are_compared(tmp_path: Path) -> None:
    """Digests of an unknown algorithm are compared with each other, but not with a checkpoint."""
    paths = replicas(tmp_path, [network(), changed(network(), "fc.bias")])
    for path in paths:
        with open(path, encoding="ascii") as file:
            document = json.load(file)
        write(path, json.dumps(document | {"algorithm": "xxh3-128"}))
    assert only(compare(*paths)).clusters == ((0,), (1,))
    save_pth(tmp_path / "run_rank2.pth", network())
    assert compare(paths[0], str(tmp_path / "run_rank2.pth")).exit_code == 2


def test_tolerances_do_not_apply_to_digests(tmp_path: Path) -> None:
    """With a tolerance, unequal digests still count as different, and the report has a note."""
    close_case = changed(network(), "fc.bias", by=1e-7)
    paths = replicas(tmp_path, [network(), close_case])
    report = compare(*paths, options=Options(rtol=0.1, atol=0.1))
    assert report.verdict == "out_of_sync"
    assert Note.FINGERPRINT() in report.groups[0].notes


def test_reports_omit_unknown_numbers(tmp_path: Path) -> None:
    """Text, HTML, markdown and JSON report a difference by digest without unknown numbers."""
    state = changed(network(), *BN)
    report = compare(*replicas(tmp_path, [network(), state, changed(state, "fc.weight")], {0, 1}))
    for drawn in (
        plain.render(text.draw_comparison(report, 0)),
        plain.render(text.draw_overview(report, 0)),
        html.render(report, "1"),
        markdown.render(report),
    ):
        assert "by digest: " in drawn
        assert "0 of " not in drawn
        assert "None" not in drawn.partition("<script")[0]
    tensors = json.loads(json_document.render(report, "1"))["groups"][0]["tensors"]
    assert set(list_fields(tensors, "mismatched")) == {None}
    assert report.drift == ()


def test_disjoint_fingerprints_are_out_of_sync(tmp_path: Path) -> None:
    """Fingerprints without a common tensor are out of sync, like checkpoints."""
    report = compare(*replicas(tmp_path, [{"a": np.ones(2)}, {"b": np.ones(2)}]))
    assert report.verdict == "out_of_sync"
    assert set(list_fields(report.groups[0].tensors, "reason")) == {"missing"}
