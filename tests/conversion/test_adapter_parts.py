"""Every part of an adapter is merged, or named: no part and no setting is ignored, and --subset accepts none."""

from __future__ import annotations

import json
import random
import time
import tracemalloc
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support import llama
from support.listings import find_all, list_fields, list_names
from support.marks import slow
from support.states import add_prefix, omit, replace_in_names
from test_adapters import ALPHA, MODULES, RANK, codes, compare, make_adapter, merge

import syncheck
from syncheck.conversion.adapters import Adapter
from syncheck.options import DiffOptions
from syncheck.readers.fingerprints import fingerprint
from syncheck.records import Reason

if TYPE_CHECKING:
    from pathlib import Path

    from support.llama import Weights

PREFIX = "base_model.model."
Q = "model.layers.0.self_attn.q_proj"
EMBED, HEAD = "model.embed_tokens", "lm_head"


@pytest.fixture
def model() -> Weights:
    """Return the base model."""
    return llama.make_model()


@pytest.fixture
def adapter(model: Weights) -> Weights:
    """Return an adapter of the base model."""
    return make_adapter(model)


def uncompared(report: syncheck.Report) -> set[str]:
    """Return the names of tensors that could not be compared."""
    return {diff.name for diff in report.groups[-1].tensors if diff.uncompared and diff.reason is not Reason.MISSING}


def draw(*shape: int) -> Any:
    """Return random numbers."""
    return np.random.default_rng(7).standard_normal(shape, np.float32)


UNMERGED = {
    "another kind": {f"{Q}.vera_lambda_b": (32,)},
    "a shared part without a module": {"vera_A": (4, 32)},
    "a magnitude of DoRA": {f"{Q}.lora_magnitude_vector.weight": (32,)},
    "a missing factor": {"model.layers.0.self_attn.o_proj.lora_A.weight": (RANK, 32)},
    "a missing module": {
        "model.layers.9.self_attn.q_proj.lora_A.weight": (RANK, 32),
        "model.layers.9.self_attn.q_proj.lora_B.weight": (32, RANK),
    },
    "other shapes": {
        "model.layers.0.self_attn.o_proj.lora_A.weight": (RANK, 31),
        "model.layers.0.self_attn.o_proj.lora_B.weight": (32, RANK),
    },
    "the bias of a layer without bias": {f"{Q}.lora_B.bias": (32,)},
    "an expert parameter": {"model.layers.0.mlp.experts.base_layer.lora_A.weight": (RANK, 32)},
    "rows without their numbers": {f"{EMBED}.token_adapter.trainable_tokens_delta": (2, 32)},
    "a name with braces": {"model.{0}.{x.__class__}.lora_A.weight": (RANK, 32)},
}


@pytest.mark.parametrize("parts", UNMERGED.values(), ids=UNMERGED.keys())
def test_parts_that_are_not_merged(
    tmp_path: Path, model: Weights, adapter: Weights, parts: dict[str, tuple[int, ...]]
) -> None:
    """A correct merge of all other parts is undecided, and the part is named; --exclude is the way to ignore it."""
    remaining = {f"{PREFIX}{name}": draw(*shape) for name, shape in parts.items()}
    report = compare(tmp_path, model, adapter | remaining, merge(model, adapter))
    assert (report.verdict, uncompared(report)) == ("undecided", set(remaining))
    sides = f"{tmp_path}/base,{tmp_path}/adapter", f"{tmp_path}/b"
    assert syncheck.diff(*sides, options=DiffOptions(subset=True)).verdict == "undecided"
    options = DiffOptions(exclude=tuple(name.replace("[", "?") for name in remaining))
    assert syncheck.diff(*sides, options=options).verdict == "in_sync"


@pytest.mark.parametrize("merged", [True, False])
def test_a_prefix_that_fits_no_module(tmp_path: Path, model: Weights, adapter: Weights, merged: bool) -> None:
    """Parts of no module may change any weight: a merge and the base model are undecided, a lost tensor is not."""
    parts = replace_in_names(adapter, "model.layers", "model.language_model.layers")
    b = merge(model, adapter) if merged else model
    assert compare(tmp_path / "1", model, parts, b).verdict == "undecided"
    less = omit(b, "model.norm.weight")
    assert codes(compare(tmp_path / "2", model, parts, less)) == {"SYN101": 1}


