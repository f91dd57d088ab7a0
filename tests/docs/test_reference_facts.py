"""The handwritten tables of docs/reference are correct."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

from support.checkpoints import snapshot
from support.listings import find_texts, list_fields

from syncheck.cli.ranks import FIELDS
from syncheck.layout.grouping import group_replicas
from syncheck.layout.path_numbers import split_path
from syncheck.readers.open import sniff_folder

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"


def rows(name: str, section: str) -> list[list[str]]:
    """Return the cells of the table in a section of a page, without the head."""
    text = (REFERENCE / name).read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = find_texts(text.splitlines(), start="|")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_numbers_in_paths() -> None:
    """The rank, step and other numbers of each path are classified as in the table."""
    listing = rows("layouts.md", "Numbers in paths")
    assert len(listing) > 20
    for path, rank, step, remaining in listing:
        parts = split_path(path.strip("`"))
        position = {role: parts.find(role) for role in ("rank", "step")}
        output = ["" if position[role] is None else str(parts.numbers[position[role]]) for role in ("rank", "step")]
        remainder = [i for i in range(len(parts.numbers)) if i not in position.values()]
        assert [rank, step] == output, path
        assert remaining == ", ".join(f"{parts.numbers[i]} {parts.roles[i]}" for i in remainder), path


def test_groups_of_files() -> None:
    """The files of each row form the groups of the table."""
    listing = rows("layouts.md", "Which files make a group")
    assert len(listing) > 8
    for settings, groups in listing:
        result = group_replicas([snapshot(path) for path in settings.strip("`").split()])
        expected = [group.split() for group in re.findall(r"`([^`]+)`", groups)]
        assert sorted([s.path for _, s in group.ranks] for group in result) == sorted(expected), settings


FOLDERS = (
    ("huggingface", "model.safetensors.index.json"), ("huggingface", "pytorch_model.bin.index.json"),
    ("huggingface", "model.safetensors config.json"), ("huggingface", "pytorch_model.bin trainer_state.json"),
    ("accelerate", "model.safetensors random_states_0.pkl"), ("dcp", ".metadata"),
    ("deepspeed", "mp_rank_00_model_states.pt"), ("deepspeed", "layer_00-model_00-model_states.pt"),
    ("megatron", "mp_rank_00/model_optim_rng.pt"), ("megatron", "mp_rank_00_001/model_optim_rng.pt"),
)  # fmt: skip


def test_folders_are_recognized(tmp_path: Path) -> None:
    """A folder with empty files named as in a row has the format of this row."""
    listing = dict(zip(dict(FOLDERS), list_fields(rows("layouts.md", "Folders"), 1), strict=True))
    for i, (name, files) in enumerate(FOLDERS):
        for file in files.split():
            location = tmp_path / str(i) / file
            location.parent.mkdir(parents=True, exist_ok=True)
            location.touch()
            known_values = re.findall(r"`([^`]+)`", listing[name] + "`model.safetensors`")
            assert all(any(fnmatch(part, each.strip("/")) for each in known_values) for part in file.split("/")), file
        result = sniff_folder(str(tmp_path / str(i)))
        assert result is not None, files
        assert name == result.FORMAT
    assert sniff_folder(str(tmp_path)) is None


def test_every_variable_is_listed() -> None:
    """The table lists exactly the environment variables that modules read or set."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "syncheck").rglob("*.py"))
    used = set(re.findall(r"environ(?:\.get|\.setdefault)?[\[(]\"([A-Z_]+)\"", text)) | set(FIELDS.values())
    used |= set(re.findall(r"\"([A-Z]+(?:_[A-Z]+)+)\": ", text)) & set(re.findall(r"\"(\w+)\": ", text))
    listing = {
        name for cell, _ in rows("configuration.md", "Environment variables") for name in re.findall(r"\w+", cell)
    }
    # COLUMNS is read by shutil; PYTHONBREAKPOINT is set to a function of the plugin in ranks of a test.
    assert used - {"PYTHONBREAKPOINT"} == listing - {"COLUMNS"}
