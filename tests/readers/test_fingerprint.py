"""Fingerprints keep digests, moments, values and metadata of a checkpoint."""

from __future__ import annotations

import hashlib
import json
import math
import os
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from support.checkpoints import network, save_pth, save_safetensors
from support.listings import find_texts, list_fields
from support.states import omit

import syncheck
from syncheck.errors import MalformedFile
from syncheck.messages import Note, Refusal
from syncheck.readers.fingerprints import choose_output_paths, fingerprint, write
from syncheck.readers.metadata_block import KEY, metadata
from syncheck.snapshots import Sharding, Snapshot, Tensor

if TYPE_CHECKING:
    from pathlib import Path

ARRAYS: dict[str, Any] = {
    "float64": np.linspace(-3, 5, 24).reshape(2, 3, 4),
    "float32": np.array([1.5, np.nan, -np.inf, 4.25], np.float32),
    "float16": np.array([[1.0, -2.0]], np.float16),
    "bfloat16": np.array([0.5, 3.0], ml_dtypes.bfloat16),
    "float8": np.array([0.5, 448.0], ml_dtypes.float8_e4m3fn),
    "complex64": np.array([1 + 2j, 3 - 4j], np.complex64),
    "int64": np.array([-(2**62), 7], np.int64),
    "uint64": np.array([2**64 - 1], np.uint64),
    "bool": np.array([True, False, True]),
    "scalar": np.array(12, np.int64),
    "empty": np.zeros((0, 3), np.float32),
}


def read_back(snapshot: Snapshot, path: Path) -> Snapshot:
    """Write a snapshot's fingerprint and read it again."""
    write(str(path), fingerprint(snapshot))
    return syncheck.read(str(path))


def test_digests_equal_hashlib(tmp_path: Path) -> None:
    """The digest of every dtype and shape equals hashlib's for its little-endian bytes in C order."""
    result = read_back(syncheck.read(str(save_safetensors(tmp_path / "a.safetensors", ARRAYS))), tmp_path / "a.json")
    assert result.format == "fingerprint"
    assert result.tensors.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        tensor = result.tensors[name]
        assert tensor.digest is not None
        assert tensor.digest.algorithm == "blake2b-128"
        assert tensor.digest.value == hashlib.blake2b(array.tobytes(), digest_size=16).hexdigest(), name
        assert tensor.shape == array.shape


def test_moments_of_finite_elements(tmp_path: Path) -> None:
    """Moments equal numpy's for the finite elements in float64; complex and empty tensors have no moments."""
    result = read_back(syncheck.read(str(save_safetensors(tmp_path / "a.safetensors", ARRAYS))), tmp_path / "a.json")
    for name, array in ARRAYS.items():
        digest = result.tensors[name].digest
        assert digest is not None
        settings = (digest.min, digest.max, digest.mean, digest.std)
        if name in ("complex64", "empty"):
            assert settings == (None,) * 4
            continue
        wide = array.astype(np.float64)
        finite = wide[np.isfinite(wide)]
        assert settings == pytest.approx((finite.min(), finite.max(), finite.mean(), finite.std()), rel=1e-12), name
        assert digest.nonfinite == array.size - finite.size


def test_moments_of_many_blocks(tmp_path: Path) -> None:
    """Digest and moments cover all blocks of a tensor, and NaNs are counted in every block."""
    array = np.random.default_rng(0).standard_normal(700_001).astype(np.float32)
    array[[0, 300_000, 700_000]] = np.nan
    result = read_back(
        syncheck.read(str(save_safetensors(tmp_path / "a.safetensors", {"w": array}))), tmp_path / "a.json"
    )
    digest = result.tensors["w"].digest
    assert digest is not None
    assert digest.value == hashlib.blake2b(array.tobytes(), digest_size=16).hexdigest()
    finite = array[np.isfinite(array)].astype(np.float64)
    assert digest.nonfinite == 3
    assert (digest.mean, digest.std) == pytest.approx((finite.mean(), finite.std()), rel=1e-9)


def test_values_and_metadata_survive(tmp_path: Path) -> None:
    """Step, epoch, param_groups, the scaler's state and the metadata block survive; other values are dropped."""
    block = metadata(
        run="ddp", rank=1, world_size=4, step=12, run_id="r", buffers_synced=False, mesh={"dp": 1},
        config={"sync_bn": False, "lr": 0.1}, host="node",
    )  # fmt: skip
    group = {"lr": math.inf, "betas": (0.9, 0.999), "foreach": None, "maximize": False, "params": [0]}
    tree = {
        KEY: block | {"buffers": []},
        "model": network(),
        "optimizer": {"state": {0: {"step": 3}}, "param_groups": [group]},
        "scaler": {"scale": 65536.0, "_growth_tracker": 3},
        "epoch": 3,
        "comment": "not kept",
    }
    before = syncheck.read(str(save_pth(tmp_path / "a.pth", tree)))
    after = read_back(before, tmp_path / "a.json")
    assert after.metadata == before.metadata
    assert after.metadata is not None
    assert after.metadata.buffers == ()
    retained = omit(before.values, "comment")
    assert dict(after.values) == retained | {"step": 12}
    assert after.values["optimizer.param_groups.0.lr"] == math.inf


