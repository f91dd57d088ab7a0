"""Digests are a function of the bytes in C order on every device, and detect every change."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from support.listings import list_fields

from syncheck.errors import UsageError
from syncheck.live.digest import COMMON, LANES, XXH3, Stream, digest_all, hash_digests
from syncheck.live.digest.lanes import add_eagerly, start_digests

ALGORITHMS = [XXH3, COMMON, LANES]
FLOAT8 = [getattr(torch, name) for name in dir(torch) if name.startswith("float8_")]
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, *FLOAT8,
]  # fmt: skip
every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)


def values(sources: Any, algorithm: str) -> list[bytes]:
    if algorithm == LANES:
        return start_digests(sources, add_eagerly).read()
    return list_fields(digest_all(sources, algorithm), 1)


def value(source: Any, algorithm: str) -> bytes:
    return values([source], algorithm)[0]


def random(count: int, seed: int = 0) -> torch.Tensor:
    """Return random bytes."""
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


KNOWN = {
    "empty": (
        b"",
        {
            XXH3: "99aa06d3014798d86001c324468d497f",
            COMMON: "cae66941d9efbd404e4d88758ea67670",
            LANES: "afcd1d7b39a820e2166697713f8ad173",
        },
    ),
    "counting": (
        bytes(range(251)) * 4,
        {
            XXH3: "7bb82325e4a9e8b77cf203f1f93df405",
            COMMON: "188c74cea673173006add8b54c166080",
            LANES: "7a82f9cfd9990ce32f84e75ccefbbe36",
        },
    ),
    "chunks": (
        bytes(range(256)) * (17 << 10) + b"end",
        {
            XXH3: "553996b91f1be2499e7e2559a59e93e5",
            COMMON: "5803bb22e07bb82697678437a60d1d68",
            LANES: "da357a874a2a4854c3604c7d5c255175",
        },
    ),
}


@every_algorithm
@pytest.mark.parametrize("name", KNOWN)
def test_known_answers(name: str, algorithm: str) -> None:
    """The digests of known bytes never change, because other versions and stored files depend on them."""
    data, answers = KNOWN[name]
    assert value(torch.tensor(list(data), dtype=torch.uint8), algorithm).hex() == answers[algorithm]


@every_algorithm
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_flipped_bit_anywhere(algorithm: str, dtype: torch.dtype) -> None:
    """Each single bit of a small tensor of every dtype changes the digest, and no two digests are equal."""
    count = 40 // dtype.itemsize + 1
    data = random(count * dtype.itemsize)
    flipped = [data]
    for bit in range(len(data) * 8):
        second = data.clone()
        second[bit // 8] ^= 1 << bit % 8
        flipped.append(second)
    result = values([row.view(dtype) for row in flipped], algorithm)
    assert len(set(result)) == len(data) * 8 + 1


@every_algorithm
def test_reordered_and_constant_tensors(algorithm: str) -> None:
    """Permuted, swapped, rotated, sign-flipped, constant and zero tensors of many lengths have different digests."""
    selected = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    swapped = selected.clone()
    swapped[[3, 9]] = selected[[9, 3]]
    pair = selected.flatten().clone()
    pair[[4, 6]] = pair[[6, 4]]
    sign = selected.clone()
    sign[2, 3] *= -1
    variants = [
        selected,
        swapped,
        pair,
        sign,
        -selected,
        selected.flip(0),
        selected.flip(1),
        selected.t(),
        selected.abs(),
        selected.roll(1),
    ]
    variants += [torch.full((16, 16), constant) for constant in (0.0, -0.0, 1.0, 2.0, -1.0, float("nan"))]
    variants += [torch.zeros(count, dtype=torch.uint8) for count in range(100)]
    variants += [torch.ones(count) for count in (1, 2, 3, 4, 63, 64, 65)]
    assert len(set(values(variants, algorithm))) == len(variants)


@every_algorithm
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_do_not_matter(algorithm: str, dtype: torch.dtype) -> None:
    """A transposed, expanded, stepped, permuted or offset view has the digest of its copy in C order."""
    base = random(24 * 10 * dtype.itemsize).view(dtype).reshape(4, 6, 10)
    row = random(99 * dtype.itemsize).view(dtype)
    views = [
        base, base.permute(2, 0, 1), base.transpose(0, 2), base[1:3], base[:, ::2], base[:, :, 3], base[:, 1:2, 2:],
        base[:1].expand(5, 6, 10), base[1, 2, 3], base[:, :, :0], row[1:], row[3:98], row[::7], row[5:5], row[98],
    ]  # fmt: skip
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(dtype.itemsize, dtype)
    copies = [torch.empty(view.shape, dtype=bits).copy_(view.view(bits)) for view in views]
    assert values(views, algorithm) == values(copies, algorithm)


@every_algorithm
def test_conjugated_and_negated_views(algorithm: str) -> None:
    """Lazily conjugated and negated tensors are resolved."""
    selected = torch.randn(7, 5, dtype=torch.complex64)
    views = [
        selected.conj(),
        selected.t().conj(),
        selected.conj().imag,
        selected[:1, :1].conj().imag,
        selected.conj()[2, 3],
    ]
    copies = [view.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format) for view in views]
    assert values(views, algorithm) == values(copies, algorithm)
    assert value(selected.conj(), algorithm) != value(selected, algorithm)


@every_algorithm
def test_large_views_are_copied_in_parts(algorithm: str) -> None:
    """Tensors of several parts, in any memory order and alignment, have the digest of their bytes."""
    data = random((17 << 20) + 5)
    transposed = data[: 17 << 20].view(torch.float64).view(-1, 1024).t()
    views = [transposed, data[3:], transposed[None], data[8:].view(1, -1)]
    copies = [view.clone(memory_format=torch.contiguous_format) for view in views]
    assert values(views, algorithm) == values(copies, algorithm)


@pytest.mark.parametrize("algorithm", [XXH3, COMMON])
def test_arrays(algorithm: str) -> None:
    """A numpy array has the digest of the tensor with its bytes: any order, read-only, ml_dtypes."""
    selected = np.arange(60, dtype=np.float32).reshape(5, 12)
    fixed = selected.copy()
    fixed.flags.writeable = False
    arrays = [
        selected,
        np.asfortranarray(selected),
        selected.astype(">f4"),
        fixed,
        selected[::-1][::-1],
        np.broadcast_to(selected, (1, 5, 12)),
    ]
    assert set(values([*arrays, torch.from_numpy(selected)], algorithm)) == {value(selected, algorithm)}
    scalars = [np.array(3.0), torch.tensor(3.0, dtype=torch.float64), np.zeros((0, 3)), torch.empty(2, 0)]
    result = values(scalars, algorithm)
    assert result[0] == result[1] != result[2] == result[3]
    half = torch.randn(9).bfloat16()
    assert value(half.view(torch.int16).numpy().view(ml_dtypes.bfloat16), algorithm) == value(half, algorithm)


@every_algorithm
def test_modes_of_torch_change_nothing(algorithm: str) -> None:
    """Autograd, autocast and determinism modes do not change digests, and no random number is drawn."""
    selected = torch.randn(300)
    parameter = torch.nn.Parameter(selected.clone())
    expected = value(selected, algorithm)
    before = torch.random.get_rng_state()
    with torch.inference_mode():
        contents = selected.clone()
        assert values([selected, contents, parameter], algorithm) == [expected] * 3
    assert value(contents, algorithm) == value(contents[:].view(20, 15).t().t(), algorithm) == expected
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert value(parameter, algorithm) == expected
    torch.use_deterministic_algorithms(True)
    try:
        assert value(parameter, algorithm) == expected
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.device("meta"):  # the default device
        assert value(parameter, algorithm) == expected
    assert torch.equal(torch.random.get_rng_state(), before)
    assert parameter.grad is None
    assert torch.equal(parameter, selected)


@every_algorithm
def test_subclasses_are_ignored(algorithm: str) -> None:
    """A subclass that overrides torch functions has the digest of its bytes."""

    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("called")

    selected = torch.randn(6, 4)
    loud = [selected.as_subclass(Loud), selected.t().as_subclass(Loud)]
    assert values(loud, algorithm) == values([selected, selected.t()], algorithm)


@every_algorithm
def test_a_freed_storage_is_an_error(algorithm: str) -> None:
    """A tensor whose storage was freed, as in FSDP1, or truncated, raises with its number instead of crashing."""
    for bad, retained in itertools.product([torch.randn(4, 4), torch.randn(5, 3)[1:].t()], (0, 59)):
        bad.untyped_storage().resize_(retained)
        with pytest.raises(UsageError, match=r"tensor 1, float32 .* its storage has (0|59) of"):
            values([torch.ones(1), bad], algorithm)
    empty = torch.empty(3, 0)
    empty.untyped_storage().resize_(0)
    assert value(empty, algorithm) == value(torch.empty(0), algorithm)


def test_names_and_order() -> None:
    """Digests have the order of their sources and the algorithm's name; no source gives no digest."""
    assert digest_all([]) == []
    sources = [torch.ones(3), np.ones(5), torch.randn(100_000), torch.ones(4).expand(2, 4), torch.empty(0)]
    assert digest_all(sources) == [digest_all([source])[0] for source in sources]
    assert {(name, len(digest)) for name, digest in digest_all(sources)} == {(XXH3, 16)}


