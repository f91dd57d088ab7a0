"""On a GPU the kernel and the eager implementation give the digests of the eager implementation on the CPU."""

from __future__ import annotations

import pytest
import torch
from support.listings import list_fields

from syncheck.live.digest import COMMON, KERNEL, LANES, XXH3, digest_all
from syncheck.live.digest import lanes as digest_lanes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def some_tensors() -> list[torch.Tensor]:
    """Return CPU tensors: every length up to 20 bytes, many programs, other memory orders, unaligned."""
    base = torch.randint(0, 256, (3_000_001,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tensors = [base[:count] for count in (*range(20), 65535, 65536, 65537, len(base))]
    tensors += [
        base[3:500_000],
        base[: 6 << 16].view(torch.bfloat16).view(-1, 128).t(),
        base[8:80_008].view(torch.int64),
    ]
    return [*tensors, torch.zeros(1000), torch.ones(64), torch.tensor(True), torch.randn(9, dtype=torch.complex64)]


def test_the_kernel_gives_the_digest_of_the_cpu() -> None:
    """One launch for all tensors gives the digests of the eager implementation, and uses the kernel."""
    first_folder = some_tensors()
    second_folder = [tensor.cuda() for tensor in first_folder]
    expected = digest_lanes.start_digests(first_folder, digest_lanes.add_eagerly).read()
    assert digest_all(second_folder) == [(LANES, value) for value in expected]
    assert not KERNEL.broken
    assert digest_lanes.start_digests(second_folder, digest_lanes.add_eagerly).read() == expected
    for algorithm in (XXH3, COMMON):
        assert digest_all(second_folder, algorithm) == digest_all(first_folder, algorithm)


def test_views_on_the_gpu() -> None:
    """Views in other orders, unaligned and conjugated, have the digest of their copies in C order."""
    base = torch.randn(40, 30, device="cuda")
    row = torch.arange(5000, device="cuda").to(torch.uint8)
    views = [base.t(), base[:, ::2], base[3:, 1:], base[5, 6], base[:1, :1].expand(50, 2), row[3:], row[1:4998:7]]
    views.append(torch.randn(4, 4, dtype=torch.complex64, device="cuda").t().conj())
    copies = [view.resolve_conj().clone(memory_format=torch.contiguous_format) for view in views]
    assert digest_all(views) == digest_all(copies)


def test_one_bit_on_the_gpu() -> None:
    """One flipped bit at the start, middle and end of a large tensor changes its digest, on any stream."""
    base = torch.zeros(10_000_001, dtype=torch.uint8, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        variants = [base.clone() for _ in range(4)]
        for tensor, location in zip(variants[1:], (0, 5_000_000, 10_000_000), strict=True):
            tensor[location] ^= 1
        result = digest_all([*variants, torch.zeros(3)])
    assert len(set(list_fields(result[:4], 1))) == 4
    assert list_fields(result, 0) == [LANES] * 4 + [XXH3]


def test_modes_on_the_gpu() -> None:
    """Autocast, inference and deterministic modes do not change digests, and no random number is drawn."""
    selected = torch.nn.Parameter(torch.randn(1000, device="cuda"))
    expected = digest_all([selected])
    before = torch.cuda.get_rng_state()
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autocast("cuda", torch.bfloat16), torch.inference_mode():
            assert digest_all([selected]) == expected
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(torch.cuda.get_rng_state(), before)
