"""The safetensors reader compared with the safetensors library, bit by bit."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from strategies import EXAMPLES, SAFETENSORS, for_all, found_in, from_bytes, library, loaded, noise, sizes, torch

import syncheck


@st.composite
def contents(draw: Any) -> dict[str, Any]:
    """Return tensors by name for save_file: contiguous, without shared storages."""
    made = {}
    for name in draw(st.lists(st.text(max_size=6).filter("__metadata__".__ne__), max_size=5, unique=True)):
        shape, dtype = draw(sizes), draw(st.sampled_from(SAFETENSORS))
        numbers = torch.Size(shape).numel() * (2 if dtype == "complex64" else 1)
        made[name] = from_bytes(noise(draw(st.integers(0, 999)), dtype, numbers), dtype, shape)
    return made


def check(case: dict[str, Any]) -> None:
    """Save and load tensors with the library, and compare syncheck's reader."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rank0.safetensors")
        library.save_file(case, path, {"epoch": "3"})
        assert found_in(path) == {name: loaded(tensor) for name, tensor in library.load_file(path).items()}
        assert found_in(path) == {name: loaded(tensor) for name, tensor in case.items()}
        assert syncheck.read(str(path)).values == {"epoch": 3}


@EXAMPLES
def test_any_tensors(examples: int) -> None:
    """Tensors of every dtype and shape that safetensors supports, with random names and bits."""
    for_all(contents(), check, examples)


def test_every_dtype() -> None:
    """Each dtype that safetensors supports, and tensors without dimensions or elements."""
    tensors = {name: from_bytes(noise(1, name, 12), name) for name in SAFETENSORS}
    check(tensors | {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5)})