def test_hostile_metadata_is_not_written(tmp_path: Path) -> None:
    """Containers, NaN, huge integers and integer keys of an untrusted metadata block are not written."""
    config = {"lr": 0.1, "deep": {"a": 1}, "nan": math.nan, "huge": 10**5000, 3: 4}
    block = metadata(run="r", rank=0, world_size=2) | {"config": config}
    after = read_back(syncheck.read(str(save_pth(tmp_path / "a.pth", {KEY: block, "w": np.ones(2)}))), tmp_path / "f")
    assert after.metadata is not None
    assert dict(after.metadata.config) == {"lr": 0.1}


def test_refused_tensors_and_shards_survive(tmp_path: Path) -> None:
    """A refused tensor keeps the reason, and a shard its sharding."""
    sharding = Sharding((2, 2), (0, 1, 2, 3), ("R", "S(0)"), (8, 3), ("replicate", "shard"), (1, 0))
    shard = Tensor("w", "float32", (4, 3), (3, 1), "x", 0, data=bytes(48), sharding=sharding)
    refused = Tensor("q", "unknown", (), (), "x", 0, refused=Refusal.QUANTIZED())
    after = read_back(Snapshot("x", "torch-zip", 48, {"w": shard, "q": refused}), tmp_path / "f.json")
    assert after.tensors["w"].sharding == sharding
    assert after.tensors["q"].refused == Refusal.QUANTIZED()
    assert after.tensors["q"].digest is None


def test_the_text_is_reproducible(tmp_path: Path) -> None:
    """A checkpoint always gives the same file, in ASCII, with one line per tensor and without folder names."""
    path = save_pth(tmp_path / "secret-folder" / "a.pth", {"caf\u00e9": np.ones(2), "b": np.ones(3)})
    text = fingerprint(syncheck.read(str(path)))
    assert text == fingerprint(syncheck.read(str(path)))
    assert text.isascii()
    assert "secret-folder" not in text
    assert len(find_texts(text.splitlines(), '"digest"')) == 2
    assert json.loads(text)["source"] == {"name": "a.pth", "format": "torch-zip", "bytes": path.stat().st_size}


def test_a_fingerprint_is_small(tmp_path: Path) -> None:
    """A fingerprint has at most 300 bytes per tensor, for any size of the tensors."""
    state = {f"layer{i}.weight": np.full((64, 64), i / 7, np.float32) for i in range(50)}
    path = save_pth(tmp_path / "a.pth", state)
    assert len(fingerprint(syncheck.read(str(path)))) < 50 * 300 < path.stat().st_size / 50


def test_a_dropped_value_is_noted(tmp_path: Path) -> None:
    """A step too large for a JSON number is dropped, and a note reports this."""
    path = save_pth(tmp_path / "a.pth", {"w": np.ones(2), "step": 2**64})
    (tmp_path / "a.json").write_text(fingerprint(syncheck.read(str(path))))
    notes = syncheck.read(str(tmp_path / "a.json")).notes
    assert any("step" in note.parameters["text"] for note in notes if note.code is Note.STORED)


def test_a_changed_file_is_an_error(tmp_path: Path) -> None:
    """A checkpoint rewritten between opening and reading is an error and gets no digest."""
    path = save_pth(tmp_path / "a.pth", network())
    opened = syncheck.read(str(path))
    save_pth(path, network(1, layers=3))
    with pytest.raises(MalformedFile, match="changed since it was opened"):
        fingerprint(opened)


def test_output_paths(tmp_path: Path) -> None:
    """In an output folder, fingerprints keep the names of their checkpoints and the folders that distinguish them."""
    paths = [save_pth(tmp_path / f"run/node{i}/rank_{i}.pth", {"w": np.ones(2)}) for i in range(2)]
    chosen = choose_output_paths([syncheck.read(str(path)) for path in paths], "out")
    assert list_fields(chosen, 1) == [
        "out/node0/rank_0.fingerprint.json",
        "out/node1/rank_1.fingerprint.json",
    ]
    first = syncheck.read(str(paths[0]))
    assert list_fields(choose_output_paths([first], "x.json"), 1) == ["x.json"]
    assert list_fields(choose_output_paths([first], f"out{os.sep}"), 1) == ["out/rank_0.fingerprint.json"]
    assert list_fields(choose_output_paths([first], str(tmp_path)), 1) == [str(tmp_path / "rank_0.fingerprint.json")]


def test_digests_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    """Transposed, viewed, expanded and conjugated tensors have the digests of their contiguous copies."""
    torch = pytest.importorskip("torch")
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "transposed": base.T,
        "view": base[1:3, ::2],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "conj": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "neg": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    }
    torch.save(state, tmp_path / "a.pth")
    torch.save(
        {name: t.contiguous().resolve_conj().resolve_neg().clone() for name, t in state.items()}, tmp_path / "b.pth"
    )
    a = read_back(syncheck.read(str(tmp_path / "a.pth")), tmp_path / "a.json")
    b = read_back(syncheck.read(str(tmp_path / "b.pth")), tmp_path / "b.json")
    assert a.tensors.keys() == state.keys()
    for name in state:
        assert a.tensors[name].digest == b.tensors[name].digest, name
