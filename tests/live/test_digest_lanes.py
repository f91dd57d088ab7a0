"""The sums of mixed words for GPUs, compared with Python integers on the CPU."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.marks import slow

from syncheck.live.digest import KERNEL, triton_kernel
from syncheck.live.digest import lanes as digest_lanes

if TYPE_CHECKING:
    from pathlib import Path

WORDS = 1 << 64
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


def python_mix(x: int, shifts: tuple[int, int, int], factors: tuple[int, int]) -> int:
    x = (x ^ (x >> shifts[0])) * factors[0] % WORDS
    x = (x ^ (x >> shifts[1])) * factors[1] % WORDS
    return x ^ (x >> shifts[2])


def splitmix(x: int) -> int:
    return python_mix(x, (30, 27, 31), (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def murmur(x: int) -> int:
    return python_mix(x, (33, 33, 33), (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53))


def python_digest(data: bytes) -> bytes:
    """Compute the definition in the docstring of `digest_lanes` with Python integers."""
    step_a, step_b = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95
    padded = data + bytes(-len(data) % 8)
    words = [int.from_bytes(padded[start : start + 8], "little") for start in range(0, len(padded), 8)]
    a = sum(splitmix((word + i * step_a) % WORDS) for i, word in enumerate(words, start=1))
    b = sum(murmur(word ^ (i * step_b % WORDS)) for i, word in enumerate(words, start=1))
    end = len(data) + 1
    a = splitmix((a + end * step_a) % WORDS)
    b = murmur((b % WORDS) ^ (end * step_b % WORDS))
    return a.to_bytes(8, "little") + b.to_bytes(8, "little")


def lanes(tensors: list[torch.Tensor]) -> list[bytes]:
    return digest_lanes.start_digests(tensors, digest_lanes.add_eagerly).read()


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.binary(max_size=70), min_size=1, max_size=4))
def test_integers_of_python_agree(datas: list[bytes]) -> None:
    """The eager implementation agrees with Python integers for bytes of any number."""
    assert lanes([as_tensor(data) for data in datas]) == [python_digest(data) for data in datas]


def test_splitmix_is_splitmix() -> None:
    """The first lane over zeros sums the numbers of the published generator for seed 0."""
    published = [16294208416658607535, 7960286522194355700, 487617019471545679]
    assert [splitmix(i * 0x9E3779B97F4A7C15 % WORDS) for i in (1, 2, 3)] == published
    sums = digest_lanes.start_digests([torch.zeros(3, dtype=torch.int64)], digest_lanes.add_eagerly).sums
    assert int(sums[0, 0]) % WORDS == sum(published) % WORDS


@pytest.mark.parametrize("kind", ["zeros", *slow("random", "float32")])
def test_avalanche(kind: str) -> None:
    """A flipped input bit flips each bit of the digest in about half of the cases, even in regular data."""
    draw = torch.Generator().manual_seed(0)
    if kind == "float32":
        base = torch.randn(40, 6, generator=draw).view(torch.int64)
    elif kind == "random":
        base = torch.randint(-(2**63), 2**63 - 1, (40, 3), generator=draw)
    else:
        base = torch.arange(40)[:, None] * torch.tensor([1, 0, 0])
    tensors = list(base)
    for word, bit in itertools.product(range(3), range(64)):
        flipped = base.clone()
        flipped[:, word] ^= (1 << bit) - (WORDS if bit == 63 else 0)
        tensors += list(flipped)
    bits = torch.tensor([list(value) for value in lanes(tensors)], dtype=torch.uint8)
    bits = (bits[:, :, None] >> torch.arange(8)) & 1
    bits = bits.reshape(193, 40, 128).to(torch.int64)
    changed = (bits[1:] ^ bits[0]).double()
    assert abs(float(changed.mean()) - 0.5) < 0.003
    # 5,120 digest bits per input bit, 7,680 tensors per digest bit: five standard deviations.
    assert float((changed.mean((1, 2)) - 0.5).abs().max()) < 0.035
    assert float((changed.mean((0, 1)) - 0.5).abs().max()) < 0.03


def test_parts_are_summed_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest does not depend on the size of parts."""
    selected = torch.arange(1000, dtype=torch.int16)
    rows = selected.view(10, 100)
    views = [selected, selected[1:], rows.t(), selected.view(torch.uint8)[3:1500], selected[::3], rows[:9, 1:9]]
    views.append(selected.view(torch.uint8)[:1995].view(7, 285).t())
    expected = lanes(views)
    monkeypatch.setattr(digest_lanes, "EAGER", 64)
    calls = []

    def add(rows: Any, sums: Any) -> None:
        calls.append(len(rows))
        digest_lanes.add_eagerly(rows, sums)

    monkeypatch.setattr(digest_lanes.parts, "MOST_COPIED", 256)
    monkeypatch.setattr(digest_lanes.parts.iterate_parts, "__defaults__", (128,))
    assert digest_lanes.start_digests(views, add).read() == expected
    assert len(calls) > 20


