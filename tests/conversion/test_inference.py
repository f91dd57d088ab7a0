"""Maps that are inferred from equal data: renames, fused tensors, stacks and transposed tensors, and ambiguous data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import llama
import numpy as np
import pytest

import syncheck
from syncheck.cli import main
from syncheck.messages import Note
from syncheck.options import DiffOptions

if TYPE_CHECKING:
    from pathlib import Path

    from llama import Weights


def rename(model: Weights) -> Weights:
    """Return the model with names that no built-in map has."""
    pairs = (("model.layers.", "blocks."), ("self_attn.", "attention."), ("model.", "net."), ("decoder.layers.", "b."))
    renamed = {}
    for name, weight in model.items():
        for old, new in pairs:
            name = name.replace(old, new)
        renamed[f"x.{name}"] = weight
    return renamed


def rotate(model: Weights) -> Weights:
    """Return the model with the other rotary order of query and key."""
    return {
        name: llama.interleave(w) if "q_proj" in name or "k_proj" in name else w for name, w in rename(model).items()
    }


def transpose(model: Weights) -> Weights:
    """Return the model with transposed matrices."""
    return {name: w.T if w.ndim == 2 else w for name, w in rename(model).items()}


def fuse(model: Weights) -> Weights:
    """Return the model in the layout of Megatron-Core."""
    return rename(llama.to_megatron(model))


def interleave_rows(model: Weights) -> Weights:
    """Return the model with gate and up row by row."""
    fused = rename(model)
    for i in range(llama.LAYERS):
        parts = [fused.pop(f"x.blocks.{i}.mlp.{x}_proj.weight") for x in ("gate", "up")]
        fused[f"x.blocks.{i}.mlp.both.weight"] = np.stack(parts, 1).reshape(-1, llama.WIDTH)
    return fused


@pytest.mark.parametrize("convert", [rename, rotate, transpose, fuse, interleave_rows])
@pytest.mark.parametrize("turned", [False, True])
def test_maps_from_data(tmp_path: Path, convert: Any, turned: bool) -> None:
    """A model with unknown names is in sync, also as A, and the written map gives the same result."""
    model = llama.make_model()
    paths = [llama.write(tmp_path / "a", model), llama.write(tmp_path / "b", convert(model))]
    a, b = paths[::-1] if turned else paths
    written = str(tmp_path / "map.toml")
    report = syncheck.diff(a, b, options=DiffOptions(write_map=written))
    assert (report.exit_code, report.counts.identical) == (0, len(model))
    notes = [note.code for note in report.groups[-1].notes]
    assert Note.INFERRED in notes
    # One rule for both layers.
    assert notes.count(Note.RULE) <= len(model) / 2 + 2
    again = syncheck.diff(a, b, options=DiffOptions(map=written))
    assert (again.exit_code, again.counts) == (0, report.counts)
    assert Note.INFERRED not in {note.code for note in again.groups[-1].notes}


def test_a_written_map_finds_a_fault(tmp_path: Path) -> None:
    """A map from a correct conversion locates a changed element of the next one."""
    model = llama.make_model()
    a, b = llama.write(tmp_path / "a", model), llama.write(tmp_path / "b", fuse(model))
    written = str(tmp_path / "map.toml")
    assert main(["diff", "-q", a, b, "--write-map", written]) == 0
    converted = fuse(model)
    converted["x.b.0.mlp.linear_fc1.weight"][llama.INNER + 3, 2] += 1
    report = syncheck.diff(a, llama.write(tmp_path / "c", converted), options=DiffOptions(map=written))
    (diff,) = report.groups[-1].tensors
    assert (diff.name, diff.index) == ("model.layers.0.mlp.up_proj.weight", (3, 2))


def test_stacks(tmp_path: Path) -> None:
    """A tensor for all experts or layers against one tensor for each."""
    rng = np.random.default_rng(0)
    stack = rng.standard_normal((5, 4, 3), np.float32)
    single = {f"experts.{i}.w": stack[i] for i in range(5)}
    a, b = llama.write(tmp_path / "a", single), llama.write(tmp_path / "b", {"all": stack})
    assert syncheck.diff(a, b).exit_code == syncheck.diff(b, a).exit_code == 0


def test_names_of_equal_tensors(tmp_path: Path) -> None:
    """Tensors with equal data are paired by their numbers and the ends of their names."""
    model = llama.make_model()
    model |= {name: np.ones_like(w) for name, w in model.items() if w.ndim == 1}
    a, b = llama.write(tmp_path / "a", model), llama.write(tmp_path / "b", rename(model))
    assert syncheck.diff(a, b).exit_code == 0


def test_ambiguous_data_is_never_in_sync(tmp_path: Path) -> None:
    """Tensors with equal data and other names: nothing shows which of them belong together."""
    model = llama.make_model()
    names = {"input_layernorm": "n1", "post_attention_layernorm": "n2"}
    model |= {name: np.ones_like(w) for name, w in model.items() if w.ndim == 1}
    other = {}
    for name, weight in rename(model).items():
        for old, new in names.items():
            name = name.replace(old, new)
        other[name] = weight
    report = syncheck.diff(llama.write(tmp_path / "a", model), llama.write(tmp_path / "b", other))
    assert report.verdict == "undecided"
    assert Note.AMBIGUOUS_MAP in {note.code for note in report.groups[-1].notes}
    assert report.counts.not_compared == 2 * llama.LAYERS + 1


@pytest.mark.parametrize(
    ("name", "code"), [("x.net.norm.weight", "SYN101"), ("x.blocks.1.mlp.down_proj.weight", "SYN399")]
)
def test_other_data_is_not_paired(tmp_path: Path, name: str, code: str) -> None:
    """A tensor with other data stays missing, unless another layer has shown its name."""
    model = llama.make_model()
    copy = rename(model)
    copy[name] = copy[name] + np.float32(0.5) * np.arange(copy[name].shape[-1], dtype=np.float32) % 1
    report = syncheck.diff(llama.write(tmp_path / "a", model), llama.write(tmp_path / "b", copy))
    assert report.exit_code == 1
    assert {finding.code for finding in report.groups[-1].findings} == {code}


def test_a_misspelled_name_is_no_other_naming(tmp_path: Path) -> None:
    """If most names agree, a tensor with another name is missing; a note names the tensor with its data."""
    model = llama.make_model()
    copy = dict(model)
    copy["model.layers.0.self_attn.q.weight"] = copy.pop("model.layers.0.self_attn.q_proj.weight")
    written = str(tmp_path / "map.toml")
    a, b = llama.write(tmp_path / "a", model), llama.write(tmp_path / "b", copy)
    report = syncheck.diff(a, b, options=DiffOptions(write_map=written))
    assert [finding.code for finding in report.groups[-1].findings] == ["SYN101"]
    assert {Note.PROPOSED, Note.RULE} <= {note.code for note in report.groups[-1].notes}
    assert main(["diff", "-q", a, b, "--map", written]) == 0


def test_every_map_can_be_written(tmp_path: Path) -> None:
    """The file has the map that was used, also a built-in map; without a map, a note says so."""
    model = llama.make_model()
    a, b = llama.write(tmp_path / "a", model), llama.write(tmp_path / "b", llama.to_megatron(model))
    assert main(["diff", "-q", a, b, "--write-map", str(tmp_path / "llama.toml")]) == 0
    assert main(["diff", "-q", a, b, "--map", str(tmp_path / "llama.toml")]) == 0
    report = syncheck.diff(a, a, options=DiffOptions(write_map=str(tmp_path / "none.toml")))
    assert Note.NO_MAP in {note.code for note in report.groups[-1].notes}
    assert not (tmp_path / "none.toml").exists()


def test_a_map_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, and exit code 2."""
    model = llama.make_model()
    a, b = llama.write(tmp_path / "a", model), llama.write(tmp_path / "b", rename(model))
    assert main(["diff", a, b, "--write-map", str(tmp_path / "no" / "map.toml")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
