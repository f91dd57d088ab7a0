"""The verdict and all numbers equal the direct computation with Python integers and fractions.

Torch and safetensors write two to four replicas of equal tensors with injected changes, in any strides. The numbers of
each tensor in the report must equal the numbers of `exact`, which shares no code with `syncheck`.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from support.exact import FORMATS, Format, Numbers, clusters_of, is_close, numbers, value
from support.listings import index_by
from support.strategies import (
    DTYPES,
    EXAMPLES,
    SAFETENSORS,
    SLOW,
    for_all,
    from_bytes,
    library,
    packed,
    patterns,
    torch,
)

import syncheck


@dataclass(frozen=True)
class ReplicatedTensor:
    """One tensor on all replicas. bits: by rank, None if missing; layouts: the storage layout on each rank."""

    dtype: str
    shape: tuple[int, ...]
    bits: list[list[int] | None]
    layouts: list[str]

    @property
    def of(self) -> Format:
        """The format of the bits."""
        return FORMATS[self.dtype]


@dataclass(frozen=True)
class Case:
    """Tensors by name, the file format of each rank, and options."""

    tensors: dict[str, ReplicatedTensor]
    endings: list[str]
    tolerance: dict[str, Any] = field(default_factory=dict)


LAYOUTS = ["plain", "reversed", "gaps", "offset", "conj"]


@st.composite
def replicated_tensors(draw: Any, ranks: int, dtypes: list[str]) -> ReplicatedTensor:
    """Return a tensor with up to three versions that differ in some elements; each replica has any of the versions."""
    dtype = draw(st.sampled_from(dtypes))
    source_value, shape = FORMATS[dtype], draw(st.lists(st.integers(0, 4), max_size=3).map(tuple))
    count = torch.Size(shape).numel() * source_value.parts
    any_bits = patterns(source_value, dtype)
    base = draw(st.lists(any_bits, min_size=count, max_size=count))
    versions = [base]
    for _ in range(draw(st.integers(1, 2))):
        version = list(draw(st.sampled_from(versions)))
        if count:
            first = draw(st.integers(0, count - 1))
            last = draw(st.sampled_from([first, min(first + 3, count - 1), count - 1]))
            for position in range(first, last + 1, draw(st.integers(1, 3))):
                # Any number, a neighbour, or the number with the other sign.
                changes = [
                    version[position] ^ 1,
                    version[position] ^ (0 if dtype == "bool" else 1 << (source_value.width - 1)),
                ]
                version[position] = draw(st.one_of(any_bits, st.sampled_from(changes)))
        versions.append(version)
    bits = draw(st.lists(st.sampled_from(versions), min_size=ranks, max_size=ranks))
    if draw(st.integers(0, 9)) == 0:
        bits[draw(st.integers(0, ranks - 1))] = None
    layouts = draw(st.lists(st.sampled_from(LAYOUTS), min_size=ranks, max_size=ranks))
    return ReplicatedTensor(dtype, shape, bits, layouts)


@st.composite
def cases(draw: Any, tolerances: Any = None) -> Case:
    """Return two to four replicas."""
    endings = draw(st.lists(st.sampled_from([".pth", ".pth", ".safetensors"]), min_size=2, max_size=4))
    dtypes = SAFETENSORS if ".safetensors" in endings else DTYPES
    names = draw(st.lists(st.sampled_from(["w", "fc.bias", "bn.running_mean"]), min_size=1, unique=True))
    tensors = {name: draw(replicated_tensors(len(endings), dtypes)) for name in names}
    return Case(tensors, endings, {} if tolerances is None else draw(tolerances))


def with_layout(tensor: Any, layout: str) -> Any:
    """Return a tensor with equal bits and another layout in memory, and thus in its file."""
    if layout == "reversed":
        dims = list(range(tensor.ndim))[::-1]
        return tensor.permute(dims).clone(memory_format=torch.contiguous_format).permute(dims)
    if layout == "gaps" and tensor.ndim:
        return torch.stack([tensor, tensor], -1)[..., 1]
    if layout == "offset":
        flat = tensor.reshape(-1)
        return torch.cat([flat, flat])[flat.numel() :].reshape(tensor.shape)
    if layout == "conj" and tensor.is_complex():
        return torch.view_as_complex(torch.stack([tensor.real, tensor.imag.neg()], -1)).conj()
    return tensor


def write(folder: Path, case: Case, order: list[int]) -> None:
    """Write the replicas; the replica of rank order[i] becomes rank i."""
    for position, rank in enumerate(order):
        state = {}
        for name, tensor in case.tensors.items():
            bits = tensor.bits[rank]
            if bits is not None:
                state[name] = from_bytes(packed(bits, tensor.of), tensor.dtype, tensor.shape)
                if case.endings[rank] == ".pth":
                    state[name] = with_layout(state[name], tensor.layouts[rank])
        path = folder / f"rank{position}{case.endings[rank]}"
        if case.endings[rank] == ".pth":
            torch.save(state, path)
        else:
            library.save_file(state, path)


def compare_case(case: Case, order: list[int]) -> syncheck.Report:
    """Write the replicas and compare them."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), case, order)
        return syncheck.compare(folder, options=syncheck.Options(**case.tolerance))


