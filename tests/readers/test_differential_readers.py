"""The readers compared with torch.load and the safetensors library, bit by bit and name by name."""

from __future__ import annotations

import math
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import reject
from hypothesis import strategies as st
from support.listings import find_texts
from support.states import pick
from support.strategies import (
    DTYPES,
    EXAMPLES,
    SAFETENSORS,
    SLOW,
    for_all,
    found_in,
    from_bytes,
    is_leaf,
    library,
    loaded,
    noise,
    sizes,
    tensors,
    trees,
    walk,
)

import syncheck

torch = pytest.importorskip("torch")
VALUES = (bool, int, float, complex, str, bytes, type(None), np.generic)
# torch itself does not swap the bytes of dtypes that it saves as untyped storages.
SWAPPED = [name for name in DTYPES if "8_" not in name and name not in ("uint16", "uint32", "uint64")]


def same_value(a: Any, b: Any) -> bool:
    """Whether two values are equal, with NaN equal to NaN; numpy scalars are read as Python numbers."""
    if isinstance(a, float) and math.isnan(a):
        return isinstance(b, float) and math.isnan(b)
    return bool(a == b) and str(a) == str(b)


def assert_same(path: Path, tree: Any) -> None:
    """Assert that syncheck reads the tensors and values of a tree, with names, order and bits."""
    parts = list(walk(tree))
    snapshot = syncheck.read(str(path))
    expected = [(name, loaded(leaf)) for name, leaf in parts if is_leaf(leaf)]
    assert_paired(expected, list(found_in(path).items()), lambda a, b: a == b)
    values = [(name, leaf) for name, leaf in parts if isinstance(leaf, VALUES)]
    assert_paired(values, list(snapshot.values.items()), same_value)


def assert_paired(wanted: list[tuple[str, Any]], found: list[tuple[str, Any]], same: Any) -> None:
    """Assert names and contents; a repeated name has a suffix, except for the first."""
    assert len(found) == len(wanted), (wanted, found)
    busy = set()
    for (base, a), (name, b) in zip(wanted, found, strict=True):
        assert name.startswith(f"{base}#") if base in busy else name == base, (base, name)
        assert same(a, b), (name, a, b)
        busy.add(name)


def check_tree(tree: Any) -> None:
    """Save a tree, load it with torch, and compare syncheck's reader."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rank0.pth")
        torch.save(tree, path)
        assert_same(path, torch.load(path, weights_only=False))


@EXAMPLES
def test_any_tensor(examples: int) -> None:
    """Tensors with random dtype, shape, strides, offset, lazy conjugation and bits are read as by torch."""
    for_all(tensors().map(lambda tensor: {"t": tensor}), check_tree, examples)


@pytest.mark.parametrize("view", ["conj", "permuted", "row"])
def test_tensors_without_elements(tmp_path: Path, view: str) -> None:
    """Tensors without elements are read and compared, with any strides and lazy operations."""
    empty = torch.zeros(2, 0, 3, dtype=torch.complex64)
    tensor = {"conj": empty.conj(), "permuted": empty.permute(2, 1, 0), "row": empty[1:, :, 2]}[view]
    check_tree({"t": tensor})
    for rank in range(2):
        torch.save({"t": tensor, "w": torch.ones(2)}, tmp_path / f"rank{rank}.pth")
    assert syncheck.compare(tmp_path).counts.identical == 2


@EXAMPLES
def test_any_tree(examples: int) -> None:
    """Nested containers, shared storages, Parameters, arrays, scalars and odd keys: every tensor and its name."""
    for_all(trees(), check_tree, examples)


def check_legacy(tree: Any) -> None:
    """Do the same as `check_tree` in the format before torch 1.6."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rank0.pth")
        torch.save(tree, path, _use_new_zipfile_serialization=False)
        try:
            tree = torch.load(path, weights_only=False)
        except AttributeError:  # torch writes dtypes without a typed storage into this format and cannot read them
            reject()
        assert_same(path, tree)


@EXAMPLES
def test_any_tree_of_the_legacy_format(examples: int) -> None:
    """The same for the format before torch 1.6, which torch still writes on request."""
    for_all(st.one_of(tensors().map(lambda tensor: {"t": tensor}), trees()), check_legacy, examples)


