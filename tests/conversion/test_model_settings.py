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

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
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


def test_two_forms_of_scaled_positions(tmp_path: Path) -> None:
    """The scaling of positions has one meaning in transformers 4 and 5."""
    old = BASE | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    new = BASE | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}
    assert diff(tmp_path, old, new).exit_code == 0


def test_settings_that_one_configuration_lacks_are_listed(tmp_path: Path) -> None:
    """A missing setting is unknown: it is no difference, and a note lists it. So is another type of models."""
    shorter = {key: value for key, value in BASE.items() if key != "rope_theta"} | {"model_type": "mistral"}
    report = diff(tmp_path, BASE, shorter)
    assert report.exit_code == 0
    assert find_note(report, Note.MODEL_SETTINGS_ABSENT) == {"settings": ("rope_theta",)}
    assert find_note(report, Note.MODEL_TYPES_DIFFER) == {"a": "llama", "b": "mistral"}


def test_models_without_a_configuration(tmp_path: Path) -> None:
    """If only one model has a configuration, nothing is compared."""
    report = diff(tmp_path, BASE, None)
    assert (report.exit_code, report.groups[-1].values) == (0, ())


def test_settings_of_meta(tmp_path: Path) -> None:
    """The numbers of heads have other names in Meta's params.json, which has no name for scaled positions."""
    scaled = BASE | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}
    for heads, expected in ((4, 0), (8, 2)):
        first = write(tmp_path / "a", make_model(), scaled)
        second = write(tmp_path / "b", make_model())
        params = {"dim": 32, "n_heads": heads, "n_kv_heads": 2, "rope_theta": 10000.0}
        (tmp_path / "b" / "params.json").write_text(json.dumps(params), encoding="utf-8")
        assert syncheck.diff(first, second).exit_code == expected


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
