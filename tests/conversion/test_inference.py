"""Maps that are inferred from equal data: renames, fused tensors, stacks and transposed tensors, and ambiguous data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support import llama
from support.listings import find_all, list_codes, list_names
from support.states import add_prefix, cast

import syncheck
from syncheck.cli import main
from syncheck.messages import Note, Undecided
from syncheck.options import DiffOptions
from syncheck.report.undecided import undecided_reason
from syncheck.text import options_as_typed

if TYPE_CHECKING:
    from pathlib import Path

    from support.llama import Weights


def rename(model: Weights) -> Weights:
    """Return the model with names that no built-in map has."""
    pairs = (("model.layers.", "blocks."), ("self_attn.", "attention."), ("model.", "net."), ("decoder.layers.", "b."))
    renamed = {}
    for name, weight in model.items():
        for old, new in pairs:
            name = name.replace(old, new)
        renamed[f"x.{name}"] = weight
    return renamed


def load(folder: str) -> Weights:
    """Return the weights that `llama.write` wrote."""
    from safetensors.numpy import load_file

    return dict(load_file(f"{folder}/model.safetensors"))


def rotate(model: Weights) -> Weights:
    """Return the model with the other rotary order of query and key."""
    return {
        name: llama.interleave(w) if "q_proj" in name or "k_proj" in name else w for name, w in rename(model).items()
    }


def transpose(model: Weights) -> Weights:
    """Return the model with transposed matrices."""
    return {name: w.T if w.ndim == 2 else w for name, w in rename(model).items()}


def fuse(model: Weights) -> Weights:
    """Return the model in the layout of Megatron-Core, without padding."""
    fused = llama.to_megatron(model)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        fused[name] = fused[name][: llama.WORDS]
    return rename(fused)


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
    """Equality under an inferred map is undecided, also as A; the written map, or its acceptance, decide."""
    model = llama.make_model()
    paths = [llama.write(tmp_path / "a", model), llama.write(tmp_path / "b", convert(model))]
    a, b = paths[::-1] if turned else paths
    written = str(tmp_path / "map.toml")
    report = syncheck.diff(a, b, options=DiffOptions(write_map=written))
    assert (report.exit_code, report.counts.identical) == (2, len(model))
    with options_as_typed():
        assert str(undecided_reason(report)).endswith(f"pass --map {written}")
        assert undecided_reason(syncheck.diff(a, b)).code is Undecided.INFERRED_MAP
    notes = list_codes(report.groups[-1].notes)
    assert Note.INFERRED in notes
    # One rule for both layers.
    assert notes.count(Note.RULE) <= len(model) / 2 + 2
    again = syncheck.diff(a, b, options=DiffOptions(map=written))
    assert (again.exit_code, again.counts) == (0, report.counts)
    assert Note.INFERRED not in list_codes(again.groups[-1].notes)
    accepted = syncheck.diff(a, b, options=DiffOptions(accept_inferred=True))
    assert accepted.exit_code == 0
    assert Note.ACCEPTED_MAP in list_codes(accepted.groups[-1].notes)


def test_counts_of_stored_tensors(tmp_path: Path) -> None:
    """The files have the number of tensors that they store, and the map the number of those that it renames."""
    model = llama.make_model()
    fused = fuse(model)
    a, b = llama.write(tmp_path / "a", model), llama.write(tmp_path / "b", fused)
    report = syncheck.diff(a, b)
    (group,) = report.groups
    assert report.counts.tensors == len(model) > len(fused)
    assert [replica.tensors for replica in group.replicas] == [len(model), len(fused)]
    (note,) = [note for note in group.notes if note.code is Note.MAP]
    assert str(note).endswith(f": {len(fused)} tensors of B")


def test_a_written_map_finds_a_fault(tmp_path: Path) -> None:
    """A map from a correct conversion locates a changed element of the next one."""
    model = llama.make_model()
    a, b = llama.write(tmp_path / "a", model), llama.write(tmp_path / "b", fuse(model))
    written = str(tmp_path / "map.toml")
    assert main(["diff", "-q", a, b, "--write-map", written]) == 2
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
    assert syncheck.diff(a, b).exit_code == syncheck.diff(b, a).exit_code == 2
    exchanged = llama.write(tmp_path / "c", {"all": stack[[0, 1, 3, 2, 4]]})
    assert syncheck.diff(a, exchanged).exit_code == 1


def test_names_of_equal_tensors(tmp_path: Path) -> None:
    """Tensors with equal data are paired by their numbers and the ends of their names."""
    model = llama.make_model()
    model |= {name: np.ones_like(w) for name, w in model.items() if w.ndim == 1}
    a, b = llama.write(tmp_path / "a", model), llama.write(tmp_path / "b", rename(model))
    report = syncheck.diff(a, b)
    assert (report.exit_code, report.counts.identical) == (2, len(model))


def test_a_model_with_its_initial_values(tmp_path: Path) -> None:
    """Norms of 1 and biases of 0 are paired by names, the rules are marked as guesses, and the written map is right."""
    model = llama.make_model()
    names = {"input_layernorm": "n1", "post_attention_layernorm": "n2"}
    model |= {name: np.ones_like(w) for name, w in model.items() if w.ndim == 1}
    second = {}
    for name, weight in rename(model).items():
        for old, new in names.items():
            name = name.replace(old, new)
        second[name] = weight
    a, b = llama.write(tmp_path / "a", model), llama.write(tmp_path / "b", second)
    written = tmp_path / "map.toml"
    report = syncheck.diff(a, b, options=DiffOptions(write_map=str(written)))
    assert (report.verdict, report.counts.identical) == ("undecided", len(model))
    assert Note.GUESSED_RULES in list_codes(report.groups[-1].notes)
    assert written.read_text().count("# A guess") == 3
    again = syncheck.diff(a, b, options=DiffOptions(map=str(written)))
    assert again.exit_code == 0
    # The passed map decides, and the report says that the data does not.
    (note,) = find_all(again.groups[-1].notes, code=Note.INTERCHANGEABLE)
    assert sorted(note.parameters["names"]) == sorted(name for name, weight in model.items() if weight.ndim == 1)


def test_constants_that_differ_are_not_interchangeable(tmp_path: Path) -> None:
    """Norms of random numbers, constants of other values and tensors with equal beginnings have no note."""
    model = llama.make_model()
    vectors = [name for name, weight in model.items() if weight.ndim == 1]
    for number, name in enumerate(vectors[1:]):
        model[name] = np.full_like(model[name], number)
    # Two vectors that are longer than the part that is read first.
    for last in (2, 3):
        model[f"model.long_{last}"] = np.concatenate([np.ones(200, np.float32), np.full(1, last, np.float32)])
    a, b = llama.write(tmp_path / "a", model), llama.write(tmp_path / "b", rename(model))
    written = str(tmp_path / "map.toml")
    syncheck.diff(a, b, options=DiffOptions(write_map=written))
    report = syncheck.diff(a, b, options=DiffOptions(map=written))
    assert report.exit_code == 0
    assert Note.INTERCHANGEABLE not in list_codes(report.groups[-1].notes)


def test_ambiguous_data_is_never_in_sync(tmp_path: Path) -> None:
    """If one model has more tensors with equal data, nothing shows which of them belong together."""
    model = llama.make_model()
    model |= {f"model.norm_{x}.weight": model["model.norm.weight"] * 0 + 1 for x in "abc"}
    a, b = llama.write(tmp_path / "a", model), llama.write(tmp_path / "b", rename(model))
    second = rename(model)
    del second["x.net.norm_b.weight"]
    c = llama.write(tmp_path / "c", second)
    for accept in (False, True):
        report = syncheck.diff(a, c, options=DiffOptions(accept_inferred=accept))
        assert (report.verdict, report.counts.not_compared) == ("undecided", 3)
        assert Note.AMBIGUOUS_MAP in list_codes(report.groups[-1].notes)
    assert syncheck.diff(a, b, options=DiffOptions(accept_inferred=True)).exit_code == 0


def test_a_tied_weight_that_one_model_stores_once(tmp_path: Path) -> None:
    """Both copies are compared with the tensor of the other model, also by the written map."""
    model = llama.make_model()
    model["lm_head.weight"] = model["model.embed_tokens.weight"]
    once = rename(model)
    del once["x.lm_head.weight"]
    a, b = llama.write(tmp_path / "a", model), llama.write(tmp_path / "b", once)
    written = str(tmp_path / "map.toml")
    for first, second in ((a, b), (b, a)):
        report = syncheck.diff(first, second, options=DiffOptions(write_map=written))
        assert (report.exit_code, report.counts.identical) == (2, len(model))
        assert main(["diff", "-q", first, second, "--map", written]) == 0
    model["lm_head.weight"] = model["lm_head.weight"] + 1
    c = llama.write(tmp_path / "c", model)
    assert main(["diff", "-q", c, b, "--map", written]) == 1


def test_constants_of_other_shapes_are_ambiguous(tmp_path: Path) -> None:
    """Fused zeros may be the zeros of the parts: undecided, unless one model has more of them."""
    rng = np.random.default_rng(0)
    zeros = {f"a.{x}": np.zeros(8, np.float32) for x in "qkv"}
    a = llama.write(tmp_path / "a", {"a.w": rng.standard_normal((4, 4)).astype("f4"), **zeros})
    weight = {"b.x": rng.standard_normal((4, 4)).astype("f4")}
    weight["b.x"] = np.array(load(a)["a.w"])
    b = llama.write(tmp_path / "b", {**weight, "c.bias": np.zeros(24, np.float32)})
    c = llama.write(tmp_path / "c", {**weight, "c.bias": np.zeros(16, np.float32)})
    assert [syncheck.diff(a, second).exit_code for second in (b, c)] == [2, 1]


def test_biases_follow_the_rule_of_their_weight(tmp_path: Path) -> None:
    """Zero biases of q, k and v, fused, are compared by the rule of the weights."""
    rng = np.random.default_rng(0)
    a: Weights = {}
    b: Weights = {}
    for i in range(3):
        parts = [rng.standard_normal((n, 8)).astype("f4") for n in (16, 8, 8)]
        a |= {f"layers.{i}.{x}.weight": part for x, part in zip("qkv", parts, strict=True)}
        a |= {f"layers.{i}.{x}.bias": np.zeros(len(part), "f4") for x, part in zip("qkv", parts, strict=True)}
        b |= {f"h.{i}.qkv.weight": np.concatenate(parts), f"h.{i}.qkv.bias": np.zeros(32, "f4")}
    first_path, second_path = llama.write(tmp_path / "a", a), llama.write(tmp_path / "b", b)
    report = syncheck.diff(first_path, second_path)
    assert (report.exit_code, report.counts.identical) == (2, 18)
    b["h.1.qkv.bias"][20] = 1
    report = syncheck.diff(first_path, llama.write(tmp_path / "c", b))
    assert list_names(report.groups[-1].tensors) == ["layers.1.k.bias"]


def test_rows_are_never_inferred_as_padding(tmp_path: Path) -> None:
    """A tensor with fewer or more rows is a difference, whatever its name, and whichever side is shorter."""
    rng = np.random.default_rng(0)
    head, body = rng.standard_normal((20, 16)).astype("f4"), rng.standard_normal((8, 16)).astype("f4")
    a = llama.write(tmp_path / "a", {"embed.weight": head, "body.w": body})
    for i, rows in enumerate((1, 10, 19)):
        b = llama.write(tmp_path / str(i), {"tok.weight": head[:rows], "trunk.w": body})
        for pair in ((a, b), (b, a)):
            report = syncheck.diff(*pair)
            assert set(list_codes(report.groups[-1].findings)) == {"SYN318"}


def test_other_dtypes_are_paired_after_the_cast(tmp_path: Path) -> None:
    """A renamed copy in float16 is a cast, also as A; with --cast it is equal under an inferred map."""
    model = llama.make_model()
    half = cast(rename(model), np.float16)
    a, b = llama.write(tmp_path / "a", model), llama.write(tmp_path / "b", half)
    assert set(list_codes(syncheck.diff(a, b).groups[-1].findings)) == {"SYN307"}
    assert syncheck.diff(a, b, options=DiffOptions(cast="float16")).exit_code == 2
    assert syncheck.diff(b, a).exit_code == 1
    options = DiffOptions(cast="float16", accept_inferred=True)
    assert syncheck.diff(a, b, options=options).exit_code == 0


def test_hostile_names(tmp_path: Path) -> None:
    """Braces, format specifications and regular expressions in names are text, in both directions and in a map."""
    rng = np.random.default_rng(0)
    names = ["a{0}.1.w", "a{i:9999999999}.1.w", "a{.w", "a}.w", "{0.__class__}", "(.*)+$.w", "{{i}}.2", "a\\1.w", "{i}"]
    model = {name: rng.standard_normal((4, 4)).astype("f4") for name in names}
    renamed = add_prefix(model, "v.")
    a, b = llama.write(tmp_path / "a", model), llama.write(tmp_path / "b", renamed)
    written = str(tmp_path / "map.toml")
    for first, second in ((a, b), (b, a)):
        report = syncheck.diff(first, second, options=DiffOptions(write_map=written))
        assert (report.exit_code, report.counts.identical) == (2, len(names))
        assert syncheck.diff(first, second, options=DiffOptions(map=written)).exit_code == 0


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
    assert set(list_codes(report.groups[-1].findings)) == {code}


def test_a_misspelled_name_is_no_other_naming(tmp_path: Path) -> None:
    """If most names agree, a tensor with another name is missing; a note names the tensor with its data."""
    model = llama.make_model()
    copy = dict(model)
    copy["model.layers.0.self_attn.q.weight"] = copy.pop("model.layers.0.self_attn.q_proj.weight")
    written = str(tmp_path / "map.toml")
    a, b = llama.write(tmp_path / "a", model), llama.write(tmp_path / "b", copy)
    report = syncheck.diff(a, b, options=DiffOptions(write_map=written))
    assert list_codes(report.groups[-1].findings) == ["SYN101"]
    assert {Note.PROPOSED, Note.RULE} <= set(list_codes(report.groups[-1].notes))
    assert main(["diff", "-q", a, b, "--map", written]) == 0


def test_every_map_can_be_written(tmp_path: Path) -> None:
    """The file has the map that was used, also a built-in map; without a map, a note says so."""
    model = llama.make_model()
    a, b = llama.write(tmp_path / "a", model), llama.write(tmp_path / "b", llama.to_megatron(model))
    # The map has the number of heads, which no configuration states.
    assert main(["diff", "-q", a, b, "--write-map", str(tmp_path / "llama.toml")]) == 2
    assert main(["diff", "-q", a, b, "--map", str(tmp_path / "llama.toml")]) == 0
    report = syncheck.diff(a, a, options=DiffOptions(write_map=str(tmp_path / "none.toml")))
    assert Note.NO_MAP in list_codes(report.groups[-1].notes)
    assert not (tmp_path / "none.toml").exists()


def test_a_map_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, and exit code 2."""
    model = llama.make_model()
    a, b = llama.write(tmp_path / "a", model), llama.write(tmp_path / "b", rename(model))
    assert main(["diff", a, b, "--write-map", str(tmp_path / "no" / "map.toml")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def make_long_names() -> tuple[Weights, Weights]:
    """Return a model with names of thousands of characters, and a copy with other names."""
    rng = np.random.default_rng(0)
    model = {f"{'a' * size}.{'b' * size}.w": rng.standard_normal((4, 4)).astype("f4") for size in (510, 600, 9000)}
    return model, add_prefix(model, "other{")


def make_many_parts() -> tuple[Weights, Weights]:
    """Return a model with one tensor, and a copy with a tensor for each of its 300 rows."""
    rows = np.random.default_rng(0).standard_normal((300, 8)).astype("f4")
    return {"all": rows}, {f"part_{chr(97 + i // 26)}{chr(97 + i % 26)}": rows[i : i + 1] for i in range(300)}


@pytest.mark.parametrize("make", [make_long_names, make_many_parts])
def test_a_written_map_is_readable(tmp_path: Path, make: Any) -> None:
    """Names of any length and fused tensors of many parts are within the limits of a map."""
    a, b = make()
    paths = llama.write(tmp_path / "a", a), llama.write(tmp_path / "b", b)
    written = str(tmp_path / "map.toml")
    assert main(["diff", "-q", *paths, "--write-map", written]) == 2
    assert main(["diff", "-q", *paths, "--map", written]) == 0


def test_a_map_that_could_not_be_read_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tensor without a name has no rule: one line, exit code 2, and no file."""
    weight = np.random.default_rng(0).standard_normal((4, 4)).astype("f4")
    paths = llama.write(tmp_path / "a", {"": weight}), llama.write(tmp_path / "b", {"w": weight})
    written = tmp_path / "map.toml"
    assert main(["diff", *paths, "--write-map", str(written)]) == 2
    assert "map.toml: rule 1" in capsys.readouterr().err
    assert not written.exists()
