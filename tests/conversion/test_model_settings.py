"""Equal weights beside configurations of different models, and files that both sides read."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from support.listings import list_fields
from support.llama import CONFIG, make_model, write

import syncheck
from syncheck.messages import Note

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.records import Report

ABSENT = object()
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
LABELS = {"id2label": {"0": "NO", "1": "YES"}, "label2id": {"NO": 0, "YES": 1}}
CLASSIFIER = {"architectures": ["LlamaForSequenceClassification"]}
BASE = CONFIG | {
    "model_type": "llama",
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def diff(folder: Path, config_a: object, config_b: object, **options: Any) -> Report:
    """Compare two copies of one model with other configurations."""
    paths = [write(folder / side, make_model(), config) for side, config in (("a", config_a), ("b", config_b))]
    return syncheck.diff(*paths, options=syncheck.DiffOptions(**options))


def find_note(report: Report, code: Note) -> dict[str, Any] | None:
    """Return the parameters of a note; None if the report has no such note."""
    for note in report.groups[-1].notes:
        if note.code is code:
            return dict(note.parameters)
    return None


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 8},
        {"num_key_value_heads": 1},
        {"rope_theta": 500000.0},
        {"rms_norm_eps": 1e-5},
        {"hidden_act": "gelu"},
        {"tie_word_embeddings": True},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"sliding_window": 4096},
        {"text_config": {"rope_theta": 500000.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    ],
)
def test_settings_of_another_model_are_undecided(tmp_path: Path, change: dict[str, Any]) -> None:
    """Equal weights are not in sync if a setting changes their function; a note states both values."""
    for configs in ((BASE, BASE | change), (BASE | change, BASE)):
        report = diff(tmp_path, *configs)
        assert (report.exit_code, report.findings) == (2, ())
        note = find_note(report, Note.MODEL_SETTINGS_DIFFER)
        assert note is not None
        (value,) = report.groups[-1].values
        assert (value.unknown, value.counts) == (True, False)
        assert diff(tmp_path, *configs, exclude=(value.name,)).exit_code == 0


@pytest.mark.parametrize(
    "change",
    [
        {"torch_dtype": "bfloat16", "transformers_version": "5.0", "_name_or_path": "x", "use_cache": False},
        {"rope_theta": 10000},
        {"rope_scaling": None},
        {"rope_scaling": {"rope_type": "default"}},
        {"sliding_window": 4096, "use_sliding_window": False},
        # The form of transformers 5.
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ],
)
def test_settings_without_effect(tmp_path: Path, change: dict[str, Any]) -> None:
    """Other spellings of a setting, and settings without an effect on the function, leave the models in sync."""
    assert diff(tmp_path, BASE, BASE | change).exit_code == 0
    assert diff(tmp_path, BASE | change, BASE).exit_code == 0


@pytest.mark.parametrize(
    ("config", "change"),
    [
        # No list has the names of these settings.
        ({}, {"use_qk_norm": True}),
        ({"no_rope_layers": [1, 1, 0]}, {"no_rope_layers": [1, 1, 1]}),
        ({"model_type": "my_model", "my_scale": 1.0}, {"my_scale": 2.0}),
        ({"model_type": "bert", "is_decoder": False}, {"is_decoder": True}),
        ({"model_type": "clip", "vision_config": {"hidden_act": "gelu"}}, {"vision_config": {"hidden_act": "relu"}}),
        ({"model_type": "clip", "vision_config": {"hidden_act": "gelu"}}, {"vision_config": {}}),
        ({"model_type": "x", "audio_config": {"a_config": {"eps": 1}}}, {"audio_config": {"a_config": {"eps": 2}}}),
        ({"model_type": "x", "text_config": {"model_type": "llama"}}, {"text_config": {"model_type": "qwen2"}}),
        ({"model_type": "clip", "projection_dim": 16, "text_config": {"projection_dim": 512}}, {"projection_dim": 512}),
        ({"model_type": "t5", "num_heads": 8, "d_kv": 64}, {"num_heads": 16}),
        ({"model_type": "roberta", "pad_token_id": 1}, {"pad_token_id": 0}),
        ({"model_type": None, "_class_name": "UNet", "act_fn": "silu"}, {"act_fn": "gelu"}),
    ],
)
def test_unknown_settings_count_in_one_type_of_model(
    tmp_path: Path, config: dict[str, Any], change: dict[str, Any]
) -> None:
    """Every setting that is not known to be without effect counts, also in nested configurations."""
    config = BASE | config
    for configs in ((config, config | change), (config | change, config)):
        report = diff(tmp_path, *configs)
        assert report.exit_code == 2
        (value,) = report.groups[-1].values
        assert value.name.startswith("(model setting ")
        assert find_note(report, Note.MODEL_SETTINGS_DIFFER) is not None


@pytest.mark.parametrize(
    ("config", "change", "code"),
    [
        (LABELS, {"id2label": {"0": "YES", "1": "NO"}}, 2),
        (LABELS, {"label2id": {"NO": 1, "YES": 0}}, 2),
        (LABELS, {"id2label": {"1": "YES", "0": "NO"}}, 0),
        ({}, {"id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1}}, 0),
        ({}, {"id2label": {"0": "LABEL_1", "1": "LABEL_0"}}, 2),
        ({}, {"id2label": None}, 0),
        (CLASSIFIER | {"pad_token_id": 0}, {"pad_token_id": 3}, 2),
        (CLASSIFIER, {"pad_token_id": 3}, 2),
        ({"architectures": ["LlamaForCausalLM"], "pad_token_id": 0}, {"pad_token_id": 3}, 0),
        ({"model_type": "bart", "eos_token_id": 2}, {"eos_token_id": 1}, 2),
        ({"model_type": "esm", "mask_token_id": 32}, {"mask_token_id": 31}, 2),
        ({"model_type": "esm", "token_dropout": True}, {"token_dropout": False}, 2),
        ({"bos_token_id": 1, "attention_dropout": 0.0}, {"bos_token_id": 2, "attention_dropout": 0.1}, 0),
    ],
)
def test_settings_of_classifiers(tmp_path: Path, config: Any, change: Any, code: int) -> None:
    """Other labels of rows, and another token that decides which output is used, make another model."""
    config = BASE | config
    for configs in ((config, config | change), (config | change, config)):
        report = diff(tmp_path, *configs)
        assert report.exit_code == code
        names = [value.name for value in report.groups[-1].values]
        assert names == [f"(model setting {key})" for key in change] * (code // 2)


def test_a_scale_that_depends_on_the_tie_counts(tmp_path: Path) -> None:
    """T5 scales the outputs of a decoder with tied embeddings, so the tie counts beside equal weights."""
    model = make_model()
    tied = model | {HEAD: model[EMBEDDING].copy()}
    first = write(tmp_path / "a", tied, {"model_type": "t5", "tie_word_embeddings": True})
    second = write(tmp_path / "b", tied, {"model_type": "t5", "tie_word_embeddings": False})
    (value,) = syncheck.diff(first, second).groups[-1].values
    assert value.name == "(model setting scale_decoder_outputs)"


@pytest.mark.parametrize(
    ("key", "value"),
    [("rope_theta", 1e6), ("rms_norm_eps", 1e-5), ("hidden_act", "gelu"), ("num_key_value_heads", 2), ("new_key", 1)],
)
def test_a_lost_setting_is_undecided(tmp_path: Path, key: str, value: Any) -> None:
    """If only one configuration of one type states a setting, the default of the loader applies: exit code 2."""
    config = BASE | {"model_type": "qwen2", key: value}
    lost = {name: value for name, value in config.items() if name != key}
    for configs in ((config, lost), (lost, config)):
        report = diff(tmp_path, *configs)
        assert report.exit_code == 2
        (difference,) = report.groups[-1].values
        assert difference.name == f"(model setting {key})"
        assert set(difference.by_rank.values()) == {None, value}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param({"model_type": "llama"}, {"rope_theta": 10000.0, "attention_bias": False}, id="llama"),
        pytest.param({"model_type": "gpt2", "n_positions": 8, "n_ctx": 8}, {"n_ctx": None}, id="gpt2"),
        pytest.param(
            {"model_type": "bert", "position_embedding_type": "absolute"},
            {"position_embedding_type": ABSENT, "is_decoder": False, "add_cross_attention": False},
            id="bert",
        ),
        pytest.param(
            {"model_type": "t5", "num_layers": 6, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
            {
                "num_decoder_layers": 6,
                "dense_act_fn": "gelu_new",
                "is_gated_act": True,
                "scale_decoder_outputs": False,
                "relative_attention_max_distance": 128,
            },
            id="t5",
        ),
        pytest.param(
            {"model_type": "gpt_neox", "rotary_emb_base": 10000, "rotary_pct": 0.25, "rope_theta": None},
            {
                "rotary_emb_base": None,
                "rotary_pct": None,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
            },
            id="gpt_neox",
        ),
        pytest.param(
            {"model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 2},
            {
                "rope_theta": None,
                "rope_local_base_freq": None,
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                },
                "layer_types": ["sliding_attention", "full_attention"],
            },
            id="gemma3",
        ),
    ],
)
def test_two_versions_of_transformers_store_one_model(tmp_path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Transformers 4 and 5 store a model in other forms, and omit defaults that are known."""
    config = BASE | {"num_hidden_layers": 2} | old
    changed = {key: value for key, value in (config | new).items() if value is not ABSENT}
    assert diff(tmp_path, config, changed).exit_code == 0
    assert diff(tmp_path, changed, config).exit_code == 0


