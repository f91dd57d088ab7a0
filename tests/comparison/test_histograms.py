"""Histograms of differences: agreement with numpy, and the tensors and outputs with histograms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import ml_dtypes
import numpy as np
import pytest
from support.checkpoints import Done, changed, network, save, save_safetensors
from support.listings import join_fields, list_fields

import syncheck
from syncheck.comparison import histograms
from syncheck.records import DECADES, Histogram

if TYPE_CHECKING:
    from collections.abc import Callable

SCHEMA = json.loads((Path(syncheck.__file__).parent / "report" / "schema.json").read_text())
EDGES = [0.0, *(float(f"1e{power}") for power in (*DECADES, DECADES.stop)), np.inf]


def compare_histograms(
    folder: Path, *ranks: dict[str, np.ndarray[Any, Any]], **options: Any
) -> dict[str, Histogram | None]:
    """Write one file per rank, compare the files, and return the histograms by tensor."""
    for rank, state in enumerate(ranks):
        save_safetensors(folder / f"rank{rank}.safetensors", state)
    report = syncheck.compare(folder, options=syncheck.api.Options(**options), histograms=True)
    return dict(list_fields(report.groups[0].tensors, "name", "histogram"))


def make_replicas(seed: int, size: int = 4000) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return two replicas with zero, tiny, medium, huge and non-finite differences."""
    random = np.random.default_rng(seed)
    differences = 10.0 ** random.uniform(-15, 9, size) * random.choice([-1, 0, 1], size)
    a = np.where(random.random(size) < 0.5, 0.0, random.normal(size=size))
    b = a + differences
    a[:6] = [np.nan, np.nan, np.inf, np.inf, 1.0, 0.0]
    b[:6] = [np.nan, 1.0, np.inf, -np.inf, np.nan, -0.0]
    return a, b


def expected(differences: np.ndarray[Any, Any]) -> tuple[int, ...]:
    """Return numpy's count of the differences in each bin."""
    return tuple(map(int, np.histogram(differences, EDGES)[0]))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("seed", range(3))
def test_two_replicas_against_numpy(tmp_path: Path, dtype: str, seed: int) -> None:
    """Each bin has numpy's count; equal NaNs, equal infinities and zeros of different sign are equal."""
    with np.errstate(over="ignore"):
        a, b = (array.astype(getattr(ml_dtypes, dtype, dtype)) for array in make_replicas(seed))
    result = compare_histograms(tmp_path, {"w": a}, {"w": b})["w"]
    with np.errstate(invalid="ignore"):
        differences = np.abs(a.astype(np.float64) - b.astype(np.float64))
    is_same = (a == b) | (np.isnan(a) & np.isnan(b))
    finite = np.isfinite(a) & np.isfinite(b) & ~is_same
    assert result == Histogram(int(is_same.sum()), expected(differences[finite]), int((~is_same & ~finite).sum()))
    assert result.elements == a.size
    assert min(np.count_nonzero(result.counts), result.equal, result.not_finite) > 0


def test_differences_from_the_majority(tmp_path: Path) -> None:
    """An element counts with its largest difference from the majority or the reference, else between any two ranks."""
    a = np.zeros(3, np.float32)
    b, c = np.float32([0.0, 0.5, 5.0]), np.float32([0.0, -50.0, -0.005])
    ranks = [{"w": array} for array in (a, b, a, a, c)]
    result = compare_histograms(tmp_path, *ranks)["w"]
    assert result == Histogram(1, expected(np.array([50.0, 5.0])), 0)
    assert compare_histograms(tmp_path, *ranks, reference=4)["w"] == Histogram(1, expected(np.array([50.5, 5.005])), 0)
    ranks = [{"w": np.float32([1.0, value])} for value in (-0.5, 0.0, 0.75)]
    assert compare_histograms(tmp_path / "three", *ranks)["w"] == Histogram(1, expected(np.array([1.25])), 0)


def test_large_tensor_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large tensor is sampled in blocks, including the first block and the block with the largest difference."""
    monkeypatch.setattr(histograms, "ELEMENTS", 8 * 65536)
    a = np.zeros(30 * 65536 + 7, np.float32)
    b = a.copy()
    b[0], b[18 * 65536 + 9], b[19 * 65536] = 1e-3, 5.0, 1.0
    result = compare_histograms(tmp_path, {"w": a}, {"w": b})["w"]
    assert (result.elements, result.elements - result.equal) == (8 * 65536, 2)
    assert result.counts == expected(np.array([1e-3, 5.0]).astype(np.float32).astype(np.float64))


def test_only_the_largest_differences_of_floats(tmp_path: Path) -> None:
    """Only the 40 floating-point tensors with the largest differences, NaNs first, have histograms."""
    a = {f"w{i}": np.zeros(2, np.float32) for i in range(50)} | {"n": np.zeros(2, np.int64), "x": np.zeros(2)}
    b = {f"w{i}": np.float32([0.0, 2.0**i]) for i in range(50)} | {"n": np.ones(2, np.int64), "x": np.zeros(2)}
    b["w0"] = np.float32([0.0, np.nan])
    result = compare_histograms(tmp_path, a, b)
    assert {name for name, histogram in result.items() if histogram} == {"w0", *(f"w{i}" for i in range(11, 50))}
    assert result["w0"] == Histogram(1, (0,) * 20, 1)


def test_no_histograms_of_checksums(tmp_path: Path) -> None:
    """Tensors compared by stored checksum have no histograms."""
    for rank in range(2):
        save(tmp_path / f"rank{rank}.pth", {"w": np.full(2, float(rank))})
    report = syncheck.compare(tmp_path, options=syncheck.api.Options(quick=True), histograms=True)
    assert list_fields(report.groups[0].tensors, "status", "histogram") == [("different", None)]


def test_histograms_are_computed_for_pages(cli: Callable[..., Done], tmp_path: Path) -> None:
    """The JSON document has valid histograms only if a page is written too, and only for a run's last step."""
    for step in (1, 2):
        for rank in range(2):
            state = changed(network(), "fc.weight", by=0.5 * rank)
            save(tmp_path / f"ckpts/history/ddp/step_{step}/rank_{rank}.pth", state)
    assert cli("compare", "ckpts", "-o", "a.json", "-q").code == 1
    assert cli("compare", "ckpts", "-o", "b.json", "-o", "b.html", "-q").code == 1
    result = []
    for name in ("a.json", "b.json"):
        document = json.loads((tmp_path / name).read_text())
        jsonschema.validate(document, SCHEMA)
        result.append(list_fields(join_fields(document["groups"], "tensors"), "histogram"))
    numel = network()["fc.weight"].size
    counts = [numel if power == -1 else 0 for power in (-13, *DECADES, DECADES.stop)]
    assert result == [[None, None], [None, {"equal": 0, "counts": counts, "not_finite": 0}]]