PROGRAM = """
import sys
import torch
from syncheck.live.digest import KERNEL
from syncheck.live.digest import triton_kernel
from syncheck.live.digest import lanes as digest_lanes
from syncheck.live.digest import parts as digest_parts

assert "triton" in sys.modules
draw = torch.Generator().manual_seed(0)
base = torch.randint(0, 256, (200_001,), dtype=torch.uint8, generator=draw)
tensors = [base[:count] for count in (*range(20), 65535, 65536, 65537, 131072, 200_001)]
tensors += [base[3:5000], base[8:80_000].view(torch.int64), base[:6000].view(60, 100).t(), base[7], base[:0]]
tensors += [torch.zeros(1000), torch.ones(64), -torch.ones(64), torch.randn(9, dtype=torch.complex64).conj()]
digest_parts.iterate_parts.__defaults__ = (1000,)  # so that what is copied is copied in many parts
digests = digest_lanes.start_digests(tensors, triton_kernel.add_rows).read()
assert digests == digest_lanes.start_digests(tensors, digest_lanes.add_eagerly).read()
assert digest_lanes.start_digests(tensors[:9], KERNEL.add).read() == digests[:9]
assert not KERNEL.broken, KERNEL.broken
flipped = [base.clone() for _ in range(3)]
for tensor, place in zip(flipped, (0, 100_000, 200_000)):
    tensor[place] ^= 1
assert len(set(digest_lanes.start_digests([base, *flipped], triton_kernel.add_rows).read())) == 4
class OnGpu:
    is_cuda = True


try:
    triton_kernel.add_rows([], OnGpu())
except RuntimeError as error:  # it would read addresses of the GPU
    print("AGREE", len(digests), error)
"""


def run(program: str, tmp_path: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", program],
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)} | environment,
        capture_output=True, text=True, timeout=100, check=False, start_new_session=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_triton
@pytest.mark.slow
def test_the_kernel_agrees_with_the_eager_implementation(tmp_path: Path) -> None:
    """The kernel in Triton's interpreter agrees with the eager implementation on all tails and unaligned views."""
    assert run(PROGRAM, tmp_path, TRITON_INTERPRET="1").startswith("AGREE 34 Triton's interpreter")


COMPILES = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from syncheck.live.digest import triton_kernel

signature = dict.fromkeys(("table", "owners", "sums"), "*i64")
signature |= dict.fromkeys(triton_kernel.CONSTANTS, "constexpr")
try:
    source = ASTSource(triton_kernel.sum_words, signature, constexprs=dict(triton_kernel.CONSTANTS))
except TypeError:  # before Triton 3.3
    source = ASTSource(triton_kernel.sum_words, signature, constants=dict(triton_kernel.CONSTANTS))
for target, made in ((GPUTarget("cuda", 80, 32), "ptx"), (GPUTarget("cuda", 90, 32), "cubin")):
    compiled = triton.compile(source, target=target, options=dict(triton_kernel.OPTIONS))
    assert compiled.asm[made]
assert "red.global" in compiled.asm["ptx"] or "atom.global" in compiled.asm["ptx"]
print("COMPILED")
"""


@needs_triton
@pytest.mark.slow
def test_the_kernel_compiles(tmp_path: Path) -> None:
    """Triton compiles the kernel for two kinds of GPU without a GPU; the fallback would hide a failure."""
    assert run(COMPILES, tmp_path, TRITON_INTERPRET="0") == "COMPILED\n"


def test_fallback_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """If Triton is missing or fails, the eager implementation computes the digest, and the reason is kept."""
    selected = [torch.randn(100), torch.randn(7, 3).t()]
    expected = lanes(selected)
    for error in (ImportError("no Triton"), RuntimeError("Failed to find C compiler")):
        tried = []

        def fails(*_: Any, error: Exception = error, tried: list[int] = tried) -> None:
            tried.append(1)
            raise error

        kernel = type(KERNEL)()
        monkeypatch.setattr(triton_kernel, "add_rows", fails)
        assert [digest_lanes.start_digests(selected, kernel.add).read() for _ in range(3)] == [expected] * 3
        assert len(tried) == 1
        assert str(error) in kernel.broken
        assert kernel.fallback == kernel.broken
    assert KERNEL.broken == ""


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried"), RuntimeError("Triton: out of memory")]
)
def test_the_kernel_is_retried_after_out_of_memory(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one out-of-memory error, which uses the fallback, the next digest uses the kernel again."""
    selected = [torch.randn(100), torch.randn(7, 3).t()]
    expected = lanes(selected)
    kernel, tried = type(KERNEL)(), []

    def add(rows: Any, sums: Any) -> None:
        tried.append(1)
        if len(tried) == 1:
            raise error
        digest_lanes.add_eagerly(rows, sums)

    monkeypatch.setattr(triton_kernel, "add_rows", add)
    assert digest_lanes.start_digests(selected, kernel.add).read() == expected
    assert type(error).__name__ in kernel.fallback
    kernel.fallback = ""
    assert digest_lanes.start_digests(selected, kernel.add).read() == expected
    assert (kernel.fallback, kernel.broken, len(tried)) == ("", "", 2)


@pytest.mark.slow
def test_without_triton(tmp_path: Path) -> None:
    """Without Triton the modules import, and the kernel has the reason."""
    program = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "import torch\n"
        "from syncheck.live.digest import KERNEL, lanes as digest_lanes\n"
        "digest_lanes.start_digests([torch.ones(3)], KERNEL.add).read()\n"
        "print(KERNEL.broken)\n"
    )
    assert "Triton is not installed" in run(program, tmp_path)
