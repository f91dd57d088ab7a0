"""A map may not hide anything: padding, orientations, ignored tensors, colliding parts, and hostile files."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support import llama
from support.listings import list_codes, list_names, map_fields

import syncheck
from syncheck.cli import main
from syncheck.conversion.map_files import read_map
from syncheck.conversion.templates import escape, parse_template
from syncheck.errors import UsageError
from syncheck.messages import Note
from syncheck.options import DiffOptions

if TYPE_CHECKING:
    from pathlib import Path

    from support.llama import Weights

RNG = np.random.default_rng(0)


def draw(*shape: int) -> Any:
    """Return random numbers."""
    return RNG.standard_normal(shape).astype("f4")


def write_map(path: Path, *rules: dict[str, Any]) -> str:
    """Write a map with these rules, and return its path."""
    lines = []
    for rule in rules:
        lines += ["[[rule]]", *(f"{key} = {json.dumps(value)}" for key, value in rule.items())]
    path.write_text("\n".join(lines))
    return str(path)


def codes(report: syncheck.Report) -> set[str]:
    """Return the codes of the findings."""
    return set(list_codes(report.groups[-1].findings))


EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


@pytest.mark.parametrize(
    ("rows", "config", "code"),
    [
        (128, {}, 0),
        (128, {"vocab_size": 100}, 0),
        (256, {"vocab_size": 100}, 1),  # not the next multiple of 128
        (120, {"vocab_size": 100}, 1),
        (256, {"vocab_size": 100, "make_vocab_size_divisible_by": 128, "tensor_model_parallel_size": 2}, 0),
        (128, {"vocab_size": 110}, 1),  # ten tokens of the vocabulary were lost
    ],
)
def test_padding_is_the_next_multiple(tmp_path: Path, rows: int, config: Any, code: int) -> None:
    """Zero rows up to the multiple of the map or of the arguments are padding; the padded model may be A or B."""
    model = llama.make_model()
    padded = llama.to_megatron(model)
    for name in (EMBEDDING, OUTPUT):
        padded[name] = np.concatenate([padded[name][: llama.WORDS], np.zeros((rows - llama.WORDS, llama.WIDTH), "f4")])
    a = llama.write(tmp_path / "a", model, llama.CONFIG | config)
    b = llama.write(tmp_path / "b", padded)
    for pair in ((a, b), (b, a)):
        report = syncheck.diff(*pair)
        assert report.exit_code == code
        assert codes(report) == ({"SYN309"} if code else set())


def test_real_rows_are_no_padding(tmp_path: Path) -> None:
    """Rows with values are cut only if a configuration states that they are not in the vocabulary."""
    model = llama.make_model()
    padded = llama.to_megatron(model)
    for name in (EMBEDDING, OUTPUT):
        padded[name][llama.WORDS :] = draw(28, llama.WIDTH)
    b = llama.write(tmp_path / "b", padded)
    a = llama.write(tmp_path / "a", model, llama.CONFIG)
    stated = llama.write(tmp_path / "c", model, llama.CONFIG | {"vocab_size": llama.WORDS})
    assert codes(syncheck.diff(a, b)) == {"SYN318"}
    report = syncheck.diff(stated, b)
    assert report.exit_code == 0
    assert Note.PADDED in list_codes(report.groups[-1].notes)


def test_only_the_library_that_pads_may_have_more_rows(tmp_path: Path) -> None:
    """40 rows in Hugging Face's names against 5 in Megatron's, and the other way round."""
    for own_values, second in ((40, 5), (5, 40), (128, 5)):
        model, converted = llama.make_model(), llama.to_megatron(llama.make_model())
        for weights, names, rows in (
            (model, ("model.embed_tokens.weight", "lm_head.weight"), own_values),
            (converted, (EMBEDDING, OUTPUT), second),
        ):
            for name in names:
                weights[name] = np.resize(llama.make_model()["lm_head.weight"], (rows, llama.WIDTH))
        a = llama.write(tmp_path / f"a{own_values}{second}", model, llama.CONFIG)
        b = llama.write(tmp_path / f"b{own_values}{second}", converted)
        assert syncheck.diff(a, b).exit_code == syncheck.diff(b, a).exit_code == 1


def make_gpt2() -> Weights:
    """Return the linear layers of a GPT-2 with inputs first."""
    model: Weights = {}
    for i in range(2):
        prefix = f"transformer.h.{i}."
        model |= {f"{prefix}attn.c_attn.weight": draw(16, 48), f"{prefix}attn.c_proj.weight": draw(16, 16)}
        model |= {f"{prefix}mlp.c_fc.weight": draw(16, 64), f"{prefix}mlp.c_proj.weight": draw(64, 16)}
    return model


@pytest.mark.parametrize(
    "forgotten",
    [
        ("h.1.mlp.c_fc",),
        ("c_fc",),
        ("h.0.attn.c_proj",),
        ("c_attn", "attn.c_proj"),
        ("h.0.mlp", "attn", "h.1.mlp.c_proj"),  # only one was transposed
    ],
)
def test_a_model_has_one_orientation(tmp_path: Path, forgotten: tuple[str, ...]) -> None:
    """Layers in the other orientation than most are transposed, square ones too."""
    model = make_gpt2()
    turned = {n: w if any(part in n for part in forgotten) else w.T for n, w in model.items()}
    a, b = llama.write(tmp_path / "a", model), llama.write(tmp_path / "b", turned)
    options = DiffOptions(map="gpt2")
    for pair in ((a, b), (b, a)):
        assert codes(syncheck.diff(*pair, options=options)) == {"SYN304"}
    complete = llama.write(tmp_path / "c", map_fields(model, "T"))
    assert syncheck.diff(a, complete, options=options).exit_code == 0
    assert syncheck.diff(a, a, options=options).exit_code == 0


def test_a_wrong_number_of_heads(tmp_path: Path) -> None:
    """Keys that were permuted with the number of query heads."""
    model = llama.make_model()
    names = {"q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo"}
    titan: Weights = {
        "tok_embeddings.weight": model["model.embed_tokens.weight"],
        "norm.weight": model["model.norm.weight"],
    }
    titan["output.weight"] = model["lm_head.weight"]
    for i in range(llama.LAYERS):
        old, new = f"model.layers.{i}.", f"layers.{i}."
        for name, short in names.items():
            weight = model[f"{old}self_attn.{name}.weight"]
            size = {"q_proj": llama.HEAD, "k_proj": llama.GROUPS * llama.HEAD // llama.HEADS}.get(name)
            titan[f"{new}attention.{short}.weight"] = llama.interleave(weight, size) if size else weight
        for name, short in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
            titan[f"{new}feed_forward.{short}.weight"] = model[f"{old}mlp.{name}_proj.weight"]
        titan[f"{new}attention_norm.weight"] = model[f"{old}input_layernorm.weight"]
        titan[f"{new}ffn_norm.weight"] = model[f"{old}post_attention_layernorm.weight"]
    a, b = llama.write(tmp_path / "a", model, llama.CONFIG), llama.write(tmp_path / "b", titan)
    for pair in ((a, b), (b, a)):
        report = syncheck.diff(*pair)
        assert codes(report) == {"SYN306"}
        assert {diff.name.split(".")[-2] for diff in report.groups[-1].tensors} == {"k_proj"}


@pytest.mark.parametrize(("rows", "codes"), [(16, [1, 0]), (8, [1, 1])])
def test_a_part_that_does_not_fit(tmp_path: Path, rows: int, codes: list[int]) -> None:
    """If one part of a tensor has half a head, no part of it is compared; otherwise all are."""
    fused, body = draw(rows * 3 // 2, 4), draw(2, 2)
    changed = fused.copy()
    changed[rows:] += 1
    config = {"num_attention_heads": 1, "head_dim": 8}
    a = llama.write(tmp_path / "a", {"x.qk": fused, "body": body}, config)
    rules = [{"name": f"{n}.qk", "parts": ["q", "k"], "sizes": [2, 1], "rotary": True} for n in "xy"]
    path = write_map(tmp_path / "m.toml", *rules)
    for i, second in enumerate((changed, fused)):
        b = llama.write(tmp_path / f"b{i}", {"y.qk": second, "body": body}, config)
        assert main(["diff", "-q", "--map", path, a, b]) == codes[i]


def test_ignored_tensors_that_differ(tmp_path: Path) -> None:
    """A map that ignores what differs is an error, with equal names, other names, and other shapes."""
    weight, mask = draw(4, 4), draw(3, 3)
    a = llama.write(tmp_path / "a", {"a.w": weight, "a.k": mask, "both": mask})
    equal_copy = llama.write(tmp_path / "same", {"b.w": weight, "b.k": mask, "both": mask})
    second_path = llama.write(tmp_path / "other", {"b.w": weight, "b.k": draw(3, 3), "both": mask})
    name = llama.write(tmp_path / "name", {"b.w": weight, "b.k": mask, "both": draw(3, 3)})
    shape = llama.write(tmp_path / "shape", {"b.w": weight, "b.k": mask, "both": draw(3, 4)})
    lacks = llama.write(tmp_path / "lacks", {"b.w": weight})
    path = write_map(
        tmp_path / "m.toml",
        {"name": "b.w", "parts": ["a.w"]},
        {"name": "both", "parts": []},
        {"name": "{m}.k", "parts": []},
    )
    assert [main(["diff", "-q", "--map", path, a, b]) for b in (equal_copy, second_path, name, shape, lacks)] == [
        0,
        2,
        2,
        2,
        0,
    ]


def test_colliding_parts(tmp_path: Path) -> None:
    """Two rules for one part are an error; a part with the name of another tensor keeps its stored name."""
    x, y, z = draw(6, 4), draw(6, 4), draw(6, 4)
    a = llama.write(tmp_path / "a", {"x": x, "y": y, "z": z})
    b = llama.write(tmp_path / "b", {"t": x, "z": z})
    both = write_map(tmp_path / "both.toml", {"name": "x", "parts": ["t"]}, {"name": "y", "parts": ["t"]})
    assert main(["diff", "-q", "--map", both, a, b]) == 2
    chain = write_map(
        tmp_path / "chain.toml",
        {"name": "x", "parts": ["y"]},
        {"name": "y", "parts": ["z"]},
        {"name": "t", "parts": ["y"]},
    )
    report = syncheck.diff(a, llama.write(tmp_path / "c", {"t": y, "z": z}), options=DiffOptions(map=chain))
    assert list_names(report.groups[-1].tensors) == ["x"]


@pytest.mark.parametrize(
    "rule",
    [
        {"name": "{m}.qkv", "parts": ["q", "q", "v"]},
        {"name": "a.{0}", "parts": ["b.{0}"]},
        {"name": "a.{i}", "parts": ["b.{i:>9999999999}"]},
        {"name": "a.{i}", "parts": ["b.{i.__class__}"]},
        {"name": "a.{i}", "parts": ["b.{i!r}"]},
        {"name": "a.1", "parts": ["b.{"]},
        {"name": "a.1", "parts": ["b.}"]},
        {"name": "a.{²}", "parts": ["b.{²}"]},
        {"name": "".join(f"{{{letter}}}" for letter in "abcdefghijklmn") + ".w", "parts": ["q"]},
        {"name": ".".join(f"{{{letter}}}" for letter in "abcdefghijklmn"), "parts": ["q"]},
        {"name": "a" * ((1 << 20) + 1), "parts": ["q"]},
        {"name": "body.w", "parts": ["trunk.w"], "pad": 64},
        {"name": "embed.w", "parts": ["tok.w"], "pad": 1},
        {"name": "a", "parts": ["b"], "beside": "{"},
    ],
)
def test_rules_that_are_refused(tmp_path: Path, rule: dict[str, Any]) -> None:
    """One line with the file and the rule."""
    path = write_map(tmp_path / "m.toml", rule)
    with pytest.raises(UsageError, match=r"m\.toml: rule 1") as raised:
        read_map(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["x=" + "[" * 5000 + "]" * 5000, "x=" + "9" * 5000, "x=" + "{a=" * 5000])
def test_deep_files(tmp_path: Path, text: str) -> None:
    """Nesting and numbers without an end."""
    path = tmp_path / "m.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"m\.toml"):
        read_map(str(path))


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("layers.{i}.w", "layers.12.w", {"i": "12"}),
        ("layers.{i}.w", "layers.1.2.w", None),
        ("layers.{i}.w", "layers..w", None),
        ("h{i}_{p}x.w", "h0_bias_x.w", {"i": "0", "p": "bias_"}),
        ("{a}.{b}.{c}", "x.y.z", {"a": "x", "b": "y", "c": "z"}),
        ("{a}.{b}", "x.y.z", None),
        ("{{i}}.{i}", "{i}.7", {"i": "7"}),
        ("(.*).{i}", "(.*).7", {"i": "7"}),
        ("(.*).{i}", "abc.7", None),
    ],
)
def test_templates(text: str, name: str, values: dict[str, str] | None) -> None:
    """Placeholders are parts of a name without dots, and everything else is text."""
    template = parse_template(text)
    assert template.match(name) == values
    if values is not None:
        assert template.fill(values) == name


def test_escaped_names_match_only_themselves() -> None:
    """Any name is a template after `escape`."""
    for name in ("{i}", "a{{b}}", "{", "}}{", "x{0.__class__}y"):
        assert parse_template(escape(name)).match(name) == {}
        assert parse_template(escape(name)).match(f"{name}x") is None


def test_matching_takes_linear_time() -> None:
    """Eight placeholders in a long name."""
    template = parse_template("a".join(f"{{{letter}}}" for letter in "bcdefghi") + "!")
    start = time.process_time()
    assert template.match("a" * 200_000) is None
    assert time.process_time() - start < 1