SETTINGS: dict[str, dict[str, Any]] = {
    "kind": {"peft_type": "ADALORA"},
    "DoRA": {"use_dora": True},
    "parameters": {"target_parameters": ["experts.gate_up_proj"]},
    "layers": {"layer_replication": [[0, 2], [1, 2]]},
    "initial values": {"init_lora_weights": "pissa_niter_16"},
    "unknown": {"invented_in_2030": {"scale": 2}},
    "alpha beyond floats": {"lora_alpha": 10**400},
    "alpha is not a number": {"lora_alpha": float("nan")},
    "alpha is infinite": {"lora_alpha": float("inf")},
    "alpha is text": {"lora_alpha": "8"},
    "alpha is a flag": {"lora_alpha": True},
    "no alpha": {"lora_alpha": None},
    "another rank": {"r": RANK + 1},
    "rank beyond floats": {"r": 10**400},
    "flag is text": {"use_rslora": "yes"},
    "patterns are a list": {"alpha_pattern": ["q_proj"]},
    "a pattern with a lookahead": {"alpha_pattern": {"(?=q)q_proj": 1}},
    "a broken pattern": {"rank_pattern": {"(": 1}},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_settings_that_are_not_supported(
    tmp_path: Path, model: Weights, adapter: Weights, settings: dict[str, Any]
) -> None:
    """A merge is undecided with a setting that may change it; a difference elsewhere is certain."""
    merged = merge(model, adapter)
    report = compare(tmp_path / "1", model, adapter, merged, **settings)
    assert (report.verdict, uncompared(report)) == ("undecided", {*adapter, *(f"{m}.weight" for m in MODULES)})
    second = merged | {"model.norm.weight": merged["model.norm.weight"] * 2 + 1}
    assert compare(tmp_path / "2", model, adapter, second, **settings).verdict == "out_of_sync"


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"lora_alpha": ' + "9" * 6000 + "}", "{}"])
def test_damaged_settings(tmp_path: Path, model: Weights, adapter: Weights, text: str) -> None:
    """A file that is no JSON object is like a missing file."""
    merged = merge(model, adapter)
    compare(tmp_path, model, adapter, merged)
    (tmp_path / "adapter" / "adapter_config.json").write_text(text)
    assert syncheck.diff(f"{tmp_path}/base,{tmp_path}/adapter", tmp_path / "b").verdict == "undecided"


@pytest.mark.parametrize("names", [("default", "second"), ("a", "b")])
def test_several_adapters(tmp_path: Path, model: Weights, adapter: Weights, names: tuple[str, str]) -> None:
    """It is unknown which of two adapters in a file is active."""
    parts = {
        n.replace(".weight", f".{x}.weight"): w * (1 + i)
        for (i, x), (n, w) in product(enumerate(names), adapter.items())
    }
    for scale in (ALPHA / RANK, 4 * ALPHA / RANK):
        report = compare(tmp_path / str(scale), model, parts, merge(model, adapter, scale))
        assert (report.verdict, uncompared(report) >= parts.keys()) == ("undecided", True)


def test_patterns_as_in_peft(tmp_path: Path, model: Weights, adapter: Weights) -> None:
    """The first matching expression counts, for alpha and for the rank."""
    patterns = {"alpha_pattern": {r".*\.layers\.1\..*q_proj": 32, r"layers\.\d+\.self_attn\.q_proj": 16, "_proj": 1}}
    alphas = {Q: 16, "model.layers.1.self_attn.q_proj": 32}
    merged = dict(model)
    for module in MODULES:
        first = {name: w for name, w in adapter.items() if module in name}
        product = first[f"{PREFIX}{module}.lora_B.weight"] @ first[f"{PREFIX}{module}.lora_A.weight"]
        merged[f"{module}.weight"] = model[f"{module}.weight"] + np.float32(alphas.get(module, ALPHA) / RANK) * product
    assert compare(tmp_path / "1", model, adapter, merged, **patterns).exit_code == 0
    assert codes(compare(tmp_path / "2", model, adapter, merge(model, adapter), **patterns)) == {"SYN303": 2}
    ranks = {"r": 64, "rank_pattern": {"q_proj|down_proj": RANK}}
    assert compare(tmp_path / "3", model, adapter, merge(model, adapter), **ranks).exit_code == 0


def test_replaced_tensors(tmp_path: Path, model: Weights, adapter: Weights) -> None:
    """Lost modules_to_save and rows of tokens are named; --base shows that other tensors were updated."""
    head, rows = draw(llama.WORDS, llama.WIDTH), draw(2, llama.WIDTH)
    parts = {
        f"{PREFIX}{HEAD}.weight": head,
        f"{PREFIX}{EMBED}.token_adapter.trainable_tokens_delta": rows,
    }
    settings = {"modules_to_save": [HEAD], "trainable_token_indices": {"embed_tokens": [7, 3]}}
    embedding = model[f"{EMBED}.weight"].copy()
    embedding[[7, 3]] = rows
    merged = merge(model, adapter)
    full = merged | {f"{HEAD}.weight": head, f"{EMBED}.weight": embedding}
    assert compare(tmp_path / "1", model, adapter | parts, full, **settings).exit_code == 0
    lost = compare(tmp_path / "2", model, adapter | parts, merged, **settings)
    assert codes(lost) == {"SYN303": 2}
    options = DiffOptions(base=str(tmp_path / "2" / "base"))
    report = syncheck.diff(f"{tmp_path}/2/base,{tmp_path}/2/adapter", tmp_path / "2" / "b", options=options)
    assert codes(report) == {"SYN303": 2}
    second = full | {f"{EMBED}.weight": embedding[::-1].copy()}
    assert "SYN303" not in codes(compare(tmp_path / "3", model, adapter | parts, second, **settings))


def test_a_new_module(tmp_path: Path, model: Weights, adapter: Weights) -> None:
    """A module that only the adapter has is compared with B, and is not ignored if B lacks it."""
    head = {"score.weight": draw(2, llama.WIDTH)}
    parts = adapter | add_prefix(head, PREFIX)
    merged = merge(model, adapter)
    assert compare(tmp_path / "1", model, parts, merged | head).exit_code == 0
    assert compare(tmp_path / "2", model, parts, merged | {"score.weight": -head["score.weight"]}).exit_code == 1
    assert compare(tmp_path / "3", model, parts, merged).exit_code == 2


def test_embeddings_biases_and_convolutions(tmp_path: Path) -> None:
    """The products of an embedding are transposed, kernels are flattened, and biases have the scale of their module."""
    base = {"embed.weight": draw(20, 8), "conv.weight": draw(6, 8, 3, 3), "conv.bias": draw(6), "norm.weight": draw(8)}
    parts = {
        "embed.lora_embedding_A": draw(2, 20), "embed.lora_embedding_B": draw(8, 2),
        "conv.lora_A.weight": draw(2, 8, 3, 3), "conv.lora_B.weight": draw(6, 2, 1, 1), "conv.lora_B.bias": draw(6),
    }  # fmt: skip
    kernel = parts["conv.lora_B.weight"].reshape(6, 2) @ parts["conv.lora_A.weight"].reshape(2, -1)
    merged = base | {
        "embed.weight": base["embed.weight"]
        + 4 * (parts["embed.lora_embedding_B"] @ parts["embed.lora_embedding_A"]).T,
        "conv.weight": base["conv.weight"] + 4 * kernel.reshape(6, 8, 3, 3),
        "conv.bias": base["conv.bias"] + 4 * parts["conv.lora_B.bias"],
    }
    adapter = add_prefix(parts, PREFIX)
    settings = {"r": 2, "lora_alpha": 8, "lora_bias": True}
    report = compare(tmp_path / "1", base, adapter, merged, **settings)
    assert (report.exit_code, report.counts.not_compared) == (0, 0)
    for name in ("embed.weight", "conv.weight", "conv.bias"):
        report = compare(tmp_path / name, base, adapter, merged | {name: base[name]}, **settings)
        assert codes(report) == {"SYN303": 1}


def fuse(weights: Weights) -> Weights:
    """Return the weights with one fused layer of query, key and value."""
    fused = {name: w for name, w in weights.items() if not any(f".{x}_proj." in name for x in "qkv")}
    for i in range(llama.LAYERS):
        parts = [weights[f"model.layers.{i}.self_attn.{x}_proj.weight"] for x in "qkv"]
        fused[f"model.layers.{i}.self_attn.qkv_proj.weight"] = np.concatenate(parts)
    return fused


@pytest.mark.parametrize("fused_copy", [True, False])
@pytest.mark.parametrize("scale", [ALPHA / RANK, 0.5, 0.0])
def test_adapters_of_the_parts_of_a_fused_layer(
    tmp_path: Path, model: Weights, adapter: Weights, fused_copy: bool, scale: float
) -> None:
    """With a map, the parts of fused layers are merged and compared; without the map, nothing is certain."""
    merged = merge(model, adapter, scale)
    base = llama.write(tmp_path / "base", fuse(model), llama.CONFIG)
    copy = llama.write(tmp_path / "b", fuse(merged) if fused_copy else merged, llama.CONFIG)
    compare(tmp_path / "files", model, adapter, merged)
    sides = [base, str(tmp_path / "files" / "adapter")], copy
    report = syncheck.diff(*sides, options=DiffOptions(map="llama"))
    expected = {} if scale == ALPHA / RANK else {"SYN303": len(MODULES)}
    assert (report.exit_code, codes(report)) == (bool(expected), expected)
    if fused_copy:  # down_proj has no fused layer, so its differences are certain
        assert syncheck.diff(*sides).exit_code == (1 if expected else 2)


@pytest.mark.parametrize("scale", [ALPHA / RANK, 0.5, 0.0])
def test_adapters_of_a_fused_layer(tmp_path: Path, model: Weights, scale: float) -> None:
    """The merge of an adapter of a fused layer is compared part by part if B has the parts."""
    megatron = llama.to_megatron(model)
    name = "decoder.layers.1.self_attention.linear_qkv"
    parts = {
        f"{PREFIX}{name}.lora_A.weight": draw(RANK, llama.WIDTH),
        f"{PREFIX}{name}.lora_B.weight": draw(megatron[f"{name}.weight"].shape[0], RANK),
    }
    product = parts[f"{PREFIX}{name}.lora_B.weight"] @ parts[f"{PREFIX}{name}.lora_A.weight"]
    groups = (megatron[f"{name}.weight"] + np.float32(scale) * product).reshape(llama.GROUPS, -1, llama.WIDTH)
    rows = llama.HEADS // llama.GROUPS * llama.HEAD
    copy = dict(model)
    spans = {"q": slice(0, rows), "k": slice(rows, rows + llama.HEAD), "v": slice(rows + llama.HEAD, None)}
    for part, span in spans.items():
        copy[f"model.layers.1.self_attn.{part}_proj.weight"] = groups[:, span].reshape(-1, llama.WIDTH)
    compare(tmp_path, megatron, parts, copy)
    for folder in ("base", "b"):
        (tmp_path / folder / "config.json").write_text(json.dumps(llama.CONFIG))
    sides = [tmp_path / "base", tmp_path / "adapter"], tmp_path / "b"
    report = syncheck.diff(*sides, options=DiffOptions(map="llama"))
    expected = {} if scale == ALPHA / RANK else {"SYN303": 3}
    assert (report.exit_code, codes(report)) == (bool(expected), expected)


def test_doubts_under_a_map(tmp_path: Path, model: Weights, adapter: Weights) -> None:
    """Parts that are not merged touch mapped tensors too, also in one file with the base model."""
    merged = llama.write(tmp_path / "b", merge(model, adapter), llama.CONFIG)
    state = add_prefix(fuse(model), PREFIX) | adapter
    one_file = llama.write(tmp_path / "a", state, llama.CONFIG)
    report = syncheck.diff(one_file, merged, options=DiffOptions(map="llama"))
    assert (report.verdict, codes(report)) == ("undecided", {})


def test_settings_of_two_adapters(tmp_path: Path, model: Weights, adapter: Weights) -> None:
    """Equal parts with another alpha are another model."""
    for folder, alpha in (("1", ALPHA), ("2", ALPHA), ("3", 2 * ALPHA)):
        compare(tmp_path / folder, model, adapter, model, lora_alpha=alpha)
    sides = [[tmp_path / folder / "base", tmp_path / folder / "adapter"] for folder in "123"]
    assert syncheck.diff(sides[0], sides[1]).verdict == "in_sync"
    assert syncheck.diff(sides[0], sides[2]).verdict == "undecided"
    assert syncheck.diff(sides[0][1], sides[2][1]).verdict == "undecided"


def test_tied_weights(tmp_path: Path, model: Weights, adapter: Weights) -> None:
    """PEFT unties a tied weight that it replaces, or not: the second name is never a wrong difference."""
    base = omit(model, f"{HEAD}.weight")
    new = draw(llama.WORDS, llama.WIDTH)
    merged = merge(base, adapter) | {f"{EMBED}.weight": new}
    parts = adapter | {f"{PREFIX}{EMBED}.weight": new}
    assert compare(tmp_path / "1", base, parts, merged).verdict == "in_sync"
    untied = merged | {f"{HEAD}.weight": base[f"{EMBED}.weight"]}
    report = compare(tmp_path / "2", base, parts, untied)
    assert (report.verdict, uncompared(report)) == ("undecided", {f"{HEAD}.weight"})
    report = compare(tmp_path / "3", base, parts, untied | {f"{EMBED}.weight": base[f"{EMBED}.weight"]})
    assert codes(report) == {"SYN303": 1}


UP = [module for module in MODULES if "q_proj" in module]
# Settings, and the modules whose factors PEFT does not load with them.
SELECTIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "one name": ({"target_modules": ["down_proj"]}, UP),
    "no name": ({"target_modules": []}, MODULES),
    "the end of a segment": ({"target_modules": ["down_proj", "proj"]}, UP),
    "excluded": ({"exclude_modules": ["q_proj"]}, UP),
    "an excluded expression": ({"exclude_modules": r".*\.self_attn\..*"}, UP),
    "an expression": ({"target_modules": r"model\.layers\.\d+\.mlp\.down_proj"}, UP),
    "the end of a name as an expression": ({"target_modules": "q_proj|down_proj"}, MODULES),
    "a layer": ({"layers_to_transform": [1]}, [m for m in MODULES if ".0." in m]),
    "a layer of a list": ({"layers_to_transform": 0, "layers_pattern": "layers"}, [m for m in MODULES if ".1." in m]),
    "another list": ({"layers_to_transform": [0, 1], "layers_pattern": ["blocks"]}, MODULES),
    "a list without layers": ({"layers_pattern": "layers"}, MODULES),
    "a layer and an expression": ({"target_modules": ".*_proj", "layers_to_transform": [0, 1]}, MODULES),
    "saved as a whole": ({"modules_to_save": ["self_attn"]}, UP),
    "all but the output": ({"target_modules": "all-linear", "layers_pattern": []}, MODULES),
    "a lookahead": ({"target_modules": "(?=model).*_proj"}, MODULES),
    "no names": ({"target_modules": [["q_proj"], "down_proj"]}, MODULES),
    "a layer as a text": ({"layers_to_transform": ["1"]}, MODULES),
}


