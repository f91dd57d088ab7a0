"""Models that real libraries converted (fixtures/conversion_pairs.py): clean, and damaged as in the trials."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.listings import list_codes

import syncheck
from syncheck.cli import main
from syncheck.testing import assert_same_model

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

if TYPE_CHECKING:
    from types import ModuleType

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
PAIRS = sorted(path.name for path in (FIXTURES / "conversions").iterdir())


@pytest.fixture(scope="module")
def trials() -> Any:
    """Return the module with the faults of the trials."""
    sys.path.insert(0, str(FIXTURES))
    import conversion_faults

    yield conversion_faults
    sys.path.remove(str(FIXTURES))


def folders(trials: ModuleType, pair: str) -> list[str]:
    """Return the arguments for both models of a pair."""
    return [trials.source_of(pair, FIXTURES / "conversions" / pair / side) for side in "ab"]


@pytest.mark.parametrize("pair", PAIRS)
def test_clean_conversions(trials: ModuleType, pair: str) -> None:
    """Every tensor agrees, in both directions; without a map, except for layers of one name in two orientations."""
    a, b = folders(trials, pair)
    options = syncheck.DiffOptions(map=trials.MAPS.get(pair))
    for first, second in ((a, b), (b, a)):
        report = syncheck.diff(first, second, options=options)
        assert (report.exit_code, report.counts.not_compared) == (0, 0)
        assert report.counts.compared > 20


@pytest.mark.parametrize("fault", ["gate and up swapped", "rotary order", "scaled", "transposed", "not loaded"])
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if not pair.startswith("peft")])
def test_damaged_conversions(trials: ModuleType, tmp_path: Path, pair: str, fault: str) -> None:
    """Each fault leads to its finding alone."""
    damage, code = trials.FAULTS[fault]
    try:
        trials.edit(FIXTURES / "conversions" / pair / "b", tmp_path / "b", damage)
    except trials.Skip:
        pytest.skip("the model has no such tensor")
    assert trials.compare(pair, folders(trials, pair)[0], trials.source_of(pair, tmp_path / "b")) == (code,)


def test_exchanged_files_of_ranks(trials: ModuleType, tmp_path: Path) -> None:
    """The files of two tensor-parallel ranks are exchanged: both shards of each divided tensor are wrong."""
    pair = "llama_megatron_tp2_pp2"
    a, b = folders(trials, pair)
    for path in Path(b).rglob("*.pt"):
        name = path.parent.name
        target = tmp_path / "iter_0000001" / f"mp_rank_{1 - int(name[8:10]):02d}{name[10:]}" / path.name
        target.parent.mkdir(parents=True)
        target.write_bytes(path.read_bytes())
    report = syncheck.diff(a, tmp_path / "iter_0000001")
    assert set(list_codes(report.groups[-1].findings)) == {"SYN313"}


def test_a_regression_test_of_a_conversion(trials: ModuleType, tmp_path: Path) -> None:
    """The test that a framework engineer would add: it passes, and fails with the cause if the conversion breaks."""
    hf_dir, megatron_dir = folders(trials, "llama_megatron_tp2_pp2")
    assert_same_model(hf_dir, megatron_dir, map="llama")
    damage, code = trials.FAULTS["gate and up swapped"]
    trials.edit(Path(megatron_dir).parent, tmp_path / "b", damage)
    with pytest.raises(syncheck.OutOfSync, match=code):
        assert_same_model(hf_dir, tmp_path / "b" / "iter_0000001", map="llama")


def test_libraries_with_one_table_are_compared_with_each_other(trials: ModuleType) -> None:
    """Megatron-Core against torchtitan: both have the weights of one seed."""
    megatron = folders(trials, "llama_megatron_tp2_pp2")[1]
    titan = folders(trials, "llama_torchtitan")[1]
    assert main(["diff", "-q", megatron, titan]) == 0
