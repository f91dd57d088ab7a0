"""Hypothesis strategies for the differential tests: numbers, tensors of every layout, and trees of tensors."""

from __future__ import annotations

import os
import random
import sys
import tempfile
from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir

import syncheck
from support.exact import FORMATS, Format
from syncheck.tensors.blocks import Files, ranges

torch = pytest.importorskip("torch")
library = pytest.importorskip("safetensors.torch")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from syncheck.snapshots import Tensor

    State = dict[str, Any]

# hypothesis writes files even without its database; keep them out of the clone.
set_hypothesis_home_dir(os.path.join(tempfile.gettempdir(), "syncheck-hypothesis"))

# Number of cases: few by default, more in slow tests.
SLOW = (pytest.mark.slow, pytest.mark.timeout(600))
EXAMPLES = pytest.mark.parametrize("examples", [25, pytest.param(150, marks=SLOW)])
# If set, the number of cases, with different cases in each run, to search for bugs.
SEARCH = int(os.environ.get("SYNCHECK_EXAMPLES", "0"))

DTYPES = [name for name in FORMATS if hasattr(torch, name)]


def is_saved(name: str) -> bool:
    """Return whether the safetensors library supports a dtype: complex128 is missing, fnuz dtypes are recent."""
    try:
        library.save({"t": torch.zeros(1, dtype=torch.uint8).repeat(16).view(getattr(torch, name))})
    except (KeyError, ValueError):
        return False
    return True


SAFETENSORS = [name for name in DTYPES if is_saved(name)]


def for_all(strategy: Any, check: Callable[[Any], None], examples: int) -> None:
    """Call `check` with this many cases, equal in each run; hypothesis minimizes failing cases."""

    @settings(
        max_examples=SEARCH or examples,
        derandomize=not SEARCH,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def one(case: Any) -> None:
        check(case)

    one()


def patterns(of: Format, name: str) -> Any:
    """Return a strategy for the bits of one number: boundary values of the format, or any bits."""
    if name == "bool":
        return st.integers(0, 1)
    top, sign = (1 << of.width) - 1, 1 << (of.width - 1)
    turns = {0, 1, 2, sign, sign | 1, sign - 1, top, top - 1}
    if of.special == "scale":
        turns |= {of.bias - 1, of.bias, of.bias + 1}
    elif of.exponent:
        first, infinity = of.bias << of.mantissa, ((1 << of.exponent) - 1) << of.mantissa
        turns |= {first, first + 1, first - 1, sign | first, infinity, infinity - 1, infinity + 1, sign | infinity}
        turns |= {1 << of.mantissa, infinity | 1 << (of.mantissa - 1), sign | (infinity - 1)}
    elif of.width == 64:
        turns |= {2**53, 2**53 + 1, 2**62}
    return st.one_of(st.sampled_from(sorted(turns)), st.integers(0, top))


def packed(bits: list[int], of: Format) -> bytes:
    """Return patterns as little-endian bytes."""
    created = array({8: "B", 16: "H", 32: "I", 64: "Q"}[of.width], bits)
    if sys.byteorder == "big":
        created.byteswap()
    return created.tobytes()


def from_bytes(data: bytes, name: str, shape: tuple[int, ...] | None = None) -> Any:
    """Return a contiguous torch tensor with the given bytes."""
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)
    flat = raw.view(getattr(torch, name))
    return flat if shape is None else flat.reshape(shape)