@pytest.mark.parametrize(("settings", "modules"), SELECTIONS.values(), ids=SELECTIONS.keys())
def test_factors_that_peft_does_not_load(
    tmp_path: Path, model: Weights, adapter: Weights, settings: dict[str, Any], modules: list[str]
) -> None:
    """A merge of factors that the settings do not select is undecided, and their modules are named."""
    report = compare(tmp_path, model, adapter, merge(model, adapter), **settings)
    factors = {f"{PREFIX}{module}.lora_{role}.weight" for module, role in product(modules, "AB")}
    weights = {f"{module}.weight" for module in modules}
    assert (report.verdict, uncompared(report)) == ("undecided", factors | weights)


LOADED: dict[str, dict[str, Any]] = {
    "no setting": {"target_modules": None},
    "an additional name": {"target_modules": ["q_proj", "down_proj", "o_proj"]},
    "whole names": {"target_modules": MODULES},
    "whole names in any layer": {"target_modules": MODULES, "layers_to_transform": [7]},
    "several segments": {"target_modules": ["self_attn.q_proj", "mlp.down_proj"]},
    "an expression": {"target_modules": r".*\.(q|down)_proj"},
    "all": {"target_modules": "ALL-linear"},
    "excluded": {"exclude_modules": ["proj", "v_proj"], "layers_to_transform": []},
    "layers": {"layers_to_transform": list(range(llama.LAYERS)), "layers_pattern": ["blocks", "layers"]},
    "layers of any list": {"layers_to_transform": list(range(llama.LAYERS))},
    "saved": {"modules_to_save": ["q"]},
}