def test_the_quantization_of_other_weights_has_no_effect(tmp_path: Path) -> None:
    """A configuration of the quantization counts beside equal weights only: other weights are compared themselves."""
    quantized = BASE | {"quantization_config": {"quant_method": "fp8"}}
    assert diff(tmp_path / "equal", BASE, quantized).exit_code == 2
    first = write(tmp_path / "a", make_model(), BASE)
    second = write(tmp_path / "b", make_model(1), quantized)
    assert syncheck.diff(first, second).groups[-1].values == ()


def test_settings_of_two_files_are_compared_by_file(tmp_path: Path) -> None:
    """A second configuration of another library beside one model is no difference."""
    first = write(tmp_path / "a", make_model(), BASE)
    second = write(tmp_path / "b", make_model(), BASE)
    (tmp_path / "b" / "params.json").write_text(json.dumps({"dim": 32, "use_biases": False}), encoding="utf-8")
    assert syncheck.diff(first, second).exit_code == 0


@pytest.mark.parametrize("content", ["{ not json", "[1, 2]", "folder", "[" * 200000, '{"a":' * 100 + "1" + "}" * 100])
def test_an_unreadable_configuration_is_undecided(tmp_path: Path, content: str) -> None:
    """A file that is no configuration has a note, and exit code 2 if the other model has a configuration."""
    first = write(tmp_path / "a", make_model(), BASE)
    second = write(tmp_path / "b", make_model())
    path = tmp_path / "b" / "config.json"
    if content == "folder":
        path.mkdir()
    else:
        path.write_text(content, encoding="utf-8")

    for sides in ((first, second), (second, first)):
        report = syncheck.diff(*sides)
        assert report.exit_code == 2
        assert find_note(report, Note.UNREADABLE_CONFIGURATIONS) == {"files": (str(path),)}
        assert syncheck.diff(*sides, options=syncheck.DiffOptions(exclude=("(model setting *)",))).exit_code == 0

    os.remove(tmp_path / "a" / "config.json")
    report = syncheck.diff(first, second)
    assert report.exit_code == 0
    assert find_note(report, Note.UNREADABLE_CONFIGURATIONS) is not None


