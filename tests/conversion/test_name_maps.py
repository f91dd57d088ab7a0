"""Maps of names: operations, files, variables, padding, and the location of differences."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support import llama
from support.listings import list_codes, list_names, map_fields

import syncheck
from syncheck.cli import main
from syncheck.conversion.map_files import list_built_in, read_map
from syncheck.conversion.name_maps import Rule, split_tensor
from syncheck.errors import UsageError
from syncheck.messages import Note, Undecided
from syncheck.options import DiffOptions
from syncheck.report.undecided import undecided_reason
from syncheck.snapshots import Tensor, contiguous_strides
from syncheck.tensors.blocks import Files

if TYPE_CHECKING:
    from pathlib import Path

VARIABLES = {"heads": 4, "kv_heads": 2, "head_dim": 8}


def in_memory(array: Any) -> Tensor:
    """Return a tensor with the elements of an array."""
    data = array.astype("<f4").tobytes()
    return Tensor("w", "float32", array.shape, contiguous_strides(array.shape), "memory", 0, data=data)


def read(tensor: Tensor) -> Any:
    """Return the elements of a tensor."""
    with Files() as files:
        return np.frombuffer(bytes(files.read(tensor, 0, tensor.numel, 0)), "<f4").reshape(tensor.shape)


def split(rule: Rule, array: Any) -> dict[str, Any]:
    """Apply a rule to the tensor "w"."""
    parts = split_tensor(rule, {}, in_memory(array), VARIABLES)
    return {name: read(part) for name, part in (parts or {}).items()}


ROWS = np.arange(64 * 6, dtype=np.float32).reshape(64, 6)
STACK = ROWS.reshape(4, 16, 6)


@pytest.mark.parametrize(
    ("rule", "array", "wanted"),
    [
        (Rule("w", ("v",)), ROWS, {"v": ROWS}),
        (Rule("w", ("v",), transpose=True), ROWS, {"v": ROWS.T}),
        (Rule("w", ("a", "b")), ROWS, {"a": ROWS[:32], "b": ROWS[32:]}),
        (Rule("w", ("a", "b"), dim=1), ROWS, {"a": ROWS[:, :3], "b": ROWS[:, 3:]}),
        (Rule("w", ("a", "b"), groups="rows"), ROWS, {"a": ROWS[::2], "b": ROWS[1::2]}),
        (Rule("w", ("a", "b"), sizes=(3, 1)), ROWS, {"a": ROWS[:48], "b": ROWS[48:]}),
        (
            Rule("w", ("q", "k", "v"), sizes=("heads", "kv_heads", "kv_heads"), groups="kv_heads"),
            ROWS,
            {
                "q": ROWS.reshape(2, 32, 6)[:, :16].reshape(32, 6),
                "k": ROWS.reshape(2, 32, 6)[:, 16:24].reshape(16, 6),
                "v": ROWS.reshape(2, 32, 6)[:, 24:].reshape(16, 6),
            },
        ),
        (Rule("w", ("v.{e}",)), STACK, {f"v.{e}": STACK[e] for e in range(4)}),
        (
            Rule("w", ("g.{e}", "u.{e}"), transpose=True, dim=0),
            STACK,
            {f"{x}.{e}": STACK[e].T[i : i + 3] for e, (x, i) in product(range(4), (("g", 0), ("u", 3)))},
        ),
    ],
)
def test_operations(rule: Rule, array: Any, wanted: dict[str, Any]) -> None:
    """Each operation gives the elements that numpy computes."""
    result = split(rule, array)
    assert result.keys() == wanted.keys()
    for name, part in wanted.items():
        assert np.array_equal(result[name], part), name


def test_rotary() -> None:
    """Halves of heads of 8 rows are interleaved in the stored tensor, also in a bias."""
    for array in (ROWS, ROWS[:, 0]):
        result = split(Rule("w", ("v",), rotary=True), llama.interleave(array))
        assert np.array_equal(result["v"], array)


@pytest.mark.parametrize(
    "rule",
    [
        Rule("w", ("a", "b", "c")),
        Rule("w", ("a", "b"), groups=5),
        Rule("w", ("a", "b"), dim=2),
        Rule("w", ("a", "b"), groups="rows", sizes=(40, 30)),
    ],
)
def test_rules_that_do_not_fit(rule: Rule) -> None:
    """Shapes that a rule cannot divide give no part."""
    assert split(rule, ROWS) == {}
    assert split(Rule("w", ("v",), transpose=True), ROWS[:, 0]) == {}


@pytest.mark.parametrize("name", list_built_in())
def test_built_in_maps(name: str) -> None:
    """Each map can be read, and each rule has parts or ignores its tensor."""
    assert read_map(name).rules


@pytest.mark.parametrize(
    "text",
    [
        "no toml [",
        "rules = 1",
        "[rule]\nname = 'a'",
        "[[rule]]\nparts = ['a']",
        "[[rule]]\nname = 'a'\nparts = 'b'",
        "[[rule]]\nname = 'a'\nparts = ['b']\nturn = true",
        "[[rule]]\nname = 'a'\nparts = ['b']\nsizes = [1, 2]",
        "[[rule]]\nname = 'a'\nparts = ['b']\nsizes = ['width']",
        "[[rule]]\nname = 'a'\nparts = ['b']\ngroups = 0",
        "[[rule]]\nname = 'a'\nparts = ['b']\npad = 1",
        "[[rule]]\nname = 'a.{i}.{i}'\nparts = ['b']",
        "[[rule]]\nname = 'a'\nparts = ['b.{i}', 'c.{j}']",
        "[[rule]]\nname = 'a'\nparts = ['b.{i}.{j}']",
        "tied = ['a', 'b']",
    ],
)
def test_files_that_are_no_map(tmp_path: Path, text: str) -> None:
    """One error with the name of the file."""
    path = tmp_path / "map.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"map\.toml") as raised:
        read_map(str(path))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["unknown", "missing.toml"])
def test_unknown_maps(name: str) -> None:
    """A map that does not exist."""
    with pytest.raises(UsageError, match=name):
        read_map(name)


def notes(report: syncheck.Report) -> set[Any]:
    """Return the sentences of the notes."""
    return set(list_codes(report.groups[-1].notes))


def test_megatron_names_are_recognized(tmp_path: Path) -> None:
    """A converted model is in sync in both directions, with all tensors compared, and without a map."""
    model = llama.make_model()
    a = llama.write(tmp_path / "hf", model, llama.CONFIG)
    b = llama.write(tmp_path / "megatron", llama.to_megatron(model))
    for pair in ((a, b), (b, a)):
        report = syncheck.diff(*pair)
        assert (report.exit_code, report.counts.identical) == (0, len(model))
        assert {Note.MAP, Note.PADDED} <= notes(report)


def test_norms_in_linear_layers_are_recognized(tmp_path: Path) -> None:
    """A state dict of Transformer Engine's layers is in sync, also with its extra states; an exchanged norm is not."""
    model = llama.make_model()
    a = llama.write(tmp_path / "hf", model, llama.CONFIG)
    converted: llama.Weights = {}
    for name, weight in llama.to_megatron(model).items():
        module = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        converted[module.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")] = weight
    attention_norm = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
    mlp_norm = "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"
    states = {f"decoder.layers.0.{name}._extra_state": np.ones(3, "u1") for name in ("self_attention.core", "mlp.fc")}
    exchanged = converted | {attention_norm: converted[mlp_norm], mlp_norm: converted[attention_norm]}
    for content, exit_code in ((converted, 0), (converted | states, 0), (exchanged, 1)):
        report = syncheck.diff(a, llama.write(tmp_path / "megatron", content))
        assert (report.exit_code, report.counts.tensors) == (exit_code, len(model))


def test_sizes_of_heads_are_found_in_the_data(tmp_path: Path) -> None:
    """Without config.json, numbers of heads that fit are a proposal; in two unrelated models, none fits."""
    a = llama.write(tmp_path / "hf", llama.make_model())
    equal_copy = llama.write(tmp_path / "same", llama.to_megatron(llama.make_model()))
    report = syncheck.diff(a, equal_copy)
    assert (report.exit_code, undecided_reason(report).code) == (2, Undecided.GUESSED_HEADS)
    assert Note.GUESSED_HEADS in notes(report)
    accepted = syncheck.diff(a, equal_copy, options=DiffOptions(accept_inferred=True))
    assert (accepted.exit_code, Note.GUESSED_HEADS in notes(accepted)) == (0, True)
    report = syncheck.diff(a, llama.write(tmp_path / "other", llama.to_megatron(llama.make_model(seed=1))))
    assert report.exit_code == 1
    assert Note.UNKNOWN_SETTINGS in notes(report)


@pytest.mark.parametrize("turned", [False, True])
def test_parts_of_all_layers_in_another_order(tmp_path: Path, turned: bool) -> None:
    """Query, key and value that do not alternate fit other numbers of heads: never in sync without a configuration."""
    model = llama.make_model()
    joined = llama.to_megatron(model)
    for layer in range(2):
        parts = [model[f"model.layers.{layer}.self_attn.{part}_proj.weight"] for part in "qkv"]
        joined[f"decoder.layers.{layer}.self_attention.linear_qkv.weight"] = np.concatenate(parts)
    wrong = llama.write(tmp_path / "wrong", joined)
    for config, exit_code in ((None, 2), (llama.CONFIG, 1)):
        sides = [llama.write(tmp_path / f"hf{exit_code}", model, config), wrong]
        assert syncheck.diff(*sides[:: -1 if turned else 1]).exit_code == exit_code


def test_two_numbers_of_heads_are_an_error(tmp_path: Path) -> None:
    """Configurations of two numbers of heads describe two models, whichever is A."""
    model = llama.make_model()
    a = llama.write(tmp_path / "hf", model, llama.CONFIG)
    second = {**llama.CONFIG, "num_attention_heads": 2 * llama.CONFIG["num_attention_heads"]}
    b = llama.write(tmp_path / "megatron", llama.to_megatron(model), second)
    for sides in ((a, b), (b, a)):
        assert main(["diff", "-q", *sides]) == 2


@pytest.mark.parametrize("number", ["0", "-1", "true", "'4'", "1" + "0" * 300])
def test_numbers_of_heads_in_a_map(tmp_path: Path, number: str) -> None:
    """A map may state numbers of heads; a value that is none is an error."""
    path = tmp_path / "map.toml"
    path.write_text(f"head_dim = {number}\n")
    with pytest.raises(UsageError):
        read_map(str(path))


def test_a_changed_element_is_located_in_both_files(tmp_path: Path) -> None:
    """The index is that of the part, and the place has the name and index in the stored tensor."""
    model = llama.make_model()
    a = llama.write(tmp_path / "hf", model, llama.CONFIG)
    converted = llama.to_megatron(model)
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    converted[name][18, 5] += 1  # group 0 has 16 rows of query, then 8 of key
    report = syncheck.diff(a, llama.write(tmp_path / "megatron", converted))
    (diff,) = report.groups[-1].tensors
    assert (diff.name, diff.index) == ("model.layers.1.self_attn.k_proj.weight", (2, 5))
    assert (diff.places[0].tensor, diff.places[1].tensor, diff.places[1].index) == ("", name, (18, 5))


def test_ties_and_ignored_tensors(tmp_path: Path) -> None:
    """A model without an output layer uses its embedding, and buffers that the map ignores are not compared."""
    model = llama.make_model()
    model["lm_head.weight"] = model["model.embed_tokens.weight"]
    converted = llama.to_megatron(model)
    del converted["output_layer.weight"]
    (tmp_path / "map.toml").write_text(
        "tied = [['lm_head.weight', 'model.embed_tokens.weight']]\n[[rule]]\nname = 'inv_freq'\nparts = []\n"
    )
    config = llama.CONFIG | {"tie_word_embeddings": True}
    a = llama.write(tmp_path / "hf", {**model, "inv_freq": np.ones(4, np.float32)}, config)
    report = syncheck.diff(a, llama.write(tmp_path / "megatron", converted))
    assert report.exit_code == 1  # inv_freq is missing in B
    text = (tmp_path / "map.toml").read_text()
    built_in = syncheck.__path__[0] + "/conversion/maps/llama.toml"
    with open(built_in, encoding="utf-8") as file:
        rules = file.read().partition("[[rule]]")[2]
    (tmp_path / "map.toml").write_text(f"{text}[[rule]]{rules}")
    options = DiffOptions(map=str(tmp_path / "map.toml"))
    report = syncheck.diff(a, str(tmp_path / "megatron"), options=options)
    assert report.exit_code == 0
    assert Note.IGNORED in notes(report)


def test_other_rows_of_padding_are_a_difference(tmp_path: Path) -> None:
    """Only the longer tensor of a padded pair is cut: rows that B lacks are reported."""
    model = llama.make_model()
    converted = llama.to_megatron(model)
    converted["output_layer.weight"] = converted["output_layer.weight"][: llama.WORDS - 1]
    a = llama.write(tmp_path / "hf", model, llama.CONFIG)
    report = syncheck.diff(a, llama.write(tmp_path / "megatron", converted))
    assert report.exit_code == 1
    assert list_codes(report.groups[-1].findings) == ["SYN318"]


def test_two_tensors_for_one_part_are_both_kept(tmp_path: Path) -> None:
    """A model with the names of two libraries: the mapped tensor keeps its name, and nothing is lost."""
    model = llama.make_model()
    both = {**llama.to_megatron(model), "model.norm.weight": model["model.norm.weight"] + 1}
    a = llama.write(tmp_path / "a", model, llama.CONFIG)
    for i, names in enumerate((both, dict(reversed(both.items())))):
        report = syncheck.diff(a, llama.write(tmp_path / str(i), names))
        result = set(list_names(report.groups[-1].tensors))
        assert (report.exit_code, result) == (1, {"model.norm.weight", "decoder.final_layernorm.weight"})


def test_linear_layers_in_both_orientations(tmp_path: Path) -> None:
    """A map transposes tensors of one name if the shape of one of them shows it, square ones too."""
    rng = np.random.default_rng(0)
    model = {
        f"h.{i}.{x}.weight": rng.standard_normal((6, n), np.float32)
        for i, (x, n) in product(range(2), (("a", 9), ("b", 6)))
    }
    (tmp_path / "map.toml").write_text(
        "".join(
            f"[[rule]]\nname = 'h.{{i}}.{x}.weight'\nparts = ['h.{{i}}.{x}.weight']\ntranspose = true\n" for x in "ab"
        )
    )
    a = llama.write(tmp_path / "a", model)
    b = llama.write(tmp_path / "b", map_fields(model, "T"))
    options = DiffOptions(map=str(tmp_path / "map.toml"))
    assert syncheck.diff(a, b, options=options).exit_code == 0
    assert syncheck.diff(a, a, options=options).exit_code == 0
    assert set(list_codes(syncheck.diff(a, b).groups[-1].findings)) == {"SYN304"}


@pytest.mark.parametrize(
    "config",
    [
        {"num_attention_heads": 10**30, "num_key_value_heads": 10**15, "head_dim": 7},
        {"num_attention_heads": -1, "num_key_value_heads": 0, "head_dim": "8"},
        {"num_attention_heads": 10**400, "num_key_value_heads": 10**400, "head_dim": 10**400, "hidden_size": 10**400},
        {"num_attention_heads": float("inf"), "num_key_value_heads": float("nan"), "head_dim": True},
        {"text_config": [1], "hidden_size": 2**63},
        [[]],
    ],
)
def test_hostile_configurations(tmp_path: Path, config: Any) -> None:
    """Numbers that do not fit the shapes leave tensors unmapped, or are replaced by the data; nothing crashes."""
    model = llama.make_model()
    a = llama.write(tmp_path / "hf", model, config)
    report = syncheck.diff(a, llama.write(tmp_path / "megatron", llama.to_megatron(model)))
    # Numbers that are found in the data are a proposal.
    assert report.verdict != "in_sync"
    (tmp_path / "hf" / "config.json").write_text("[" * 100_000)
    report = syncheck.diff(a, str(tmp_path / "megatron"), options=DiffOptions(accept_inferred=True))
    assert report.exit_code == 0


def test_digests_are_renamed_and_not_divided(tmp_path: Path) -> None:
    """A fingerprint has digests of whole tensors: fused tensors cannot be compared by their parts."""
    model = llama.make_model()
    llama.write(tmp_path / "hf", model, llama.CONFIG)
    b = llama.write(tmp_path / "megatron", llama.to_megatron(model))
    path = str(tmp_path / "b.fingerprint.json")
    assert main(["fingerprint", f"{b}/model.safetensors", "-o", path, "-q"]) == 0
    report = syncheck.diff(str(tmp_path / "hf"), path)
    assert report.exit_code != 0
    names = set(list_names(report.groups[-1].tensors))
    assert "decoder.layers.0.mlp.linear_fc1.weight" in names
    assert "model.layers.0.mlp.down_proj.weight" not in names


@pytest.mark.parametrize(
    "rule",
    [
        Rule("qkv", ("q", "k", "v"), sizes=("heads", "kv_heads", "kv_heads")),
        Rule("qkv", ("q", "k", "v"), groups="kv_heads"),
        Rule("q", ("q",), rotary=True),
        Rule("qkv", ("q", "k", "v"), transpose=True, groups="heads"),
    ],
    ids=["sizes", "groups", "rotary", "transposed"],
)
def test_a_rule_with_an_unknown_variable_divides_nothing(rule: Rule) -> None:
    """A rule that needs a number of heads does not fit if no configuration states this number."""
    array = np.zeros((24, 24), "float32")
    assert split_tensor(rule, {}, in_memory(array), {}) is None