def dense(tensor: Any) -> bytes:
    """Return the bytes of a torch tensor in C order."""
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def content(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor in C order from syncheck's reader."""
    with Files() as files:
        return b"".join(bytes(files.read(tensor, start, count, slot=0)) for start, count in ranges([tensor]))


def found_in(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return dtype, shape and bytes of a checkpoint's tensors by name. Fails if the reader refuses a tensor."""
    read = syncheck.read(str(path)).tensors
    assert not [tensor.refused for tensor in read.values() if tensor.refused]
    return {name: (tensor.dtype, tensor.shape, content(tensor)) for name, tensor in read.items()}


def loaded(leaf: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Return dtype, shape and bytes of a torch tensor or numpy array."""
    if isinstance(leaf, torch.Tensor):
        return str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape), dense(leaf)
    return leaf.dtype.name, leaf.shape, leaf.astype(leaf.dtype.newbyteorder("<")).tobytes()


def noise(seed: int, name: str, count: int) -> bytes:
    """Return the bytes of `count` elements: random bits, and often boundary values of the format."""
    source_value, source = FORMATS[name], random.Random(seed)
    sign = 1 << (source_value.width - 1)
    turns = [
        0,
        1,
        sign,
        sign - 1,
        2 * sign - 1,
        ((1 << source_value.exponent) - 1) << source_value.mantissa if source_value.exponent else sign,
    ]
    bits = [
        source.choice(turns) if source.random() < 0.2 else source.getrandbits(source_value.width) for _ in range(count)
    ]
    return packed([bit & 1 for bit in bits] if name == "bool" else bits, source_value)


sizes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def tensors(draw: Any, storages: list[Any] | None = None) -> Any:
    """Return a tensor of any dtype, shape and strides, on a new storage or a storage of `storages`."""
    shape = draw(sizes)
    shared = draw(st.sampled_from(storages)) if storages and draw(st.booleans()) else None
    if draw(st.booleans()):  # contiguous, in some order of the dimensions
        order = draw(st.permutations(range(len(shape))))
        strides = [0] * len(shape)
        step = 1
        for dim in order:
            strides[dim] = step
            step *= max(shape[dim], 1)
    else:  # anything: gaps, overlaps, expanded dimensions
        strides = draw(st.lists(st.integers(0, 5), min_size=len(shape), max_size=len(shape)))
    offset = draw(st.integers(0, 3))
    needed = 0 if 0 in shape else offset + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if shared is not None and shared.numel() >= max(needed, offset):
        base = shared
    else:
        name = draw(st.sampled_from(DTYPES))
        count = max(needed, offset) + draw(st.integers(0, 2))
        base = from_bytes(noise(draw(st.integers(0, 999)), name, count * FORMATS[name].parts), name)
        if storages is not None:
            storages.append(base)
    # torch refuses to save views of one storage as complex and as real numbers.
    alone = base.clone().as_strided(shape, strides, offset)
    tensor = base.as_strided(shape, strides, offset)
    if tensor.is_complex():
        tensor = draw(st.sampled_from([tensor, tensor.conj(), alone.conj().imag, alone.real]))
    if draw(st.integers(0, 4)) == 0:
        tensor = torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point() or tensor.is_complex())
    return tensor


NUMPY = "f2 f4 f8 i1 i2 i4 i8 u1 u2 u4 u8 c8 c16 b1 >f4 >i8 >c16 >f2".split()


@st.composite
def arrays(draw: Any) -> Any:
    """Return a numpy array of a dtype of torch, in C or Fortran order, reversed, transposed, or big-endian."""
    shape, code = draw(sizes), np.dtype(draw(st.sampled_from(NUMPY)))
    count = int(np.prod(shape, dtype=int))
    data = noise(draw(st.integers(0, 999)), "bool" if code.kind == "b" else "uint8", count * code.itemsize)
    created: Any = np.frombuffer(data, code).reshape(shape)
    turned = draw(st.sampled_from([lambda a: a, np.asfortranarray, lambda a: a[::-1] if a.ndim else a, np.transpose]))
    return turned(created)


leaves = st.one_of(
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=4),
    st.none(),
    st.binary(max_size=4),
    st.builds(np.float64, st.floats()),
    st.builds(np.int64, st.integers(-(2**63), 2**63 - 1)),
    st.builds(np.bool_, st.booleans()),
)
# Names omit keys of containers such as `model`; keys may be numbers and tuples, and contain dots.
keys = st.one_of(
    st.sampled_from(["model", "state_dict", "a", "b", "fc.weight", "layer1", "net", "a.b", "running_mean", "ema"]),
    st.text("ab.1\u00e9 ", min_size=1, max_size=3),
    st.integers(-2, 12),
    st.tuples(st.integers(0, 1), st.just("k")),
    st.booleans(),
    st.none(),
)


@st.composite
def trees(draw: Any) -> Any:
    """Return nested containers of tensors, arrays and values for torch.save; parts may be shared."""
    storages: list[Any] = []
    created: list[Any] = []

    def build(depth: int) -> Any:
        if created and draw(st.integers(0, 9)) == 0:
            return draw(st.sampled_from(created))
        kind = draw(st.sampled_from("tttttnv" if depth == 0 else "dddottnvlp"))
        if kind == "t":
            node = draw(tensors(storages))
        elif kind == "n":
            node = draw(arrays())
        elif kind == "v":
            return draw(leaves)
        else:
            parts = [build(depth - 1) for _ in range(draw(st.integers(0, 4)))]
            if kind in "lp":
                node = parts if kind == "l" else tuple(parts)
            else:
                named = zip(draw(st.lists(keys, min_size=len(parts), max_size=len(parts))), parts, strict=True)
                node = dict(named) if kind == "d" else OrderedDict(named)
        created.append(node)
        return node

    return {draw(keys): build(2) for _ in range(draw(st.integers(1, 4)))}


def is_leaf(node: Any) -> bool:
    """Return whether a node of a tree is compared as a tensor."""
    return isinstance(node, (torch.Tensor, np.ndarray))


CONTAINERS = set("model state_dict model_state_dict model_state module net network weights params app".split())


def walk(tree: Any) -> list[tuple[str, Any]]:
    """Return the names and leaves of a tree loaded by torch. A name is the keys joined by dots.

    The key of a model's state dict is omitted, unless there are two model keys or two tensors would get one name.
    """
    result = list(_walk(tree, ""))
    leaves = [name for name, node in result if is_leaf(node)]
    return result if len(set(leaves)) == len(leaves) else list(_walk(tree, "", whole=True))


def _walk(node: Any, name: str, *, whole: bool = False) -> Iterator[tuple[str, Any]]:
    parts = [(str(key), child) for key, child in node.items()] if isinstance(node, dict) else None
    if isinstance(node, (list, tuple)):
        parts = [(str(i), child) for i, child in enumerate(node)]
    if parts is None:
        yield name or "tensor", node
        return
    models = [key for key, child in parts if key in CONTAINERS and isinstance(child, dict) and _holds_leaf(child)]
    for key, child in parts:
        short = [key] == models and not whole
        yield from _walk(child, name if short else f"{name}.{key}" if name else key, whole=whole)


def _holds_leaf(node: dict[Any, Any]) -> bool:
    return any(map(is_leaf, node.values()))