@pytest.mark.parametrize("settings", LOADED.values(), ids=LOADED.keys())
def test_factors_that_peft_loads(tmp_path: Path, model: Weights, adapter: Weights, settings: dict[str, Any]) -> None:
    """Every factor that the settings select is merged."""
    report = compare(tmp_path, model, adapter, merge(model, adapter), **settings)
    assert (report.verdict, report.counts.not_compared) == ("in_sync", 0)


def test_tensors_that_peft_does_not_load(tmp_path: Path, model: Weights, adapter: Weights) -> None:
    """A bias without `lora_bias`, and a whole tensor whose name is that of the adapted module, are not ignored."""
    base = model | {f"{Q}.bias": -draw(llama.WIDTH)}
    merged = merge(base, adapter)
    bias = {f"{PREFIX}{Q}.lora_B.bias": draw(llama.WIDTH)}
    with_bias = merged | {f"{Q}.bias": base[f"{Q}.bias"] + np.float32(ALPHA / RANK) * draw(llama.WIDTH)}
    assert compare(tmp_path / "1", base, adapter | bias, with_bias, lora_bias=True).verdict == "in_sync"
    report = compare(tmp_path / "2", base, adapter | bias, with_bias, lora_bias=False)
    assert (report.verdict, uncompared(report)) == ("undecided", {*bias, f"{Q}.bias"})
    new = {f"{PREFIX}{Q}.base_layer.bias": draw(llama.WIDTH)}
    assert compare(tmp_path / "3", base, adapter | new, merged | {f"{Q}.bias": draw(llama.WIDTH)}).verdict == "in_sync"
    outer = {f"{PREFIX}{Q}.bias": draw(llama.WIDTH)}
    report = compare(tmp_path / "4", base, adapter | outer, merged | {f"{Q}.bias": draw(llama.WIDTH)})
    assert (report.verdict, uncompared(report)) == ("undecided", {*outer, f"{Q}.bias"})