def test_two_forms_of_scaled_positions(tmp_path: Path) -> None:
    """The scaling of positions has one meaning in transformers 4 and 5."""
    old = BASE | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    new = BASE | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}
    assert diff(tmp_path, old, new).exit_code == 0


@pytest.mark.parametrize(
    ("model_type", "key", "default"),
    [
        ("mistral", "sliding_window", 4096),
        ("gemma2", "attn_logit_softcapping", 50.0),
        ("gemma2", "final_logit_softcapping", 30.0),
        ("gpt_oss", "sliding_window", 128),
        ("gptj", "rotary_dim", 64),
        ("granite", "attention_multiplier", 1.0),
    ],
)
def test_null_is_not_the_default(tmp_path: Path, model_type: str, key: str, default: Any) -> None:
    """A setting that is null differs from the default of a configuration without it, which an explicit value equals."""
    lost = {name: value for name, value in BASE.items() if name != key} | {"model_type": model_type}
    for configs in ((lost, lost | {key: None}), (lost | {key: None}, lost)):
        report = diff(tmp_path, *configs)
        assert report.exit_code == 2
        (difference,) = report.groups[-1].values
        assert difference.name == f"(model setting {key})"
        assert set(difference.by_rank.values()) == {None, "null"}

    assert diff(tmp_path, lost, lost | {key: default}).exit_code == 0
    assert diff(tmp_path, lost | {key: default}, lost | {key: None}).exit_code == 2
    assert diff(tmp_path, lost | {key: None}, lost | {key: None}).exit_code == 0


