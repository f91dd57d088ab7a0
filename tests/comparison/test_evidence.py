"""Evidence on the differing tensors of real files: single elements, runs, norms and directions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import compare_ranks, save_safetensors
from support.dtensors import save_ranks
from support.listings import index_by, list_rank_files

import syncheck
from syncheck.comparison import evidence, vectors
from syncheck.readers.fingerprints import fingerprint, write
from syncheck.records import Evidence

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.records import TensorDiff

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

NAN, INF = float("nan"), float("inf")


def compare_folder(folder: Path) -> dict[str, TensorDiff]:
    """Compare the files of a folder, and return the non-identical tensors by name."""
    (group,) = syncheck.compare(folder).groups
    return index_by(group.tensors, "name")


def read_evidence(folder: Path, name: str = "w") -> Evidence:
    """Compare the files of a folder, and return the evidence on one tensor."""
    return compare_folder(folder)[name].evidence or Evidence()


def save(folder: Path, *states: dict[str, Any]) -> list[Path]:
    """Write one file per state with torch.save."""
    paths = list_rank_files(folder, "m_rank{}.pth", len(states))
    for path, state in zip(paths, states, strict=True):
        torch.save(state, path)
    return paths


def weights(count: int = 24) -> Any:
    """Return a tensor without zeros."""
    return torch.arange(1.0, count + 1)


def compare_tensors(folder: Path, *tensors: Any) -> Evidence:
    """Compare one tensor per rank, and return the evidence."""
    states = ({"w": tensor} for tensor in tensors)
    report = compare_ranks(folder, *states, suffix=".safetensors", write=lambda path, s: safetensors.save_file(s, path))
    return report.groups[0].tensors[0].evidence


class TestSingles:
    """Values and bits of a single differing element."""

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
        """Values are decoded according to the dtype, and bits are counted from the lowest bit."""
        kind = getattr(torch, dtype)
        first = torch.ones(3, 5).to(kind)
        second = first.clone()
        first[1, 2], second[1, 2] = torch.tensor(one).to(kind), torch.tensor(other).to(kind)
        result = compare_tensors(tmp_path, first, second)
        assert (result.values, (result.flipped_bits, result.bit)) == (values, bits)

    def test_several_ranks(self, tmp_path: Path) -> None:
        """With several ranks, all values and the most bits between any two ranks are reported, but no single bit."""
        result = compare_tensors(tmp_path, *(torch.tensor([3.0, value, 4.0]) for value in (1.0, 1.0, -1.0, 0.5)))
        assert (result.values, result.flipped_bits, result.bit) == ({0: 1.0, 1: 1.0, 2: -1.0, 3: 0.5}, 2, None)

    def test_tensors_of_one_element(self, tmp_path: Path) -> None:
        """The values of one-element tensors are reported, with and without dimensions."""
        result = compare_tensors(tmp_path, torch.tensor(100.0), torch.tensor(98.0))
        assert result.values == {0: 100.0, 1: 98.0}
        assert compare_tensors(tmp_path, torch.tensor([7]), torch.tensor([6])).values == {0: 7, 1: 6}

    def test_transposed_and_viewed(self, tmp_path: Path) -> None:
        """For a transposed view, the values are read from the right position of the storage."""
        states = [{"w": torch.arange(24.0).reshape(4, 6).t()[1:]} for _ in range(2)]
        states[1]["w"][2, 3] = -5
        save(tmp_path, *states)
        assert read_evidence(tmp_path).values == {0: 21.0, 1: -5.0}

    def test_number_of_read_elements_is_limited(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Only the first MOST single elements are read; further tensors have no evidence."""
        monkeypatch.setattr(evidence, "MOST", 2)
        for rank in range(2):
            state = {f"n{i}": torch.tensor([i, rank]) for i in range(4)}
            safetensors.save_file(state, tmp_path / f"m_rank{rank}.safetensors")
        assert [diff.evidence is not None for diff in compare_folder(tmp_path).values()] == [True, True, False, False]

    def test_two_differing_elements(self, tmp_path: Path) -> None:
        """If two elements differ, no values are read."""
        result = compare_tensors(tmp_path, torch.tensor([1, 2, 3]), torch.tensor([1, 5, 6]))
        assert (result.values, result.flipped_bits) == ({}, None)


