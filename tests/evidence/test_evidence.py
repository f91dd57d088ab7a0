"""The second look at what differs, on real files: single elements, runs, norms and directions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import compare_ranks, save_safetensors
from dtensors import save_ranks

import syncheck
from syncheck import readers
from syncheck.evidence import tensors as evidence
from syncheck.fingerprint import fingerprint, write
from syncheck.records import Evidence

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.records import TensorDiff

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

NAN, INF = float("nan"), float("inf")


def apart(folder: Path) -> dict[str, TensorDiff]:
    """Compare the files of a folder, and return what is not identical by name."""
    (group,) = syncheck.compare(folder).groups
    return {diff.name: diff for diff in group.tensors}


def told(folder: Path, name: str = "w") -> Evidence:
    """Return the evidence of one tensor that differs."""
    return apart(folder)[name].evidence or Evidence()


def save(folder: Path, *states: dict[str, Any]) -> list[Path]:
    """Write a file a rank with torch.save."""
    paths = [folder / f"m_rank{rank}.pth" for rank in range(len(states))]
    for path, state in zip(paths, states, strict=True):
        torch.save(state, path)
    return paths


def weights(count: int = 24) -> Any:
    """Return numbers of which none is zero."""
    return torch.arange(1.0, count + 1)


def singles(folder: Path, *tensors: Any) -> Evidence:
    """Compare one tensor of each rank, and return the evidence."""
    states = ({"w": tensor} for tensor in tensors)
    report = compare_ranks(folder, *states, suffix=".safetensors", write=lambda path, s: safetensors.save_file(s, path))
    return report.groups[0].tensors[0].evidence


class TestSingles:
    """The one element that differs."""

    @pytest.mark.parametrize(
        ("dtype", "one", "other", "values", "bits"),
        [
            ("float32", 1.0, 2.0**-63, {0: 1.0, 1: 2.0**-63}, (6, None)),
            ("float32", 0.75, -0.75, {0: 0.75, 1: -0.75}, (1, 31)),
            ("float32", 1.0, NAN, {0: 1.0, 1: "nan"}, (2, None)),
            ("float64", 2.0, -INF, {0: 2.0, 1: "-inf"}, (11, None)),
            ("float16", 1.0, 1.5, {0: 1.0, 1: 1.5}, (1, 9)),
            ("bfloat16", 1.0, 0.5, {0: 1.0, 1: 0.5}, (1, 7)),
            ("float8_e4m3fn", 1.0, 1.125, {0: 1.0, 1: 1.125}, (1, 0)),
            ("int64", -1, 2**62 - 1, {0: -1, 1: 2**62 - 1}, (2, None)),
            ("uint8", 255, 127, {0: 255, 1: 127}, (1, 7)),
            ("bool", True, False, {0: 1, 1: 0}, (1, 0)),
            ("complex64", 1 + 2j, 1 - 2j, {}, (1, 63)),
        ],
    )
    def test_every_dtype(
        self, tmp_path: Path, dtype: str, one: Any, other: Any, values: Any, bits: tuple[int, int | None]
    ) -> None:
        """Values are read as the dtype has them, and bits are counted from the lowest."""
        kind = getattr(torch, dtype)
        first = torch.ones(3, 5).to(kind)
        second = first.clone()
        first[1, 2], second[1, 2] = torch.tensor(one).to(kind), torch.tensor(other).to(kind)
        found = singles(tmp_path, first, second)
        assert (found.values, (found.flipped_bits, found.bit)) == (values, bits)

    def test_of_many_ranks_the_two_farthest(self, tmp_path: Path) -> None:
        """All ranks' values are told, and the most bits between any two; one bit between two is not proof of three."""
        found = singles(tmp_path, *(torch.tensor([3.0, value, 4.0]) for value in (1.0, 1.0, -1.0, 0.5)))
        assert (found.values, found.flipped_bits, found.bit) == ({0: 1.0, 1: 1.0, 2: -1.0, 3: 0.5}, 2, None)

    def test_tensors_of_one_element(self, tmp_path: Path) -> None:
        """Counters and other single numbers have their values told, without a shape too."""
        found = singles(tmp_path, torch.tensor(100.0), torch.tensor(98.0))
        assert found.values == {0: 100.0, 1: 98.0}
        assert singles(tmp_path, torch.tensor([7]), torch.tensor([6])).values == {0: 7, 1: 6}

    def test_transposed_and_viewed(self, tmp_path: Path) -> None:
        """The element is that of the tensor, wherever its storage has it."""
        states = [{"w": torch.arange(24.0).reshape(4, 6).t()[1:]} for _ in range(2)]
        states[1]["w"][2, 3] = -5
        save(tmp_path, *states)
        assert told(tmp_path).values == {0: 21.0, 1: -5.0}

    def test_only_so_many(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of many single elements the first are read; the rest have no evidence rather than a wrong one."""
        monkeypatch.setattr(evidence, "MOST", 2)
        for rank in range(2):
            state = {f"n{i}": torch.tensor([i, rank]) for i in range(4)}
            safetensors.save_file(state, tmp_path / f"m_rank{rank}.safetensors")
        assert [diff.evidence is not None for diff in apart(tmp_path).values()] == [True, True, False, False]

    def test_two_that_differ_are_no_single(self, tmp_path: Path) -> None:
        """Where two elements differ neither is read."""
        found = singles(tmp_path, torch.tensor([1, 2, 3]), torch.tensor([1, 5, 6]))
        assert (found.values, found.flipped_bits) == ({}, None)


class TestStart:
    """Where a run of adjacent elements begins."""

    @pytest.mark.parametrize(("start", "length"), [(0, 2), (5, 64), (70_000, 130_000), (199_998, 2)])
    def test_it_is_found_in_large_and_small_tensors(self, tmp_path: Path, start: int, length: int) -> None:
        """The first element of the run is told, over block borders too, wherever the greatest gap is."""
        one = torch.rand(200_000)
        other = one.clone()
        other[start : start + length] += torch.rand(length) + 1
        assert singles(tmp_path, one, other).first == start

    def test_zeros_and_nans_before_it(self, tmp_path: Path) -> None:
        """Zeros of unlike signs and equal NaNs are no part of a run, right before it."""
        one = torch.tensor([1.0, NAN, 0.0, 3.0, 4.0, 9.0, 9.0, 9.0])
        other = torch.tensor([1.0, NAN, -0.0, 3.5, NAN, 19.0, 9.0, 9.0])
        assert singles(tmp_path, one, other).first == 3

    @pytest.mark.parametrize("dtype", ["bfloat16", "complex64", "int8", "float8_e5m2", "bool"])
    def test_other_dtypes(self, tmp_path: Path, dtype: str) -> None:
        """Elements are counted, not bytes."""
        one = torch.zeros(4, 8).to(getattr(torch, dtype))
        other = one.clone()
        other.view(-1)[11:14] = torch.ones(3).to(one.dtype)
        assert singles(tmp_path, one, other).first == 11

    def test_nothing_else_has_one(self, tmp_path: Path) -> None:
        """Elements here and there, and all of them, begin nowhere."""
        for other in ([1, 0, 1, 0], [1, 1, 1, 1]):
            assert singles(tmp_path, torch.zeros(4), torch.tensor(other).float()).first is None


class TestShards:
    """Of DTensors only ranks that hold one part are held against each other."""

    def test_one_part_apart(self, tmp_path: Path) -> None:
        """One element of one rank's part is read from the two ranks that hold that part."""
        rows = np.arange(24, dtype=np.float32).reshape(8, 3)
        parts = {rank: np.split(rows, 2)[rank % 2].copy() for rank in range(4)}
        parts[3][2, 1] = 0.5
        save_ranks(tmp_path, parts, ["R", "S(0)"], (2, 2))
        found = told(tmp_path)
        assert (found.values, found.damaged) == ({1: 19.0, 3: 0.5}, ())
        assert sorted(found.norms) == [1, 3]

    def test_both_parts_apart(self, tmp_path: Path) -> None:
        """Where two parts differ, each in its own element, none of them is taken for the other's."""
        rows = np.arange(24, dtype=np.float32).reshape(8, 3)
        parts = {rank: np.split(rows, 2)[rank % 2].copy() for rank in range(4)}
        parts[2][0, 0] = 0.5
        parts[3][2, 1] = 0.25
        save_ranks(tmp_path, parts, ["R", "S(0)"], (2, 2))
        found = told(tmp_path)
        assert (found.values, found.flipped_bits, found.bit) == ({}, None, None)
        assert len(found.norms) == 4


class TestDirections:
    """Norms, and whether replicas point in one direction."""

    def compare(self, folder: Path, *arrays: Any) -> Evidence:
        """Compare one tensor of each rank."""
        return singles(folder, *(torch.tensor(np.asarray(array, np.float32)) for array in arrays))

    def test_norms_and_cosine(self, tmp_path: Path) -> None:
        """Scaled replicas keep their direction and have their own norms; the worst of several cosines counts."""
        base = np.array([3.0, 4.0, 0.0])
        found = self.compare(tmp_path, base, base * 2)
        assert found.norms == {0: 5.0, 1: 10.0}
        assert found.cosine == pytest.approx(1.0)
        found = self.compare(tmp_path, base, base, -base, [4.0, -3.0, 0.0])
        assert found.cosine == pytest.approx(-1.0)
        assert found.norms == dict.fromkeys(range(4), 5.0)

    def test_elements_that_are_not_finite_are_left_out(self, tmp_path: Path) -> None:
        """A NaN of one rank is left out on all, and tensors of zeros have no direction."""
        found = self.compare(tmp_path, [3.0, 4.0, 7.0], [3.0, 4.0, NAN])
        assert (found.norms, found.cosine) == ({0: 5.0, 1: 5.0}, pytest.approx(1.0))
        assert self.compare(tmp_path, np.zeros(3), [1.0, 0.0, 1.0]).cosine is None

    def test_the_start_of_large_tensors(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Only so many elements are looked at, and what lies behind them changes nothing."""
        monkeypatch.setattr(evidence, "MEASURED", 100)
        base = np.ones(1000)
        other = base.copy()
        other[500] = 1e6
        found = self.compare(tmp_path, base, other)
        assert found.norms == {0: 10.0, 1: 10.0}
        assert found.cosine == pytest.approx(1.0)

    def test_which_tensors_have_them(self, tmp_path: Path) -> None:
        """Parameters and first moments have norms; second moments, buffers and integers do not."""
        for rank in range(2):
            model = {"w": weights() + rank, "bn.running_mean": weights(3) + rank, "bn.running_var": weights(3)}
            model["bn.num_batches_tracked"] = torch.tensor(3)
            state = {0: {"exp_avg": weights() + rank, "exp_avg_sq": weights() + rank, "step": torch.tensor(3.0)}}
            optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]}
            torch.save({"model": model, "optimizer": optimizer}, tmp_path / f"m_rank{rank}.pth")
        having = {name for name, diff in apart(tmp_path).items() if diff.evidence and diff.evidence.norms}
        assert having == {"w", "optimizer.w.exp_avg"}

    def test_bfloat16_is_read_as_it_is(self, tmp_path: Path) -> None:
        """Norms of short floats are those of their values."""
        found = singles(tmp_path, *(torch.full((4,), size).to(torch.bfloat16) for size in (0.5, 1.5)))
        assert (found.norms, found.cosine) == ({0: 1.0, 1: 3.0}, pytest.approx(1.0))


def test_digests_have_no_evidence(tmp_path: Path) -> None:
    """What only digests tell is not looked at a second time: the bytes are not there."""
    for rank, path in enumerate(save(tmp_path, {"w": weights()}, {"w": weights() + 1})):
        write(str(tmp_path / f"m_rank{rank}.fingerprint.json"), fingerprint(readers.read(str(path))))
        path.unlink()
    found = apart(tmp_path)["w"]
    assert (found.status, found.mismatched, found.evidence) == ("different", None, None)


def test_a_signalling_nan_is_no_warning(tmp_path: Path) -> None:
    """NaNs of every payload are left out of norms and histograms without a word: warnings are errors here."""
    for rank in range(2):
        values = np.full(8, 2.0 + rank, np.float32)
        values.view(np.uint32)[0] = 0x3F800000 if rank else 0x7F800001
        save_safetensors(tmp_path / f"rank{rank}.safetensors", {"fc.weight": values})
    (diff,) = syncheck.compare(tmp_path, histograms=True).groups[0].tensors
    assert diff.nonfinite == {0: 1, 1: 0}
    assert (diff.evidence.cosine, diff.histogram.not_finite) == (pytest.approx(1.0), 1)