@pytest.mark.parametrize(
    ("model_type", "key", "code"),
    [
        ("llama", "rope_scaling", 0),
        ("llama", "head_dim", 0),
        ("mixtral", "sliding_window", 0),
        ("qwen2", "sliding_window", 0),
        ("olmo", "clip_qkv", 0),
        ("my_model", "rope_scaling", 0),
        ("my_model", "sliding_window", 2),
        ("llama", "my_setting", 2),
    ],
)
def test_null_is_a_known_default(tmp_path: Path, model_type: str, key: str, code: int) -> None:
    """Null counts as absent for settings whose default is known to be null, and is undecided for all others."""
    lost = {name: value for name, value in BASE.items() if name != key} | {"model_type": model_type}
    assert diff(tmp_path, lost, lost | {key: None}).exit_code == code
    assert diff(tmp_path, lost | {key: None}, lost).exit_code == code


def test_a_window_that_is_switched_off_is_not_the_default(tmp_path: Path) -> None:
    """A window that is off differs from the window that another type of model has by default."""
    off = BASE | {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}
    (difference,) = diff(tmp_path, off, BASE | {"model_type": "mistral"}).groups[-1].values
    assert difference.name == "(model setting sliding_window)"
    assert diff(tmp_path, off, BASE).exit_code == 0