@st.composite
def large(draw: Any) -> Any:
    """Return a tensor of several blocks with strides other than C order."""
    name = draw(st.sampled_from(DTYPES))
    shape = draw(st.sampled_from([(700, 1100), (3, 5, 90_000), (1_500_000,), (40_000, 33), (2, 700_000)]))
    # A short pattern, repeated over a prime number of bytes: no block is equal to the next.
    size = torch.empty(0, dtype=getattr(torch, name)).element_size()
    data = noise(draw(st.integers(0, 99)), name, 1009)
    tensor = from_bytes((data * (math.prod(shape) * size // len(data) + 1))[: math.prod(shape) * size], name, shape)
    dims = list(range(len(shape)))
    views = [tensor.permute(dims[::-1]), tensor[1:], tensor[..., ::3], tensor[..., 5:], tensor[:1].expand(shape)]
    view = draw(st.sampled_from(views))
    return {"t": view.conj() if view.is_complex() else view}


@pytest.mark.parametrize("examples", [4, pytest.param(80, marks=SLOW)])
def test_any_large_tensor(examples: int) -> None:
    """A tensor of several blocks with strides is read in C order."""
    for_all(large(), check_tree, examples)


LAYERS = [
    lambda n: torch.nn.Linear(n, 3),
    lambda n: torch.nn.Conv2d(2, n, 3, bias=False),
    torch.nn.BatchNorm2d,
    torch.nn.LayerNorm,
    lambda n: torch.nn.Embedding(n, 2),
    lambda n: torch.nn.LSTM(2, n),
]
OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    lambda p: torch.optim.SGD(p, 0.1),
    lambda p: torch.optim.AdamW(p, amsgrad=True),
    lambda p: torch.optim.Adagrad(p),
    lambda p: torch.optim.RMSprop(p, centered=True),
]


@st.composite
def trainings(draw: Any) -> Any:
    """Return a model, its optimizer after some steps, and a checkpoint as a script would save it."""
    torch.manual_seed(draw(st.integers(0, 99)))
    chosen = draw(st.lists(st.tuples(st.sampled_from(LAYERS), st.integers(1, 5)), min_size=1, max_size=4))
    model = torch.nn.Sequential(*(make(n) for make, n in chosen)).to(draw(st.sampled_from([None, torch.bfloat16])))
    optimizer = draw(st.sampled_from(OPTIMIZERS))(model.parameters())
    for _ in range(draw(st.integers(0, 2))):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    key = draw(st.sampled_from(["model", "state_dict", "net", "encoder"]))
    extras = {
        "lr_scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3]).state_dict(),
        "scaler": {"scale": 65536.0, "_growth_tracker": 3},
        "ema": model.state_dict(),
        "rng": [torch.get_rng_state(), np.random.get_state()],
        "best": np.float32(0.5),
        "epoch": 3,
    }
    retained = draw(st.lists(st.sampled_from(sorted(extras)), unique=True))
    saved = {key: model.state_dict(), "optimizer": optimizer.state_dict()} | pick(extras, retained)
    return model, optimizer, "" if key != "encoder" else "encoder.", saved


def check_training(case: Any) -> None:
    """Compare the names and bytes of a training checkpoint with the model and the optimizer."""
    model, optimizer, prefix, saved = case
    expected = {f"{prefix}{name}": loaded(tensor) for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for state, content_of in optimizer.state.get(parameter, {}).items():
            if isinstance(content_of, torch.Tensor):
                expected[f"optimizer.{prefix}{name}.{state}"] = loaded(content_of)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rank0.pth")
        torch.save(saved, path)
        snapshot = syncheck.read(str(path))
        result = found_in(path)
    aside = set(find_texts(result, start=("ema.", "rng.")))
    assert {name: result[name] for name in result if name not in aside} == expected
    assert len(aside) == ("ema" in saved) * len(model.state_dict()) + ("rng" in saved) * 2
    assert snapshot.values.get("epoch") == saved.get("epoch")
    assert snapshot.values["optimizer.param_groups.0.lr"] == saved["optimizer"]["param_groups"][0]["lr"]


@EXAMPLES
def test_any_training(examples: int) -> None:
    """Optimizer states get their parameters' names; scheduler, scaler, EMA and RNG state are complete."""
    for_all(trainings(), check_training, examples)


@pytest.mark.parametrize("name", SWAPPED)
def test_files_of_a_big_endian_machine(tmp_path: Path, name: str) -> None:
    """Records of a big-endian machine are read as by torch."""
    torch.save({"t": from_bytes(noise(3, name, 24), name).reshape(-1, 3).t()}, tmp_path / "little.pth")
    size = torch.empty(0, dtype=getattr(torch, name)).element_size() // (2 if name.startswith("complex") else 1)
    with zipfile.ZipFile(tmp_path / "little.pth") as old, zipfile.ZipFile(tmp_path / "big.pth", "w") as new:
        for record in old.namelist():
            data = old.read(record)
            if record.endswith("byteorder"):
                data = b"big"
            elif "/data/" in record:
                data = b"".join(data[position : position + size][::-1] for position in range(0, len(data), size))
            new.writestr(record.replace("little/", "big/"), data)
    assert_same(tmp_path / "big.pth", torch.load(tmp_path / "big.pth"))
    assert_same(tmp_path / "big.pth", torch.load(tmp_path / "little.pth"))


# --- safetensors ---


@st.composite
def safetensors(draw: Any) -> dict[str, Any]:
    """Return tensors by name for save_file: contiguous, without shared storages."""
    created = {}
    for name in draw(st.lists(st.text(max_size=6).filter("__metadata__".__ne__), max_size=5, unique=True)):
        shape, dtype = draw(sizes), draw(st.sampled_from(SAFETENSORS))
        numbers = torch.Size(shape).numel() * (2 if dtype == "complex64" else 1)
        created[name] = from_bytes(noise(draw(st.integers(0, 999)), dtype, numbers), dtype, shape)
    return created


def check_safetensors(case: dict[str, Any]) -> None:
    """Save and load tensors with the library, and compare syncheck's reader."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rank0.safetensors")
        library.save_file(case, path, {"epoch": "3"})
        assert found_in(path) == {name: loaded(tensor) for name, tensor in library.load_file(path).items()}
        assert found_in(path) == {name: loaded(tensor) for name, tensor in case.items()}
        assert syncheck.read(str(path)).values == {"epoch": 3}


@EXAMPLES
def test_any_safetensors_file(examples: int) -> None:
    """Tensors of all dtypes and shapes of safetensors, with random names and bits, are read as by the library."""
    for_all(safetensors(), check_safetensors, examples)


def test_every_dtype_of_safetensors() -> None:
    """Each dtype of safetensors, and tensors without dimensions or elements, are read as by the library."""
    every = {name: from_bytes(noise(1, name, 12), name) for name in SAFETENSORS}
    check_safetensors(every | {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5)})