class TestStart:
    """The first element of a run of adjacent differing elements."""

    @pytest.mark.parametrize(("start", "length"), [(0, 2), (5, 64), (70_000, 130_000), (199_998, 2)])
    def test_start_of_a_run(self, tmp_path: Path, start: int, length: int) -> None:
        """The first element of a run is reported, also for runs across block borders."""
        first = torch.rand(200_000)
        second = first.clone()
        second[start : start + length] += torch.rand(length) + 1
        assert compare_tensors(tmp_path, first, second).first == start

    def test_zeros_and_nans_before_a_run(self, tmp_path: Path) -> None:
        """Zeros of different sign and equal NaNs right before a run are not part of the run."""
        first = torch.tensor([1.0, NAN, 0.0, 3.0, 4.0, 9.0, 9.0, 9.0])
        second = torch.tensor([1.0, NAN, -0.0, 3.5, NAN, 19.0, 9.0, 9.0])
        assert compare_tensors(tmp_path, first, second).first == 3

    @pytest.mark.parametrize("dtype", ["bfloat16", "complex64", "int8", "float8_e5m2", "bool"])
    def test_other_dtypes(self, tmp_path: Path, dtype: str) -> None:
        """The position of the run is counted in elements, not in bytes."""
        first = torch.zeros(4, 8).to(getattr(torch, dtype))
        second = first.clone()
        second.view(-1)[11:14] = torch.ones(3).to(first.dtype)
        assert compare_tensors(tmp_path, first, second).first == 11

    def test_no_start_without_a_run(self, tmp_path: Path) -> None:
        """Scattered differences, and differences in all elements, have no first element."""
        for second in ([1, 0, 1, 0], [1, 1, 1, 1]):
            assert compare_tensors(tmp_path, torch.zeros(4), torch.tensor(second).float()).first is None


class TestShards:
    """Only ranks with the same shard of a DTensor are compared."""

    def test_one_differing_shard(self, tmp_path: Path) -> None:
        """One differing element of one rank's shard is read from the two ranks with the shard."""
        rows = np.arange(24, dtype=np.float32).reshape(8, 3)
        parts = {rank: np.split(rows, 2)[rank % 2].copy() for rank in range(4)}
        parts[3][2, 1] = 0.5
        save_ranks(tmp_path, parts, ["R", "S(0)"], (2, 2))
        result = read_evidence(tmp_path)
        assert (result.values, result.damaged) == ({1: 19.0, 3: 0.5}, ())
        assert sorted(result.norms) == [1, 3]

    def test_two_differing_shards(self, tmp_path: Path) -> None:
        """If two shards differ in one element each, the evidence has no values and no bits."""
        rows = np.arange(24, dtype=np.float32).reshape(8, 3)
        parts = {rank: np.split(rows, 2)[rank % 2].copy() for rank in range(4)}
        parts[2][0, 0] = 0.5
        parts[3][2, 1] = 0.25
        save_ranks(tmp_path, parts, ["R", "S(0)"], (2, 2))
        result = read_evidence(tmp_path)
        assert (result.values, result.flipped_bits, result.bit) == ({}, None, None)
        assert len(result.norms) == 4