@pytest.mark.parametrize(
    ("model_type", "theta", "code"), [("llama", 1e4, 0), ("llama", 1e6, 2), ("mixtral", 1e6, 0), ("my_model", 1e4, 2)]
)
def test_a_setting_that_another_type_of_model_lacks(tmp_path: Path, model_type: str, theta: float, code: int) -> None:
    """A setting that another type of model does not state is equal to its known default only; a note has the types."""
    lost = {key: value for key, value in BASE.items() if key != "rope_theta"} | {"model_type": model_type}
    stated = BASE | {"model_type": "mistral", "rope_theta": theta, "sliding_window": None}
    lost["sliding_window"] = None
    for configs in ((stated, lost), (lost, stated)):
        report = diff(tmp_path, *configs)
        assert report.exit_code == code
        names = [value.name for value in report.groups[-1].values]
        assert names == ["(model setting rope_theta)"] * (code // 2)

    assert find_note(report, Note.MODEL_TYPES_DIFFER) == {"a": model_type, "b": "mistral"}


def test_models_without_a_configuration(tmp_path: Path) -> None:
    """If only one model has a configuration, nothing is compared."""
    report = diff(tmp_path, BASE, None)
    assert (report.exit_code, report.groups[-1].values) == (0, ())


SCALED = {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}


@pytest.mark.parametrize(
    ("config", "params", "differing"),
    [
        ({}, {}, None),
        ({}, {"n_heads": 8}, "num_attention_heads"),
        ({}, {"n_kv_heads": 4}, "num_key_value_heads"),
        ({}, {"norm_eps": 1e-5}, "rms_norm_eps"),
        ({"rms_norm_eps": 1e-2}, {}, "rms_norm_eps"),
        ({}, {"rope_theta": 5e5}, "rope_theta"),
        ({"rope_theta": 5e5}, {}, "rope_theta"),
        ({"rope_theta": 5e5}, {"rope_theta": 5e5}, None),
        ({}, {"use_scaled_rope": True}, "rope_scaling"),
        (SCALED, {}, "rope_scaling"),
        (SCALED, {"use_scaled_rope": True}, None),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, {"use_scaled_rope": True}, "rope_scaling"),
        ({"hidden_act": "gelu"}, {}, "hidden_act"),
        ({"vocab_size": 100}, {"vocab_size": 99}, "vocab_size"),
        ({"vocab_size": 100}, {"vocab_size": -1}, None),
        ({"model_type": "mistral", "sliding_window": 4096}, {}, "sliding_window"),
        ({"model_type": "mistral", "sliding_window": 4096}, {"sliding_window": 4096}, None),
    ],
)
def test_settings_of_meta(tmp_path: Path, config: Any, params: Any, differing: str | None) -> None:
    """Settings have other names and constants in Meta's params.json, and are compared with those of Hugging Face."""
    first = write(tmp_path / "a", make_model(), BASE | config)
    second = write(tmp_path / "b", make_model())
    content = {"dim": 32, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-6} | params
    (tmp_path / "b" / "params.json").write_text(json.dumps(content), encoding="utf-8")
    for sides in ((first, second), (second, first)):
        report = syncheck.diff(*sides)
        assert report.exit_code == (2 if differing else 0)
        names = [value.name for value in report.groups[-1].values]
        assert names == ([f"(model setting {differing})"] if differing else [])


def test_a_tie_of_equal_weights_has_no_effect(tmp_path: Path) -> None:
    """An output layer that equals the embedding is tied or not, without a difference."""
    model = make_model()
    tied = model | {HEAD: model[EMBEDDING].copy()}
    first = write(tmp_path / "a", tied, BASE)
    second = write(tmp_path / "b", tied, BASE | {"tie_word_embeddings": True})
    assert syncheck.diff(first, second).exit_code == 0


def test_a_difference_of_tensors_remains(tmp_path: Path) -> None:
    """Other weights beside other settings are out of sync."""
    first = write(tmp_path / "a", make_model(), BASE)
    second = write(tmp_path / "b", make_model(1), BASE | {"rope_theta": 5.0})
    assert syncheck.diff(first, second).exit_code == 1


@pytest.mark.parametrize("link", ["path", "folder", "symlink", "hard link"])
def test_a_file_and_itself(tmp_path: Path, link: str) -> None:
    """A file that both sides read is stated, under any spelling of its path."""
    folder = write(tmp_path / "a", make_model(), BASE)
    file = tmp_path / "a" / "model.safetensors"
    other = tmp_path / "b.safetensors"
    if link == "symlink":
        other.symlink_to(file)
    elif link == "hard link":
        os.link(file, other)
    else:
        other = {"path": file, "folder": tmp_path / "a"}[link]
    report = syncheck.diff(folder, str(other))
    assert report.exit_code == 0
    note = find_note(report, Note.SAME_FILES)
    assert note is not None
    assert list(map(os.path.basename, note["files"])) == [file.name]


def test_a_copy_is_another_file(tmp_path: Path) -> None:
    """A copy of a file is not stated."""
    folder = write(tmp_path / "a", make_model(), BASE)
    shutil.copytree(folder, tmp_path / "b")
    report = syncheck.diff(folder, str(tmp_path / "b"))
    assert (report.exit_code, find_note(report, Note.SAME_FILES)) == (0, None)
    assert list_fields(report.findings, "code") == []