@pytest.mark.parametrize("segment", ["modules_to_save.", *slow("a.base_layer.", "a.", "lora_A.")])
def test_names_with_many_segments(tmp_path: Path, model: Weights, adapter: Weights, segment: str) -> None:
    """Names with thousands of segments need little time and memory; the parts are undecided."""
    deep = {f"{PREFIX}{number}.{segment * 8000}lora_B.weight": draw(2) for number in range(8)}
    base = model | {f"{number}.{segment * 8000}weight": draw(2) for number in range(8)}
    folders = [llama.write(tmp_path / name, weights) for name, weights in (("a", base | adapter | deep), ("b", base))]
    tracemalloc.start()
    start = time.process_time()
    report = syncheck.diff(*folders)
    duration, (_, peak) = time.process_time() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert report.exit_code in (1, 2)
    assert duration < 20
    assert peak < 300_000_000


def test_touched_modules() -> None:
    """A part touches the innermost module of the base model in its name, as the list of all modules shows it."""
    draw_names = random.Random(4)
    for _ in range(500):
        names = [".".join(draw_names.choices("abc!", k=draw_names.randint(1, 4))) for _ in range(8)]
        base, parts = frozenset(names[:5]), list(dict.fromkeys(names[5:]))
        modules = {name[:end] for name in base for end in range(len(name)) if name[end] == "."}
        touched = Adapter(dict.fromkeys(parts), base, memory=False).list_touched()
        expected: dict[str, list[str]] = {}
        for part in parts:
            ends = [end for end in range(len(part) + 1) if part[end : end + 1] in ("", ".") and part[:end] in modules]
            prefix = f"{part[: ends[-1]]}." if ends else ""
            expected.setdefault(prefix, []).append(part)
        assert touched == expected