class TestDirections:
    """Norms of replicas, and cosines between replicas."""

    def compare_arrays(self, folder: Path, *arrays: Any) -> Evidence:
        """Compare one array per rank."""
        return compare_tensors(folder, *(torch.tensor(np.asarray(array, np.float32)) for array in arrays))

    def test_norms_and_cosine(self, tmp_path: Path) -> None:
        """Scaled replicas have a cosine of 1 and their own norms; the lowest of several cosines is reported."""
        base = np.array([3.0, 4.0, 0.0])
        result = self.compare_arrays(tmp_path, base, base * 2)
        assert result.norms == {0: 5.0, 1: 10.0}
        assert result.cosine == pytest.approx(1.0)
        result = self.compare_arrays(tmp_path, base, base, -base, [4.0, -3.0, 0.0])
        assert result.cosine == pytest.approx(-1.0)
        assert result.norms == dict.fromkeys(range(4), 5.0)

    def test_non_finite_elements_are_skipped(self, tmp_path: Path) -> None:
        """An element with a NaN on one rank is skipped on all ranks, and a tensor of zeros has no cosine."""
        result = self.compare_arrays(tmp_path, [3.0, 4.0, 7.0], [3.0, 4.0, NAN])
        assert (result.norms, result.cosine) == ({0: 5.0, 1: 5.0}, pytest.approx(1.0))
        assert self.compare_arrays(tmp_path, np.zeros(3), [1.0, 0.0, 1.0]).cosine is None

    def test_number_of_measured_elements_is_limited(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Norms and cosines cover only the first MEASURED elements."""
        monkeypatch.setattr(vectors, "MEASURED", 100)
        base = np.ones(1000)
        second = base.copy()
        second[500] = 1e6
        result = self.compare_arrays(tmp_path, base, second)
        assert result.norms == {0: 10.0, 1: 10.0}
        assert result.cosine == pytest.approx(1.0)

    def test_tensors_with_norms(self, tmp_path: Path) -> None:
        """Parameters and moments have norms; running statistics and integers do not."""
        for rank in range(2):
            model = {"w": weights() + rank, "bn.running_mean": weights(3) + rank, "bn.running_var": weights(3)}
            model["bn.num_batches_tracked"] = torch.tensor(3)
            state = {0: {"exp_avg": weights() + rank, "exp_avg_sq": weights() + rank, "step": torch.tensor(3.0)}}
            optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]}
            torch.save({"model": model, "optimizer": optimizer}, tmp_path / f"m_rank{rank}.pth")
        having = {name for name, diff in compare_folder(tmp_path).items() if diff.evidence and diff.evidence.norms}
        assert having == {"w", "optimizer.w.exp_avg", "optimizer.w.exp_avg_sq"}

    def test_norms_of_bfloat16(self, tmp_path: Path) -> None:
        """Norms of bfloat16 tensors are the norms of their values."""
        result = compare_tensors(tmp_path, *(torch.full((4,), size).to(torch.bfloat16) for size in (0.5, 1.5)))
        assert (result.norms, result.cosine) == ({0: 1.0, 1: 3.0}, pytest.approx(1.0))


class TestShares:
    """Shares of smaller second moments and of zeros, among the elements that differ."""

    def test_smaller_second_moments(self, tmp_path: Path) -> None:
        """Rank 1 has smaller second moments in two of three different elements; first moments have no share."""
        for rank, squares in enumerate(([4.0, 4.0, 4.0, 4.0], [4.0, 1.0, 2.0, 9.0], [4.0, 4.0, 4.0, 4.0])):
            state = {0: {"exp_avg": weights(4) + rank, "exp_avg_sq": torch.tensor(squares)}}
            optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]}
            torch.save({"model": {"w": weights(4)}, "optimizer": optimizer}, tmp_path / f"m_rank{rank}.pth")
        assert read_evidence(tmp_path, "optimizer.w.exp_avg_sq").smaller == {1: pytest.approx(2 / 3)}
        assert read_evidence(tmp_path, "optimizer.w.exp_avg").smaller == {}

    def test_zeros(self, tmp_path: Path) -> None:
        """Rank 1 holds zeros in all different elements, and rank 0 in none of them."""
        pruned = weights(6)
        pruned[:3] = 0
        assert compare_tensors(tmp_path, weights(6), pruned).zeroed == {1: 1.0}


class TestExchanged:
    """Tensors that hold the values of another tensor of the other ranks."""

    def hold(self, folder: Path, *states: dict[str, Any]) -> dict[str, dict[int, str]]:
        """Return which tensors hold the values of which others."""
        save(folder, *states)
        return {name: dict(diff.evidence.holds) for name, diff in compare_folder(folder).items() if diff.evidence}

    def test_two_tensors_of_one_rank(self, tmp_path: Path) -> None:
        """Two tensors of rank 1 are exchanged."""
        a, b = weights(), weights() * 2
        states = [{"a": a, "b": b}, {"a": b, "b": a}, {"a": a, "b": b}]
        assert self.hold(tmp_path, *states) == {"a": {1: "b"}, "b": {1: "a"}}

    def test_three_tensors_moved_by_one(self, tmp_path: Path) -> None:
        """Each of three tensors holds the values of the next."""
        a, b, c = weights(), weights() * 2, weights() * 3
        contents = self.hold(tmp_path, {"a": a, "b": b, "c": c}, {"a": b, "b": c, "c": a})
        assert contents == {"a": {1: "b"}, "b": {1: "c"}, "c": {1: "a"}}

    def test_constants_and_other_shapes_prove_nothing(self, tmp_path: Path) -> None:
        """Exchanged constants, and equal bytes in another shape, are not exchanged tensors."""
        ones, twos = torch.ones(24), torch.ones(24) * 2
        states = [
            {"a": ones, "b": twos, "c": weights(), "d": weights().view(4, 6) * 2},
            {"a": twos, "b": ones, "c": weights() * 2, "d": weights().view(4, 6)},
        ]
        assert not any(self.hold(tmp_path, *states).values())

    def test_equal_only_at_the_start(self, tmp_path: Path) -> None:
        """Tensors that begin with equal bytes and differ later are not exchanged."""
        long = torch.arange(5000.0)
        changed = long.clone()
        changed[4000] = -1
        assert not any(self.hold(tmp_path, {"a": long, "b": long + 1}, {"a": long + 2, "b": changed}).values())


@pytest.mark.parametrize(("damaged", "resembling"), [("", {"a", "b"}), ("a", set()), ("b", set())])
def test_only_finite_tensors_resemble_each_other(tmp_path: Path, damaged: str, resembling: set[str]) -> None:
    """Two matrices with each other's directions are exchanged; with a NaN in one of them, it has no direction."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(8, 16, generator=generator)
    b = torch.randn(8, 16, generator=generator)
    noise = torch.randn(8, 16, generator=generator)
    exchanged = {"a": b + noise / 10, "b": a + noise / 10}
    if damaged:
        exchanged[damaged][0, 0] = NAN
    save(tmp_path, {"a": a, "b": b}, exchanged, {"a": a, "b": b})
    diffs = compare_folder(tmp_path)
    assert {name for name, diff in diffs.items() if diff.evidence.resembles} == resembling


def test_digests_have_no_evidence(tmp_path: Path) -> None:
    """Tensors compared by digest have no evidence, because their bytes are unavailable."""
    for rank, path in enumerate(save(tmp_path, {"w": weights()}, {"w": weights() + 1})):
        write(str(tmp_path / f"m_rank{rank}.fingerprint.json"), fingerprint(syncheck.read(str(path))))
        path.unlink()
    result = compare_folder(tmp_path)["w"]
    assert (result.status, result.mismatched, result.evidence) == ("different", None, None)


def test_signalling_nan_causes_no_warning(tmp_path: Path) -> None:
    """Norms and histograms skip signalling NaNs without a warning, which pytest would turn into an error."""
    for rank in range(2):
        values = np.full(8, 2.0 + rank, np.float32)
        values.view(np.uint32)[0] = 0x3F800000 if rank else 0x7F800001
        save_safetensors(tmp_path / f"rank{rank}.safetensors", {"fc.weight": values})
    (diff,) = syncheck.compare(tmp_path, histograms=True).groups[0].tensors
    assert diff.nonfinite == {0: 1, 1: 0}
    assert (diff.evidence.cosine, diff.histogram.not_finite) == (pytest.approx(1.0), 1)
