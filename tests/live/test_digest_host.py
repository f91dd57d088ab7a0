"""Digests on the CPU: the number of threads changes nothing, and xxhash may be missing."""

from __future__ import annotations

import hashlib
import sys
import threading
from typing import TYPE_CHECKING

import pytest
import torch
import xxhash
from support.listings import list_fields

from syncheck.live.digest import COMMON, XXH3, digest_all
from syncheck.live.digest import host as digest_host

if TYPE_CHECKING:
    from collections.abc import Iterator


def some_tensors() -> list[torch.Tensor]:
    """Return tensors in C order and other orders, small and of several chunks."""
    large = torch.randint(0, 256, ((9 << 20) + 3,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    small = [large[i * 1000 : i * 1000 + i] for i in range(50)]
    medium = [large[i << 17 : (i + 1) << 17].view(torch.float32) for i in range(16)]
    return [large, *small, *medium, *(tensor.view(-1, 64).t() for tensor in medium)]


@pytest.fixture
def without_xxhash(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    digest_host.load_xxhash.cache_clear()
    yield
    digest_host.load_xxhash.cache_clear()


def test_the_digest_is_that_of_the_package_xxhash() -> None:
    """Up to one chunk the digest is the package's xxh3-128, beyond that the xxh3-128 of the chunk digests."""
    data = some_tensors()[0]
    size = 4 << 20
    chunk = data[:size]
    assert digest_all([chunk]) == [(XXH3, xxhash.xxh3_128_digest(chunk.numpy()))]
    digests = [xxhash.xxh3_128_digest(data[start : start + size].numpy()) for start in range(0, len(data), size)]
    assert len(digests) == 3
    assert digest_all([data]) == [(XXH3, xxhash.xxh3_128_digest(b"".join(digests)))]


@pytest.mark.parametrize("algorithm", [XXH3, COMMON])
def test_any_number_of_threads_gives_the_same(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One, two and more threads give the same digests, and several threads take part."""
    observed = set()
    joined = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        observed.add(thread)
        joined(thread)

    sources = some_tensors()
    expected = digest_all(sources, algorithm, threads=1)
    monkeypatch.setattr(threading.Thread, "start", start)
    for threads in (2, 5):
        observed.clear()
        assert digest_all(sources, algorithm, threads=threads) == expected
        assert len(observed) == threads - 1
    observed.clear()
    digest_all(sources[1:20], algorithm, threads=5)
    assert not observed  # too small to share


def test_a_rank_takes_its_share_of_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one machine share its CPUs, by torchrun's variable; other values count as one rank."""
    monkeypatch.setattr(digest_host.os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    for reports, threads in (("3", 4), ("12", 1), ("100", 1), ("", 12), ("many", 12), ("0", 12)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", reports)
        assert digest_host.default_threads() == threads
    monkeypatch.setattr(digest_host.os, "sched_getaffinity", lambda _: set(range(500)), raising=False)
    assert digest_host.default_threads() == digest_host.MAX_THREADS


@pytest.mark.usefixtures("without_xxhash")
def test_without_xxhash() -> None:
    """Without the package the digest is 128-bit BLAKE2b, as in fingerprints, over all bytes in one piece."""
    sources = some_tensors()
    result = digest_all(sources)
    assert result == digest_all(sources, COMMON)
    assert set(list_fields(result, 0)) == {COMMON}
    assert result[0][1] == hashlib.blake2b(sources[0].numpy(), digest_size=16).digest()