def expected(tensor: ReplicatedTensor, tolerance: dict[str, Any]) -> tuple[str, Numbers | None]:
    """Return the expected status of a tensor, "" if it depends on rounding, and its numbers unless identical."""
    present = [bits for bits in tensor.bits if bits is not None]
    if len(clusters_of(present)) < 2:
        return ("identical" if len(present) == len(tensor.bits) else "not_compared"), None
    result = numbers(present, tensor.of, tolerance=bool(tolerance))
    close = is_close(result, tensor.of, **{"rtol": None, "atol": None, "ulp": None} | tolerance)
    status = "equal" if not result.mismatched else "" if close is None else "close" if close else "different"
    return ("not_compared" if status in ("equal", "close") else status) if None in tensor.bits else status, result


def assert_numbers(diff: syncheck.TensorDiff, tensor: ReplicatedTensor, found: Numbers) -> None:
    """Assert that the reported numbers of a tensor equal the direct computation."""
    ranks = [rank for rank, bits in enumerate(tensor.bits) if bits is not None]
    assert {frozenset(map(ranks.index, cluster)) for cluster in diff.clusters} == found.clusters
    sizes = list(map(len, diff.clusters))
    assert sizes == sorted(sizes, reverse=True)
    if found.minority or None not in tensor.bits:
        assert diff.minority == tuple(ranks[i] for i in found.minority)
    assert (diff.mismatched, diff.numel) == (found.mismatched, torch.Size(tensor.shape).numel())
    assert diff.max_abs == found.max_abs
    assert type(diff.max_abs) is type(found.max_abs)
    rounding = 4e-16 if tensor.of.exponent else 0  # of a difference and its ratio, each to the nearest float64
    assert diff.max_rel == (found.max_rel and pytest.approx(found.max_rel, rel=rounding + 4e-16, abs=0))
    assert diff.max_ulp == found.max_ulp
    assert dict(diff.nonfinite) == {ranks[i]: count for i, count in found.nonfinite.items()}
    assert diff.extent == found.extent
    index = None
    if found.index is not None:
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(found.index), tensor.shape))
    assert diff.index == index


def check(case: Case) -> None:
    """Compare a report with the direct computation, and with a report of the files in reverse order."""
    ranks = list(range(len(case.endings)))
    report = compare_case(case, ranks)
    (group,) = report.groups
    assert not report.unreadable
    diffs = index_by(group.tensors, "name")
    out_of_sync = False
    for name, tensor in case.tensors.items():
        if not any(bits is not None for bits in tensor.bits):
            continue
        status, result = expected(tensor, case.tolerance)
        assert status in ("", diffs[name].status if name in diffs else "identical"), name
        if result is not None:
            assert_numbers(diffs[name], tensor, result)
        missing = None in tensor.bits
        assert missing == (name in diffs and diffs[name].reason == "missing")
        out_of_sync |= missing or (name in diffs and diffs[name].status == "different")
    assert out_of_sync == (report.exit_code == 1)
    assert_symmetric(case, diffs, ranks[::-1])