# Settings that make two adapters different models, or may do so.
DIFFERENT_SETTINGS: dict[str, dict[str, Any]] = {
    "alpha": {"lora_alpha": 2 * ALPHA},
    "no scale": {"lora_alpha": 0},
    "rank": {"r": 2 * RANK},
    "root of the rank": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "order of patterns": {"alpha_pattern": {".*": 4, "q_proj": 2}},
    "names": {"target_modules": ["q_proj"]},
    "an expression": {"target_modules": "q_proj"},
    "no names": {"target_modules": []},
    "excluded": {"exclude_modules": ["q_proj"]},
    "layers": {"layers_to_transform": [0]},
    "layer 0": {"layers_to_transform": 0},
    "initial values": {"init_lora_weights": "pissa"},
    "tokens": {"alora_invocation_tokens": [3, 5]},
    "quantized": {"use_qalora": True},
    "parameters": {"target_parameters": ["experts.up"]},
    "unknown": {"foo": 1},
    "unknown in an object": {"foo": {"scale": 0.5}},
    "named as a step": {"step": 3},
    "text": {"bias": "all"},
    "LoftQ": {"loftq_config": {"loftq_bits": 4}},
}


def write_adapters(folder: Path, adapter: Weights, model: Weights, *settings: dict[str, Any]) -> list[Path]:
    """Write adapters with equal tensors and these settings."""
    for number, edit in enumerate(settings):
        compare(folder / f"rank{number}", model, adapter, model, **{"target_modules": ["q_proj", "down_proj"], **edit})
    return [folder / f"rank{number}" / "adapter" for number in range(len(settings))]