def test_combined_hash() -> None:
    """The combined hash changes with any digest, algorithm, order or number of digests."""
    first, second = digest_all([torch.ones(3), torch.ones(4)])
    altered = (COMMON, first[1])
    lists = [[first, second], [second, first], [first], [first, second, second], [altered, second], []]
    roots = [hash_digests(digests) for digests in lists]
    assert len(set(roots)) == len(lists)
    assert {len(result) for result in roots} == {16}
    assert hash_digests([first, second]) == roots[0]


@pytest.mark.parametrize("algorithm", [XXH3, COMMON])
def test_a_stream_is_the_digest_of_its_bytes(algorithm: str) -> None:
    """Bytes from a file in blocks of any size have the digest of a tensor with the same bytes."""
    data = random((12 << 20) + 321)
    expected = value(data, algorithm)
    for size in (1 << 16, 4 << 20, (4 << 20) - 1, (4 << 20) + 1, 12 << 20, 1 << 30):
        stream = Stream(algorithm)
        for start in range(0, len(data), size):
            stream.update(data[start : start + size].numpy())
            stream.update(b"")
        assert stream.digest() == expected
    for count in (0, 1, 4 << 20, 8 << 20):
        stream = Stream(algorithm)
        stream.update(data[:count].numpy().tobytes())
        assert stream.digest() == value(data[:count], algorithm)