def assert_symmetric(case: Case, diffs: dict[str, syncheck.TensorDiff], order: list[int]) -> None:
    """Assert that another order of the files changes only the numbers of the ranks."""
    (group,) = compare_case(case, order).groups
    swapped = index_by(group.tensors, "name")
    assert swapped.keys() == diffs.keys()
    for name, diff in diffs.items():
        second = swapped[name]
        for source_value in (
            "status",
            "reason",
            "mismatched",
            "numel",
            "max_abs",
            "max_rel",
            "max_ulp",
            "index",
            "extent",
        ):
            assert getattr(second, source_value) == getattr(diff, source_value), (name, source_value)
        clusters = {tuple(sorted(map(order.__getitem__, cluster))) for cluster in second.clusters}
        assert clusters == set(diff.clusters)
        assert sorted(order[rank] for rank in second.minority) == list(diff.minority)
        assert {order[rank]: count for rank, count in second.nonfinite.items()} == dict(diff.nonfinite)


TOLERANCES = st.one_of(
    st.builds(
        lambda rtol, atol: {"rtol": rtol, "atol": atol}, st.floats(0, 1), st.sampled_from([0.0, 1e-30, 1.0, 1e6])
    ),
    st.builds(lambda ulp: {"ulp": ulp}, st.sampled_from([0, 1, 2, 5, 2**20, 2**62])),
    st.builds(lambda rtol, ulp: {"rtol": rtol, "atol": 0.0, "ulp": ulp}, st.floats(0, 1), st.integers(0, 9)),
)


@EXAMPLES
def test_numbers_of_any_replicas(examples: int) -> None:
    """Status, clusters, counts, differences, index, extent and exit code are exact, in any order of the files."""
    for_all(cases(), check, examples)


@EXAMPLES
def test_any_tolerance(examples: int) -> None:
    """A tensor is close if and only if the direct computation finds every difference within the tolerance."""
    for_all(cases(TOLERANCES), check, examples)


def test_the_direct_computation_reads_numbers_like_torch() -> None:
    """The direct computation reads the bits of formats of up to 16 bits as torch does."""
    for dtype in DTYPES:
        source_value = FORMATS[dtype]
        if source_value.width > 16 or dtype == "bool":
            continue
        bits = list(range(0, 1 << source_value.width, 1 if source_value.width == 8 else 37))
        mine = [float(value(pattern, source_value)) for pattern in bits]
        torchs = from_bytes(packed(bits, source_value), dtype).to(torch.float64).tolist()
        assert list(map(repr, mine)) == [repr(number + 0.0) for number in torchs], dtype


@pytest.mark.parametrize("dtype", ["bool", "float32", "int64", "bfloat16"])
def test_zeros_hide_no_relative_difference(dtype: str) -> None:
    """If an element of a differing replica equals a zero of the majority, 0/0 hides no relative difference."""
    bits = [[0, 1, 0], [0, 0, 0], [0, 0, 0], [0, 0, 1]]
    check(Case({"w": ReplicatedTensor(dtype, (3,), list(bits), ["plain"] * 4)}, [".pth"] * 4))


@st.composite
def long_tensors(draw: Any) -> Case:
    """Return two or three replicas of a tensor of several blocks, with few changes anywhere in it."""
    dtype = draw(st.sampled_from(["float32", "int64", "complex64", "float64"]))
    source_value = FORMATS[dtype]
    count = draw(st.sampled_from([1_200_000, (1 << 20) + 8, 1 << 21])) // (
        source_value.width // 8
    )  # bytes; a block is 1 MiB
    base = [(position * 37 + 11) & 0x3F for position in range(count)]
    ranks = draw(st.integers(2, 3))
    bits = []
    for _ in range(ranks):
        version = list(base)
        for position in draw(st.lists(st.integers(0, count - 1), max_size=3)):
            run = min(draw(st.integers(1, 3)), count - position)
            version[position : position + run] = draw(
                st.lists(patterns(source_value, dtype), min_size=run, max_size=run)
            )
        bits.append(version)
    layouts = draw(st.lists(st.sampled_from(LAYOUTS), min_size=ranks, max_size=ranks))
    shape = draw(st.sampled_from([(count // source_value.parts,), (1, count // source_value.parts)]))
    return Case({"w": ReplicatedTensor(dtype, shape, bits, layouts)}, [".pth"] * ranks)


@pytest.mark.parametrize("examples", [2, pytest.param(40, marks=SLOW)])
def test_any_tensor_of_several_blocks(examples: int) -> None:
    """The numbers are exact if the differences are in several blocks."""
    for_all(long_tensors(), check, examples)