@pytest.mark.parametrize("setting", DIFFERENT_SETTINGS.values(), ids=DIFFERENT_SETTINGS.keys())
def test_other_settings_may_be_another_model(
    tmp_path: Path, model: Weights, adapter: Weights, setting: dict[str, Any]
) -> None:
    """Adapters with equal tensors and another setting are undecided: as folders, as files, beside their base models."""
    patterns = {"alpha_pattern": {"q_proj": 2, ".*": 4}} if "alpha_pattern" in setting else {}
    folders = write_adapters(tmp_path, adapter, model, patterns, setting)
    files = [folder / "adapter_model.safetensors" for folder in folders]
    (key,) = setting
    for pair in (folders, files):
        report = syncheck.compare(*pair)
        assert (report.verdict, report.exit_code) == ("undecided", 2)
        names = list_names(find_all(report.groups[-1].values, unknown=True))
        assert names == [f"(adapter setting {key})"]
        assert syncheck.diff(*pair).exit_code == 2
    sides = [[folder.parent / "base", folder] for folder in folders]
    assert syncheck.diff(*sides).exit_code == 2
    options = DiffOptions(exclude=("(adapter setting *",))
    assert syncheck.diff(*folders, options=options).exit_code == 0


EQUAL_SETTINGS: dict[str, dict[str, Any]] = {
    "order of names": {"target_modules": ["down_proj", "q_proj"]},
    "values of older versions": {"use_dora": False, "foo": None, "layers_to_transform": [], "bias": "none"},
    "training": {"lora_dropout": 0.1, "inference_mode": True, "task_type": "CAUSAL_LM", "peft_version": "0.21.2"},
    "base": {"base_model_name_or_path": "/scratch/rank1/base", "revision": "main", "auto_mapping": {"a": "b"}},
    "initial values": {"init_lora_weights": "gaussian", "loftq_config": {}},
}


@pytest.mark.parametrize("setting", EQUAL_SETTINGS.values(), ids=EQUAL_SETTINGS.keys())
def test_settings_without_influence(tmp_path: Path, model: Weights, adapter: Weights, setting: dict[str, Any]) -> None:
    """Adapters whose settings differ without influence on a loaded model are in sync."""
    folders = write_adapters(tmp_path, adapter, model, {}, setting)
    assert syncheck.compare(*folders).verdict == "in_sync"
    assert syncheck.diff(*folders).exit_code == 0


def test_settings_of_replicas(tmp_path: Path, model: Weights, adapter: Weights) -> None:
    """Ranks with equal settings, with settings of the first rank only, or without any settings are in sync."""
    folders = write_adapters(tmp_path, adapter, model, {}, {}, {})
    ranks = list_fields(folders, "parent")
    assert syncheck.compare(*folders).verdict == "in_sync"
    damaged = folders[1] / "adapter_config.json"
    damaged.write_text("{")
    assert syncheck.compare(*folders).exit_code == 2
    assert syncheck.diff(*folders[:2]).exit_code == 2
    for folder in folders[1:]:
        (folder / "adapter_config.json").unlink()
    files = [folder / "adapter_model.safetensors" for folder in folders]
    assert syncheck.compare(*files).verdict == "in_sync"
    (folders[0] / "adapter_config.json").unlink()
    assert syncheck.compare(*files).verdict == "in_sync"
    assert syncheck.compare(*[rank / "base" for rank in ranks]).verdict == "in_sync"


def test_settings_in_fingerprints(tmp_path: Path, model: Weights, adapter: Weights) -> None:
    """A fingerprint contains the settings, and not those beside itself."""
    names = ["q_proj", "down_proj", *(f"layers.{number}.k_proj" for number in range(500))]
    settings = {"target_modules": names}
    first, second = write_adapters(tmp_path, adapter, model, settings, {"lora_alpha": 2 * ALPHA})
    for folder, name in ((first, "first"), (second, "second")):
        (second / f"{name}.json").write_text(fingerprint(syncheck.read(str(folder))))
    assert syncheck.diff(first, second / "first.json").exit_code == 0
    assert syncheck.diff(first, second / "second.json").exit_code == 2
